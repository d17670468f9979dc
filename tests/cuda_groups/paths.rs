//! Which path carries a call between GPUs, as the software driver records it: NCCL's stand-in calls host functions.

use bonfire::server::DeviceCollectives;
use bonfire::{DType, ReduceOp};

use super::{libraries_without_nccl, start};
use crate::groups::{Memory, check, mine, value};
use crate::software_driver::SoftwareDriver;
use crate::{Devices, on_devices};
use bonfire_testing::Kind;
use bonfire_testing::process::{is_child, send_line};

/// Starts the test `name` on two software GPUs with these variables, and waits for its end.
fn on_two_gpus(name: &str, variables: &[(&str, &str)]) {
    let mut process = start(name, 2, variables);
    assert_eq!(process.read_line(), "done");
    assert!(process.end().success());
}

/// Whether NCCL carries all-reduces of each of these sizes in bytes, between two ranks with a GPU each.
fn by_nccl(driver: &SoftwareDriver, sizes: &'static [usize]) -> Vec<bool> {
    let carried = sizes.iter().map(|bytes| {
        let before = driver.host_functions();
        on_devices(Kind::Threads, 0, 2, move |group, client| {
            let (rank, len) = (group.rank(), bytes / 4);
            let memory = Memory::new(client.clone(), 0);
            let (source, target) = (memory.create(&mine(rank, len)), memory.create(&vec![0; len]));
            let call = client.start_all_reduce(&group, &source, &target, DType::I32, ReduceOp::Sum);
            call.unwrap().wait().unwrap();
            let sum: Vec<_> = (0..len).map(|i| value(0, i) + value(1, i)).collect();
            assert!(memory.read(&target) == sum, "{bytes} bytes on rank {rank}");
        });
        driver.host_functions() != before
    });
    carried.collect()
}

#[test]
#[ignore = "needs the software driver"]
fn nccl_carries_large_calls_between_two_gpus_and_pcie_has_a_lower_threshold() {
    const NAME: &str = "paths::nccl_carries_large_calls_between_two_gpus_and_pcie_has_a_lower_threshold";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        let sizes = &[4, 512 << 10, (512 << 10) + 4, (8 << 20) + 4];
        let expected = match std::env::var("CONNECTION").unwrap().as_str() {
            "nvlink" => [false, false, false, true],
            "pcie" => [false, false, true, true],
            _ => [true; 4],
        };
        assert_eq!(by_nccl(&driver, sizes), expected);
        return send_line("done");
    }
    let auto = ("BONFIRE_CUDA", "auto");
    on_two_gpus(NAME, &[auto, ("CONNECTION", "nvlink"), ("SHIM_NVLINK", "1")]);
    on_two_gpus(NAME, &[auto, ("CONNECTION", "pcie"), ("SHIM_NVLINK", "0")]);
    on_two_gpus(NAME, &[auto, ("CONNECTION", "none"), ("SHIM_PEERS", "0")]);
}

/// GPUs that cannot access each other's memory, as those for consumers: all operations are right on each path.
#[test]
#[ignore = "needs the software driver"]
fn without_access_nccl_does_all_it_can_and_the_host_the_rest() {
    const NAME: &str = "paths::without_access_nccl_does_all_it_can_and_the_host_the_rest";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        let nccl = std::env::var("WITH_NCCL").unwrap() == "1";
        on_devices(Kind::Threads, 0, 2, |group, client| {
            for len in [0, 1, 1000, 70_001] {
                check(&group, &Memory::new(client.clone(), 1), len).unwrap();
            }
        });
        assert_eq!(driver.host_functions() > 0, nccl);
        for device in Devices::new(0, 2).all {
            assert_eq!(device.counters().uploads == 0, nccl, "{device:?}");
        }
        for kernel in ["push_sum_i32", "two_shot_sum_i32", "all_gather", "broadcast"] {
            assert_eq!(driver.launches(kernel), 0, "{kernel}");
        }
        return send_line("done");
    }
    let folder = libraries_without_nccl();
    on_two_gpus(NAME, &[("SHIM_PEERS", "0"), ("WITH_NCCL", "1")]);
    let without = ("LD_LIBRARY_PATH", folder.path().to_str().unwrap());
    on_two_gpus(NAME, &[("SHIM_PEERS", "0"), ("WITH_NCCL", "0"), without]);
}

#[test]
#[ignore = "needs the software driver"]
fn a_users_table_overrides_the_choice() {
    const NAME: &str = "paths::a_users_table_overrides_the_choice";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        assert_eq!(by_nccl(&driver, &[1000, 1004, 2000, 2004]), [true, false, false, true]);
        assert_eq!(driver.launches("one_shot_sum_i32"), 4, "the requested form");
        return send_line("done");
    }
    on_two_gpus(NAME, &[("BONFIRE_CUDA", "nccl:0-1000;one-shot:1001-2000;nccl:2001-")]);
}
