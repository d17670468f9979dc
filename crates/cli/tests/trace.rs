//! Traces: what ranks record, when they write traces, and the diagnosis by `bonfire trace`.
#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use bonfire::trace::{State, Trace};
use bonfire::{Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::{Kind, run_ranks};
use rustix::process::Signal;
use serde_json::{Value, json};

const BOTH: [&str; 2] = ["tcp", "shm"];

fn bonfire(arguments: &[&str], path: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bonfire")).arg("trace").args(arguments).arg(path).output().unwrap()
}

/// Returns the output of `bonfire trace --json` for the only group in the folder, and the exit status.
fn group(folder: &Path) -> (Value, Option<i32>) {
    let output = bonfire(&["--json"], folder);
    let object: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert_eq!(object["groups"].as_array().unwrap().len(), 1, "{object}");
    (object["groups"][0].clone(), output.status.code())
}

fn text(folder: &Path) -> String {
    String::from_utf8(bonfire(&[], folder).stdout).unwrap()
}

fn trace_to(folder: &Path) -> [(&'static str, String); 1] {
    [("BONFIRE_TRACE", folder.to_str().unwrap().to_owned())]
}

/// Polls until `condition` holds.
fn wait_until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < bonfire_testing::DEADLINE, "the condition did not become true in time");
        thread::sleep(Duration::from_millis(1));
    }
}

fn last_state(group: &Group) -> Option<State> {
    group.trace().operations.last().map(|record| record.state)
}

#[test]
fn an_operation_that_hangs_is_seen_as_begun() {
    for kind in Kind::ALL {
        let seen = Arc::new(Barrier::new(2));
        run_ranks(kind, 2, move |group| {
            if group.rank() == 1 {
                seen.wait();
                return group.barrier().unwrap();
            }
            let waiting = group.clone();
            let thread = thread::spawn(move || waiting.barrier());
            wait_until(|| last_state(&group) == Some(State::Begun));
            seen.wait();
            thread.join().unwrap().unwrap();
            assert_eq!(last_state(&group), Some(State::Done));
        });
    }
}

#[test]
fn every_call_is_recorded_with_its_call_site() {
    for kind in Kind::ALL {
        run_ranks(kind, 2, |group| {
            let line = line!();
            group.all_reduce(&mut [1f32; 8], ReduceOp::Max).unwrap();
            let work = group.start_broadcast(vec![1u16; 3], 1).unwrap();
            work.wait().unwrap();
            match group.rank() {
                0 => group.send(&[1i8; 5], 1).unwrap(),
                _ => group.recv(&mut [0i8; 5], 0).unwrap(),
            }
            let trace = group.trace();
            assert_eq!((trace.rank, trace.world_size, trace.collectives), (group.rank(), 2, 2));
            let message = if group.rank() == 0 { "send(i8 x 5) to rank 1" } else { "recv(i8 x 5) from rank 0" };
            let calls = ["all_reduce(f32 x 8, max)", "broadcast(u16 x 3, root 1)", message];
            let lines = [line + 1, line + 2, line + 5 + group.rank() as u32];
            assert_eq!(trace.operations.len(), 3);
            for (i, record) in trace.operations.iter().enumerate() {
                let place = format!("{}:{}", file!(), lines[i]);
                assert_eq!((record.to_string().as_str(), record.state), (calls[i], State::Done));
                assert_eq!((record.number, record.at.as_str()), (i as u64, place.as_str()));
            }
            assert!(trace.operations.is_sorted_by_key(|record| record.begun_ns));
        });
    }
}

#[test]
fn a_missing_rank_is_named() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        (0..5).for_each(|_| group.barrier().expect("all ranks call it"));
        if group.rank() == 1 {
            // The parent ends this.
            thread::sleep(bonfire_testing::DEADLINE);
            return;
        }
        return report(&group.all_reduce(&mut [1f32; 8], ReduceOp::Sum).map(|()| String::new()));
    }
    for transport in BOTH {
        let folder = tempfile::tempdir().unwrap();
        // Does not exist yet: the first rank creates it.
        let traces = folder.path().join("of/the/job");
        let name = "a_missing_rank_is_named";
        let ranks = Process::start_ranks_with(name, 3, transport, "1.5", &trace_to(&traces));
        for rank in [0, 2] {
            ranks[rank].outcome().unwrap_err();
        }
        assert_eq!(fs::read_dir(&traces).unwrap().count(), 2);
        let (group, status) = group(&traces);
        assert_eq!((status, &group["absent"]), (Some(1), &json!([1])));
        assert_eq!(group["unfinished"]["sequence"], 5);
        let calls = json!([{ "call": "all_reduce(f32 x 8, sum)", "ranks": [0, 2] }]);
        assert_eq!(group["unfinished"]["calls"], calls);
        // Each rank times out itself or learns of the failure.
        for failure in group["failures"].as_array().unwrap() {
            assert!(failure["failure"].as_str().unwrap().contains("waited for rank 1"), "{failure}");
        }
        let text = text(&traces);
        let words = "missing   rank 1 has no trace; at #5 ranks 0, 2 called all_reduce(f32 x 8, sum)";
        assert!(text.contains(words) && text.contains("tests/trace.rs:"), "{text}");
        // It has told the others.
        let told = "rank 1 is in no call of Bonfire's for";
        assert!(text.contains(told) && text.contains(&format!("since barrier at {}:", file!())), "{text}");
    }
}

