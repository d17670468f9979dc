//! One of three ranks fails in every way in which a process can end. `bonfire run` must name this rank, and exit with
//! its status, every time: also if the other ranks, which fail as a consequence, end first.
//!
//! `BONFIRE_FAULTS` is the number of runs of each fault (default: 5).
#![cfg(unix)]

#[path = "first_cause/faults.rs"]
mod faults;

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Mutex;

use bonfire_testing::in_parallel;
use bonfire_testing::settings::number;
use faults::{Cgroup, FAULTS, Fault, HANGS, LEAVES, rank};

/// Ranks of a run.
const RANKS: usize = 3;
/// Runs at the same time. Most of the time they wait.
const WIDTH: usize = 4;

/// One run: which rank fails, and how the others end when they learn of it.
struct Case {
    fault: &'static Fault,
    transport: &'static str,
    victim: usize,
    others_panic: bool,
}

fn main() -> ExitCode {
    let words: Vec<_> = env::args().skip(1).collect();
    if let [first, fault, victim, others_panic] = &words[..]
        && first == "rank"
    {
        return rank(fault, victim.parse().expect("a rank"), others_panic == "true");
    }
    if words.iter().any(|word| word == "--list") {
        println!("first_cause: test");
        return ExitCode::SUCCESS;
    }
    // Other tests are asked for.
    if words.iter().any(|word| !word.starts_with('-') && !"first_cause".contains(word.as_str())) {
        return ExitCode::SUCCESS;
    }
    let times = number("BONFIRE_FAULTS").unwrap_or(5) as usize;
    let no_cgroup = Cgroup::new().err();
    let mut cases = Vec::new();
    for fault in FAULTS {
        if fault.needs_cgroup
            && let Some(why) = &no_cgroup
        {
            println!("{}: skipped, because {why}", fault.name);
            continue;
        }
        cases.extend((0..times).map(|i| Case {
            fault,
            transport: ["shm", "tcp"][i / 2 % 2],
            victim: i % RANKS,
            others_panic: i % 2 == 1,
        }));
    }
    let wrong = Mutex::new(Vec::new());
    in_parallel(&cases, WIDTH, |case| {
        if let Err(what) = run(case) {
            wrong.lock().unwrap().push((case.fault.name, what));
        }
    });
    let mut wrong = wrong.into_inner().unwrap();
    wrong.extend(hang().err().map(|what| ("hang", what)));
    wrong.extend(leaves().err().map(|what| ("leaves", what)));
    for (name, what) in &wrong {
        println!("{name}: {what}\n");
    }
    for fault in FAULTS {
        let of_fault = cases.iter().filter(|case| case.fault.name == fault.name).count();
        let bad = wrong.iter().filter(|(name, _)| *name == fault.name).count();
        println!("{:28} {:3} of {of_fault} right", fault.name, of_fault - bad);
    }
    ExitCode::from(u8::from(!wrong.is_empty()))
}

/// Runs three ranks with these arguments and variables, in a control group if one is given. Returns the launcher's
/// status and standard error.
fn launch(words: [&str; 3], variables: &[(&str, &str)], cgroup: Option<&Path>) -> (Option<i32>, String) {
    let own = env::current_exe().expect("the test's own binary");
    let mut command = Command::new("sh");
    match cgroup {
        Some(cgroup) => command.args(["-c", "echo 0 >\"$0/cgroup.procs\" && exec \"$@\""]).arg(cgroup),
        None => command.args(["-c", "exec \"$@\"", "sh"]),
    };
    command.args([env!("CARGO_BIN_EXE_bonfire"), "run", "-n", &RANKS.to_string(), "--"]);
    command.arg(own).arg("rank").args(words);
    let output = command.env_remove("BONFIRE_TRACE").envs(variables.iter().copied()).output();
    let output = output.expect("the launcher starts");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Rank 2 hangs: the launcher says so, before the others time out, though the ranks have no logger. Then it ends rank
/// 2.
fn hang() -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().to_str().expect("a name in UTF-8");
    let variables = [("BONFIRE_DEADLINE", "3"), ("BONFIRE_TRACE", folder)];
    let (status, stderr) = launch(["hang", "2", "false"], &variables, None);
    let wanted = [
        " in all_reduce(f32 x 1000, mean) #20 for rank 2: ranks 0, 1 are in all_reduce at ",
        "bonfire: no rank of this node failed by itself; rank ",
        "it exited with status 1 after the error: all_reduce(f32 x 1000, mean) #20 timed out",
        "bonfire:   rank 2: killed by SIGTERM, sent by the launcher\n",
        &format!("else `bonfire trace {folder}` says what each rank did"),
        &format!(" rank 2, which was killed by SIGTERM, sent by the launcher; its last line:\n  | {HANGS}\n"),
    ];
    let right = status == Some(1) && wanted.iter().all(|part| stderr.contains(part));
    let once = stderr.matches(" has waited ").count() == 1 && !stderr.contains("set BONFIRE_TRACE");
    if right && once { Ok(()) } else { Err(format!("{status:?} instead of 1 and {wanted:#?}:\n{stderr}")) }
}

/// Rank 2 ends as if all were well while the others need it: it is named by its rank in the run. Rank 1 leaves as soon
/// as it knows of that, so rank 0 may name either.
fn leaves() -> Result<(), String> {
    let (status, stderr) = launch([LEAVES, "2", "false"], &[], None);
    let wanted = [
        "bonfire: no rank of this node failed by itself; rank ",
        " rank 2, which exited with status 0; it printed nothing\n",
    ];
    let right = status == Some(1) && wanted.iter().all(|part| stderr.contains(part));
    if right { Ok(()) } else { Err(format!("{status:?} instead of 1 and {wanted:#?}:\n{stderr}")) }
}

/// Runs the case and checks what the launcher says.
fn run(case: &Case) -> Result<(), String> {
    // Of its own: while a rank of one run has all the memory of its group, no other run could start there.
    let cgroup = case.fault.needs_cgroup.then(Cgroup::new).transpose()?;
    let (status, stderr) = launch(
        [case.fault.name, &case.victim.to_string(), &case.others_panic.to_string()],
        &[("BONFIRE_TRANSPORT", case.transport), ("BONFIRE_DEADLINE", "60")],
        cgroup.as_ref().map(|cgroup| &*cgroup.0),
    );
    let Case { fault: Fault { ended, status: wanted, .. }, victim, .. } = case;
    let first = format!("bonfire: rank {victim} failed first: it {ended}");
    let mut listed = vec![0; RANKS];
    for line in stderr.lines().filter_map(|line| line.strip_prefix("bonfire:   rank")) {
        let ranks = line.trim_start_matches('s').split_whitespace();
        for ranks in ranks.map_while(|word| word.starts_with(|c: char| c.is_ascii_digit()).then_some(word)) {
            let ranks = ranks.trim_end_matches([',', ':']);
            let (low, high) = ranks.split_once('-').unwrap_or((ranks, ranks));
            let number = |text: &str| text.parse::<usize>().expect("a rank");
            (number(low)..=number(high)).for_each(|rank| listed[rank] += 1);
        }
    }
    // A limit on memory is claimed only where it was the reason.
    let limited = stderr.contains("because its control group") == case.fault.needs_cgroup;
    let right = status == Some((*wanted).into()) && stderr.contains(&first) && limited && listed == [1; RANKS];
    let wanted = format!("status {wanted}, '{first}' and the status of each rank once");
    if right { Ok(()) } else { Err(format!("{status:?} instead of {wanted}:\n{stderr}")) }
}
