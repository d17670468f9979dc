//! Programs that ask whether they should stop: a signal to one rank has all of them stop after the same step.
#![cfg(unix)]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bonfire_core::internal::{answer_stop, stop_is_requested};
use bonfire_core::launch::{self, launch};
use bonfire_core::{Builder, Error, Group, ReduceOp, StopSignal};
use bonfire_testing::process::{Process, is_child, report, send_line};
use rustix::process::Signal;

/// Longer than these tests take, so that a child that hangs ends.
const DEADLINE: &str = "60";
const TERM: i32 = Signal::TERM.as_raw();

/// Makes a step as far as requests to stop are concerned: the ranks exchange their words, and the program asks.
fn step(group: &Group, step: u64) -> Result<bool, Error> {
    let mut word = [u8::from(stop_is_requested())];
    group.all_reduce(&mut word, ReduceOp::Max)?;
    answer_stop(step, word[0] > 0);
    Ok(word[0] > 0)
}

/// Trains until the ranks stop. Returns after which step.
fn train(group: &Group) -> Result<String, Error> {
    let mut steps = 1;
    while !step(group, steps)? {
        if steps == 1 {
            send_line("going");
        }
        steps += 1;
    }
    Ok(steps.to_string())
}

fn connected() -> Group {
    Group::from_env().expect("ranks find each other")
}

fn start(name: &str, n: usize, variables: &[(&str, &str)]) -> Vec<Process> {
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Process::start_ranks_with(name, n, "tcp", DEADLINE, &variables)
}

/// As [`start`], with the standard error of each rank in a file of this folder.
fn start_with_files(name: &str, n: usize, folder: &Path, variables: &[(&str, &str)]) -> Vec<Process> {
    let script = |rank: usize| {
        let file = stderr_file(folder, rank).to_str().expect("a name in UTF-8").to_owned();
        ["sh", "-c", "exec \"$@\" 2>\"$0\""].map(String::from).into_iter().chain([file]).collect()
    };
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Process::start_ranks_by(script, name, n, "tcp", DEADLINE, &variables)
}

fn stderr_file(folder: &Path, rank: usize) -> std::path::PathBuf {
    folder.join(format!("stderr-{rank}"))
}

/// Waits until all ranks have made a step, after which a signal waits for another.
fn expect_all_going(ranks: &[Process]) {
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
}

/// Waits until all ranks have stopped, and returns after which step, which is the same on all.
fn expect_all_stopped(ranks: &[Process]) -> String {
    let steps: Vec<_> = ranks.iter().map(|rank| rank.outcome().expect("it stops in order")).collect();
    assert!(steps.iter().all(|step| *step == steps[0]), "{steps:?}");
    steps[0].clone()
}

fn expect_all_succeed(ranks: &mut [Process]) {
    ranks.iter_mut().for_each(|rank| assert!(rank.end().success()));
}

#[test]
fn a_signal_to_one_rank_stops_all_after_the_same_step() {
    if is_child() {
        return report(&train(&connected()));
    }
    for asked in 0..3 {
        let mut ranks = start("a_signal_to_one_rank_stops_all_after_the_same_step", 3, &[]);
        expect_all_going(&ranks);
        ranks[asked].signal(Signal::TERM);
        expect_all_stopped(&ranks);
        expect_all_succeed(&mut ranks);
    }
}

#[test]
fn the_environment_and_code_choose_the_signal() {
    const NAME: &str = "the_environment_and_code_choose_the_signal";
    if is_child() {
        let builder = Builder::from_env().expect("settings");
        let in_code = std::env::var_os("IN_CODE").is_some();
        let builder = if in_code { builder.stop_signal(StopSignal::Usr2) } else { builder };
        return report(&train(&builder.connect().expect("ranks find each other")));
    }
    let usr1 = ("BONFIRE_STOP_SIGNAL", "USR1");
    for (variables, signal) in [(&[usr1][..], Signal::USR1), (&[usr1, ("IN_CODE", "1")], Signal::USR2)] {
        let mut ranks = start(NAME, 2, variables);
        expect_all_going(&ranks);
        ranks[1].signal(signal);
        expect_all_stopped(&ranks);
        expect_all_succeed(&mut ranks);
    }
    // SIGTERM ends a rank at once then.
    let mut ranks = start(NAME, 2, &[usr1]);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::TERM);
    assert!(matches!(ranks[0].outcome(), Err(Error::Left { rank: 1, .. })));
    assert_eq!(ranks[1].end().signal(), Some(TERM));
}

