//! Ranks as processes that are killed, interrupted, or exit without a graceful shutdown.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use half::f16;
use rustix::process::{Resource, Rlimit, Signal, setrlimit};

/// Longer than these tests take, so that a child that hangs ends.
const DEADLINE: &str = "20";

/// Transports between processes of one host.
const BOTH: [&str; 2] = ["tcp", "shm"];

/// The body of a child: joins, reports that it has, and calls until it fails.
fn call_until_failure(len: usize) {
    let group = Group::from_env().expect("ranks find each other");
    let mut data = vec![1f32; len];
    let mut all_reduce = || group.all_reduce(&mut data, ReduceOp::Mean);
    all_reduce().expect("all ranks are there");
    send_line("going");
    let error = loop {
        if let Err(error) = all_reduce() {
            break error;
        }
    };
    report(&Err(error));
}

/// Starts three ranks of the test `name`, sends `signal` to rank `victim` while all ranks call, and returns the errors
/// of the others, and the victim.
fn signal_rank(name: &str, transport: &str, victim: usize, signal: Signal, deadline: &str) -> (Vec<Error>, Process) {
    let mut ranks = Process::start_ranks(name, 3, transport, deadline);
    for rank in &ranks {
        assert_eq!(rank.read_line(), "going");
    }
    ranks[victim].signal(signal);
    let victim = ranks.remove(victim);
    let errors = ranks.iter().map(|rank| rank.outcome().expect_err("a rank succeeds without its peer")).collect();
    assert!(ranks.iter_mut().all(|rank| rank.end().success()));
    (errors, victim)
}

#[test]
fn a_killed_process_is_named_with_its_address() {
    if is_child() {
        return call_until_failure(200_000);
    }
    for (transport, victim) in BOTH.into_iter().flat_map(|transport| (0..3).map(move |victim| (transport, victim))) {
        let (errors, mut killed) =
            signal_rank("a_killed_process_is_named_with_its_address", transport, victim, Signal::KILL, DEADLINE);
        assert_eq!(killed.end().signal(), Some(Signal::KILL.as_raw()));
        for error in errors {
            let Error::PeerLost { peer, address: Some(address), .. } = &error else {
                panic!("{transport}: rank {victim} was killed, and a survivor got {error:?}")
            };
            assert_eq!(*peer, victim);
            assert!(address.starts_with("127.0.0.1:"), "{address}");
            assert!(error.to_string().contains(&format!("rank {victim} at {address}")), "{error}");
        }
    }
}

#[test]
fn a_process_that_is_killed_while_ranks_make_subgroups_is_named() {
    const NAME: &str = "a_process_that_is_killed_while_ranks_make_subgroups_is_named";
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        group.barrier().expect("all ranks are there");
        send_line("going");
        let error = loop {
            if let Err(error) = group.split(Some(0), 0) {
                break error;
            }
        };
        return report(&Err(error));
    }
    for victim in (0..3).cycle().take(12) {
        for error in signal_rank(NAME, "tcp", victim, Signal::KILL, DEADLINE).0 {
            assert!(
                matches!(error, Error::PeerLost { peer, .. } if peer == victim),
                "rank {victim} was killed: {error:?}"
            );
        }
    }
}

#[test]
fn an_interrupted_process_leaves_and_ends_by_the_signal() {
    if is_child() {
        return call_until_failure(50);
    }
    let victims = [(0, Signal::INT), (1, Signal::TERM), (2, Signal::INT)];
    for (transport, (victim, signal)) in BOTH.into_iter().flat_map(|transport| victims.map(|v| (transport, v))) {
        let (errors, mut interrupted) =
            signal_rank("an_interrupted_process_leaves_and_ends_by_the_signal", transport, victim, signal, DEADLINE);
        assert_eq!(interrupted.end().signal(), Some(signal.as_raw()));
        for error in errors {
            let left = matches!(error, Error::Left { rank, .. } if rank == victim);
            assert!(left, "{transport}: rank {victim} left: {error:?}");
        }
    }
}

