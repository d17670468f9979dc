//! Every system call of a rank fails, in every way that its manual page documents.
//!
//! Two ranks connect, compute and leave, and one of them has failing calls. Each rank ends in time with a typed error,
//! or with the right numbers. After an error that says "try again" it must be the right numbers. A lack of descriptors
//! is named, and no rank waits until its deadline for the one that has it. Every call fails in some run.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bonfire_core::{Builder, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::syscalls::{Failing, fail, stop_failing};
use bonfire_testing::{free_address, in_parallel};
use libc::{EAGAIN, EINTR, EMFILE, ENFILE};
use rustix::process::Signal;

use super::calls::{CALLS, Call};

const FAILING: &str = "BONFIRE_TEST_FAILING";
const TIMEOUT: &str = "BONFIRE_TEST_TIMEOUT";

/// Longer than any deadline of the ranks.
const LIMIT: Duration = Duration::from_secs(120);

/// Cases at the same time. Most of them wait until a rank gives up.
const WIDTH: usize = 24;

/// Calls whose failure only means that ranks use TCP, if they may choose.
const FALL_BACK: [&str; 5] = ["memfd_create", "ftruncate", "fstat", "sendmsg", "recvmsg"];

/// A run of two ranks.
#[derive(Clone, Copy)]
struct Case {
    call: &'static Call,
    errno: i32,
    /// See [`Failing`].
    first: u64,
    step: u64,
    /// The rank whose calls fail.
    rank: usize,
    transport: &'static str,
}

impl Case {
    /// Whether both ranks must succeed.
    fn must_succeed(&self) -> bool {
        let accepts_again = self.call.name == "accept4" && self.errno != EAGAIN && self.step == 0;
        let falls_back = self.transport == "auto" && FALL_BACK.contains(&self.call.name);
        self.errno == EINTR || accepts_again || falls_back
    }

    /// Runs both ranks. Returns how many such calls the rank made, or what is wrong.
    fn run(&self, right: &AtomicU64) -> Result<u64, String> {
        // Seconds: for the rendezvous, and for an operation.
        let limits = if self.must_succeed() { [60, 60] } else { [2, 8] };
        let Call { number, own, .. } = *self.call;
        let failing = Failing { call: number as u32, own, errno: self.errno, first: self.first, step: self.step };
        let (mut seen, mut errors) = (0, Vec::new());
        let mut ranks = start(2, self.transport, limits, (self.rank, failing));
        for (rank, process) in ranks.iter_mut().enumerate() {
            let line = process.read_line_within(LIMIT).map_err(|e| format!("rank {rank} says nothing: {e}"))?;
            let outcome: Result<String, Error> =
                serde_json::from_str(&line).map_err(|_| format!("rank {rank}: {line}"))?;
            match outcome {
                Ok(_) => drop(right.fetch_add(1, Ordering::Relaxed)),
                Err(error) if self.must_succeed() => return Err(format!("rank {rank}: {error}")),
                Err(error) => errors.push((rank, error)),
            }
            let count = process.read_line_within(LIMIT).map_err(|e| format!("rank {rank} counts nothing: {e}"))?;
            if rank == self.rank {
                seen = count.parse().map_err(|_| count)?;
            }
            let ended = process.end_within(LIMIT);
            if !ended.is_some_and(|status| status.success()) {
                return Err(format!("rank {rank} ends with {ended:?}"));
            }
        }
        // Otherwise the call did not fail, and whatever went wrong is not its doing.
        let lack = [EMFILE, ENFILE].contains(&self.errno) && self.call.name != "futex";
        if seen >= self.first && lack && !self.names_the_lack(&errors) {
            return Err(format!("no error names the lack of descriptors, or one is not about it: {errors:?}"));
        }
        Ok(seen)
    }

    /// Whether the errors of a run without descriptors say so. A rank that was not yet connected can only say that the
    /// other one did not come.
    fn names_the_lack(&self, errors: &[(usize, Error)]) -> bool {
        let named = |error: &Error| error.to_string().contains("open files");
        let follows = |error: &Error| match error {
            Error::Rendezvous { .. } => true,
            Error::PeerLost { peer, .. } | Error::Left { rank: peer, .. } => *peer == self.rank,
            _ => false,
        };
        errors.is_empty()
            || errors.iter().any(|(_, error)| named(error))
                && errors.iter().all(|(rank, error)| named(error) || *rank != self.rank && follows(error))
    }

    /// This case, and others in which the call fails in the same way, for a call that the rank does not make so often.
    fn or_else(self) -> impl Iterator<Item = Case> {
        let first = [self, Case { first: 1, ..self }];
        let transports =
            first.into_iter().chain(["shm", "tcp", "auto"].map(|transport| Case { transport, ..first[1] }));
        let cases: Vec<_> = transports.collect();
        cases.into_iter().flat_map(|case| [case, Case { rank: 1 - case.rank, ..case }])
    }
}

