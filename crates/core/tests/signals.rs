//! Signals that the program handles itself, or that it was started to ignore, are left to it.
#![cfg(unix)]

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use rustix::process::Signal;

/// Longer than these tests take, so that a child that hangs ends.
const DEADLINE: &str = "20";

/// Installs a handler that only notes the signal.
fn note(signal: Signal) -> Arc<AtomicBool> {
    let noted = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal.as_raw(), noted.clone()).expect("a handler is installed");
    noted
}

/// Calls until any rank has noted a signal. Then all ranks stop after the same call, as a program does that saves.
fn call_until(group: &Group, noted: &AtomicBool) -> Result<String, Error> {
    group.barrier()?;
    send_line("going");
    loop {
        let mut stop = [u8::from(noted.load(Ordering::Relaxed))];
        group.all_reduce(&mut stop, ReduceOp::Max)?;
        if stop[0] > 0 {
            return Ok("saved".into());
        }
    }
}

fn expect_all_saved(ranks: &mut [Process]) {
    for rank in ranks {
        assert_eq!(rank.outcome(), Ok("saved".into()));
        assert!(rank.end().success());
    }
}

/// Waits until all ranks call operations.
fn expect_all_going(ranks: &[Process]) {
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
}

#[test]
fn a_program_with_handlers_of_its_own_gets_its_signals() {
    if is_child() {
        let before = std::env::var("HANDLER").expect("set by the test") == "before";
        let noted = before.then(|| note(Signal::TERM));
        let group = Group::from_env().expect("ranks find each other");
        let noted = noted.unwrap_or_else(|| note(Signal::TERM));
        return report(&call_until(&group, &noted));
    }
    const NAME: &str = "a_program_with_handlers_of_its_own_gets_its_signals";
    for when in ["before", "after"] {
        let mut ranks = Process::start_ranks_with(NAME, 2, "tcp", DEADLINE, &[("HANDLER", when.into())]);
        expect_all_going(&ranks);
        ranks[1].signal(Signal::TERM);
        expect_all_saved(&mut ranks);
    }
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    if is_child() {
        let noted = note(Signal::USR1);
        let group = Group::from_env().expect("ranks find each other");
        return report(&call_until(&group, &noted));
    }
    const NAME: &str = "a_signal_that_was_ignored_at_the_start_stays_ignored";
    let script = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"].map(String::from);
    let mut ranks = Process::start_ranks_by(|_| script.to_vec(), NAME, 2, "tcp", DEADLINE, &[]);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::INT);
    ranks[0].signal(Signal::USR1);
    expect_all_saved(&mut ranks);
}

#[test]
fn the_signals_of_a_forked_child_are_not_those_of_the_rank() {
    if is_child() {
        let noted = note(Signal::USR1);
        let group = Group::from_env().expect("ranks find each other");
        // SAFETY: the child only waits for a signal, which needs no lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: it waits, and changes nothing.
                unsafe { libc::pause() };
            }
        }
        let pid = rustix::process::Pid::from_raw(child).expect("a child was made");
        rustix::process::kill_process(pid, Signal::TERM).expect("a signal to one's own child");
        let status = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        let status = status.expect("one's own child").expect("it has ended").1;
        assert_eq!(status.terminating_signal(), Some(Signal::TERM.as_raw()));
        return report(&call_until(&group, &noted));
    }
    const NAME: &str = "the_signals_of_a_forked_child_are_not_those_of_the_rank";
    let mut ranks = Process::start_ranks(NAME, 2, "tcp", DEADLINE);
    expect_all_going(&ranks);
    ranks[0].signal(Signal::USR1);
    expect_all_saved(&mut ranks);
    // The signal of the rank itself still ends it.
    let mut ranks = Process::start_ranks(NAME, 2, "tcp", DEADLINE);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::TERM);
    assert!(matches!(ranks[0].outcome(), Err(Error::Left { rank: 1, .. })));
    assert_eq!(ranks[1].end().signal(), Some(Signal::TERM.as_raw()));
}
