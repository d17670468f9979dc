//! Groups on MPI: a test runs itself again under `mpirun`, on the ranks that it needs.
//!
//! `BONFIRE_TEST_MPIRUN` names a launcher other than `mpirun`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bonfire_conformance::{check, check_all_types, check_group};
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Algorithm, Builder, Error, Group, Operation, ReduceOp, TransportKind};
// Without this line the transport would not be linked.
use bonfire_mpi as _;
use half::{bf16, f16};

/// The environment variable with the folder of a test's markers, which are files by which its ranks synchronise.
const FOLDER: &str = "BONFIRE_TEST_FOLDER";
/// The environment variable with a test's number of ranks.
const RANKS: &str = "BONFIRE_TEST_RANKS";

/// Runs the test `name` on `n` ranks, with these variables in addition. Returns the output and the number of ranks on
/// which the test passed.
fn launch(name: &str, n: usize, variables: &[(&str, &str)]) -> (Output, usize) {
    // One test at a time, since the ranks of one test alone have to share the processors.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let launcher = std::env::var("BONFIRE_TEST_MPIRUN").unwrap_or("mpirun".into());
    let mut command = Command::new(launcher);
    command.args(["-n", &n.to_string()]).arg(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(FOLDER, folder.path()).env(RANKS, n.to_string()).env_remove("BONFIRE_TRANSPORT");
    // Open MPI 4 and 5 otherwise refuse more ranks than there are cores, and root, which containers run as.
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    // Ends a job that hangs, on both versions.
    command.env("MPIEXEC_TIMEOUT", "200").envs(variables.iter().copied());
    let output = command.output().expect("MPI's launcher starts");
    let passed = count_marks(folder.path(), "passed");
    (output, passed)
}

/// The folder of the markers, if this process is a rank.
fn folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Returns how many ranks have left this marker.
fn count_marks(folder: &Path, name: &str) -> usize {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    files.filter(|file| file.starts_with(name)).count()
}

fn mark(name: &str) {
    std::fs::write(folder().unwrap().join(format!("{name}-{}", std::process::id())), "").unwrap();
}

/// Waits until so many ranks have left this marker, without an operation of the group.
fn await_marks(name: &str, count: usize) {
    let start = Instant::now();
    while count_marks(&folder().unwrap(), name) < count {
        assert!(start.elapsed() < Duration::from_secs(60), "{count} ranks do not reach '{name}'");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Launches the test on all world sizes and transports. In a launched process, runs `rank`.
fn on_ranks(name: &str, worlds: &[usize], kinds: &[TransportKind], rank: impl FnOnce(Builder)) {
    if folder().is_some() {
        bonfire_testing::log_to_stderr();
        rank(Builder::from_env().unwrap().deadline(Duration::from_secs(60)));
        mark("passed");
        // The launcher may end all ranks with the first that ends.
        return await_marks("passed", std::env::var(RANKS).unwrap().parse().unwrap());
    }
    for kind in kinds {
        for n in worlds {
            let (output, passed) = launch(name, *n, &[("BONFIRE_TRANSPORT", &kind.to_string())]);
            let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert_eq!(passed, *n, "{kind}: not every rank has passed\n{out}\n{err}");
            assert!(output.status.success(), "{kind}, {n} ranks: {}\n{out}\n{err}", output.status);
        }
    }
}

const BOTH: [TransportKind; 2] = [TransportKind::Mpi, TransportKind::MpiBlocking];

#[test]
fn all_operations_types_and_lengths() {
    on_ranks("all_operations_types_and_lengths", &[1, 2, 3, 4], &BOTH, |builder| {
        check_group(&builder.connect().unwrap());
    });
}

#[test]
fn plans_on_mpi_messages() {
    on_ranks("plans_on_mpi_messages", &[3], &BOTH, |builder| {
        for algorithm in Algorithm::ALL.iter().copied() {
            let group = builder.clone().algorithms(algorithm).connect().unwrap();
            for len in [0, 2, 7, 1000, 140_001] {
                check::<f32>(&group, len);
                check::<bf16>(&group, len);
            }
        }
    });
}

#[test]
fn max_and_min_propagate_a_nan_of_any_rank() {
    fn extremes<T: bonfire_core::Element>(group: &Group, nan: T, one: T, is_nan: impl Fn(T) -> bool) {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            for place in 0..group.world_size() {
                let mut data = vec![one; 3];
                if group.rank() == place {
                    data[1] = nan;
                }
                group.all_reduce(&mut data, op).unwrap();
                assert!(data[0] == one && is_nan(data[1]) && data[2] == one, "{op} of {} at {place}", T::DTYPE);
            }
        }
    }
    on_ranks("max_and_min_propagate_a_nan_of_any_rank", &[3], &BOTH, |builder| {
        let group = builder.connect().unwrap();
        extremes(&group, f32::NAN, 1.0, f32::is_nan);
        extremes(&group, f64::NAN, 1.0, f64::is_nan);
        extremes(&group, f16::NAN, f16::ONE, f16::is_nan);
        extremes(&group, bf16::NAN, bf16::ONE, bf16::is_nan);
    });
}

#[test]
fn what_needs_two_groups_at_once_is_refused_by_groups_that_block() {
    on_ranks("what_needs_two_groups_at_once_is_refused_by_groups_that_block", &[1, 2], &BOTH, |builder| {
        let group = builder.connect().unwrap();
        let subgroup = group.subgroup(&(0..group.world_size()).collect::<Vec<_>>()).unwrap();
        let blocks = std::env::var("BONFIRE_TRANSPORT").unwrap() == "mpi-blocking" && group.world_size() > 1;
        for group in [group, subgroup] {
            let outcome = group.check_concurrent("a step");
            assert_eq!(matches!(&outcome, Err(Error::Config(_))), blocks, "{outcome:?}");
        }
    });
}

#[test]
fn a_mismatch_is_reported_to_all_ranks() {
    on_ranks("a_mismatch_is_reported_to_all_ranks", &[3], &[TransportKind::Mpi], |builder| {
        let group = builder.connect().unwrap();
        group.barrier().unwrap();
        let outcome = match group.rank() {
            1 => group.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum),
            _ => group.all_reduce(&mut [1.0f32; 7], ReduceOp::Sum),
        };
        let Err(Error::Mismatch { sequence: 1, calls, .. }) = &outcome else { panic!("{outcome:?}") };
        let counts: Vec<_> = calls.iter().map(|(rank, call)| (*rank, call.operation, call.count)).collect();
        let all_reduce = Operation::AllReduce;
        assert_eq!(counts, [(0, all_reduce, 7), (1, all_reduce, 8), (2, all_reduce, 7)]);
        assert_eq!(group.barrier(), outcome);
    });
}

#[test]
fn a_rank_that_does_not_call_is_named_by_all_ranks() {
    on_ranks("a_rank_that_does_not_call_is_named_by_all_ranks", &[4], &[TransportKind::Mpi], |builder| {
        let group = builder.clone().connect().unwrap();
        if group.rank() == 2 {
            await_marks("failed", 3);
        }
        // A late rank learns that its peers have failed.
        let outcome = group.with_deadline(Duration::from_secs(1)).all_reduce(&mut [1.0f32; 7], ReduceOp::Sum);
        let Err(Error::Timeout { missing, .. }) = outcome else { panic!("{outcome:?}") };
        assert_eq!(missing, [2]);
        mark("failed");
        // The others wait here for the late rank. In these calls MPI completes the agreement that they gave up, so the
        // late rank's is complete too, and it must not go on.
        builder.connect().unwrap().barrier().unwrap();
    });
}

#[test]
fn a_rank_that_leaves_too_early_is_named() {
    on_ranks("a_rank_that_leaves_too_early_is_named", &[3], &[TransportKind::Mpi], |builder| {
        let group = builder.connect().unwrap();
        group.barrier().unwrap();
        if group.rank() == 1 {
            return;
        }
        let outcome = group.barrier();
        assert!(matches!(outcome, Err(Error::Left { rank: 1, .. })), "{outcome:?}");
    });
}

#[test]
fn a_message_from_a_rank_that_leaves_is_not_waited_for() {
    on_ranks("a_message_from_a_rank_that_leaves_is_not_waited_for", &[2], &BOTH, |builder| {
        let group = builder.connect().unwrap();
        if group.rank() == 1 {
            return;
        }
        let outcome = group.recv(&mut [0u8; 8], 1);
        assert!(matches!(outcome, Err(Error::Left { rank: 1, .. })), "{outcome:?}");
    });
}

#[test]
fn a_thread_that_panics_is_lost() {
    on_ranks("a_thread_that_panics_is_lost", &[3], &[TransportKind::Mpi], |builder| {
        let group = builder.connect().unwrap();
        group.barrier().unwrap();
        if group.rank() == 2 {
            let panics = thread::spawn(move || {
                let _group = group;
                panic!("on purpose");
            });
            return assert!(panics.join().is_err());
        }
        let outcome = group.all_reduce(&mut [1.0f32; 7], ReduceOp::Sum);
        assert!(matches!(outcome, Err(Error::PeerLost { peer: 2, .. })), "{outcome:?}");
    });
}

#[test]
fn messages_of_a_different_length_or_without_a_receiver_fail() {
    on_ranks("messages_of_a_different_length_or_without_a_receiver_fail", &[2], &BOTH, |builder| {
        for (sent, received) in [(10, 11), (10, 2000), (2000, 10), (2000, 2001)] {
            let group = builder.clone().connect().unwrap();
            let outcome = match group.rank() {
                0 => group.send(&vec![1.0f32; sent], 1).and_then(|()| group.recv(&mut [0.0f32], 1)),
                _ => group.recv(&mut vec![0.0f32; received], 0),
            };
            let Err(Error::Mismatch { calls, .. }) = &outcome else { panic!("{outcome:?}") };
            assert_eq!(calls.iter().map(|(_, call)| call.count).collect::<Vec<_>>(), [sent, received]);
        }
        let group = builder.connect().unwrap();
        if group.rank() == 0 {
            let outcome = group.with_deadline(Duration::from_secs(1)).send(&vec![0u8; 1 << 20], 1);
            assert!(matches!(&outcome, Err(Error::Timeout { missing, .. }) if *missing == [1]), "{outcome:?}");
            mark("failed");
        } else {
            await_marks("failed", 1);
            let outcome = group.recv(&mut vec![0u8; 1 << 20], 0);
            assert!(matches!(outcome, Err(Error::Timeout { .. })), "{outcome:?}");
        }
    });
}

#[test]
fn subgroups_have_communicators_of_their_own() {
    on_ranks("subgroups_have_communicators_of_their_own", &[4], &BOTH, |builder| {
        let group = builder.connect().unwrap();
        assert_eq!(group.by_host().unwrap().members(), [0, 1, 2, 3]);
        let rank = group.rank();
        // So often that communicators must be freed: some MPI libraries have about 2,000.
        for _ in 0..300 {
            let half = group.split(Some(rank as u64 % 2), -(rank as i64)).unwrap().unwrap();
            assert_eq!(half.members(), [rank % 2 + 2, rank % 2]);
            let mut sum = [rank as u64];
            half.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [2 * (rank % 2) as u64 + 2]);
        }
        if rank != 1 {
            let part = group.subgroup(&[3, 0, 2]).unwrap();
            check_all_types(&part, &[0, 5, 1000]);
            check::<f32>(&part.subgroup(&[part.rank()]).unwrap(), 7);
        }
        group.barrier().unwrap();
    });
}

