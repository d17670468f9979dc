//! Ranks as processes: by kernels, and by NCCL if the library is found, if each has a GPU of its own
//! (`BONFIRE_TEST_GPUS` is the number of GPUs), else through host memory.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use bonfire::server::DeviceCollectives;
use bonfire::{DType, Error, Group, ReduceOp};
use burn::tensor::Float;
use rustix::process::Signal;

use super::groups::{Memory, check, check_messages, check_unequal_parts, mine};
use super::{Devices, stays_on_gpus};
use bonfire_testing::process::{Process, is_child, report, send_line};

/// A child's rank, device and memory.
pub fn join() -> (Group, Devices, Memory<cubecl::cuda::CudaRuntime>) {
    bonfire_testing::log_to_stderr();
    let group = Group::from_env().expect("ranks find each other");
    let devices = Devices::new(group.rank() as u8, 1);
    let memory = Memory::new(devices.client(0), 1);
    (group, devices, memory)
}

fn asked_for_gpus_only() -> bool {
    std::env::var("BONFIRE_CUDA").is_ok_and(|path| ["nccl", "kernels"].contains(&&path[..]))
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn every_operation_between_processes() {
    if is_child() {
        let (group, devices, memory) = join();
        let lengths = [0, 1, 2, 1000, 70_001];
        let outcome = lengths.into_iter().try_for_each(|len| check(&group, &memory, len));
        let outcome = outcome.and_then(|()| check_unequal_parts::<bonfire::Cuda, Float>(&group, &devices.all[0]));
        let outcome = outcome.and_then(|()| check_messages::<bonfire::Cuda, Float>(&group, &devices.all[0]));
        if asked_for_gpus_only() {
            stays_on_gpus(&devices);
        }
        return report(&outcome.map(|()| "all".into()));
    }
    for (n, transport) in [(2, "auto"), (2, "tcp")] {
        let mut ranks = Process::start_ranks("processes::every_operation_between_processes", n, transport, "60");
        let outcomes: Vec<_> = ranks.iter().map(Process::outcome).collect();
        assert!(outcomes.iter().all(|outcome| *outcome == Ok("all".into())), "{outcomes:?}");
        assert!(ranks.iter_mut().all(|rank| rank.end().success()));
    }
}

/// The survivor may be in the middle of an operation on its GPU, which then only the survivor itself can end.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_killed_process_is_named_and_the_survivors_device_stays_usable() {
    const NAME: &str = "processes::a_killed_process_is_named_and_the_survivors_device_stays_usable";
    if is_child() {
        let (group, devices, memory) = join();
        let own = memory.create(&mine(group.rank(), 2_000_000));
        let client = &memory.client;
        let all_reduce = || client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Max)?.wait();
        all_reduce().expect("all ranks are there");
        send_line("going");
        let error = loop {
            if let Err(error) = all_reduce() {
                break error;
            }
        };
        assert_eq!(devices.all[0].failure(), None);
        if asked_for_gpus_only() {
            stays_on_gpus(&devices);
        }
        let other = memory.create(&[1, 2, 3]);
        assert_eq!(memory.read(&other), [1, 2, 3]);
        return report(&Err(error));
    }
    for round in 0..8 {
        let victim = round % 2;
        let mut ranks = Process::start_ranks(NAME, 2, "tcp", "60");
        assert!(ranks.iter().all(|rank| rank.read_line() == "going"));
        // At a different point of an operation each time.
        std::thread::sleep(Duration::from_micros(700) * round as u32);
        ranks[victim].signal(Signal::KILL);
        assert_eq!(ranks.remove(victim).end().signal(), Some(Signal::KILL.as_raw()));
        let mut survivor = ranks.remove(0);
        let error = survivor.outcome().expect_err("there is no peer left");
        assert!(matches!(error, Error::PeerLost { peer, .. } if peer == victim), "{error}");
        assert!(survivor.end().success());
    }
}

/// All ranks get the error before data moves.
#[test]
#[ignore = "needs a CUDA GPU"]
fn ranks_with_different_tables_get_the_same_error() {
    const NAME: &str = "processes::ranks_with_different_tables_get_the_same_error";
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        let client = Devices::new(group.rank() as u8, 1).client(0);
        let own = Memory::new(client.clone(), 0).create(&[7]);
        let outcome = client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Sum);
        assert_eq!(Memory::new(client, 0).read(&own), [7]);
        return report(&outcome.map(|_| "started".into()));
    }
    let tables = ["auto", "kernels:0-9;nccl:10-"];
    let command = |rank: usize| vec!["env".to_owned(), format!("BONFIRE_CUDA={}", tables[rank])];
    let mut ranks = Process::start_ranks_by(command, NAME, 2, "tcp", "60", &[]);
    for rank in &ranks {
        let error = rank.outcome().expect_err("the tables differ");
        let words = "BONFIRE_CUDA is auto:0- on rank 0, and BONFIRE_CUDA is kernels:0-9;nccl:10- on rank 1";
        assert!(matches!(&error, Error::Config(text) if text.contains(words)), "{error}");
    }
    assert!(ranks.iter_mut().all(|rank| rank.end().success()));
}