#[test]
fn an_interrupt_ends_a_rank_at_once() {
    if is_child() {
        return report(&train(&connected()));
    }
    let mut ranks = start("an_interrupt_ends_a_rank_at_once", 2, &[]);
    expect_all_going(&ranks);
    ranks[0].signal(Signal::INT);
    assert!(matches!(ranks[1].outcome(), Err(Error::Left { rank: 0, .. })));
    assert_eq!(ranks[0].end().signal(), Some(Signal::INT.as_raw()));
}

#[test]
fn a_signal_before_the_first_question_ends_the_rank_at_once() {
    if is_child() {
        let group = connected();
        send_line("going");
        let ended = (0..).try_for_each(|_| group.barrier());
        return report(&ended.map(|()| String::new()));
    }
    let mut ranks = start("a_signal_before_the_first_question_ends_the_rank_at_once", 2, &[]);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::TERM);
    assert!(matches!(ranks[0].outcome(), Err(Error::Left { rank: 1, .. })));
    assert_eq!(ranks[1].end().signal(), Some(TERM));
}

/// Systems that end a job signal its ranks one after the other: a rank that saves already must go on.
#[test]
fn the_first_signal_of_a_rank_that_has_stopped_changes_nothing() {
    if is_child() {
        report(&train(&connected()));
        while !stop_is_requested() {
            thread::yield_now();
        }
        return send_line("saved");
    }
    let mut ranks = start("the_first_signal_of_a_rank_that_has_stopped_changes_nothing", 3, &[]);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::TERM);
    expect_all_stopped(&ranks);
    for rank in [0, 2] {
        ranks[rank].signal(Signal::TERM);
    }
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "saved"));
    expect_all_succeed(&mut ranks);
}

#[test]
fn saving_may_take_longer_than_the_grace() {
    if is_child() {
        report(&train(&connected()));
        thread::sleep(Duration::from_secs(6));
        return send_line("saved");
    }
    let mut ranks = start("saving_may_take_longer_than_the_grace", 2, &[("BONFIRE_GRACE", "5")]);
    expect_all_going(&ranks);
    ranks[0].signal(Signal::TERM);
    expect_all_stopped(&ranks);
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "saved"));
    expect_all_succeed(&mut ranks);
}

#[test]
fn a_second_signal_ends_a_rank_that_saves() {
    if is_child() {
        let group = connected();
        report(&train(&group));
        loop {
            thread::park();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = start_with_files("a_second_signal_ends_a_rank_that_saves", 2, folder.path(), &[]);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::TERM);
    expect_all_stopped(&ranks);
    // Signals that come within a second of the first are the same request.
    let status = loop {
        ranks[1].signal(Signal::TERM);
        if let Some(status) = ranks[1].end_within(Duration::from_millis(50)) {
            break status;
        }
    };
    assert_eq!(status.signal(), Some(TERM));
    let said = fs::read_to_string(stderr_file(folder.path(), 1)).unwrap();
    assert!(said.contains("bonfire: rank 1 got SIGTERM after it was asked to stop: it ends at once\n"), "{said}");
}

#[test]
fn a_rank_ends_if_no_step_does() {
    if is_child() {
        let group = connected();
        assert_eq!(step(&group, 1), Ok(false));
        send_line("going");
        if group.rank() == 1 {
            loop {
                thread::park();
            }
        }
        return report(&step(&group, 2).map(|stop| stop.to_string()));
    }
    // It waits in a step, or does something else.
    for asked in 0..2 {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = start_with_files("a_rank_ends_if_no_step_does", 2, folder.path(), &[("BONFIRE_GRACE", "1")]);
        expect_all_going(&ranks);
        ranks[asked].signal(Signal::TERM);
        assert_eq!(ranks[asked].end().signal(), Some(TERM));
        let said = fs::read_to_string(stderr_file(folder.path(), asked)).unwrap();
        let expected = format!(
            "bonfire: rank {asked} was asked to stop by SIGTERM, but step 2 has not ended within 900.0ms: it ends at \
             once\n"
        );
        assert!(said.contains(&expected), "{said}");
    }
}

#[test]
fn a_rank_whose_group_has_failed_waits_for_no_step() {
    if is_child() {
        let group = connected();
        assert_eq!(step(&group, 1), Ok(false));
        send_line("going");
        if group.rank() == 0 {
            report(&step(&group, 2).map(|stop| stop.to_string()));
        }
        loop {
            thread::park();
        }
    }
    // It would be killed by the test's own limit.
    let grace = [("BONFIRE_GRACE", "100000")];
    let mut ranks = start("a_rank_whose_group_has_failed_waits_for_no_step", 2, &grace);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::KILL);
    assert!(matches!(ranks[0].outcome(), Err(Error::PeerLost { peer: 1, .. })));
    ranks[0].signal(Signal::TERM);
    assert_eq!(ranks[0].end().signal(), Some(TERM));
}