#[test]
fn a_stopped_process_is_named_when_the_deadline_expires() {
    if is_child() {
        return call_until_failure(50);
    }
    for transport in BOTH {
        let (errors, mut stopped) =
            signal_rank("a_stopped_process_is_named_when_the_deadline_expires", transport, 1, Signal::STOP, "1.5");
        for error in errors {
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing.contains(&1)), "{transport}: {error:?}");
        }
        stopped.signal(Signal::KILL);
        stopped.end();
    }
}

#[test]
fn a_stopped_process_is_declared_lost_long_before_the_deadline() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        group.barrier().expect("all ranks are there");
        send_line("going");
        let error = if group.rank() == 0 {
            // Does not involve the rank that is stopped.
            group.recv(&mut [0u8; 8], 2).expect_err("no rank sends")
        } else {
            std::iter::repeat_with(|| {
                group.send(&[0u8; 8], 3 - group.rank()).and_then(|()| group.recv(&mut [0u8; 8], 3 - group.rank()))
            })
            .find_map(Result::err)
            .expect("the loop ends with an error")
        };
        return report(&Err(error));
    }
    for transport in BOTH {
        let name = "a_stopped_process_is_declared_lost_long_before_the_deadline";
        let mut ranks = Process::start_ranks(name, 3, transport, "250");
        ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
        ranks[1].signal(Signal::STOP);
        for rank in [0, 2] {
            let error = ranks[rank].outcome().unwrap_err();
            let named =
                matches!(&error, Error::PeerLost { peer: 1, elapsed, .. } if *elapsed < Duration::from_secs(60));
            assert!(named, "{transport}: rank {rank} got {error:?}");
        }
        // It receives what it missed when it resumes.
        ranks[1].signal(Signal::CONT);
        ranks[1].outcome().unwrap_err();
        assert!(ranks.iter_mut().all(|rank| rank.end().success()));
    }
}

#[test]
fn a_process_that_exits_without_shutdown_is_lost() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let barrier = group.barrier();
        if group.rank() == 1 {
            std::process::exit(0);
        }
        // Its peers may learn that rank 1 is lost before the barrier ends for them.
        let result = barrier.and_then(|()| group.all_reduce(&mut [1f32; 10], ReduceOp::Sum));
        return report(&result.map(|()| String::new()));
    }
    for transport in BOTH {
        let ranks = Process::start_ranks("a_process_that_exits_without_shutdown_is_lost", 3, transport, DEADLINE);
        for rank in [0, 2] {
            let error = ranks[rank].outcome().unwrap_err();
            assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{transport}: rank {rank} got {error:?}");
        }
    }
}

#[test]
fn a_process_that_drops_its_group_has_left() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        group.barrier().expect("all ranks are there");
        if group.rank() == 2 {
            return;
        }
        return report(&group.barrier().map(|()| String::new()));
    }
    for transport in BOTH {
        let ranks = Process::start_ranks("a_process_that_drops_its_group_has_left", 3, transport, DEADLINE);
        for rank in [0, 1] {
            let error = ranks[rank].outcome().unwrap_err();
            assert!(matches!(error, Error::Left { rank: 2, .. }), "{transport}: rank {rank} got {error:?}");
        }
    }
}

/// Limits this process's memory to what it has now and `more` bytes.
fn limit_memory(more: u64) {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.strip_suffix("kB")?.trim().parse().ok());
    let limit = Some(size.map(|kib: u64| (kib << 10) + more).expect("a size in KiB"));
    setrlimit(Resource::As, Rlimit { current: limit, maximum: limit }).expect("a limit may be lowered");
}

