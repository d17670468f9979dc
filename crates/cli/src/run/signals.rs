//! The signals the launcher passes on.

use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::machine::Machine;

const FORWARDED: [Signal; 6] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// Catches the signals to pass on, from now until the process ends.
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

/// The name of a signal, for people.
pub fn name(number: i32) -> String {
    match signal_hook::low_level::signal_name(number) {
        Some(name) => name.to_owned(),
        None => format!("signal {number}"),
    }
}

/// The status by which a shell reports an end by signal `number`. Signals go up to 64.
pub fn exit_status(number: i32) -> u8 {
    128 + number as u8
}

/// Whether `signal` asks the ranks to end, rather than only to take note.
pub fn ends(signal: Signal) -> bool {
    signal != Signal::USR1 && signal != Signal::USR2
}

/// The signals ignored since before this process began, signal N in bit N - 1.
///
/// `nohup` ignores SIGHUP for the command it starts, and a shell ignores SIGINT for a script's
/// background jobs. A handler would undo that: for the launcher at once, and for the ranks because
/// a caught signal returns to its default across `exec` while an ignored one stays ignored.
/// Only Linux says which they are.
fn ignored() -> u64 {
    let mask = Machine::this().field("proc/self/status", "SigIgn");
    mask.and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or(0)
}
