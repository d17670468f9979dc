//! Training programs that the launcher asks to stop.

use std::env;
use std::process::{Command, exit};
use std::thread;
use std::time::Duration;

use bonfire::{Error, Group, ReduceOp};
use bonfire_core::internal::{answer_stop, stop_is_requested};
use rustix::process::{Pid, Signal, getpid, kill_process};

use super::harness::*;

/// The variable that makes a test the program of a rank, and says what it does when it has stopped.
const AFTERWARDS: &str = "TEST_RANK_AFTERWARDS";

/// Starts the test `name` as two ranks.
fn start(name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Running {
    let own = env::current_exe().expect("the test's own binary");
    let mut command: Command = launcher(&[&["-n", "2", "--no-prefix"], arguments].concat());
    command.arg(own).args([&format!("stop::{name}"), "--exact", "--nocapture", "--test-threads=1"]);
    Running::spawn(command.envs(variables.iter().copied()))
}

/// Waits until both ranks have printed a line that begins so. Returns what follows it.
fn expect(run: &mut Running, beginning: &str) -> [String; 2] {
    [(); 2].map(|()| {
        loop {
            let line = run.lines(1).pop().expect("another line");
            // The test harness prints, too, and does not end its lines.
            if let Some((_, rest)) = line.split_once(beginning) {
                break rest.to_owned();
            }
        }
    })
}

/// The program of a rank, as far as requests to stop are concerned: in each step the ranks exchange their words. Does
/// nothing in the test itself.
fn rank() -> bool {
    let Ok(afterwards) = env::var(AFTERWARDS) else { return false };
    let group = Group::from_env().expect("ranks find each other");
    let train = || -> Result<(), Error> {
        for step in 1.. {
            let mut word = [u8::from(stop_is_requested())];
            group.all_reduce(&mut word, ReduceOp::Max)?;
            answer_stop(step, word[0] > 0);
            if step == 1 {
                println!("\ngoing: {}", getpid().as_raw_pid());
            }
            if word[0] > 0 {
                println!("\nstopped after step {step}");
                break;
            }
        }
        Ok(())
    };
    train().expect("no rank is lost");
    match &*afterwards {
        "wait" => loop {
            thread::park();
        },
        "die" if group.rank() == 1 => kill_process(getpid(), Signal::KILL).expect("a signal to itself"),
        "die" => {
            eprintln!("{}", group.barrier().expect_err("rank 1 is lost"));
            exit(1);
        }
        _ => thread::sleep(Duration::from_secs(afterwards.parse().expect("seconds"))),
    }
    true
}

/// What the launcher prints about ranks that stop in order.
fn notes(signal: &str, step: &str) -> String {
    format!(
        "bonfire: {signal}: ending ranks 0, 1\n\
         bonfire: the ranks stop after training step {step}, and are waited for\n"
    )
}

#[test]
fn ranks_that_stop_in_order_are_waited_for_and_succeed() {
    if rank() {
        return;
    }
    const NAME: &str = "ranks_that_stop_in_order_are_waited_for_and_succeed";
    let term = (&[][..], Signal::TERM, "SIGTERM");
    let usr1 = (&[("BONFIRE_STOP_SIGNAL", "USR1")][..], Signal::USR1, "SIGUSR1");
    for (variables, signal, name) in [term, usr1] {
        let longer_than_grace = [variables, &[(AFTERWARDS, "6")]].concat();
        let mut run = start(NAME, &["--grace", "5"], &longer_than_grace);
        expect(&mut run, "going: ");
        run.signal(signal);
        let [step, other] = expect(&mut run, "stopped after step ");
        assert_eq!(step, other);
        assert_eq!(run.wait().code(), Some(0));
        assert_eq!(run.stderr(), notes(name, &step));
    }
}

#[test]
fn ranks_of_which_one_was_signalled_are_waited_for_and_succeed() {
    if rank() {
        return;
    }
    let name = "ranks_of_which_one_was_signalled_are_waited_for_and_succeed";
    let mut run = start(name, &["--grace", "5"], &[(AFTERWARDS, "6")]);
    let [pid, _] = expect(&mut run, "going: ");
    kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), Signal::TERM).unwrap();
    let [step, _] = expect(&mut run, "stopped after step ");
    // The ranks stop already: those that know are not asked again.
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code(), Some(0));
    let notes = run.stderr();
    let mut lines: Vec<_> = notes.lines().collect();
    lines.sort_unstable();
    let waited_for = format!("bonfire: the ranks stop after training step {step}, and are waited for");
    assert_eq!(lines, ["bonfire: SIGTERM: ending ranks 0, 1", &waited_for]);
}

#[test]
fn a_second_signal_kills_ranks_that_save() {
    if rank() {
        return;
    }
    let mut run = start("a_second_signal_kills_ranks_that_save", &["--grace", "30"], &[(AFTERWARDS, "wait")]);
    expect(&mut run, "going: ");
    run.signal(Signal::TERM);
    let [step, _] = expect(&mut run, "stopped after step ");
    // Signals that come within a second of the first are the same request.
    let status = loop {
        run.signal(Signal::TERM);
        thread::sleep(Duration::from_millis(50));
        if let Some(status) = run.child.try_wait().unwrap() {
            break status;
        }
    };
    assert_eq!(status.code(), Some(128 + 15));
    assert_eq!(run.stderr(), format!("{}bonfire: SIGTERM again: killing ranks 0, 1\n", notes("SIGTERM", &step)));
}

#[test]
fn a_rank_that_dies_while_the_others_save_is_reported() {
    if rank() {
        return;
    }
    let mut run =
        start("a_rank_that_dies_while_the_others_save_is_reported", &["--grace", "30"], &[(AFTERWARDS, "die")]);
    expect(&mut run, "going: ");
    run.signal(Signal::TERM);
    let [step, _] = expect(&mut run, "stopped after step ");
    assert_eq!(run.wait().code(), Some(128 + 15));
    let stderr = run.stderr();
    // Rank 0 fails a millisecond after it, so the launcher may hear of either first. The report knows the cause.
    let died = ["rank 1 was killed by SIGKILL", "rank 0 exited with status 1"];
    let died = died.map(|how| format!("bonfire: {how} before all had stopped\n"));
    let first = "bonfire: rank 1 failed first: it was killed by SIGKILL";
    let is_noted = died.iter().any(|note| stderr.contains(note));
    let right = stderr.starts_with(&notes("SIGTERM", &step)) && is_noted && stderr.contains(first);
    assert!(right, "{stderr}");
}

#[test]
fn a_program_that_does_not_ask_ends_by_the_signal() {
    let mut run = Running::start(&["-n", "2"], "echo ready; exec sleep 1000");
    run.expect("ready", 2);
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code(), Some(128 + 15));
    assert_eq!(run.stderr(), "bonfire: SIGTERM: ending ranks 0, 1\n");
}

#[test]
fn refuses_a_signal_that_cannot_be_one_before_it_starts_a_rank() {
    let mut command = launcher(&["-n", "1"]);
    let output = command.env("BONFIRE_STOP_SIGNAL", "KILL").args(["echo", "started"]).output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""));
    let expected = "error: invalid settings: BONFIRE_STOP_SIGNAL is 'KILL': give TERM, USR1 or USR2\n";
    assert_eq!(text(&output.stderr), expected);
}
