//! How ranks leave: at what cost to the others, on a signal, and in a process that was forked.
#![cfg(target_os = "linux")]

use std::net::TcpStream;
use std::time::Duration;

use bonfire_core::{Builder, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use rustix::process::Signal;

fn sum(group: &Group) -> Result<u64, Error> {
    let mut ranks = [group.rank() as u64];
    group.all_reduce(&mut ranks, ReduceOp::Sum)?;
    Ok(ranks[0])
}

/// Returns the number of this process's sockets.
fn sockets() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").expect("open files");
    let target = |file: std::io::Result<std::fs::DirEntry>| std::fs::read_link(file.ok()?.path()).ok();
    files.filter_map(target).filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn ranks_of_a_large_group_that_rank_0_has_left_open_no_connections() {
    const PROCESSES: usize = 64;
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        assert_eq!(sum(&group).expect("all ranks are there"), (PROCESSES * (PROCESSES - 1) / 2) as u64);
        group.barrier().expect("all ranks are there");
        let before = sockets();
        if group.rank() > 0 {
            // For as long as the ranks once took to connect to each other.
            std::thread::sleep(Duration::from_secs(4));
        }
        let after = sockets();
        drop(group);
        return send_line(format!("{before} {after}"));
    }
    for transport in ["tcp", "shm"] {
        let name = "ranks_of_a_large_group_that_rank_0_has_left_open_no_connections";
        let mut ranks = Process::start_ranks(name, PROCESSES, transport, "240");
        for (rank, process) in ranks.iter_mut().enumerate() {
            let line = process.read_line();
            let (before, after) = line.split_once(' ').expect("two numbers");
            let (before, after): (usize, usize) = (before.parse().unwrap(), after.parse().unwrap());
            assert!(after <= before, "{transport}: rank {rank} had {before} sockets and then {after}");
            assert!(process.end().success());
        }
    }
}

/// A program's error: rank 0, or another one, makes a call less than the others.
#[test]
fn a_large_group_that_a_rank_has_left_fails_at_the_next_call_and_opens_no_connections() {
    const PROCESSES: usize = 64;
    const LEAVER: &str = "BONFIRE_TEST_LEAVER";
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        // Opens the connections for data that the next one needs.
        group.barrier().expect("all ranks are there");
        let before = sockets();
        let leaver = std::env::var(LEAVER).expect("set by the parent");
        if group.rank().to_string() == leaver {
            return;
        }
        let outcome = group.barrier();
        let after = sockets();
        let named = matches!(outcome, Err(Error::Left { rank, .. }) if rank.to_string() == leaver);
        return send_line(format!("{before} {after} {named} {outcome:?}"));
    }
    for (transport, leaver) in [("tcp", 0), ("shm", 0), ("tcp", 37)] {
        let name = "a_large_group_that_a_rank_has_left_fails_at_the_next_call_and_opens_no_connections";
        let ranks = Process::start_ranks_with(name, PROCESSES, transport, "240", &[(LEAVER, leaver.to_string())]);
        for (rank, process) in ranks.iter().enumerate().filter(|(rank, _)| *rank != leaver) {
            let line = process.read_line();
            let [before, after, named, outcome] = line.splitn(4, ' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let (before, after): (usize, usize) = (before.parse().unwrap(), after.parse().unwrap());
            assert!(after <= before, "{transport}: rank {rank} had {before} sockets and then {after}");
            assert_eq!(named, "true", "{transport}: rank {rank} got {outcome}");
        }
    }
}

