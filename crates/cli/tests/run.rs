//! `bonfire run`, with shell commands as ranks.
#![cfg(unix)]

#[path = "run/harness.rs"]
mod harness;
#[path = "run/output.rs"]
mod output;
#[path = "run/secret.rs"]
mod secret;
#[path = "run/stop.rs"]
mod stop;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_child_subreaper};

use harness::*;

const PRINT_ENVIRONMENT: &str = "env | grep -E '^(BONFIRE_|CUDA_|RANK=|WORLD_|LOCAL_|MASTER_)'";

const IGNORE_SIGNALS: &str = "trap '' TERM INT; echo ready; while :; do sleep 1; done";

#[test]
fn gives_each_rank_its_environment() {
    let output = bonfire(&["-n", "2"], PRINT_ENVIRONMENT);
    let environments = environments(&output);
    assert_eq!(environments.len(), 2);
    for (rank, environment) in environments.iter().enumerate() {
        assert_eq!(environment["BONFIRE_RANK"], rank.to_string());
        assert_eq!(environment["BONFIRE_LOCAL_RANK"], rank.to_string());
        assert_eq!(environment["BONFIRE_WORLD_SIZE"], "2");
        assert_eq!(environment["BONFIRE_LOCAL_WORLD_SIZE"], "2");
        assert_eq!(environment["BONFIRE_HOST"], "127.0.0.1");
        assert_common_names(environment);
        // All ranks get the same address, with a port that the launcher chose.
        assert_eq!(environment["BONFIRE_ADDRESS"], environments[0]["BONFIRE_ADDRESS"]);
        assert_eq!(environment["MASTER_ADDR"], "127.0.0.1");
        assert_ne!(environment["MASTER_PORT"], "0");
        assert_eq!(environment["CUDA_DEVICE_MAX_CONNECTIONS"], "32");
        assert_eq!(environment["BONFIRE_GRACE"], "10");
    }
}

#[test]
fn leaves_a_users_number_of_hardware_queues() {
    let mut command = launcher(&["-n", "1"]);
    command.args(["sh", "-c", PRINT_ENVIRONMENT]).env("CUDA_DEVICE_MAX_CONNECTIONS", "1");
    assert_eq!(environments(&command.output().unwrap())[0]["CUDA_DEVICE_MAX_CONNECTIONS"], "1");
}

#[test]
fn numbers_the_ranks_of_several_nodes() {
    for (node, ranks) in [("0", ["0", "1", "2"]), ("1", ["3", "4", "5"])] {
        let nodes = ["-n", "3", "--nodes", "2", "--node-rank", node];
        let master = ["--master", "localhost:29400", "--host", "127.0.0.2"];
        let output = bonfire(&[&nodes[..], &master[..]].concat(), PRINT_ENVIRONMENT);
        let environments = environments(&output);
        assert_eq!(environments.len(), 3);
        for (local, environment) in environments.iter().enumerate() {
            assert_eq!(environment["BONFIRE_RANK"], ranks[local]);
            assert_eq!(environment["BONFIRE_LOCAL_RANK"], local.to_string());
            assert_eq!(environment["BONFIRE_WORLD_SIZE"], "6");
            assert_eq!(environment["BONFIRE_LOCAL_WORLD_SIZE"], "3");
            assert_eq!(environment["BONFIRE_ADDRESS"], "localhost:29400");
            assert_eq!(environment["BONFIRE_HOST"], "127.0.0.2");
            assert_common_names(environment);
        }
    }
}

#[test]
fn gives_the_ranks_the_time_to_find_each_other() {
    for (arguments, variable, expected) in [
        (&["-n", "1"][..], None, None),
        (&["-n", "1"], Some("300"), Some("300")),
        (&["-n", "1", "--rendezvous-timeout", "600"], Some("300"), Some("600")),
    ] {
        let mut command = launcher(arguments);
        command.args(["sh", "-c", PRINT_ENVIRONMENT]);
        command.envs(variable.map(|seconds| ("BONFIRE_RENDEZVOUS_TIMEOUT", seconds)));
        let environment = &environments(&command.output().unwrap())[0];
        assert_eq!(environment.get("BONFIRE_RENDEZVOUS_TIMEOUT").map(String::as_str), expected, "{arguments:?}");
    }
}

#[test]
#[ignore = "needs IPv6"]
fn writes_ipv6_addresses_in_brackets() {
    let output = bonfire(&["-n", "1", "--master", "[::1]:29400"], PRINT_ENVIRONMENT);
    let environment = &environments(&output)[0];
    assert_eq!(environment["BONFIRE_ADDRESS"], "[::1]:29400");
    assert_eq!(environment["BONFIRE_HOST"], "::1");
    assert_eq!(environment["MASTER_ADDR"], "::1");
    assert_eq!(environment["MASTER_PORT"], "29400");
}

