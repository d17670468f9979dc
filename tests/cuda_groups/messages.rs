//! Messages between devices: which of them pass through host memory.

use std::time::Duration;

use bonfire::tensor::operation;
use bonfire::{Cuda, CudaDevice, Error, Group, ReduceOp};
use burn::tensor::{Float, Tensor, TensorData};

use super::{libraries_without_nccl, start, start_ranks};
use crate::Devices;
use crate::processes::join;
use crate::software_driver::SoftwareDriver;
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::{Kind, run_ranks, run_ranks_with};

const LEN: usize = 100_000;

/// Passes a tensor from rank 0 to rank 1 and one both ways. Returns whether any byte went to the host or came from it.
fn through_the_host(driver: &SoftwareDriver, group: &Group, device: &CudaDevice) -> Result<bool, Error> {
    let numbers = |rank: usize| (0..LEN).map(|i| (rank * LEN + i) as f32).collect::<Vec<_>>();
    let own = Tensor::<Cuda, 1>::from_data(TensorData::from(&numbers(group.rank())[..]), device);
    let agreed = operation::all_reduce(own.clone(), ReduceOp::Sum, group)?;
    // The tensors are on the devices when they have been read.
    drop((own.to_data(), agreed.into_data()));
    let other = 1 - group.rank();
    group.barrier()?;
    let before = driver.copied();
    let received = match group.rank() {
        0 => operation::send(own.clone(), 1, group).map(|()| None)?,
        _ => Some(operation::recv::<Cuda, 1, Float>([LEN], 0, device, group)?),
    };
    let swapped = operation::exchange(own, other, [LEN], other, group)?;
    group.barrier()?;
    let passed = driver.copied() != before;
    group.barrier()?;
    for tensor in received.into_iter().chain([swapped]) {
        assert_eq!(tensor.into_data(), TensorData::from(&numbers(other)[..]));
    }
    Ok(passed)
}

#[test]
#[ignore = "needs the software driver"]
fn tensors_pass_between_devices_of_one_process_without_the_host() {
    const NAME: &str = "messages::tensors_pass_between_devices_of_one_process_without_the_host";
    if is_child() {
        let passed = run_ranks(Kind::Threads, 2, |group| {
            let driver = SoftwareDriver::loaded();
            through_the_host(&driver, &group, &Devices::new(0, 2).all[group.rank()]).unwrap()
        });
        return send_line(format!("{passed:?}"));
    }
    for (gpus, variables, passed) in [
        (1, &[][..], "[false, false]"),
        (2, &[][..], "[false, false]"),
        (2, &[("SHIM_PEERS", "0")][..], "[true, true]"),
        (2, &[("BONFIRE_CUDA", "host")][..], "[true, true]"),
    ] {
        let mut child = start(NAME, gpus, variables);
        assert_eq!(child.read_line(), passed, "{gpus} GPUs, {variables:?}");
        assert!(child.end().success());
    }
}

#[test]
#[ignore = "needs the software driver"]
fn tensors_pass_between_processes_by_nccl_or_through_the_host() {
    const NAME: &str = "messages::tensors_pass_between_processes_by_nccl_or_through_the_host";
    if is_child() {
        let (group, devices, _) = join();
        let passed = through_the_host(&SoftwareDriver::loaded(), &group, &devices.all[0]);
        return report(&passed.map(|passed| passed.to_string()));
    }
    let folder = libraries_without_nccl();
    let without = [("LD_LIBRARY_PATH", folder.path().to_str().unwrap())];
    for (variables, passed) in [(&[][..], "false"), (&without[..], "true")] {
        let mut ranks: Vec<Process> = start_ranks(NAME, 2, 2, variables);
        for rank in &ranks {
            assert_eq!(rank.outcome(), Ok(passed.into()), "{variables:?}");
        }
        assert!(ranks.iter_mut().all(|rank| rank.end().success()));
    }
}

#[test]
#[ignore = "needs the software driver"]
fn a_sender_that_does_not_call_is_named_and_the_devices_stay_usable() {
    const NAME: &str = "messages::a_sender_that_does_not_call_is_named_and_the_devices_stay_usable";
    if is_child() {
        let limit = |builder: bonfire::Builder| builder.deadline(Duration::from_secs(3));
        let errors = run_ranks_with(Kind::Threads, 2, limit, |group| {
            let device = &Devices::new(0, 2).all[group.rank()];
            operation::all_reduce(Tensor::<Cuda, 1>::from_data([1.0], device), ReduceOp::Sum, &group).unwrap();
            let error = match group.rank() {
                // It stays in the group until the other rank has its error.
                0 => group.recv(&mut [0u8], 1).err(),
                _ => operation::recv::<Cuda, 1, Float>([4], 0, device, &group).err(),
            };
            assert_eq!(device.failure(), None);
            error
        });
        let named = |error: &Option<Error>| matches!(error, Some(Error::Timeout { missing, .. }) if missing.len() == 1);
        assert!(errors.iter().any(named), "{errors:?}");
        assert!(errors.iter().all(Option::is_some), "{errors:?}");
        return send_line("done");
    }
    let mut child = start(NAME, 1, &[]);
    assert_eq!(child.read_line(), "done");
    assert!(child.end().success());
}