/// MPI requires that all ranks work in place, or none.
#[test]
fn some_ranks_may_work_in_place_while_others_do_not() {
    on_ranks("some_ranks_may_work_in_place_while_others_do_not", &[3, 4], &BOTH, |builder| {
        let group = builder.connect().unwrap();
        let (rank, n) = (group.rank(), group.world_size());
        for len in [7, 60, 5000] {
            let own = bonfire_core::partition(len, n, rank);
            let mine: Vec<u32> = (0..len).map(|i| (rank * len + i) as u32).collect();
            let sums: Vec<u32> = (0..len).map(|i| (0..n).map(|r| (r * len + i) as u32).sum()).collect();
            let parts = |r: usize| bonfire_core::partition(len, n, r).map(move |i| (r * len + i) as u32);
            let whole: Vec<u32> = (0..n).flat_map(parts).collect();
            for even in [true, false] {
                let in_place = (rank % 2 == 0) == even;
                let (mut data, mut output, mut part) = (mine.clone(), vec![0; len], vec![0; own.len()]);
                if in_place {
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, sums);
                    data.copy_from_slice(&mine);
                    group.reduce_scatter(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data[own.clone()], sums[own.clone()]);
                    data.copy_from_slice(&mine);
                    group.all_gather(&mut data).unwrap();
                    assert_eq!(data, whole);
                    data.copy_from_slice(&mine);
                    group.reduce(&mut data, ReduceOp::Sum, 1).unwrap();
                    assert_eq!(data, if rank == 1 { &sums[..] } else { &mine[..] });
                } else {
                    group.all_reduce_into(&mine, &mut output, ReduceOp::Sum).unwrap();
                    assert_eq!(output, sums);
                    group.reduce_scatter_into(&mine, &mut part, ReduceOp::Sum).unwrap();
                    assert_eq!(part, sums[own.clone()]);
                    group.all_gather_into(&mine[own.clone()], &mut output).unwrap();
                    assert_eq!(output, whole);
                    group.reduce_into(&mine, &mut output, ReduceOp::Sum, 1).unwrap();
                    assert_eq!(output, if rank == 1 { &sums[..] } else { &whole[..] });
                }
            }
        }
    });
}

