//! NCCL communicators on a library with NCCL's interface that needs no GPU (`kernels/shim/nccl/`): a test builds it and
//! starts its own binary again with the library in `LD_LIBRARY_PATH`, with only that test in it.

#[path = "nccl/rank.rs"]
mod rank;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use bonfire::error::Site;
use bonfire::server::cuda::nccl::{self, Action, Communicator, Gpu, Scalar, Work};
use bonfire::{Call, DType, Deadline, Element, Error, Group, ReduceOp, partition};
use cudarc::driver::sys::CUstream;
use cudarc::driver::{CudaContext, result};
use half::{bf16, f16};

use rank::{Rank, Stream, perform, site};

/// The environment variable that is set where a test was started again.
const RESTARTED: &str = "BONFIRE_TEST_NCCL";

/// The folder with the library, built with this macro defined.
fn library(defined: &str) -> PathBuf {
    static BUILT: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    let build = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{defined}"));
        std::fs::create_dir_all(&folder).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/shim/nccl/library.cpp");
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", &format!("-D{defined}")]);
        let built = compiler.arg(source).arg("-o").arg(folder.join("libnccl.so.2")).args(["-lrt", "-ldl"]).status();
        assert!(built.expect("g++ is there").success());
        folder
    };
    BUILT[usize::from(defined == "FAKE_NCCL_PARTIAL")].get_or_init(build).clone()
}