#[test]
fn a_programs_own_handler_gets_the_signal() {
    if is_child() {
        let noted = Arc::new(AtomicBool::new(false));
        let group = connected();
        assert_eq!(step(&group, 1), Ok(false));
        signal_hook::flag::register(TERM, noted.clone()).expect("a handler is installed");
        send_line("going");
        // Its own way to stop. The words stay unset.
        let stop = (2..).find_map(|i| match step(&group, i) {
            Ok(stop) => {
                let mut any = [u8::from(noted.load(Ordering::Relaxed))];
                let agreed = group.all_reduce(&mut any, ReduceOp::Max);
                agreed.map(|()| (any[0] > 0).then(|| stop.to_string())).transpose()
            }
            Err(error) => Some(Err(error)),
        });
        return report(&stop.expect("it ends"));
    }
    let mut ranks = start("a_programs_own_handler_gets_the_signal", 2, &[]);
    expect_all_going(&ranks);
    ranks[1].signal(Signal::TERM);
    assert_eq!(expect_all_stopped(&ranks), "false");
    expect_all_succeed(&mut ranks);
}

#[test]
fn ranks_that_are_threads_stop_after_the_same_step() {
    const NAME: &str = "ranks_that_are_threads_stop_after_the_same_step";
    if is_child() {
        // One line of the four ranks.
        let said = Arc::new(Mutex::new(false));
        let body = move |group: Group| -> Result<u64, Error> {
            for steps in 1.. {
                let stop = step(&group, steps)?;
                if stop {
                    return Ok(steps);
                }
                let mut said = said.lock().expect("no rank panics");
                if !std::mem::replace(&mut said, true) {
                    send_line("going");
                }
            }
            Ok(0)
        };
        let steps = match std::env::var_os("LAUNCH") {
            Some(_) => launch(4, body),
            None => launch::run(Group::threads(4).expect("threads"), body),
        };
        let steps = steps.expect("no rank fails");
        assert!(steps.iter().all(|step| *step == steps[0]), "{steps:?}");
        return send_line("stopped");
    }
    for variables in [&[][..], &[("LAUNCH", "1".to_owned())]] {
        let mut process = Process::start(NAME, variables);
        assert_eq!(process.read_line(), "going");
        process.signal(Signal::TERM);
        assert_eq!(process.read_line(), "stopped");
        assert!(process.end().success());
    }
}

#[test]
fn a_signal_that_cannot_be_one_is_an_error_of_the_settings() {
    if is_child() {
        return report(&Group::from_env().map(|_| String::new()));
    }
    let ranks = start("a_signal_that_cannot_be_one_is_an_error_of_the_settings", 1, &[("BONFIRE_STOP_SIGNAL", "KILL")]);
    let error = ranks[0].outcome().unwrap_err().to_string();
    assert_eq!(error, "invalid settings: BONFIRE_STOP_SIGNAL is 'KILL': give TERM, USR1 or USR2");
}