#[test]
fn ranks_read_nothing() {
    let output = bonfire(&["-n", "1"], "cat; echo end");
    assert_eq!(text(&output.stdout), "[0] end\n");
}

#[test]
fn reports_the_first_failure_and_ends_the_others() {
    let script = "if [ $RANK = 1 ]; then
            for i in $(seq 30); do echo line $i; done; echo out of luck >&2; exit 3
        fi
        exec sleep 1000";
    let output = bonfire(&["-n", "3"], script);
    assert_eq!(output.status.code(), Some(3));
    let stderr = text(&output.stderr);
    for note in ["bonfire: rank 1 exited with status 3\n", "bonfire: ending ranks 0, 2\n"] {
        assert!(stderr.contains(note), "{stderr}");
    }
    let (ends, report) =
        stderr.split_once("bonfire: rank 1 ended first: it exited with status 3; its last 20 lines:\n").unwrap();
    let listed = "bonfire:   ranks 0, 2: killed by SIGTERM, sent by the launcher\n\
                  bonfire:   rank 1: exited with status 3\n";
    assert!(ends.ends_with(listed), "{stderr}");
    let report: Vec<_> = report.lines().collect();
    assert_eq!(report.len(), 20, "{stderr}");
    assert!(report.contains(&"  | out of luck"), "{stderr}");
    assert!(report.contains(&"  | line 30"), "{stderr}");
    assert!(!report.contains(&"  | line 1"), "{stderr}");
}

#[test]
fn a_failure_lets_the_others_end_in_order() {
    let fifo = Fifo::new();
    let script = format!(
        "if [ $RANK = 0 ]; then read x <{0}; exit 3; fi
        trap 'echo saved; exit 0' TERM; echo >{0}; while :; do sleep 0.05; done",
        fifo.path()
    );
    let output = bonfire(&["-n", "2"], &script);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(text(&output.stdout), "[1] saved\n");
}

#[test]
fn a_failure_does_not_cut_the_last_line_of_another_rank() {
    let fifo = Fifo::new();
    // Rank 1 is in the middle of its last line when rank 0 fails.
    let script = format!(
        "if [ $RANK = 0 ]; then read x <{0}; exit 3; fi
        printf '['; echo >{0}; sleep 0.1; echo 'the whole line]'; exit 4",
        fifo.path()
    );
    let output = bonfire(&["-n", "2"], &script);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(text(&output.stdout), "[1] [the whole line]\n");
    let stderr = text(&output.stderr);
    for end in ["rank 0: exited with status 3\n", "rank 1: exited with status 4\n"] {
        assert!(stderr.contains(end), "{stderr}");
    }
}

#[test]
fn misspelled_variables_are_named() {
    let mut command = launcher(&["-n", "2"]);
    let output = command.env("BONFIRE_TRANSPRT", "tcp").args(["true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let warning = "bonfire: the variable BONFIRE_TRANSPRT is set, but Bonfire has none of this name: do you mean \
                   BONFIRE_TRANSPORT?\n";
    assert_eq!(text(&output.stderr), warning);
    assert_eq!(text(&bonfire(&["-n", "1"], "exit 0").stderr), "");
}

#[test]
fn all_variables_that_the_sources_read_are_known() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let mut folders: Vec<_> =
        ["src", "crates/core/src", "crates/cli/src"].map(|folder| format!("{root}/{folder}")).into();
    let mut command = launcher(&["-n", "1"]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path().to_str().unwrap().to_owned();
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
                continue;
            }
            let source = fs::read_to_string(&path).unwrap();
            // Tests misspell names on purpose.
            let code = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
            for rest in code.split("\"BONFIRE_").skip(1) {
                let name = format!("BONFIRE_{}", rest.split('"').next().unwrap());
                let is_whole =
                    name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_') && !name.ends_with('_');
                // Secrets are checked before anything starts, and so is the signal.
                if is_whole && !name.contains("SECRET") {
                    let value = if name == "BONFIRE_STOP_SIGNAL" { "TERM" } else { "1" };
                    command.env(name, value);
                }
            }
        }
    }
    assert!(command.get_envs().filter(|(_, value)| value.is_some()).count() > 10);
    let output = command.args(["true"]).output().unwrap();
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn names_the_signal_that_killed_a_rank() {
    let output = bonfire(&["-n", "1"], "kill -SEGV $$");
    assert_eq!(output.status.code(), Some(128 + 11));
    let report = "bonfire: rank 0 ended first: it was killed by SIGSEGV; it printed nothing\n";
    assert_eq!(text(&output.stderr), report);
}

