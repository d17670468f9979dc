//! burn-train's `Learner` on several devices, in one process or in several, on handwritten digits.
//!
//! One process uses burn's own distributed training:
//!
//! ```sh
//! cargo run --release -p bonfire-examples --features wgpu,ddp --bin burn_train -- --devices 2
//! cargo run --release -p bonfire-examples --features cuda,ddp --bin burn_train -- --devices 2 --backend cuda
//! ```
//!
//! Processes that `bonfire run` started use Bonfire's strategy, with `--devices` in each.

#[cfg(feature = "cuda")]
#[path = "digits/cuda.rs"]
mod cuda;
#[path = "burn_train/data.rs"]
mod data;
#[path = "digits/data.rs"]
mod digits;
#[path = "burn_train/model.rs"]
mod model;
#[path = "burn_train/progress.rs"]
mod progress;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use bonfire::{Builder, DataParallelStrategy};
use burn::backend::Autodiff;
use burn::backend::flex::Flex;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::linear::{LinearLrScheduler, LinearLrSchedulerConfig};
use burn::module::Module;
use burn::optim::{Adam, AdamConfig, adaptor::OptimizerAdaptor};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::backend::distributed::{DistributedBackend, DistributedConfig, ReduceOperation};
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{ExecutionStrategy, Learner, LearningComponentsMarker, SupervisedTraining, TrainingStrategy};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};

use crate::data::Images;
use crate::digits::Digits;
use crate::model::Network;
use crate::progress::{Epochs, Silent};

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Components<B> = LearningComponentsMarker<B, LinearLrScheduler, Network<B>, OptimizerAdaptor<Adam, Network<B>, B>>;

/// Images in a step unless the user says otherwise, or as many more as the ranks need to have equally many.
const BATCH: usize = 60;

/// Trains a small network on handwritten digits with burn-train, on several devices at once.
#[derive(Parser)]
#[command(name = "burn_train")]
struct Args {
    /// Devices of this process: logical ones, which share a physical device. With cuda they have GPUs of their own as far as
    /// there are enough
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    devices: u8,
    /// What computes
    #[arg(long, value_enum, default_value_t = if cfg!(feature = "wgpu") { Backend::Wgpu } else { Backend::Cuda })]
    backend: Backend,
    /// Passes over the training images
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Images in a step, of all devices of all processes together [default: about 60]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Learning rate of the first step, from which it falls evenly to nothing
    #[arg(long, default_value_t = 0.02, value_parser = learning_rate)]
    lr: f64,
    /// Seed of the initial weights and of the order of the images
    #[arg(long, default_value_t = 42)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    Wgpu,
    Cuda,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn,cubecl_runtime=error")).init();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    match args.backend {
        #[cfg(feature = "wgpu")]
        Backend::Wgpu => {
            let device = |replica| bonfire::WgpuDevice::new(Default::default(), replica);
            train::<Autodiff<bonfire::Wgpu>>(args, (0..args.devices).map(device).collect())
        }
        #[cfg(feature = "cuda")]
        Backend::Cuda => {
            let first = cuda::local_rank() * usize::from(args.devices);
            let devices = (first..).take(args.devices.into()).map(cuda::device).collect::<Result<_, _>>()?;
            train::<Autodiff<bonfire::Cuda>>(args, devices)
        }
        #[allow(unreachable_patterns, reason = "programs may have both")]
        backend => {
            let name = backend.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            Err(format!("this program was built without {name}: build it with `--features {name},ddp`").into())
        }
    }
}

#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), allow(dead_code))]
fn train<B: AutodiffBackend + DistributedBackend>(args: &Args, devices: Vec<B::Device>) -> Result<(), Failure> {
    let device = devices[0].clone();
    let (digits, test) = Digits::load()?;

    let (strategy, rank, ranks) = strategy::<B>(devices)?;
    let (batch, steps) = batch_of_each(args, digits.len(), ranks);
    let loader = DataLoaderBuilder::new(Images).batch_size(batch).shuffle(args.seed).set_device(device.clone());
    let train = loader.build(InMemDataset::new(digits.items()));
    let valid = DataLoaderBuilder::new(Images).batch_size(test.len()).set_device(device.clone());
    let valid = valid.build(InMemDataset::new(test.items()));

    B::seed(&device, args.seed);
    let network = Network::<B>::new(&device);
    // Weights are drawn when they are first used. burn's strategy copies the network before that, and the copies on its
    // devices would draw weights of their own. Counting them is a use.
    network.num_params();

    let folder = tempfile::tempdir()?;
    let mut training = SupervisedTraining::<Components<B>>::new(folder.path(), train, valid)
        .metrics((AccuracyMetric::<Flex>::new(), LossMetric::<Flex>::new()))
        .num_epochs(args.epochs as usize)
        .with_application_logger(None)
        .with_training_strategy(strategy);
    training = if rank == 0 { training.renderer(Epochs::new()) } else { training.renderer(Silent) };

    // burn takes a step of the schedule for each rank in each iteration.
    let schedule = LinearLrSchedulerConfig::new(args.lr, 0.0, args.epochs as usize * steps * ranks).init()?;
    let clock = Instant::now();
    let trained = training.launch(Learner::new(network, AdamConfig::new().init(), schedule)).model;
    if rank == 0 {
        let (accuracy, seconds) = (100.0 * trained.accuracy(&test, &device), clock.elapsed().as_secs_f64());
        println!("{ranks} devices, {} epochs in {seconds:.1} s", args.epochs);
        println!("test accuracy: {accuracy:.1} %");
    }
    Ok(())
}

/// How these devices train, this process's first rank, and the number of all ranks.
fn strategy<B: AutodiffBackend + DistributedBackend>(
    devices: Vec<B::Device>,
) -> Result<(TrainingStrategy<Components<B>>, usize, usize), Failure> {
    let builder = Builder::from_env()?;
    if builder.launched().is_none() {
        let ranks = devices.len();
        let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
        return Ok((ExecutionStrategy::ddp(devices, config).into(), 0, ranks));
    }
    let groups = builder.connect_ranks(devices.len())?;
    let (rank, ranks) = (groups[0].rank(), groups[0].world_size());
    let strategy = DataParallelStrategy::new(devices.into_iter().zip(groups).collect())?;
    Ok((TrainingStrategy::Custom(Arc::new(strategy)), rank, ranks))
}

/// Images in a step of each rank, and steps in an epoch. Ends the program where the ranks would not make equally many steps: burn's own
/// strategy would wait forever for those that are missing.
fn batch_of_each(args: &Args, images: usize, ranks: usize) -> (usize, usize) {
    let batch = args.batch.map_or(BATCH.next_multiple_of(ranks), |batch| batch as usize);
    if !batch.is_multiple_of(ranks) {
        wrong(&format!("a batch of {batch} cannot be shared by {ranks} devices: give a multiple of {ranks}"));
    }
    let batch = batch / ranks;
    // burn gives each rank an equal part of the images, and what remains to the last.
    let part = images / ranks;
    let (steps, last) = (part.div_ceil(batch), (images - part * (ranks - 1)).div_ceil(batch));
    if steps != last {
        wrong(&format!(
            "of {images} images {ranks} devices get {part} each and the last what remains, which are {steps} and \
             {last} batches of {batch}: all need equally many, so give another --batch or another number of devices"
        ));
    }
    (batch, steps)
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(lr) if lr > 0.0 && lr <= 1.0 => Ok(lr),
        _ => Err("give a number above 0 and up to 1".into()),
    }
}

/// Ends the program as clap does for wrong arguments: with a message and status 2.
fn wrong(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