/// A rank that missed all shrinks would take a closed port for the end of the rank.
#[test]
#[expect(clippy::disallowed_methods, reason = "it finds out only whether a process listens")]
fn a_rank_keeps_its_first_port_in_use_in_all_groups_that_follow() {
    if is_child() {
        let run = || {
            let mut group = Group::from_env()?;
            for _ in 0..3 {
                // Drops the former group.
                group = group.shrink()?;
            }
            group.barrier()?;
            let address = std::env::var("BONFIRE_ADDRESS").expect("set by the parent");
            let reached = group.rank() == 0 || TcpStream::connect(address).is_ok();
            group.barrier().map(|()| format!("{reached}"))
        };
        return report(&run());
    }
    let name = "a_rank_keeps_its_first_port_in_use_in_all_groups_that_follow";
    let ranks = Process::start_ranks(name, 2, "tcp", "60");
    for (rank, process) in ranks.iter().enumerate() {
        assert_eq!(process.outcome(), Ok("true".into()), "rank {rank}");
    }
}

/// A rank that is interrupted leaves all of its groups at once. Each one's peers stay.
#[test]
fn an_interrupted_rank_leaves_many_groups_in_the_time_of_one() {
    const GROUPS: usize = 60;
    /// Far longer than one group takes to leave, and far shorter than as many one after the other.
    const LIMIT: Duration = Duration::from_secs(30);
    if is_child() {
        let group = Builder::from_env().and_then(Builder::connect).expect("ranks find each other");
        let subgroups: Vec<_> = (0..GROUPS).map(|_| group.subgroup(&[0, 1]).expect("both ranks are there")).collect();
        subgroups.iter().for_each(|group| assert_eq!(sum(group), Ok(1)));
        send_line("going");
        if group.rank() == 1 {
            loop {
                std::thread::park();
            }
        }
        // Each waits until rank 1 leaves it, and keeps its connections.
        for subgroup in &subgroups {
            let error = sum(subgroup).expect_err("rank 1 has left");
            assert!(matches!(error, Error::Left { rank: 1, .. }), "{error:?}");
        }
        send_line("left");
        loop {
            std::thread::park();
        }
    }
    let mut ranks = Process::start_ranks("an_interrupted_rank_leaves_many_groups_in_the_time_of_one", 2, "tcp", "240");
    ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
    ranks[1].signal(Signal::TERM);
    let ended = ranks[1].end_within(LIMIT);
    assert!(ended.is_some_and(|status| !status.success()), "{ended:?}");
    assert_eq!(ranks[0].read_line(), "left");
}

/// The copy of a group in a forked process neither panics nor leaves for the rank.
#[test]
fn a_group_that_is_dropped_in_a_forked_process_goes_on() {
    if is_child() {
        return report(&Group::from_env().and_then(|group| {
            sum(&group)?;
            let started = group.start_all_reduce(vec![1u64], ReduceOp::Sum)?.wait().map_err(|(error, _)| error)?;
            // SAFETY: the child drops its copy, which touches no lock that another thread may have held, and exits.
            match unsafe { libc::fork() } {
                0 => {
                    drop(group);
                    // SAFETY: ends the process at once.
                    unsafe { libc::_exit(0) }
                }
                child => {
                    let mut status = -1;
                    // SAFETY: a child of this process, and a place for its status.
                    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
                    assert_eq!((ended, status), (child, 0), "the child ends in order");
                }
            }
            sum(&group).map(|sum| format!("{sum} {}", started[0]))
        }));
    }
    for transport in ["tcp", "shm"] {
        let name = "a_group_that_is_dropped_in_a_forked_process_goes_on";
        let mut ranks = Process::start_ranks(name, 3, transport, "60");
        for rank in &mut ranks {
            assert_eq!(rank.outcome(), Ok("3 3".into()), "{transport}");
            assert!(rank.end().success());
        }
    }
}

#[test]
fn a_group_of_thousands_of_threads_is_made_and_left_and_a_larger_one_is_refused() {
    let groups = Group::threads(2000).expect("a group of threads");
    assert_eq!(groups.len(), 2000);
    drop(groups);
    for world_size in [4097, 20_000, usize::MAX] {
        let error = Group::threads(world_size).expect_err("it is too large");
        assert!(matches!(&error, Error::InvalidArgument { reason, .. } if reason.contains("at most 4096")), "{error}");
    }
}