#[test]
fn a_rank_that_succeeds_leaves_the_others_running() {
    let fifo = Fifo::new();
    // Rank 1 runs until rank 0 has ended, which closes the writing end.
    let script = format!("if [ $RANK = 0 ]; then exec 3>{0}; exit 0; fi; cat {0}; echo still here", fifo.path());
    let output = bonfire(&["-n", "2"], &script);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), "[1] still here\n");
}

#[test]
fn forwards_signals() {
    // SIGTERM asks the ranks to stop, and all do so with success.
    for (signal, status) in [(Signal::TERM, 0), (Signal::INT, 128 + 2), (Signal::HUP, 128 + 1)] {
        let script = "trap 'echo caught; exit 0' TERM INT HUP; echo ready; \
                      while :; do sleep 0.05; done";
        let mut run = Running::start(&["-n", "2"], script);
        run.expect("ready", 2);
        run.signal(signal);
        run.expect("caught", 2);
        assert_eq!(run.wait().code(), Some(status));
    }
}

#[test]
fn forwards_signals_that_do_not_end_the_run() {
    let script = "trap 'echo caught; exit 0' USR1; echo ready; while :; do sleep 0.05; done";
    let mut run = Running::start(&["-n", "2"], script);
    run.expect("ready", 2);
    run.signal(Signal::USR1);
    run.expect("caught", 2);
    assert_eq!(run.wait().code(), Some(0));
}

#[test]
fn kills_after_the_grace_period() {
    let mut run = Running::start(&["-n", "2", "--grace", "1"], IGNORE_SIGNALS);
    run.expect("ready", 2);
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code(), Some(128 + 15));
    let notes = "bonfire: SIGTERM: ending ranks 0, 1\nbonfire: ranks 0, 1 did not end in time: killed\n";
    assert_eq!(run.stderr(), notes);
}

#[test]
fn kills_ranks_that_do_not_end_after_a_failure() {
    let fifo = Fifo::new();
    let script = format!(
        "if [ $RANK = 0 ]; then read x <{0}; kill -KILL $$; fi
        trap '' TERM; echo >{0}; while :; do sleep 1; done",
        fifo.path()
    );
    let output = bonfire(&["-n", "2", "--grace", "1"], &script);
    assert_eq!(output.status.code(), Some(128 + 9));
    let stderr = text(&output.stderr);
    let note = "bonfire: rank 1 did not end in time: killed\n";
    assert!(stderr.contains(note), "{stderr}");
}

#[test]
fn a_second_interrupt_kills_at_once() {
    let mut run = Running::start(&["-n", "2", "--grace", "30"], IGNORE_SIGNALS);
    run.expect("ready", 2);
    run.signal(Signal::INT);
    let mut stderr = BufReader::new(run.child.stderr.take().unwrap());
    // The launcher has handled the first signal before the second is sent, so the two are not merged.
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert_eq!(line, "bonfire: SIGINT: ending ranks 0, 1\n");
    run.signal(Signal::INT);
    line.clear();
    stderr.read_line(&mut line).unwrap();
    assert_eq!(line, "bonfire: SIGINT again: killing ranks 0, 1\n");
    assert_eq!(run.wait().code(), Some(128 + 2));
}

#[test]
#[cfg(target_os = "linux")]
fn keeps_signals_ignored_that_were_ignored_at_its_start() {
    let script = "trap '' HUP; exec \"$0\" run -n 1 -- sh -c 'echo ready; read x < $FIFO; echo end'";
    let fifo = Fifo::new();
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_bonfire")]);
    command.env("FIFO", fifo.path());
    let mut run = Running::spawn(&mut command);
    run.expect("ready", 1);
    run.signal(Signal::HUP);
    fs::write(fifo.path(), "\n").unwrap();
    run.expect("end", 1);
    assert_eq!(run.wait().code(), Some(0));
}

