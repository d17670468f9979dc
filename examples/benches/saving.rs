//! Measures what saving checkpoints costs a training: how long it stops for a save, and for one in the background.
//!
//! ```sh
//! cargo bench -p bonfire-examples --bench saving                   # two ranks, as threads
//! cargo bench -p bonfire-examples --bench saving -- --shard full   # each has a part of the model
//! ```
//! Rounds of a few steps take turns: without a save, with one before the steps, and with one in the background of them.
//! Rank 0 prints the median of each, and by how much it is longer than without a save. Bonfire's part is `save`,
//! `save_in_background` and `wait`.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use bonfire::{Checkpoints, DataParallel, Error, FullyShardedParallel, Group, ReduceOp, ShardedBlock, TrainingState};
use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use clap::{Parser, ValueEnum};

type B = Autodiff<Flex>;
type Failure = Box<dyn std::error::Error + Send + Sync>;
type State = TrainingState<B, Network<B>, OptimizerAdaptor<Adam, Network<B>, B>, f64, ()>;

/// Measure what saving checkpoints costs a training
#[derive(Parser, Clone)]
#[command(name = "saving")]
struct Args {
    /// Ranks, as threads, where no launcher has started this process as a rank
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Layers of the model, each of which is a block
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1000))]
    layers: u16,
    /// Inputs and outputs of a layer: 1,024 make 4 MiB of parameters, and Adam keeps twice as much
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..=16_384))]
    width: u16,
    /// What a rank keeps of the model and the optimizer's state
    #[arg(long, value_enum, default_value_t = Shard::None)]
    shard: Shard,
    /// Time that each step waits as if for an accelerator, beside its own small computation
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(0..=60_000))]
    compute_ms: u64,
    /// Compute for that time instead, with a thread per rank
    #[arg(long)]
    busy: bool,
    /// Steps of a round, which has one save
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    steps: u16,
    /// Rounds of each kind
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Folder for the checkpoints, on the disk to measure: one that all ranks share
    #[arg(long, value_name = "FOLDER", default_value = concat!(env!("CARGO_TARGET_TMPDIR"), "/saving"))]
    folder: std::path::PathBuf,
    /// What `cargo bench` passes
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Shard {
    /// All of both
    None,
    /// A part of both
    Full,
}

/// Fully connected layers.
#[derive(Module, Debug)]
struct Network<B: Backend> {
    layers: Vec<ShardedBlock<Linear<B>>>,
}

impl<B: Backend> Network<B> {
    fn new(args: &Args) -> Self {
        let width = usize::from(args.width);
        let layer = |_| ShardedBlock::new(LinearConfig::new(width, width).init(&Default::default()));
        Network { layers: (0..args.layers).map(layer).collect() }
    }

    fn forward(&self, input: Tensor<B, 2>) -> Tensor<B, 2> {
        self.layers.iter().fold(input, |x, layer| layer.run(|linear| linear.forward(x)).tanh())
    }
}

/// What trains the model.
enum Parallel {
    Replicas(DataParallel<B>),
    Parts(FullyShardedParallel<B>),
}

/// How a round saves.
#[derive(Clone, Copy)]
enum Kind {
    Without,
    Before,
    Background,
}

fn main() -> ExitCode {
    env_logger::init();
    let args = Args::parse();
    let ranks = usize::from(args.ranks);
    match bonfire::launch(ranks, move |group| measure(&group, &args)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("error: {failed}");
            ExitCode::FAILURE
        }
    }
}

fn measure(group: &Group, args: &Args) -> Result<(), Failure> {
    let (model, parallel) = match args.shard {
        Shard::None => {
            let (model, ddp) = DataParallel::new(group.clone(), Network::<B>::new(args))?;
            (model, Parallel::Replicas(ddp))
        }
        Shard::Full => {
            let (model, fsdp) = FullyShardedParallel::new(group.clone(), Network::<B>::new(args))?;
            (model, Parallel::Parts(fsdp))
        }
    };
    let mut state: State = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    let mut checkpoints = Checkpoints::new(group, &args.folder)?.keep(1);
    let kinds = [Kind::Without, Kind::Before, Kind::Background];
    let mut times = [const { Vec::new() }; 3];
    // The first round warms up.
    for round in 0..=args.rounds {
        for (kind, times) in kinds.into_iter().zip(&mut times) {
            group.barrier()?;
            let start = Instant::now();
            save(&mut checkpoints, &state, &parallel, kind)?;
            for _ in 0..args.steps {
                step(&mut state, &parallel, args)?;
            }
            let mut time = [start.elapsed().as_secs_f64()];
            checkpoints.wait()?;
            group.all_reduce(&mut time, ReduceOp::Max)?;
            if round > 0 {
                times.push(1e3 * time[0]);
            }
        }
    }
    if group.rank() == 0 {
        print(args, times);
    }
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(&args.folder)?;
    }
    Ok(())
}

fn save(checkpoints: &mut Checkpoints, state: &State, parallel: &Parallel, kind: Kind) -> Result<(), Error> {
    match (kind, parallel) {
        (Kind::Without, _) => Ok(()),
        (Kind::Before, Parallel::Replicas(_)) => checkpoints.save(state),
        (Kind::Before, Parallel::Parts(fsdp)) => checkpoints.save((state, fsdp)),
        (Kind::Background, Parallel::Replicas(_)) => checkpoints.save_in_background(state),
        (Kind::Background, Parallel::Parts(fsdp)) => checkpoints.save_in_background((state, fsdp)),
    }
}

fn step(state: &mut State, parallel: &Parallel, args: &Args) -> Result<(), Error> {
    let input = Tensor::ones([1, args.width.into()], &Default::default());
    let loss = |model: &Network<B>, input| {
        let loss = model.forward(input).mean();
        compute(args);
        (loss, 1)
    };
    let gradients = match parallel {
        Parallel::Replicas(ddp) => ddp.run(&state.model, [input], loss)?,
        Parallel::Parts(fsdp) => fsdp.run(&state.model, [input], loss)?.for_optimizer(&state.optimizer)?,
    };
    state.step(gradients, 1);
    Ok(())
}

/// Waits as if for an accelerator, or keeps a core busy.
fn compute(args: &Args) {
    let (start, time) = (Instant::now(), Duration::from_millis(args.compute_ms));
    match args.busy {
        true => while start.elapsed() < time {},
        false => thread::sleep(time),
    }
}

fn print(args: &Args, times: [Vec<f64>; 3]) {
    let parameters = f64::from(args.layers) * f64::from(args.width) * f64::from(args.width + 1);
    println!(
        "{:.0} MiB of parameters and {:.0} MiB of the optimizer's state, {} rounds of {} steps",
        parameters * 4.0 / f64::from(1 << 20),
        parameters * 8.0 / f64::from(1 << 20),
        args.rounds,
        args.steps
    );
    let [without, before, background] = &times;
    // In each round, because the machine's speed changes.
    let longer = |times: &[f64]| summary(times.iter().zip(without).map(|(time, without)| time - without));
    let ([time, ..], [stop, stop_least, stop_most], [delay, delay_least, delay_most]) =
        (summary(without.iter().copied()), longer(before), longer(background));
    println!("a round without a save:       {time:9.1} ms");
    println!("longer with a save:           {stop:9.1} ms ({stop_least:.1} to {stop_most:.1})");
    println!("longer with one in background:{delay:9.1} ms ({delay_least:.1} to {delay_most:.1})");
    println!("delay in parts of a save:     {:9.1} %", 100.0 * delay / stop);
}

/// Returns the median, the least and the most.
fn summary(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}
