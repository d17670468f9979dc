//! Trainings whose copies between host and devices, and calls, the software driver counts. `scripts/gpu-check` leaves
//! these tests out.

mod calls;

use bonfire::{CudaDevice, DataParallel, Group, ShardedOptimizer, Sharding};
use bonfire_core::internal::hash;
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::{Kind, run_ranks};
use burn::backend::{Autodiff, NdArray};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamConfig, Optimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use super::{COMPARED, RATE, STEPS, Training, Way, alone, check_close, device, device_of, together};
use crate::digits;
use crate::models::{Bits, values};
use crate::software_driver::{SoftwareDriver, with_gpus};

/// Trains the network of the example `digits` as one of two ranks, as it does: by overlapped steps, or with a
/// sharded optimizer. Calls `at` as [`together`] does.
fn digits(group: &Group, device: &CudaDevice, shard: bool, mut at: impl FnMut()) {
    const BATCH: usize = 4;
    let (mut model, ddp) = DataParallel::new(group.clone(), digits::Network::<Training>::new(device)).unwrap();
    let mut optimizer = AdamConfig::new().init();
    let mut sharded = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
    let criterion = CrossEntropyLossConfig::new().init(device);
    let batches: Vec<_> = (0..STEPS)
        .map(|step| {
            let seed = 10 * step + group.rank();
            let labels = Tensor::<Training, 1, Int>::arange(0..BATCH as i64, device);
            (values::<Training, 4>([BATCH, 1, 8, 8], seed, device), labels)
        })
        .collect();
    let mut all_are_there = || {
        Training::sync(device).unwrap();
        group.barrier().unwrap();
        at();
        group.barrier().unwrap();
    };
    for (number, (images, labels)) in batches.into_iter().enumerate() {
        if number == COMPARED {
            all_are_there();
        }
        let loss = |model: &digits::Network<Training>, (images, labels)| {
            (criterion.forward(model.forward(images), labels), BATCH)
        };
        if shard {
            let parts = sharded.run(&model, [(images, labels)], loss).unwrap();
            sharded.step(RATE, &mut model, parts).unwrap();
        } else {
            let grads = ddp.run(&model, [(images, labels)], loss).unwrap();
            model = optimizer.step(RATE, model, grads);
        }
    }
    all_are_there();
}

#[test]
#[ignore = "needs the software driver"]
fn no_step_of_the_digits_copies_data_to_the_host() {
    for (shard, first) in [(false, 80), (true, 82)] {
        let copied = run_ranks(Kind::Threads, 2, move |group| {
            let (driver, mut copied) = (SoftwareDriver::loaded(), Vec::new());
            digits(&group, &device(first, group.rank()), shard, || copied.push(driver.copied()));
            [0, 1].map(|direction| copied[1][direction] - copied[0][direction])
        });
        let [downloaded, uploaded] = copied[0];
        eprintln!("sharded {shard}: {downloaded} bytes downloaded, {uploaded} uploaded");
        assert_eq!(downloaded, 0);
        // Shapes and strides, in five steps of two ranks. The parameters have 40,392 bytes.
        assert!(uploaded < 5 * 40_392, "{uploaded} bytes");
    }
}

/// Trains, and checks the bytes that copies of this process move between host and devices: when the ranks take the
/// parameters of rank 0, and in the steps without a comparison of parameters.
fn trains_on_devices(group: &Group, device: &CudaDevice, way: Way) -> Bits {
    let (driver, mut copied) = (SoftwareDriver::loaded(), Vec::new());
    let trained = together::<Training>(group, device, way, || copied.push(driver.copied()));
    let moved = |from: usize| [0, 1].map(|direction| copied[from + 1][direction] - copied[from][direction]);
    // Processes try each other's memory when a group is new, by reading words of 4 bytes.
    let words = 64;
    for (when, [downloaded, uploaded], most) in [("taking parameters", moved(0), words), ("in five steps", moved(2), 0)]
    {
        eprintln!("{way:?}, {when}: {downloaded} bytes downloaded, {uploaded} uploaded");
        assert!(downloaded <= most, "{way:?}, {when}: {downloaded} bytes");
        // Shapes and strides, which cubecl's kernels read. The model has 664,000 bytes, and the layer without
        // gradients 196,800 of them.
        assert!(uploaded < 32 << 10, "{way:?}, {when}: {uploaded} bytes");
    }
    trained
}

const WAYS: [Way; 4] = [Way::Step, Way::Sync, Way::Sharded, Way::Full];

#[test]
#[ignore = "needs the software driver"]
fn no_gradient_and_no_parameter_leaves_its_device() {
    for (way, first) in WAYS.into_iter().zip([52, 54, 56, 58]) {
        run_ranks(Kind::Threads, 2, move |group| trains_on_devices(&group, &device(first, group.rank()), way));
    }
}

/// Each rank is a process, and has a GPU.
#[test]
#[ignore = "needs the software driver"]
fn trainings_between_processes_equal_one_rank_by_kernels_and_by_nccl() {
    const NAME: &str = "software::trainings_between_processes_equal_one_rank_by_kernels_and_by_nccl";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        let group = Group::from_env().unwrap();
        let device = device_of(group.rank() as u8, 0, 1);
        let expected = alone::<Autodiff<NdArray>>(&Default::default());
        for way in WAYS {
            let trained = trains_on_devices(&group, &device, way);
            check_close(&trained, &expected, 1e-4);
            send_line(format!("{:x}", hash(trained.0.iter().flat_map(|data| data.bytes.iter().copied()))));
        }
        let by_nccl = std::env::var("BONFIRE_CUDA").as_deref() == Ok("nccl");
        assert_eq!(driver.host_functions() > 0, by_nccl, "NCCL's stand-in calls one for each operation");
        return send_line("done");
    }
    for path in ["kernels", "nccl"] {
        let variables = with_gpus(2, &[("BONFIRE_CUDA", path)]);
        let mut ranks = Process::start_ranks_with(NAME, 2, "auto", "60", &variables);
        for what in WAYS.map(|way| format!("{way:?}")).iter().map(String::as_str).chain(["the end"]) {
            assert_eq!(ranks[0].read_line(), ranks[1].read_line(), "{what} by {path}");
        }
        assert!(ranks.iter_mut().all(|rank| rank.end().success()), "{path}");
    }
}