#[test]
#[cfg(target_os = "linux")]
fn leaves_no_process_behind() {
    // The rank, a process it started, and one that holds its pipes open.
    let start = "sleep 1000 >/dev/null 2>&1 & echo $!; sleep 1000 & echo $!; echo $$; ";
    for (end, status) in [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 128 + 9)] {
        let output = bonfire(&["-n", "2"], &format!("{start}{end}"));
        assert_eq!(output.status.code(), Some(status));
        let processes: Vec<_> = text(&output.stdout).lines().map(number).collect();
        // When a rank fails, the other may be ended before it has printed everything.
        assert!(if status == 0 { processes.len() == 6 } else { (3..=6).contains(&processes.len()) }, "{output:?}");
        wait_until_gone(&processes);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn does_not_wait_for_a_detached_process() {
    let script = "setsid sleep 1000 & echo $!; echo last; exit 0";
    let output = bonfire(&["-n", "1"], script);
    assert_eq!(output.status.code(), Some(0));
    let stdout = text(&output.stdout);
    let (detached, rest) = stdout.split_once('\n').unwrap();
    assert_eq!(rest, "[0] last\n");
    // The launcher leaves it alone, so the test ends it.
    let _ = kill_process(Pid::from_raw(number(detached)).unwrap(), Signal::KILL);
}

#[test]
#[cfg(target_os = "linux")]
fn a_launcher_that_adopts_orphans_reaps_them() {
    let fifo = Fifo::new();
    // A process whose parent has ended, and which the rank can only see as a child of the launcher.
    let script = format!("(sleep 0 & echo $!); read x <{}; exit 0", fifo.path());
    let mut command = launcher(&["-n", "1"]);
    command.args(["sh", "-c", &script]);
    // SAFETY: between fork and exec: one system call, which changes a flag of the process.
    unsafe { command.pre_exec(|| Ok(set_child_subreaper(Some(Pid::INIT))?)) };
    let mut run = Running::spawn(&mut command);
    let orphan = number(&run.lines(1)[0]);
    let start = Instant::now();
    while fs::exists(format!("/proc/{orphan}")).unwrap() {
        assert!(start.elapsed() < Duration::from_secs(30), "{orphan} is left");
        std::thread::yield_now();
    }
    fs::write(fifo.path(), "\n").unwrap();
    assert_eq!(run.wait().code(), Some(0));
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_die_with_a_killed_launcher() {
    let mut run = Running::start(&["-n", "2"], "echo $$; exec sleep 1000");
    let lines = run.lines(2);
    run.signal(Signal::KILL);
    assert_eq!(run.wait().signal(), Some(9));
    wait_until_gone(&lines.iter().map(|line| number(line)).collect::<Vec<_>>());
}

#[test]
fn refuses_bad_arguments() {
    // No machine has the address 192.0.2.1 (RFC 5737).
    let cases: [(&str, &[&str]); 17] = [
        ("-n 0", &["-n 0", "at least 1"]),
        ("-n x", &["--ranks", "invalid"]),
        ("--nodes 0", &["--nodes 0", "at least 1"]),
        ("-n 65536 --nodes 65536 --node-rank 0", &["-n", "--nodes", "lower"]),
        ("--nodes 2", &["--node-rank", "0 to 1"]),
        ("--node-rank 1", &["--node-rank 1", "at most 0"]),
        ("--nodes 2 --node-rank 2", &["--node-rank 2", "at most 1"]),
        ("--nodes 2 --node-rank 0", &["--master", "HOST:PORT"]),
        ("--master localhost", &["--master", "HOST:PORT"]),
        ("--master ::1:29400", &["--master", "[fd00::1]:29400"]),
        ("--nodes 2 --node-rank 0 --master localhost:0", &["--master", "port 0"]),
        ("--master 192.0.2.1:29400", &["--host", "interface"]),
        ("--host 0.0.0.0", &["--host", "connect to"]),
        ("--rendezvous-timeout 0", &["--rendezvous-timeout", "1.."]),
        (
            "--nodes 2 --node-rank 0 --master 192.0.2.1:1 --host 192.0.2.2",
            &["BONFIRE_SECRET_FILE", "32 random", "chmod 600"],
        ),
        ("--host 192.0.2.1", &["cannot listen on 192.0.2.1", "--host"]),
        (
            "--nodes 2 --node-rank 0 --master 192.0.2.1:1 --host 127.0.0.1",
            &["--master", "--host 127.0.0.1", "loopback"],
        ),
    ];
    for (arguments, named) in cases {
        let split: Vec<_> = arguments.split(' ').collect();
        let output = bonfire(&split, "echo started");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {stderr}");
        assert!(stderr.starts_with("error: "), "{arguments}: {stderr}");
        for part in named {
            assert!(stderr.contains(part), "{arguments}: {stderr}");
        }
        assert!(output.stdout.is_empty(), "{arguments}");
    }
}

#[test]
fn names_a_command_that_cannot_be_started() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data");
    fs::write(&file, "no program").unwrap();
    let file = file.to_str().unwrap();
    for (command, status) in [("no-such-command", 127), (file, 126)] {
        let output = launcher(&["-n", "2"]).arg(command).output().unwrap();
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(status), ""));
        let stderr = text(&output.stderr);
        assert!(stderr.starts_with("error: command ") && stderr.contains(&format!("{command:?}")), "{stderr}");
    }
    let output = launcher(&[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn help_lists_the_environment_of_ranks() {
    let output = launcher(&["--help"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    for part in ["BONFIRE_RANK", "MASTER_PORT", "Examples:", "Exit status:", "127"] {
        assert!(text(&output.stdout).contains(part), "{part}");
    }
}
