//! The memory of a rank: its part of parameters, gradients and optimizer state, and a few blocks.

use std::time::Duration;

use bonfire::{Error, Group, ShardedBlock};
use bonfire_testing::allocation;
use bonfire_testing::process::{Process, is_child, report};
use bonfire_testing::resources::Limited;
use burn::nn::LinearConfig;
use burn::optim::AdamConfig;
use rustix::process::{Resource, Rlimit, Signal, setrlimit};

use crate::burn_version::*;

const BLOCKS: usize = 16;
const STEPS: usize = 3;

/// The number of columns of the square weights, which are all of the model.
const WIDTH: &str = "WIDTH";

models! {
    struct Deep {
        layers: Vec<ShardedBlock<Linear>>,
    }
}

impl Deep {
    fn new(width: usize) -> Self {
        let linear = || LinearConfig::new(width, width).with_bias(false).init(&device());
        Deep { layers: (0..BLOCKS).map(|_| ShardedBlock::new(linear())).collect() }
    }

    fn loss(&self, width: usize) -> Tensor<1> {
        let x = Tensor::<2>::ones([2, width], &device());
        let x = self.layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh()));
        x.powf_scalar(2.0).mean()
    }
}

/// What a rank needs, beyond what it had before it made its model.
#[derive(Debug, PartialEq)]
struct Use {
    /// Bytes in its allocator between two steps, and the most within one.
    kept: usize,
    most: usize,
    /// The growth of its anonymous resident memory.
    resident: usize,
}

/// A rank in a process: trains and says what it needs.
fn train() -> Result<String, Error> {
    let width = std::env::var(WIDTH).expect("set by the parent").parse().expect("a number");
    let group = Group::from_env()?;
    let (allocated, resident) = (allocation::in_use(), resident());
    let (mut model, fsdp) = FullyShardedParallel::new(group, Deep::new(width))?;
    let mut optimizer: AdamOf<Deep> = AdamConfig::new().init();
    let mut most = 0;
    for _ in 0..STEPS {
        // Of this step only.
        allocation::most_in_use();
        let step = fsdp.last_pass(&model, 1)?;
        let loss = step.model().loss(width);
        let gradients = step.finish(&mut loss.backward())?.for_optimizer(&optimizer)?;
        most = allocation::most_in_use();
        model = optimizer.step(1e-3, model, gradients);
    }
    let kept = allocation::in_use();
    fsdp.group().barrier()?;
    let own = [kept - allocated, most - allocated, self::resident().saturating_sub(resident)];
    Ok(own.map(|bytes| bytes.to_string()).join(" "))
}

/// Returns the anonymous memory of this process that is resident, in bytes: without shared memory and files.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the status of this process");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim_end_matches("kB").trim().parse::<usize>().ok());
    kib.expect("its anonymous memory") << 10
}

fn needs(processes: Vec<Process>) -> Vec<Use> {
    let need = |process: &Process| {
        let words = process.outcome().expect("a training without failures");
        let words: Vec<usize> = words.split(' ').map(|word| word.parse().expect("a number of bytes")).collect();
        Use { kept: words[0], most: words[1], resident: words[2] }
    };
    processes.iter().map(need).collect()
}

#[test]
fn a_rank_needs_its_part_of_the_training_and_a_few_blocks() {
    if is_child() {
        return report(&train());
    }
    const SIDE: usize = 512;
    const BLOCK: usize = 4 * SIDE * SIDE;
    // In the matrix product burn packs operands in a buffer that it keeps, whose size depends on the processor's
    // caches. Then it copies the product to memory that is aligned.
    const PACKED: usize = 7 << 18;
    const PRODUCT: usize = 2 * BLOCK;
    // Activations, the groups, and what they reduce at a time.
    const SMALL: usize = BLOCK + BLOCK / 4;
    let name = "shared::fully_sharded::memory::a_rank_needs_its_part_of_the_training_and_a_few_blocks";
    for transport in ["shm", "tcp"] {
        for n in [2, 4, 8] {
            let processes = Process::start_ranks_with(name, n, transport, "60", &[(WIDTH, SIDE.to_string())]);
            for Use { kept, most, resident } in needs(processes) {
                let mib = [kept, most, resident].map(|bytes| bytes as f64 / (1 << 20) as f64);
                println!("{transport}, {n} ranks: MiB kept, at most, resident: {mib:.1?}");
                // Parameters and Adam's two moments, and in a step gradients.
                let part = BLOCKS * BLOCK / n;
                // A gathered block, one that is being gathered, and the whole gradients of two. In shared memory all
                // but the first are in a segment, which is not counted.
                let in_use = if transport == "tcp" { 4 * BLOCK } else { BLOCK };
                assert!(kept <= 3 * part + in_use + PACKED + SMALL, "{kept} bytes");
                assert!(most <= 4 * part + in_use + PACKED + PRODUCT + SMALL, "{most} bytes");
            }
        }
    }
}