#[test]
fn ranks_with_different_settings_form_no_group() {
    on_ranks("ranks_with_different_settings_form_no_group", &[3], &[TransportKind::Mpi], |builder| {
        // Set by Open MPI, and by Hydra.
        let rank = std::env::var("OMPI_COMM_WORLD_RANK").or_else(|_| std::env::var("PMI_RANK")).unwrap();
        let builder = if rank == "2" { builder.algorithms(Algorithm::Ring) } else { builder };
        let Err(Error::Config(reason)) = builder.connect() else { panic!() };
        assert!(reason.contains("BONFIRE_ALGORITHMS"), "{reason}");
    });
}

#[test]
fn a_missing_member_is_named() {
    on_ranks("a_missing_member_is_named", &[3], &[TransportKind::Mpi], |builder| {
        let group = builder.connect().unwrap();
        if group.rank() == 1 {
            return await_marks("failed", 2);
        }
        let error = group.with_deadline(Duration::from_secs(1)).subgroup(&[0, 1, 2]).expect_err("rank 1 is missing");
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error:?}");
        mark("failed");
    });
}

/// The rank leaves its group although the group is not dropped.
#[test]
fn a_process_that_exits_leaves_its_groups() {
    on_ranks("a_process_that_exits_leaves_its_groups", &[3], &[TransportKind::Mpi], |builder| {
        let group = builder.connect().unwrap();
        group.barrier().unwrap();
        if group.rank() == 0 {
            mark("passed");
            std::process::exit(0);
        }
        let outcome = group.all_reduce(&mut [1.0f32; 7], ReduceOp::Sum);
        assert!(matches!(outcome, Err(Error::Left { rank: 0, .. })), "{outcome:?}");
    });
}