/// Starts `n` ranks, one of which has failing calls.
fn start(n: usize, transport: &str, limits: [u64; 2], (faulty, failing): (usize, Failing)) -> Vec<Process> {
    let address = free_address();
    let start = |rank: usize| {
        let failing = if rank == faulty { failing } else { Failing { first: 0, ..failing } };
        let variables = [
            ("BONFIRE_RANK", rank.to_string()),
            ("BONFIRE_WORLD_SIZE", n.to_string()),
            ("BONFIRE_ADDRESS", address.clone()),
            ("BONFIRE_TRANSPORT", transport.to_owned()),
            (TIMEOUT, limits[0].to_string()),
            ("BONFIRE_DEADLINE", limits[1].to_string()),
            (FAILING, failing.to_word()),
        ];
        Process::start("faults::failing_calls_are_errors_or_do_no_harm", &variables)
    };
    (0..n).map(start).collect()
}

/// Element `i` of a rank's data.
fn element(i: usize, rank: usize) -> i32 {
    (i as i32).wrapping_mul(7919).wrapping_add(rank as i32 * 1_000_003)
}

/// Sums over all ranks, and compares every element.
fn sum(group: &Group, data: &mut [i32]) -> Result<(), Error> {
    data.iter_mut().enumerate().for_each(|(i, x)| *x = element(i, group.rank()));
    group.all_reduce(data, ReduceOp::Sum)?;
    for (i, x) in data.iter().enumerate() {
        let right = (0..group.world_size()).fold(0, |sum: i32, rank| sum.wrapping_add(element(i, rank)));
        assert!(*x == right, "element {i} of {} is {x} and not {right}", data.len());
    }
    Ok(())
}

/// What each rank does.
fn connect_compute_and_leave() -> Result<String, Error> {
    let seconds = std::env::var(TIMEOUT).ok().and_then(|seconds| seconds.parse().ok());
    let limit = Duration::from_secs(seconds.expect("the parent sets it"));
    let group = Builder::from_env()?.rendezvous_timeout(limit).connect()?;
    for len in [5, 2_000, 300_000] {
        sum(&group, &mut vec![0; len])?;
    }
    let mut buffer = group.allocate(400_000)?;
    sum(&group, &mut buffer)?;
    let subgroup = group.subgroup(&(0..group.world_size()).collect::<Vec<_>>())?;
    sum(&subgroup, &mut vec![0; 1_000])?;
    drop(subgroup);
    sum(&group, &mut buffer)?;
    Ok("right".into())
}

fn child() {
    std::panic::set_hook(Box::new(|panic| {
        let panic = panic.to_string().replace('\n', " ");
        // tokio's becomes an error: see `OwnRuntime`.
        if !panic.contains("failed to create UnixStream") {
            stop_failing();
            send_line(panic);
            std::process::abort();
        }
    }));
    let failing = std::env::var(FAILING).ok().and_then(|word| Failing::from_word(&word));
    fail(failing.expect("the parent sets it")).expect("the system has filters for system calls");
    let outcome = connect_compute_and_leave();
    let seen = stop_failing();
    report(&outcome);
    send_line(seen);
}

/// Runs `cases`. If one is for call number `continued`, all later calls fail too, each in one way. Otherwise the call
/// of each case must fail, in this case or in another one for the same call.
fn run(cases: Vec<Case>, continued: Option<u64>) {
    let (wrong, right, runs) = (Mutex::new(Vec::new()), AtomicU64::new(0), AtomicU64::new(0));
    let failed = Mutex::new(BTreeSet::new());
    // Returns how many such calls there were; `None` if something is wrong.
    let run_case = |case: Case| {
        runs.fetch_add(1, Ordering::Relaxed);
        let Case { call, errno, first, step, rank, transport } = case;
        let seen = case.run(&right);
        if seen.as_ref().is_ok_and(|seen| *seen >= first) {
            failed.lock().unwrap().insert(call.name);
        }
        seen.map_err(|problem| {
            let error = std::io::Error::from_raw_os_error(errno);
            let calls = format!("calls {first} + n * {step} of {} on rank {rank}", call.name);
            wrong.lock().unwrap().push(format!("{transport}, {error} in {calls}: {problem}"));
        })
        .ok()
    };
    in_parallel(&cases, WIDTH, |case| {
        let (mut case, errors) = (*case, case.call.errors);
        if continued.is_none() {
            let fails = |case: Case| run_case(case).is_none_or(|seen| seen >= case.first);
            if !case.or_else().any(fails) {
                wrong.lock().unwrap().push(format!("no rank calls {}: {}", case.call.name, case.errno));
            }
            return;
        }
        loop {
            let first = case.first;
            let seen = run_case(case);
            if continued.is_none_or(|number| first < number) || seen.is_none_or(|seen| seen < first) {
                return;
            }
            case.first += 1;
            case.errno = errors[case.first as usize % errors.len()];
        }
    });
    let (wrong, runs) = (wrong.into_inner().unwrap(), runs.into_inner());
    println!("{runs} runs of two ranks; {} ranks got all numbers right, the others errors", right.into_inner());
    let (mut called, failed) = (cases.iter().map(|case| case.call.name), failed.into_inner().unwrap());
    assert!(called.all(|name| failed.contains(name)), "only these calls failed: {failed:?}");
    assert!(wrong.is_empty(), "{} of {runs} runs:\n{}", wrong.len(), wrong.join("\n"));
}