/// Starts the test `name` again with these variables, and runs `body` in it.
fn restart(name: &str, libraries: impl FnOnce() -> PathBuf, variables: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(RESTARTED).is_some() {
        bonfire_testing::log_to_stderr();
        return body();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([name, "--exact", "--nocapture", "--include-ignored"])
        .env(RESTARTED, "1")
        .env("LD_LIBRARY_PATH", libraries());
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
}

fn with_nccl(name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    // Not in the test that is started again: another process may be about to load it.
    restart(name, || library("FAKE_NCCL_WHOLE"), variables, body);
}

/// Runs `rank` on `n` threads as ranks, and returns their results.
fn on_ranks<T: Send>(n: usize, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let (groups, rank) = (Group::threads(n).unwrap(), &rank);
    thread::scope(|scope| {
        let start = |group: Group| scope.spawn(move || rank(group.with_deadline(Duration::from_secs(60))));
        let ranks = groups.into_iter().map(start);
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn gpu(group: &Group) -> Gpu {
    Gpu::with_uuid([group.rank() as u8; 16])
}

fn connect(group: &Group) -> Communicator {
    Communicator::connect(group, gpu(group), &soon()).unwrap()
}

#[test]
fn all_operations_types_and_lengths() {
    with_nccl("all_operations_types_and_lengths", &[], || {
        for n in 1..=4 {
            on_ranks(n, |group| {
                let mut rank = Rank::new(group);
                for len in [0, 1, 2, 12, 29] {
                    rank.check(len, f32::from);
                }
                // 13 has no equal parts but one.
                rank.check(13, f64::from);
                rank.check(13, f16::from);
                rank.check(13, bf16::from);
                rank.check(13, |value| value as i8);
                rank.check(13, i16::from);
                rank.check(13, i32::from);
                rank.check(13, i64::from);
                rank.check(13, |value| value);
                rank.check(13, u16::from);
                rank.check(13, u32::from);
                rank.check(13, u64::from);
                rank.check(40_001, f32::from);
            });
        }
    });
}

#[test]
fn floats_of_8_bits() {
    with_nccl("floats_of_8_bits", &[], || {
        // 1.5, 2 and their sum, as each format encodes them.
        for (scalar, [a, b, sum]) in [(Scalar::E4M3, [0x3c, 0x40, 0x46]), (Scalar::E5M2, [0x3e, 0x40, 0x43])] {
            on_ranks(2, |group| {
                let (mut rank, own) = (Rank::new(group.clone()), [if group.rank() == 0 { a } else { b }; 5]);
                let mut output = [0u8; 5];
                let (input, place) = (own.as_ptr().expose_provenance() as u64, output.as_mut_ptr().expose_provenance());
                let action = Action::AllReduce(ReduceOp::Sum);
                let work = Work { action, scalar, count: 5, sizes: None, input, output: place as u64 };
                perform(&mut rank.communicator, &rank.stream, work, &soon()).unwrap();
                assert_eq!(output, [sum; 5], "{scalar}");
            });
        }
    });
}

#[test]
fn processes_create_a_communicator() {
    const NAME: &str = "processes_create_a_communicator";
    if std::env::var_os("BONFIRE_RANK").is_some() {
        let mut rank = Rank::new(Group::from_env().unwrap());
        return rank.check(1000, f32::from);
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks = (0..3).map(|rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([NAME, "--exact"]).env("LD_LIBRARY_PATH", library("FAKE_NCCL_WHOLE"));
        command.env("BONFIRE_ADDRESS", format!("127.0.0.1:{port}"));
        command.env("BONFIRE_RANK", rank.to_string()).env("BONFIRE_WORLD_SIZE", "3").spawn().unwrap()
    });
    for mut rank in ranks.collect::<Vec<_>>() {
        assert!(rank.wait().unwrap().success());
    }
}

#[test]
fn one_thread_serves_several_ranks() {
    with_nccl("one_thread_serves_several_ranks", &[], || {
        let mut ranks = on_ranks(3, Rank::new);
        let mut data = [[1.0f32; 9], [2.0; 9], [4.0; 9]];
        let works: Vec<_> = (data.iter_mut())
            .map(|data| {
                let place = data.as_mut_ptr().expose_provenance() as u64;
                let action = Action::AllReduce(ReduceOp::Sum);
                Work { action, scalar: Scalar::Of(DType::F32), count: 9, sizes: None, input: place, output: place }
            })
            .collect();
        let submitted: Vec<_> = (ranks.iter_mut().zip(&works))
            // SAFETY: as in `perform`.
            .map(|(rank, work)| unsafe { rank.communicator.submit(work, rank.stream.raw()) }.unwrap())
            .collect();
        for (submitted, work) in submitted.into_iter().zip(&works) {
            submitted.settle(site(work), &soon()).unwrap();
        }
        for (rank, work) in ranks.iter_mut().zip(&works) {
            rank.communicator.wait(site(work), &soon(), || Ok(rank.stream.is_idle())).unwrap();
        }
        assert_eq!(data, [[7.0; 9]; 3]);
        // Dropped one after the other, they would wait for each other.
        thread::scope(|scope| {
            for rank in ranks {
                scope.spawn(move || drop(rank));
            }
        });
    });
}

#[test]
fn split_selects_some_ranks() {
    with_nccl("split_selects_some_ranks", &[], || {
        on_ranks(4, |group| {
            let mut rank = Rank::new(group);
            let own = rank.group.rank();
            for _ in 0..2 {
                // Rank 3 takes no part. The others are 2, 1, 0 in that order.
                let color = (own != 3).then_some(5);
                let part = rank.communicator.split(color, 9 - own, &soon()).unwrap();
                assert_eq!(part.is_some(), own != 3);
                let Some(mut part) = part else { continue };
                assert_eq!((part.rank(), part.world_size()), (2 - own, 3));
                let (mut data, stream) = ([own as i32 + 1; 3], Stream::default());
                let place = data.as_mut_ptr().expose_provenance() as u64;
                let action = Action::Broadcast(0);
                let work =
                    Work { action, scalar: Scalar::Of(DType::I32), count: 3, sizes: None, input: place, output: place };
                perform(&mut part, &stream, work, &soon()).unwrap();
                assert_eq!(data, [3; 3]);
            }
            rank.check(10, i32::from);
        });
    });
}

/// Checks that every rank gets the same error of this kind, and that the group stays usable.
fn fails_everywhere(n: usize, gpu: impl Fn(usize) -> Gpu + Sync, limit: Duration, expected: impl Fn(&Error) -> bool) {
    let errors = on_ranks(n, |group| {
        let error = Communicator::connect(&group, gpu(group.rank()), &Deadline::after(limit)).unwrap_err();
        group.barrier().unwrap();
        error
    });
    assert!(errors.iter().all(|error| *error == errors[0] && expected(error)), "{errors:?}");
}

const SECOND: Duration = Duration::from_secs(1);

fn own_gpu(rank: usize) -> Gpu {
    Gpu::with_uuid([rank as u8; 16])
}

#[test]
fn a_missing_library_is_an_error() {
    restart("a_missing_library_is_an_error", PathBuf::new, &[], || {
        // If the system has one, this test checks nothing.
        if nccl::version().is_ok() {
            return;
        }
        fails_everywhere(2, own_gpu, SECOND * 60, |error| {
            let text = error.to_string();
            let named = text.contains("rank 0") && text.contains("pip install nvidia-nccl-cu12");
            matches!(error, Error::Library { .. }) && named && text.contains("LD_LIBRARY_PATH")
        });
    });
}

#[test]
fn an_old_library_is_rejected() {
    with_nccl("an_old_library_is_rejected", &[("FAKE_NCCL_VERSION", "21703")], || {
        fails_everywhere(2, own_gpu, SECOND * 60, |error| {
            matches!(error, Error::Library { .. }) && error.to_string().contains("version 2.17.3 is too old")
        });
    });
}

#[test]
fn a_library_without_a_function_is_rejected() {
    restart(
        "a_library_without_a_function_is_rejected",
        || library("FAKE_NCCL_PARTIAL"),
        &[],
        || {
            fails_everywhere(2, own_gpu, SECOND * 60, |error| {
                matches!(error, Error::Library { .. }) && error.to_string().contains("it has no ncclCommSplit")
            });
        },
    );
}

#[test]
fn ranks_that_share_a_gpu_are_rejected() {
    with_nccl("ranks_that_share_a_gpu_are_rejected", &[], || {
        fails_everywhere(
            3,
            |rank| own_gpu(rank / 2),
            SECOND * 60,
            |error| matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("ranks 0, 1 share"),
        );
    });
}

#[test]
fn ranks_may_share_a_gpu_if_nccl_allows_it() {
    with_nccl("ranks_may_share_a_gpu_if_nccl_allows_it", &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")], || {
        on_ranks(2, |group| Communicator::connect(&group, own_gpu(0), &soon()).map(drop).unwrap());
    });
}

#[test]
fn a_rank_that_does_not_connect_fails_all_ranks() {
    with_nccl("a_rank_that_does_not_connect_fails_all_ranks", &[("FAKE_NCCL_ABSENT", "1")], || {
        fails_everywhere(
            3,
            own_gpu,
            SECOND,
            |error| matches!(error, Error::Nccl { function, code: 7, .. } if function == "ncclCommInitRankConfig"),
        );
    });
}

/// Runs an all_reduce with this time limit.
fn all_reduce(rank: &mut Rank, limit: Duration) -> Result<(), Error> {
    let mut data = [1i32; 4];
    let place = data.as_mut_ptr().expose_provenance() as u64;
    let action = Action::AllReduce(ReduceOp::Sum);
    let work = Work { action, scalar: Scalar::Of(DType::I32), count: 4, sizes: None, input: place, output: place };
    perform(&mut rank.communicator, &rank.stream, work, &Deadline::after(limit))
}

#[test]
fn a_rank_that_does_not_call_times_out_its_peers() {
    with_nccl("a_rank_that_does_not_call_times_out_its_peers", &[], || {
        on_ranks(3, |group| {
            let mut rank = Rank::new(group.clone());
            if group.rank() == 1 {
                group.barrier().unwrap();
                rank.communicator.abort();
                let error = all_reduce(&mut rank, SECOND).unwrap_err();
                return assert!(
                    matches!(&error, Error::Nccl { function, .. } if function == "ncclCommAbort"),
                    "{error:?}"
                );
            }
            let error = all_reduce(&mut rank, SECOND).unwrap_err();
            let Error::Timeout { site, rank: own, missing, .. } = &error else { panic!("{error:?}") };
            assert_eq!((site.sequence, *own), (7, group.rank()));
            assert_eq!(missing.len(), 2);
            // The stream continues, and the communicator is unusable.
            assert!(rank.stream.is_idle());
            assert_eq!(rank.communicator.failure(), Some(&error));
            assert_eq!(all_reduce(&mut rank, SECOND * 60), Err(error.clone()));
            assert_eq!(rank.communicator.poll(), Err(error.clone()));
            assert_eq!(rank.communicator.split(None, 0, &soon()).unwrap_err(), error);
            group.barrier().unwrap();
        });
    });
}

#[test]
fn a_broken_connection_is_reported() {
    with_nccl("a_broken_connection_is_reported", &[("FAKE_NCCL_BROKEN", "1")], || {
        on_ranks(2, |group| {
            let mut rank = Rank::new(group.clone());
            let error = all_reduce(&mut rank, SECOND * if group.rank() == 1 { 60 } else { 1 }).unwrap_err();
            match error {
                Error::Nccl { rank: 1, code: 6, reason, .. } => assert!(reason.contains("network"), "{reason}"),
                Error::Timeout { rank: 0, missing, .. } => assert_eq!(missing, [1]),
                other => panic!("{other:?}"),
            }
        });
    });
}

#[test]
fn invalid_arguments_are_rejected_and_change_nothing() {
    with_nccl("invalid_arguments_are_rejected_and_change_nothing", &[], || {
        on_ranks(2, |group| {
            let mut rank = Rank::new(group.clone());
            let memory = [0u8; 64].as_ptr().expose_provenance() as u64;
            let sound = Work {
                action: Action::AllGather,
                scalar: Scalar::Of(DType::F32),
                count: 4,
                sizes: None,
                input: memory,
                output: memory,
            };
            let refused = [
                Work { action: Action::Broadcast(2), ..sound },
                Work { action: Action::Send(group.rank()), ..sound },
                Work { action: Action::Exchange { to: group.rank(), from: 1 - group.rank(), incoming: 4 }, ..sound },
                Work { action: Action::Exchange { to: 1 - group.rank(), from: 2, incoming: 4 }, ..sound },
                Work { action: Action::AllToAll, count: 3, ..sound },
                Work { action: Action::AllToAll, output: memory + 15, ..sound },
                Work { sizes: Some(&[4]), ..sound },
                Work { sizes: Some(&[4, usize::MAX]), ..sound },
                Work { count: usize::MAX, ..sound },
                Work { action: Action::AllReduce(ReduceOp::Max), ..sound },
                Work { action: Action::AllReduce(ReduceOp::Mean), scalar: Scalar::Of(DType::I32), ..sound },
                Work { action: Action::AllReduce(ReduceOp::Sum), scalar: Scalar::Of(DType::U16), ..sound },
            ];
            for work in &refused {
                // SAFETY: all of these are rejected before they access memory.
                let error = unsafe { rank.communicator.submit(work, rank.stream.raw()) }.map(drop).unwrap_err();
                assert!(matches!(error, Error::InvalidArgument { .. }), "{work:?}: {error:?}");
            }
            rank.check(5, f32::from);
        });
    });
}

/// Two ranks if there are two GPUs or NCCL lets them share one, else one.
#[test]
#[ignore = "needs a CUDA GPU and libnccl"]
fn on_a_gpu() {
    let libraries = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    restart(
        "on_a_gpu",
        || libraries.into(),
        &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")],
        || {
            let gpus = usize::try_from(CudaContext::device_count().unwrap()).unwrap();
            let n = if nccl::version().unwrap() >= 2_30_00 { 2 } else { gpus.min(2) };
            on_ranks(n, |group| {
                let gpu = group.rank() % gpus;
                // One context for all ranks on a GPU, which is NCCL's own.
                let context = CudaContext::new(gpu).unwrap();
                context.bind_to_thread().unwrap();
                let stream = context.new_stream().unwrap();
                let mut communicator = Communicator::connect(&group, Gpu::of(gpu).unwrap(), &soon()).unwrap();
                let len = 100_003;
                let own: Vec<f32> = (0..len).map(|i| ((i + 3 * group.rank()) % 7) as f32).collect();
                // SAFETY: the context is current, and the memory has the length given.
                let [input, output] = [(); 2].map(|()| unsafe { result::malloc_sync(len * 4) }.unwrap());
                // SAFETY: as above; `input` has the length of `own`.
                unsafe { result::memcpy_htod_sync(input, &own) }.unwrap();
                let part = partition(len, n, group.rank());
                let (mut summed, mut gathered) = (own.clone(), own.clone());
                group.all_reduce(&mut summed, ReduceOp::Sum).unwrap();
                group.all_gather(&mut gathered).unwrap();
                for (action, start, whole) in
                    [(Action::AllReduce(ReduceOp::Sum), 0, &summed), (Action::AllGather, part.start, &gathered)]
                {
                    let input = input + 4 * start as u64;
                    let work = Work { action, scalar: Scalar::Of(DType::F32), count: len, sizes: None, input, output };
                    // SAFETY: the memory is the GPU's, and lives until the stream has passed the work.
                    unsafe { communicator.submit(&work, stream.cu_stream()) }
                        .unwrap()
                        .settle(site(&work), &soon())
                        .unwrap();
                    let event = stream.record_event(None).unwrap();
                    // SAFETY: the event is alive.
                    communicator.wait(site(&work), &soon(), || unsafe { nccl::has_passed(event.cu_event()) }).unwrap();
                    let mut result = vec![0f32; len];
                    // SAFETY: both are as long as the vector.
                    unsafe { result::memcpy_dtoh_sync(&mut result, output) }.unwrap();
                    assert_eq!(&result, whole, "{action:?}");
                }
                // A peer that does not call.
                if n == 2 && group.rank() == 0 {
                    let action = Action::AllReduce(ReduceOp::Sum);
                    let work = Work { action, scalar: Scalar::Of(DType::F32), count: len, sizes: None, input, output };
                    let deadline = Deadline::after(SECOND);
                    // SAFETY: as above.
                    let settled = unsafe { communicator.submit(&work, stream.cu_stream()) }
                        .unwrap()
                        .settle(site(&work), &deadline);
                    let event = stream.record_event(None).unwrap();
                    // SAFETY: as above.
                    let done = || unsafe { nccl::has_passed(event.cu_event()) };
                    let error = settled.and_then(|()| communicator.wait(site(&work), &deadline, done)).unwrap_err();
                    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
                    stream.synchronize().unwrap();
                }
                group.barrier().unwrap();
                communicator.abort();
            });
        },
    );
}