#[test]
fn members_that_disagree_on_the_members_get_an_error() {
    on_ranks("members_that_disagree_on_the_members_get_an_error", &[3], &[TransportKind::Mpi], |builder| {
        let group = builder.connect().unwrap();
        let outcome = match group.rank() {
            0 => group.subgroup(&[0, 1]),
            1 => group.subgroup(&[0, 1, 2]),
            // Its peers report the mismatch.
            _ => group.subgroup(&[1, 2]),
        };
        let error = outcome.expect_err("they name different members");
        assert!(matches!(error, Error::MemberMismatch { .. }), "{error:?}");
    });
}

#[test]
fn started_operations_on_two_groups_at_once() {
    on_ranks("started_operations_on_two_groups_at_once", &[3], &[TransportKind::Mpi], |builder| {
        let group = builder.connect().unwrap();
        let (rank, n) = (group.rank(), group.world_size());
        let other = group.subgroup(&[2, 1, 0]).unwrap();
        let sums = |group: &Group, base: usize| {
            for i in 0..200 {
                let works: Vec<_> = (0..4)
                    .map(|j| {
                        group.start_all_reduce(vec![(rank + base + i) as i64; 1 + 700 * j], ReduceOp::Sum).unwrap()
                    })
                    .collect();
                let want = (n * (n - 1) / 2 + n * (base + i)) as i64;
                for work in works {
                    assert!(work.wait().unwrap().iter().all(|sum| *sum == want));
                }
            }
        };
        thread::scope(|scope| {
            // The two threads are not synchronised with those of other ranks.
            scope.spawn(|| sums(&group, 0));
            scope.spawn(|| sums(&other, 1000));
        });
    });
}

#[test]
fn groups_can_be_created_repeatedly() {
    on_ranks("groups_can_be_created_repeatedly", &[2], &BOTH, |builder| {
        for i in 0..20 {
            let group = builder.clone().connect().unwrap();
            let mut sum = [i + group.rank() as i32];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [2 * i + 1]);
        }
    });
}

#[test]
fn unsupported_calls_are_rejected_with_a_remedy() {
    on_ranks("unsupported_calls_are_rejected_with_a_remedy", &[2], &[TransportKind::Mpi], |builder| {
        let Err(Error::InvalidArgument { reason, .. }) = builder.clone().connect_ranks(2) else { panic!() };
        assert!(reason.contains("start one process for each device"), "{reason}");
        let group = builder.connect().unwrap();
        let Err(Error::InvalidArgument { reason, .. }) = group.shrink() else { panic!() };
        assert!(reason.contains("checkpoint"), "{reason}");
    });
}

/// In a group that blocks, a rank that waits longer than its deadline ends the job, and reports where it waited.
#[test]
fn a_watchdog_ends_a_job_that_blocks() {
    const NAME: &str = "a_watchdog_ends_a_job_that_blocks";
    if folder().is_some() {
        let group = Builder::from_env().unwrap().connect().unwrap();
        if group.rank() == 1 {
            // Until the job is ended.
            return await_marks("never", 1);
        }
        let _ = group.with_deadline(Duration::from_secs(1)).all_reduce(&mut [1.0f32; 7], ReduceOp::Sum);
        unreachable!("the job has ended");
    }
    let (output, _) = launch(NAME, 2, &[("BONFIRE_TRANSPORT", "mpi-blocking")]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(text.contains("bonfire: rank 0: all_reduce(f32 x 7, sum) #0 has blocked for"), "{text}");
}
