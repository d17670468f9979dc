//! Drivers, libraries and settings that do not fit, and memory that does not suffice: the errors are typed, name a
//! remedy, and are the same on all ranks, and devices stay usable.

use std::time::{Duration, Instant};

use bonfire::server::DeviceCollectives;
use bonfire::{CollectiveDevice, DType, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::{Kind, run_ranks, run_ranks_with};
use cubecl::cuda::CudaRuntime;
use cubecl::server::Handle;

use super::{KERNELS, SOON, start};
use crate::Devices;
use crate::groups::{Memory, check, mine};
use crate::processes::join;
use crate::software_driver::{SoftwareDriver, with_gpus};

/// No rank may wait for it.
const DEADLINE: Duration = Duration::from_secs(120);

/// The errors of two ranks, with a device each, whose first operation fails.
fn errors_of_two_ranks(first: u8, before: impl Fn() + Clone + Send + 'static) -> Vec<Error> {
    let limit = |builder: bonfire::Builder| builder.deadline(DEADLINE);
    run_ranks_with(Kind::Threads, 2, limit, move |group: Group| {
        let client = Devices::new(first, 2).client(group.rank());
        let memory = Memory::new(client, 0);
        let own = memory.create(&mine(group.rank(), 1000));
        assert_eq!(memory.read(&own), mine(group.rank(), 1000));
        group.barrier().unwrap();
        before();
        first_error(&group, &memory, &own)
    })
}

/// The error of a first operation on this memory, which stays as it was.
fn first_error(group: &Group, memory: &Memory<CudaRuntime>, own: &Handle) -> Error {
    let begin = Instant::now();
    let call = memory.client.start_all_reduce(group, own, own, DType::I32, ReduceOp::Sum);
    let error = call.and_then(|call| call.wait()).expect_err("it cannot work");
    assert!(begin.elapsed() < SOON, "{:.1?}", begin.elapsed());
    assert_eq!(memory.read(own), mine(group.rank(), 1000));
    error
}

/// Two ranks on these devices complete all operations.
fn works(devices: [u8; 2]) {
    run_ranks(Kind::Threads, 2, move |group| {
        let client = Devices::new(devices[group.rank()], 1).client(0);
        check(&group, &Memory::new(client, 1), 1000).unwrap();
    });
}

/// Starts the test `name` in a process of its own, which reports the errors of two ranks.
fn reported(name: &str, variables: &[(&str, &str)]) -> [Error; 2] {
    let mut process = start(&format!("unusable::{name}"), 2, variables);
    let errors = [(); 2].map(|()| process.outcome().expect_err("it cannot work"));
    assert_eq!(process.read_line(), "done");
    assert!(process.end().success());
    errors
}

#[test]
#[ignore = "needs the software driver"]
fn a_gpu_without_memory_is_named_by_all_ranks_and_works_once_it_has_some() {
    let driver = SoftwareDriver::loaded();
    if is_child() {
        works([0, 1]);
        let errors = errors_of_two_ranks(2, || SoftwareDriver::loaded().exhaust(1, true));
        errors.into_iter().for_each(|error| report(&Err(error)));
        // Both on the other GPU.
        works([4, 6]);
        driver.exhaust(1, false);
        works([2, 3]);
        return send_line("done");
    }
    for error in reported("a_gpu_without_memory_is_named_by_all_ranks_and_works_once_it_has_some", &[KERNELS]) {
        let text = error.to_string();
        let named = matches!(&error, Error::OutOfMemory { device, .. } if device == "GPU 1");
        assert!(named && text.contains("make the batch smaller"), "{text}");
    }
}

#[test]
#[ignore = "needs the software driver"]
fn an_nvrtc_older_than_the_gpu_is_named_with_its_version() {
    SoftwareDriver::loaded();
    if is_child() {
        errors_of_two_ranks(0, || {}).into_iter().for_each(|error| report(&Err(error)));
        return send_line("done");
    }
    let variables = [KERNELS, ("SHIM_NVRTC", "60")];
    for error in reported("an_nvrtc_older_than_the_gpu_is_named_with_its_version", &variables) {
        let text = error.to_string();
        let named = matches!(&error, Error::Library { library, .. } if library == "NVRTC");
        assert!(named && text.contains("version 13.0 does not support this GPU"), "{text}");
        assert!(text.contains("sm_70") && text.contains("nvidia-cuda-nvrtc-cu12"), "{text}");
    }
}

#[test]
#[ignore = "needs the software driver"]
fn a_driver_that_is_too_old_is_named_with_its_version() {
    const NAME: &str = "unusable::a_driver_that_is_too_old_is_named_with_its_version";
    SoftwareDriver::loaded();
    if is_child() {
        report(&CollectiveDevice::<CudaRuntime>::of_rank(0).map(|device| format!("{device:?}")));
        return;
    }
    let mut process = start(NAME, 1, &[("SHIM_VERSION", "11080")]);
    let error = process.outcome().expect_err("the driver is too old");
    assert!(process.end().success());
    let text = error.to_string();
    assert!(matches!(error, Error::Library { .. }), "{text}");
    assert!(text.contains("NVIDIA's driver: it supports CUDA 11.8; install 525 or newer"), "{text}");
}

/// Runs the test `name` in two processes. Only in that of rank 1 this variable is set. Both report the same error.
fn error_of_two_processes(name: &str, (variable, value): (&str, &str), more: &[(&str, &str)]) -> Error {
    let name = format!("software::unusable::{name}");
    let set = ["env".to_owned(), format!("{variable}={value}")];
    let command = |rank| if rank == 1 { set.to_vec() } else { Vec::new() };
    let mut ranks = Process::start_ranks_by(command, &name, 2, "auto", "120", &with_gpus(2, more));
    let [error, other] = [0, 1].map(|rank| ranks[rank].outcome().expect_err("it cannot work"));
    assert_eq!(error, other);
    assert!(ranks.iter_mut().all(|rank| rank.end().success()));
    error
}

/// The error of a process's first operation.
fn report_first_error() {
    let (group, _devices, memory) = join();
    let own = memory.create(&mine(group.rank(), 1000));
    report(&Err(first_error(&group, &memory, &own)));
}

#[test]
#[ignore = "needs the software driver"]
fn a_malformed_setting_of_one_rank_is_the_error_of_all() {
    SoftwareDriver::loaded();
    if is_child() {
        return report_first_error();
    }
    let name = "a_malformed_setting_of_one_rank_is_the_error_of_all";
    let error = error_of_two_processes(name, ("BONFIRE_CUDA", "fast"), &[]);
    let text = error.to_string();
    assert!(matches!(error, Error::Config(_)), "{text}");
    assert!(text.contains("BONFIRE_CUDA is 'fast'; it must be one of auto, kernels"), "{text}");
}

#[test]
#[ignore = "needs the software driver"]
fn different_versions_of_nccl_are_the_error_of_all() {
    SoftwareDriver::loaded();
    if is_child() {
        return report_first_error();
    }
    let name = "different_versions_of_nccl_are_the_error_of_all";
    let error = error_of_two_processes(name, ("FAKE_NCCL_VERSION", "22105"), &[("BONFIRE_CUDA", "nccl")]);
    let text = error.to_string();
    assert!(matches!(&error, Error::Library { library, .. } if library == "NCCL"), "{text}");
    assert!(text.contains("2.30.7 on rank 0 and 2.21.5 on rank 1: install the same on all"), "{text}");
}