#[test]
#[ignore = "needs root and control groups"]
fn a_model_that_exceeds_a_limit_on_memory_in_one_process_trains_in_four() {
    if is_child() {
        return report(&train());
    }
    let name = "shared::fully_sharded::memory::a_model_that_exceeds_a_limit_on_memory_in_one_process_trains_in_four";
    // 64 MiB of parameters, and 256 with gradients and moments.
    let (width, limit) = ([(WIDTH, "1024".to_owned())], 192 << 20);
    let limits: Vec<_> = (0..4).map(|_| Limited::new(limit)).collect();
    let start = |n| Process::start_ranks_by(|rank| limits[rank].enter().to_vec(), name, n, "tcp", "60", &width);
    let status = start(1)[0].end_within(Duration::from_secs(60));
    let killed = status.and_then(|status| std::os::unix::process::ExitStatusExt::signal(&status));
    assert_eq!(killed, Some(Signal::KILL.as_raw()), "one process is within the limit");
    for Use { most, .. } in needs(start(4)) {
        println!("of a limit of {limit} bytes, {most} at most in the allocator");
    }
}

/// A rank in a process: rank 1 cannot have the memory for what it gathers. Returns the error. Where burn needs memory
/// for the parameter that could not be gathered, rank 1 aborts.
fn gather_without_memory() -> Result<String, Error> {
    const SIDE: usize = 4096;
    let group = Group::from_env()?;
    let rank = group.rank();
    let linear = LinearConfig::new(SIDE, SIDE).with_bias(false).init(&device());
    let model = Deep { layers: vec![ShardedBlock::new(linear)] };
    let (model, fsdp) = FullyShardedParallel::new(group, model)?;
    if rank == 1 {
        let status = std::fs::read_to_string("/proc/self/status").expect("the status of this process");
        let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
        let kib: Option<u64> = line.and_then(|line| line.trim_end_matches("kB").trim().parse().ok());
        // Half of the block.
        let most = Some((kib.expect("its size") << 10) + (SIDE * SIDE * 4 / 2) as u64);
        setrlimit(Resource::As, Rlimit { current: most, maximum: most }).expect("a process may lower its limits");
    }
    let step = fsdp.last_pass(&model, 1)?;
    let loss = step.model().loss(SIDE);
    let error = step.finish(&mut loss.backward()).err().expect("there is no memory for the block");
    Ok(error.to_string())
}

#[test]
fn a_rank_without_memory_for_a_block_fails_the_step_on_all_ranks() {
    if is_child() {
        return report(&gather_without_memory());
    }
    let name = "shared::fully_sharded::memory::a_rank_without_memory_for_a_block_fails_the_step_on_all_ranks";
    for transport in ["shm", "tcp"] {
        let processes = Process::start_ranks(name, 3, transport, "60");
        for rank in [0, 2] {
            let error = processes[rank].outcome().expect("an error of the step, not of the training");
            // For the block, for the tensor made of it, or so much that the rank ends.
            let causes = ["allocate on rank 1: no buffer of 6", "gathering tensors on rank 1: ", ": rank 1 at "];
            assert!(causes.iter().any(|cause| error.contains(cause)), "{transport}: {error}");
        }
    }
}
