//! Properties of the streams that collectives and copies run on, as the software driver records them.
//! `scripts/gpu-check` leaves these tests out.

use std::time::{Duration, Instant};

use bonfire::Error;
use bonfire::server::copy;
use bonfire_testing::process::{Process, is_child, report, send_line};
use cubecl::server::Handle;
use cubecl::server::ReduceOperation::Sum;
use cudarc::driver::{CudaContext, sys};

use crate::cases::{Case, all_reduces};
use crate::devices::{F32, create, read};
use crate::faults::{SLACK, works};
use crate::software_driver::{SoftwareDriver, faulty_gpu, with_gpus};
use crate::{Devices, cases};

#[test]
#[ignore = "needs the software driver"]
fn collectives_run_on_streams_of_the_highest_priority() {
    let driver = SoftwareDriver::loaded();
    works(&Devices::new(88, 2));
    let context = CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: the context is current on this thread, and both places are valid.
    unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }.result().unwrap();
    assert!(greatest < least, "the driver has priorities");
    assert!(driver.launches("push_sum_f32") > 0);
    assert_eq!(driver.least_priority("push_sum_f32"), greatest);
    // cubecl's streams have none.
    assert_eq!(driver.least_priority("tensors_ready"), least);
}

/// A computation on the other half can then run beside them.
#[test]
#[ignore = "needs the software driver"]
fn half_of_the_multiprocessors_means_half_of_the_blocks() {
    let driver = SoftwareDriver::loaded();
    if !is_child() {
        // A software GPU has 4 multiprocessors.
        for (share, blocks) in [("all", "4"), ("half", "2")] {
            let variables = with_gpus(1, &[("BONFIRE_CUDA_MULTIPROCESSORS", share)]);
            let mut process =
                Process::start("software::half_of_the_multiprocessors_means_half_of_the_blocks", &variables);
            assert_eq!(process.read_line(), blocks, "{share}");
            assert!(process.end().success());
        }
        return;
    }
    let devices = Devices::new(0, 2);
    all_reduces(&devices, &cases(&[1, 1001]));
    // Two-shot, and large enough for all blocks.
    let large = Case { number: 0, dtype: F32, mean: false, in_place: true, length: 140_001, around: (0, 0) };
    all_reduces(&devices, &[large]);
    send_line(driver.blocks("two_shot_sum_f32"));
}

/// A host function would make the next copy wait for the host.
#[test]
#[ignore = "needs the software driver"]
fn copies_do_not_wait_for_the_host_and_their_memory_is_reused() {
    let driver = SoftwareDriver::loaded();
    let devices = Devices::new(90, 2);
    let clients = [devices.client(0), devices.client(1)];
    let values = vec![3.5; 1 << 18];
    let before = driver.host_functions();
    let source = create(&clients[0], &values);
    let copy_once = || -> Handle {
        let tensor = source.clone().copy_descriptor([values.len()].into(), [1].into(), F32.size());
        copy(&clients[0], tensor, &clients[1]).unwrap()
    };
    let in_use = || clients.each_ref().map(|client| client.memory_usage().unwrap().bytes_in_use);
    assert!(read(&clients[1], &copy_once()) == values);
    clients.iter().for_each(|client| client.flush().unwrap());
    let after_one = in_use();
    for _ in 0..100 {
        // In flight together with copies before it.
        drop(copy_once());
    }
    assert!(read(&clients[1], &copy_once()) == values);
    clients.iter().for_each(|client| client.flush().unwrap());
    assert_eq!(driver.host_functions(), before, "no copy calls the host");
    assert_eq!(in_use(), after_one, "the memory of copies that are done is free");
}

/// Starts the test `name` of this module in a process with two GPUs. The first has a fault in a launch of a kernel, as
/// `SHIM_FAULT` says. Returns the errors of two devices.
fn faulty(name: &str, fault: &str) -> [Error; 2] {
    let mut process = Process::start(&format!("software::{name}"), &with_gpus(2, &[("SHIM_FAULT", fault)]));
    let errors = [(); 2].map(|()| process.outcome().expect_err("the GPU has a fault"));
    assert_eq!(process.read_line(), "done");
    assert!(process.end().success());
    errors
}

/// Two devices on the second of two GPUs.
fn on_the_second_gpu() -> Devices {
    let [one, other] = [3, 5].map(|replica| Devices::new(replica, 1));
    Devices { all: [one.all, other.all].concat(), ids: [one.ids, other.ids].concat() }
}

/// Reports the failures of these devices, and shows that others work.
fn report_failures(devices: &Devices) {
    devices.all.iter().for_each(|device| report(&Err(device.failure().expect("it is poisoned"))));
    works(&on_the_second_gpu());
    send_line("done");
}

#[test]
#[ignore = "needs the software driver"]
fn a_fault_in_an_all_reduce_is_named_by_all_devices() {
    SoftwareDriver::loaded();
    if !is_child() {
        let errors = faulty("a_fault_in_an_all_reduce_is_named_by_all_devices", "0:push_sum_f32:3");
        return errors.iter().for_each(|error| assert_eq!(faulty_gpu(error).0, 0, "{error}"));
    }
    let devices = Devices::new(0, 2);
    works(&devices);
    let begin = Instant::now();
    devices.run(|_, mut client| {
        let tensor = create(&client, &[1.0]);
        while client.flush().is_ok() {
            client.all_reduce(tensor.clone(), tensor.clone(), F32, devices.ids.clone(), Sum);
            client.sync_collective();
        }
    });
    assert!(begin.elapsed() < SLACK, "{:.1?}", begin.elapsed());
    report_failures(&devices);
}

/// The copy that was lent never arrives, so the device that receives it, on another GPU, fails at its deadline. If the
/// fault is known while the copy is being lent, both get it.
#[test]
#[ignore = "needs the software driver"]
fn a_fault_of_the_gpu_that_lends_a_copy_fails_both_devices() {
    SoftwareDriver::loaded();
    if !is_child() {
        let [lends, receives] = faulty("a_fault_of_the_gpu_that_lends_a_copy_fails_both_devices", "0:tensors_ready:5");
        assert_eq!(faulty_gpu(&lends).0, 0, "{lends}");
        let named = match &receives {
            Error::Broken { .. } => receives.to_string().contains("in time"),
            other => faulty_gpu(other).0 == 0,
        };
        return assert!(named, "{receives}");
    }
    let devices = Devices::new(0, 2);
    works(&devices);
    devices.all.iter().for_each(|device| device.set_deadline(Duration::from_secs(2)));
    let clients = [devices.client(0), devices.client(1)];
    let source = create(&clients[0], &[3.5; 64]);
    let begin = Instant::now();
    loop {
        let tensor = source.clone().copy_descriptor([64].into(), [1].into(), F32.size());
        let Ok(copied) = copy(&clients[0], tensor, &clients[1]) else { break };
        match clients[1].read_one(copied) {
            Ok(bytes) => assert!(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes) == [3.5; 64]),
            Err(_) => break,
        }
    }
    assert!(begin.elapsed() < SLACK, "{:.1?}", begin.elapsed());
    report_failures(&devices);
}