/// Which calls fail: one (0), every second one (2), every one (1). The system does not interrupt every call. It returns
/// EAGAIN once at most, because it has just reported that the call would succeed.
fn steps(errno: i32) -> &'static [u64] {
    match errno {
        EAGAIN => &[0],
        EINTR => &[0, 2],
        _ => &[0, 2, 1],
    }
}

/// One way in which each call can fail, and interruptions of all calls that can be interrupted.
#[test]
fn failing_calls_are_errors_or_do_no_harm() {
    if is_child() {
        return child();
    }
    let mut cases = Vec::new();
    for (i, call) in CALLS.iter().enumerate() {
        // All of them, of a rank that waits for the other.
        if call.name == "accept4" {
            for (errno, transport) in [(EMFILE, "tcp"), (ENFILE, "shm")] {
                cases.push(Case { call, errno, first: 1, step: 1, rank: 0, transport });
            }
        }
        // What tokio panics on.
        if call.name == "socketpair" {
            cases.push(Case { call, errno: libc::EMFILE, first: 1, step: 1, rank: 0, transport: "tcp" });
        }
        for (t, transport) in ["shm", "tcp"].into_iter().enumerate() {
            let rank = (i + t) % 2;
            let errno = call.errors[(7 * i + 3 * t) % call.errors.len()];
            cases.push(Case { call, errno, first: 1 + i as u64 % 2, step: 0, rank, transport });
            if call.errors.contains(&EINTR) {
                cases.push(Case { call, errno: EINTR, first: 1, step: 2, rank: 1 - rank, transport });
            }
        }
    }
    run(cases, None);
}

/// Rank 0 cannot send the table of addresses to rank 1. Rank 2, which it has not sent to yet, learns that at once.
#[test]
fn a_rank_that_cannot_be_welcomed_is_reported_to_those_behind_it() {
    let (reported, sends) = (AtomicU64::new(0), (1..=10).collect::<Vec<_>>());
    in_parallel(&sends, sends.len(), |first| {
        let call = libc::SYS_sendto as u32;
        let failing = Failing { call, own: false, errno: libc::ENOBUFS, first: *first, step: 0 };
        let ranks = start(3, "tcp", [20, 20], (0, failing));
        // Other sends fail too, and may be repeated.
        let Err(Error::Rendezvous { reason, .. }) = ranks[0].outcome() else { return };
        if reason.contains("the connection to rank 1 ended") {
            reported.fetch_add(1, Ordering::Relaxed);
            let two = ranks[2].outcome();
            assert!(
                matches!(&two, Err(Error::Rendezvous { reason: same, .. }) if *same == reason),
                "{two:?}: {reason}"
            );
        }
    });
    assert_eq!(reported.into_inner(), 1);
}

/// Each of the first calls fails in all ways, each later one in one of them.
#[test]
#[ignore = "takes many minutes"]
fn calls_that_fail_in_all_ways_are_errors_or_do_no_harm() {
    const EACH: u64 = 3;
    let mut cases = Vec::new();
    for call in CALLS {
        for (transport, rank) in
            ["shm", "tcp", "auto"].into_iter().flat_map(|transport| [(transport, 0), (transport, 1)])
        {
            for (i, errno) in call.errors.iter().copied().enumerate() {
                let last = if i == 0 { EACH } else { EACH - 1 };
                let once = (1..=last).map(|first| (first, 0));
                let often = steps(errno).iter().filter(|step| **step > 0).map(|step| (1, *step));
                cases.extend(once.chain(often).map(|(first, step)| Case { call, errno, first, step, rank, transport }));
            }
        }
    }
    run(cases, Some(EACH));
}

/// The first group of a process cannot watch for signals, and the second one can.
#[test]
fn a_lack_of_descriptors_does_not_disable_interrupts_for_later_groups() {
    const NAME: &str = "faults::a_lack_of_descriptors_does_not_disable_interrupts_for_later_groups";
    if is_child() {
        let socketpair =
            Failing { call: libc::SYS_socketpair as u32, own: false, errno: libc::EMFILE, first: 1, step: 0 };
        fail(socketpair).expect("the system has filters for system calls");
        let error = Group::from_env().expect_err("it needs descriptors");
        assert!(
            matches!(&error, Error::Io { operation, .. } if operation.contains("signals that end the process")),
            "{error}"
        );
        let _group = Group::from_env().expect("there are descriptors now");
        send_line("ready");
        loop {
            std::thread::park();
        }
    }
    let traces = tempfile::tempdir().expect("a folder");
    let variables = [
        ("BONFIRE_RANK", "0".into()),
        ("BONFIRE_WORLD_SIZE", "1".into()),
        ("BONFIRE_TRACE", traces.path().display().to_string()),
    ];
    let mut rank = Process::start(NAME, &variables);
    assert_eq!(rank.read_line(), "ready");
    rank.signal(Signal::TERM);
    assert!(!rank.end().success());
    // An interrupted rank writes its trace.
    assert_eq!(fs::read_dir(traces.path()).expect("the folder").count(), 1);
}