#[test]
fn a_rank_without_memory_fails_the_operation_on_all_ranks_with_the_cause() {
    const MIB: usize = 1 << 20;
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let (bytes, mut halves) = (vec![1u8; 64 * MIB], vec![f16::ONE; 64 * MIB]);
        group.barrier().expect("all ranks are there");
        if group.rank() == 1 {
            limit_memory(16 * MIB as u64);
        }
        let result = match std::env::var("BONFIRE_TEST_CASE").expect("the parent sets it").as_str() {
            "result" => group.all_gather_v(&bytes).map(|_| String::new()),
            _ => group.all_reduce(&mut halves, ReduceOp::Sum).map(|()| String::new()),
        };
        return report(&result);
    }
    let name = "a_rank_without_memory_fails_the_operation_on_all_ranks_with_the_cause";
    for (transport, case) in [("tcp", "result"), ("shm", "result"), ("tcp", "scratch")] {
        let case = ("BONFIRE_TEST_CASE", case.to_owned());
        let mut ranks = Process::start_ranks_with(name, 3, transport, DEADLINE, std::slice::from_ref(&case));
        for (rank, process) in ranks.iter().enumerate() {
            let error = process.outcome().expect_err("rank 1 has no memory");
            let label = format!("{transport}, {}, rank {rank}: {error:?}", case.1);
            assert!(matches!(error, Error::Io { .. }), "{label}");
            assert!(error.to_string().contains("on rank 1: not enough memory"), "{label}");
        }
        assert!(ranks.iter_mut().all(|rank| rank.end().success()));
    }
}

#[test]
fn the_deadline_from_the_environment_ends_a_wait() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        if group.rank() == 0 {
            // Until the parent has the results of the others and kills this process.
            loop {
                std::thread::park();
            }
        }
        assert_eq!(group.deadline(), std::time::Duration::from_millis(500));
        return report(&group.barrier().map(|()| String::new()));
    }
    for transport in BOTH {
        let ranks = Process::start_ranks("the_deadline_from_the_environment_ends_a_wait", 3, transport, "0.5");
        for rank in &ranks[1..] {
            let error = rank.outcome().unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [0]), "{transport}: {error:?}");
        }
    }
}

#[test]
fn four_processes_connect_by_their_environment() {
    if is_child() {
        let outcome = Group::from_env().and_then(|group| {
            let mut data = [group.rank() as i64 + 1; 5];
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            group.barrier()?;
            Ok(format!("{data:?} of {}", group.world_size()))
        });
        return report(&outcome);
    }
    for transport in ["auto", "tcp", "shm"] {
        let mut ranks = Process::start_ranks("four_processes_connect_by_their_environment", 4, transport, DEADLINE);
        for rank in &mut ranks {
            assert_eq!(rank.outcome(), Ok("[10, 10, 10, 10, 10] of 4".into()));
            assert!(rank.end().success());
        }
    }
}

/// Creates a file with a secret and this mode.
fn secret(text: &str, mode: u32) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
    file
}

const SECRET: &str = "of a job whose ranks know this";

#[test]
fn processes_with_a_secret_connect_and_share_memory() {
    if is_child() {
        let outcome = Group::from_env().and_then(|group| {
            let mut data = vec![group.rank() as i64 + 1; 100_000];
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            Ok(format!("{}", data.iter().all(|element| *element == 6)))
        });
        return report(&outcome);
    }
    let name = "processes_with_a_secret_connect_and_share_memory";
    let file = secret(&format!("{SECRET}\n{SECRET}\n"), 0o600);
    let by_file = ("BONFIRE_SECRET_FILE", file.path().display().to_string());
    // The same secret without the file's final newline.
    let by_text = ("BONFIRE_SECRET", format!("{SECRET}\n{SECRET}"));
    for transport in ["auto", "tcp", "shm"] {
        for given in [&by_file, &by_text] {
            let mut ranks = Process::start_ranks_with(name, 3, transport, DEADLINE, std::slice::from_ref(given));
            for rank in &mut ranks {
                assert_eq!(rank.outcome(), Ok("true".into()), "{transport}");
                assert!(rank.end().success());
            }
        }
    }
}

