//! Signals that the launcher forwards to the ranks.

use std::future::pending;
use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::machine::Machine;

const FORWARDED: [Signal; 6] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// Catches the signals to forward, from now until the process ends.
pub fn listen() -> io::Result<UnboundedReceiver<Signal>> {
    let ignored = ignored();
    let (sender, receiver) = unbounded_channel();
    for forwarded in FORWARDED {
        let number = forwarded.as_raw();
        if ignored & (1 << (number - 1)) != 0 {
            continue;
        }
        let mut arrivals = signal(SignalKind::from_raw(number))?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while arrivals.recv().await.is_some() {
                if sender.send(forwarded).is_err() {
                    break;
                }
            }
        });
    }
    Ok(receiver)
}

/// Returns the name of a signal, for messages.
pub fn name(number: i32) -> String {
    match signal_hook::low_level::signal_name(number) {
        Some(name) => name.to_owned(),
        None => format!("signal {number}"),
    }
}

/// Returns the exit status with which a shell reports an end by signal `number`, which is at most 64.
pub fn exit_status(number: i32) -> u8 {
    128 + number as u8
}

/// Whether `signal` asks the ranks to end, where `stop_signal` asks them to stop in order.
pub fn ends(signal: Signal, stop_signal: i32) -> bool {
    signal.as_raw() == stop_signal || (signal != Signal::USR1 && signal != Signal::USR2)
}

/// Waits for a signal that asks the ranks to end.
pub async fn termination(signals: &mut UnboundedReceiver<Signal>, stop_signal: i32) {
    while let Some(signal) = signals.recv().await {
        if ends(signal, stop_signal) {
            return;
        }
    }
    pending().await
}

/// Returns the signals that were ignored before this process started, signal N in bit N - 1. Known on Linux only.
///
/// `nohup` ignores SIGHUP for the command it starts, and a shell ignores SIGINT for a script's background jobs. A
/// handler would undo that: for the launcher at once, and for the ranks because across `exec` a caught signal returns
/// to its default while an ignored one stays ignored.
fn ignored() -> u64 {
    let mask = Machine::this().field("proc/self/status", "SigIgn");
    mask.and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or(0)
}
