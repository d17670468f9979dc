//! Ranks with few descriptors: they are refused before they connect, or the operation that needs one says so.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use bonfire_core::{Builder, Error, Group};
use bonfire_testing::process::{Process, is_child, report};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How many descriptors a rank may have, and whether this rank is the one.
const FEW: &str = "BONFIRE_TEST_FEW";

/// The folder that shows that this rank has no descriptors.
const READY: &str = "BONFIRE_TEST_READY";

const RANKS: usize = 6;

/// Longer than this test takes: no rank waits for it.
const DEADLINE: &str = "240";

/// Starts all ranks, of which one has few descriptors. Returns what they report.
fn outcomes(name: &str, few: usize, star: bool) -> Vec<Result<String, Error>> {
    let folder = tempfile::tempdir().expect("a folder");
    let ready = folder.path().join("ready").display().to_string();
    let variables = [(FEW, few.to_string()), ("BONFIRE_TEST_STAR", u8::from(star).to_string()), (READY, ready)];
    let ranks = Process::start_ranks_with(name, RANKS, "tcp", DEADLINE, &variables);
    ranks.iter().map(Process::outcome).collect()
}

/// Joins the group, and returns whether this rank is to have few descriptors.
fn builder() -> (Builder, bool) {
    let variable = |name| std::env::var(name).expect("the parent sets it");
    let builder = Builder::from_env().expect("settings");
    let builder = if variable("BONFIRE_TEST_STAR") == "1" { builder.full_mesh_limit(2) } else { builder };
    (builder, variable(FEW) == variable("BONFIRE_RANK"))
}

/// Opens files until there is no descriptor left.
fn use_up() -> Vec<File> {
    let limit = Rlimit { current: Some(200), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("a limit may be lowered");
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

#[test]
fn a_rank_whose_limit_is_too_low_is_named_by_all_before_they_connect() {
    const LIMIT: u64 = 40;
    if is_child() {
        let (builder, few) = builder();
        if few {
            let limit = Rlimit { current: Some(LIMIT), maximum: Some(LIMIT) };
            setrlimit(Resource::Nofile, limit).expect("a limit may be lowered");
        }
        return report(&builder.connect().map(|group| group.world_size().to_string()));
    }
    for (few, star) in [(0, false), (0, true), (2, false), (2, true)] {
        let name = "a_rank_whose_limit_is_too_low_is_named_by_all_before_they_connect";
        for (rank, outcome) in outcomes(name, few, star).into_iter().enumerate() {
            let Err(Error::Rendezvous { reason, .. }) = &outcome else { panic!("rank {rank}: {outcome:?}") };
            let named = reason.starts_with(&format!("rank {few} may have {LIMIT} open files (ulimit -n) and needs "));
            assert!(named && reason.contains("LimitNOFILE="), "rank {rank}: {reason}");
        }
    }
}

#[test]
fn the_soft_limit_is_no_limit() {
    if is_child() {
        let (builder, few) = builder();
        if few {
            let limit = Rlimit { current: Some(20), ..getrlimit(Resource::Nofile) };
            setrlimit(Resource::Nofile, limit).expect("a limit may be lowered");
        }
        return report(&builder.connect().map(|group| group.world_size().to_string()));
    }
    for few in [0, 2] {
        assert_eq!(outcomes("the_soft_limit_is_no_limit", few, false), vec![Ok(RANKS.to_string()); RANKS]);
    }
}

/// The group is connected, and then a rank has no descriptor left. An operation needs connections between all ranks.
/// Rank 0 only accepts them, and the last rank only dials.
#[test]
fn a_rank_that_runs_out_of_descriptors_fails_the_operation_on_all_ranks_and_is_named() {
    if is_child() {
        let (builder, few) = builder();
        return report(&builder.connect().and_then(|group| {
            // No rank makes a data connection before. A folder needs no descriptor.
            let ready = std::env::var(READY).expect("the parent sets it");
            let _files = if few { use_up() } else { Vec::new() };
            if few {
                std::fs::create_dir(&ready).expect("a new folder");
            }
            while !Path::new(&ready).exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
            group.all_to_all(&mut [0u64; RANKS]).map(|()| "all to all".into())
        }));
    }
    let name = "a_rank_that_runs_out_of_descriptors_fails_the_operation_on_all_ranks_and_is_named";
    for (few, star) in [(0, false), (0, true), (5, false), (5, true)] {
        let outcomes = outcomes(name, few, star);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let Err(Error::Io { operation, reason, .. }) = outcome else {
                panic!("rank {few} has no descriptors: rank {rank} got {outcome:?}")
            };
            assert!(operation.ends_with(&format!(" on rank {few}")), "rank {rank}: {operation}");
            assert!(reason.contains("open files") && reason.contains("ulimit -n"), "rank {rank}: {reason}");
            assert_eq!(outcome, &outcomes[0]);
        }
    }
}

/// A rank with descriptors again goes on: only an operation that needs one fails.
#[test]
fn a_rank_without_descriptors_completes_operations_that_need_none() {
    if is_child() {
        return report(&Group::from_env().and_then(|group| {
            group.barrier()?;
            let files = use_up();
            (0..100).try_for_each(|_| group.barrier())?;
            drop(files);
            // No rank dials one that has no descriptors yet.
            group.barrier()?;
            group.all_to_all(&mut [0u64; RANKS]).map(|()| "all to all".into())
        }));
    }
    let name = "a_rank_without_descriptors_completes_operations_that_need_none";
    let ranks = Process::start_ranks(name, RANKS, "tcp", DEADLINE);
    for rank in &ranks {
        assert_eq!(rank.outcome(), Ok("all to all".into()));
    }
}