#[test]
fn invalid_secrets_are_rejected_at_once() {
    if is_child() {
        return report(&Group::from_env().map(|group| format!("rank {}", group.rank())));
    }
    let (open, short) = (secret(&SECRET.repeat(2), 0o640), secret(SECRET, 0o600));
    let file = |file: &tempfile::NamedTempFile| ("BONFIRE_SECRET_FILE", file.path().display().to_string());
    let cases = [
        (vec![("BONFIRE_SECRET", SECRET.to_owned())], "BONFIRE_SECRET has 30 bytes"),
        (vec![("BONFIRE_SECRET", String::new())], "BONFIRE_SECRET has 0 bytes"),
        (vec![file(&short)], "has 30 bytes"),
        (vec![file(&open)], "mode 0640"),
        (vec![("BONFIRE_SECRET_FILE", "no such file".to_owned())], "cannot be opened"),
        (vec![("BONFIRE_SECRET", SECRET.repeat(2)), file(&short)], "both BONFIRE_SECRET and BONFIRE_SECRET_FILE"),
    ];
    for (given, named) in cases {
        let ranks = Process::start_ranks_with("invalid_secrets_are_rejected_at_once", 2, "tcp", DEADLINE, &given);
        for rank in &ranks {
            let error = rank.outcome().unwrap_err();
            let rejected = matches!(&error, Error::Config(text) if text.contains(named) && !text.contains(SECRET));
            assert!(rejected, "{named}: {error:?}");
        }
    }
}

#[test]
fn invalid_variables_are_named() {
    if is_child() {
        return report(&Group::from_env().map(|group| format!("rank {}", group.rank())));
    }
    const RANK: (&str, &str) = ("BONFIRE_RANK", "0");
    const SIZE: (&str, &str) = ("BONFIRE_WORLD_SIZE", "2");
    const ADDRESS: (&str, &str) = ("BONFIRE_ADDRESS", "127.0.0.1:29500");
    let cases: [(&str, &[(&str, &str)]); 11] = [
        ("BONFIRE_RANK", &[]),
        ("BONFIRE_RANK", &[SIZE, ADDRESS]),
        ("BONFIRE_WORLD_SIZE", &[RANK, ADDRESS]),
        ("BONFIRE_ADDRESS", &[RANK, SIZE]),
        ("BONFIRE_RANK", &[("BONFIRE_RANK", "-1"), SIZE, ADDRESS]),
        ("BONFIRE_WORLD_SIZE", &[RANK, ("BONFIRE_WORLD_SIZE", "two"), ADDRESS]),
        ("127.0.0.1", &[RANK, SIZE, ("BONFIRE_ADDRESS", "127.0.0.1")]),
        ("BONFIRE_DEADLINE", &[RANK, SIZE, ADDRESS, ("BONFIRE_DEADLINE", "soon")]),
        ("BONFIRE_HEARTBEAT_TIMEOUT", &[RANK, SIZE, ADDRESS, ("BONFIRE_HEARTBEAT_TIMEOUT", "-5")]),
        ("BONFIRE_HANG_TIMEOUT", &[RANK, SIZE, ADDRESS, ("BONFIRE_HANG_TIMEOUT", "0")]),
        ("BONFIRE_TRANSPORT", &[RANK, SIZE, ADDRESS, ("BONFIRE_TRANSPORT", "rdma")]),
    ];
    for (named, variables) in cases {
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let error = Process::start("invalid_variables_are_named", &variables).outcome().unwrap_err();
        assert!(matches!(&error, Error::Config(text) if text.contains(named)), "{variables:?}: {error:?}");
    }
    let alone = [("BONFIRE_RANK", "0".to_owned()), ("BONFIRE_WORLD_SIZE", "1".to_owned())];
    assert_eq!(Process::start("invalid_variables_are_named", &alone).outcome(), Ok("rank 0".into()));
}