#[test]
fn ranks_that_wait_in_two_groups_are_placed_in_the_program() {
    const LINES: [u32; 2] = [line!() + 7, line!() + 8];
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let lane = group.subgroup(&[0, 1, 2]).expect("all ranks call it");
        // The lane's deadline is longer, as that of checkpoints is.
        let lane = lane.with_deadline(bonfire_testing::DEADLINE);
        let result = match group.rank() {
            0 => lane.all_gather(&mut [0u8; 3]),
            _ => group.all_reduce(&mut [1f32; 8], ReduceOp::Sum),
        };
        report(&result.map(|()| String::new()));
        // Rank 0 stays until the test ends: a rank that has not failed yet could learn first that this one has left.
        while group.rank() == 0 {
            std::thread::park();
        }
        return;
    }
    for transport in BOTH {
        let folder = tempfile::tempdir().unwrap();
        let name = "ranks_that_wait_in_two_groups_are_placed_in_the_program";
        let ranks = Process::start_ranks_with(name, 3, transport, "3", &trace_to(folder.path()));
        let errors = [1, 2].map(|rank| ranks[rank].outcome().unwrap_err().to_string());
        let [gather, reduce] = LINES.map(|line| format!("{}:{line}", file!()));
        let places = format!("rank 0 is in all_gather at {gather}; ranks 1, 2 are in all_reduce at {reduce}");
        assert!(errors.iter().all(|error| error.contains(&places)), "{errors:?}");
        ranks[0].outcome().unwrap_err();
        let text = text(folder.path());
        // The group of the deadline, and that in which rank 0 learns that the others have left.
        assert_eq!(text.matches("; it was made of group ").count(), 1, "{text}");
        assert!(text.contains(&format!("where     {places}")), "{text}");
    }
}

#[test]
fn ranks_that_disagree_are_named_with_their_calls() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let mut data = [1f32; 8];
        group.barrier().expect("all ranks call it");
        // One rank skips an operation.
        let result = match group.rank() {
            2 => group.barrier(),
            _ => group.all_reduce(&mut data, ReduceOp::Sum),
        };
        return report(&result.map(|()| String::new()));
    }
    for transport in BOTH {
        let folder = tempfile::tempdir().unwrap();
        let name = "ranks_that_disagree_are_named_with_their_calls";
        let ranks = Process::start_ranks_with(name, 3, transport, "20", &trace_to(folder.path()));
        ranks.iter().for_each(|rank| drop(rank.outcome().unwrap_err()));
        let (group, status) = group(folder.path());
        assert_eq!((status, &group["absent"]), (Some(1), &json!([])));
        let calls =
            json!([{ "call": "all_reduce(f32 x 8, sum)", "ranks": [0, 1] }, { "call": "barrier", "ranks": [2] }]);
        assert_eq!(group["disagreements"], json!([{ "sequence": 1, "from_to": null, "calls": calls }]));
        let text = text(folder.path());
        let words = "disagree  at #1: ranks 0-1 called all_reduce(f32 x 8, sum), rank 2 called barrier";
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn interrupted_ranks_write_their_traces() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        group.barrier().expect("all ranks call it");
        let waiting = group.clone();
        if group.rank() != 2 {
            thread::spawn(move || waiting.barrier());
            wait_until(|| group.trace().collectives == 2);
        }
        send_line("hanging");
        // The parent ends this.
        return thread::sleep(bonfire_testing::DEADLINE);
    }
    for transport in BOTH {
        let folder = tempfile::tempdir().unwrap();
        let name = "interrupted_ranks_write_their_traces";
        let mut ranks = Process::start_ranks_with(name, 3, transport, "60", &trace_to(folder.path()));
        ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "hanging"));
        ranks.iter().for_each(|rank| rank.signal(Signal::TERM));
        ranks.iter_mut().for_each(|rank| assert!(!rank.end().success()));
        let (group, _) = group(folder.path());
        assert_eq!(group["absent"], json!([]));
        assert_eq!(group["unfinished"]["sequence"], 1);
        let behind = json!([{ "rank": 2, "last_call": "barrier", "last_sequence": 0 }]);
        assert_eq!(group["unfinished"]["behind"], behind, "{}", text(folder.path()));
    }
}

#[test]
fn a_slow_rank_is_named_on_request() {
    for kind in Kind::ALL {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let kept = folder.clone();
        run_ranks(kind, 3, move |group| {
            for _ in 0..10 {
                if group.rank() == 1 {
                    thread::sleep(Duration::from_millis(20));
                }
                group.all_reduce(&mut [1f32; 8], ReduceOp::Sum).unwrap();
            }
            group.write_trace(folder.path().join(format!("trace-{}.json", group.rank()))).unwrap();
            group.barrier().unwrap();
        });
        let (group, status) = group(kept.path());
        assert_eq!(status, Some(0), "{group}");
        assert_eq!((&group["paces"][0]["slow"][0], &group["paces"][0]["compared"]), (&json!(1), &json!(10)));
        let text = text(kept.path());
        assert!(text.contains("slow      rank 1: the others of ranks 0-2"), "{text}");
    }
}

#[test]
fn files_that_are_not_traces_are_refused() {
    let refuses = |path: &Path, words: &str| {
        let output = bonfire(&[], path);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{error}");
        assert!(error.contains(words) && error.contains(path.to_str().unwrap()), "{error}");
    };
    let folder = tempfile::tempdir().unwrap();
    refuses(&folder.path().join("absent"), "No such file");
    refuses(folder.path(), "has no traces");
    let file = folder.path().join("trace-0.json");
    fs::write(&file, "{\"bonfire_trace\": 1}").unwrap();
    refuses(&file, "is no trace: missing field");
    refuses(folder.path(), "is no trace");
    let group = Group::threads(1).unwrap().remove(0);
    group.write_trace(&file).unwrap();
    assert_eq!(Trace::read(&file).unwrap().world_size, 1);
    group.write_trace(folder.path().join("trace-again.json")).unwrap();
    refuses(folder.path(), "are both traces of rank 0");
    assert_eq!(bonfire(&["--no-such-flag"], &file).status.code(), Some(2));
}
