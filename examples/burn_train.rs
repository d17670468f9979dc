//! burn-train's `Learner` on handwritten digits, on several devices in one process or several.
//!
//! A single process uses burn's own distributed training:
//!
//! ```sh
//! cargo run --release -p bonfire-examples --features wgpu,ddp --bin burn_train -- --devices 2
//! cargo run --release -p bonfire-examples --features cuda,ddp --bin burn_train -- --devices 2 --backend cuda
//! ```
//!
//! Processes that `bonfire run` or another launcher started use Bonfire's strategy, with `--devices` devices in each,
//! of which every one is a rank.

#[path = "burn_train/data.rs"]
mod data;
#[path = "digits/data.rs"]
mod digits;
#[path = "burn_train/model.rs"]
mod model;
#[path = "burn_train/progress.rs"]
mod progress;

use std::panic::resume_unwind;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use bonfire::train::seeded;
use bonfire::{Builder, DataParallelStrategy, Group};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
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
use burn_train::{ExecutionStrategy, Learner, LearningComponentsMarker, SupervisedTraining};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};

use crate::data::Images;
use crate::digits::Digits;
use crate::model::Network;
use crate::progress::Epochs;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Components<B> = LearningComponentsMarker<B, LinearLrScheduler, Network<B>, OptimizerAdaptor<Adam, Network<B>, B>>;

/// Default images in a step, rounded up to a multiple of the number of ranks.
const BATCH: usize = 60;

/// Train a small network on handwritten digits with burn-train, on several devices at once.
#[derive(Parser)]
#[command(name = "burn_train")]
struct Args {
    /// Logical devices of this process, which share a physical device. With cuda each gets its own GPU as long as there
    /// are enough
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    devices: u8,
    /// Backend
    #[arg(long, value_enum, default_value_t = if cfg!(feature = "wgpu") { Backend::Wgpu } else { Backend::Cuda })]
    backend: Backend,
    /// Passes over the training images
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Global batch size: images in a step over all devices of all processes [default: about 60]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// Learning rate of the first step; it falls linearly to 0
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
            train::<Autodiff<bonfire::Wgpu>>(args, |number| Ok(bonfire::WgpuDevice::new(Default::default(), number)))
        }
        #[cfg(feature = "cuda")]
        Backend::Cuda => {
            train::<Autodiff<bonfire::Cuda>>(args, |number| Ok(bonfire::CudaDevice::of_rank(number.into())?))
        }
        #[allow(unreachable_patterns, reason = "a program may have both backends")]
        backend => {
            let name = backend.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            Err(format!("this program was built without {name}: build it with `--features {name},ddp`").into())
        }
    }
}

/// `device` returns the device of a rank by the rank's number on its host.
#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), allow(dead_code))]
fn train<B: AutodiffBackend + DistributedBackend>(
    args: &Args,
    device: impl Fn(u8) -> Result<B::Device, Failure> + Sync,
) -> Result<(), Failure> {
    let builder = Builder::from_env()?;
    if builder.launched().is_none() {
        return train_with_burn::<B>(args, (0..args.devices).map(device).collect::<Result<_, _>>()?);
    }
    let rank = |group: Group| {
        let number = group.by_host()?.rank().try_into()?;
        train_rank::<B>(args, group, &device(number)?)
    };
    let groups = builder.connect_ranks(args.devices.into())?;
    thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Trains with burn's own strategy.
fn train_with_burn<B: AutodiffBackend + DistributedBackend>(
    args: &Args,
    devices: Vec<B::Device>,
) -> Result<(), Failure> {
    let (device, ranks) = (devices[0].clone(), devices.len());
    B::seed(&device, args.seed);
    let network = Network::<B>::new(&device);
    // burn initialises weights lazily, when they are first used. Its strategy copies the network to its devices before
    // that, and each copy would draw its own weights. Counting the parameters is such a use.
    network.num_params();
    let (data, folder) = (Data::load(args, ranks)?, tempfile::tempdir()?);
    let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
    let training = data
        .training::<B>(args, &device, folder.path())
        .metrics((AccuracyMetric::<Flex>::new(), LossMetric::<Flex>::new()))
        .renderer(Epochs::new())
        .with_training_strategy(ExecutionStrategy::<B>::ddp(devices, config).into());
    let clock = Instant::now();
    // In each iteration burn's strategy advances the schedule by one step for each rank.
    let trained = training.launch(data.learner(args, network, ranks)?).model;
    data.report::<B>(args, &trained, &device, ranks, clock);
    Ok(())
}

/// Trains on a rank with Bonfire's strategy.
fn train_rank<B: AutodiffBackend>(args: &Args, group: Group, device: &B::Device) -> Result<(), Failure> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let network = seeded(&group, args.seed, device, || Network::<B>::new(device))?;
    let (data, folder) = (Data::load(args, ranks)?, tempfile::tempdir()?);
    let strategy = DataParallelStrategy::new(group);
    let mut training = data
        .training::<B>(args, device, folder.path())
        .metrics(strategy.averaged(AccuracyMetric::<Flex>::new()))
        .metrics(strategy.averaged(LossMetric::<Flex>::new()));
    if rank == 0 {
        training = training.renderer(Epochs::new());
    }
    let clock = Instant::now();
    let trained = strategy.launch(training, data.learner(args, network, 1)?)?.model;
    if rank == 0 {
        data.report::<B>(args, &trained, device, ranks, clock);
    }
    Ok(())
}

/// The images, and how they are split into batches.
struct Data {
    digits: Digits,
    test: Digits,
    /// Images in a step of each rank.
    batch: usize,
    /// Steps in an epoch.
    steps: usize,
}

impl Data {
    fn load(args: &Args, ranks: usize) -> Result<Data, Failure> {
        let (digits, test) = Digits::load()?;
        let (batch, steps) = batch_per_rank(args, digits.len(), ranks);
        Ok(Data { digits, test, batch, steps })
    }

    fn training<B: AutodiffBackend>(
        &self,
        args: &Args,
        device: &B::Device,
        folder: &Path,
    ) -> SupervisedTraining<Components<B>> {
        let loader = DataLoaderBuilder::new(Images).batch_size(self.batch).shuffle(args.seed);
        let train = loader.set_device(device.clone()).build(InMemDataset::new(self.digits.items()));
        let valid = DataLoaderBuilder::new(Images).batch_size(self.test.len()).set_device(device.clone());
        SupervisedTraining::<Components<B>>::new(folder, train, valid.build(InMemDataset::new(self.test.items())))
            .num_epochs(args.epochs as usize)
            .with_application_logger(None)
    }

    /// `rates` is the number of steps that the schedule takes in an iteration.
    fn learner<B: AutodiffBackend>(
        &self,
        args: &Args,
        network: Network<B>,
        rates: usize,
    ) -> Result<Learner<Components<B>>, Failure> {
        let steps = args.epochs as usize * self.steps * rates;
        Ok(Learner::new(network, AdamConfig::new().init(), LinearLrSchedulerConfig::new(args.lr, 0.0, steps).init()?))
    }

    fn report<B: AutodiffBackend>(
        &self,
        args: &Args,
        trained: &Network<B::InnerBackend>,
        device: &B::Device,
        ranks: usize,
        clock: Instant,
    ) {
        let (accuracy, seconds) = (100.0 * trained.accuracy(&self.test, device), clock.elapsed().as_secs_f64());
        println!("{ranks} devices, {} epochs in {seconds:.1} s", args.epochs);
        println!("test accuracy: {accuracy:.1} %");
    }
}

/// Returns the images in a step of each rank, and the steps in an epoch. Exits if the ranks would make different
/// numbers of steps: burn's own strategy would wait forever for the missing ones.
fn batch_per_rank(args: &Args, images: usize, ranks: usize) -> (usize, usize) {
    let batch = args.batch.map_or(BATCH.next_multiple_of(ranks), |batch| batch as usize);
    if !batch.is_multiple_of(ranks) {
        usage_error(&format!("a batch of {batch} cannot be shared by {ranks} devices: give a multiple of {ranks}"));
    }
    let batch = batch / ranks;
    // burn gives each rank an equal part of the images, and the remainder to the last.
    let part = images / ranks;
    let (steps, last) = (part.div_ceil(batch), (images - part * (ranks - 1)).div_ceil(batch));
    if steps != last {
        usage_error(&format!(
            "{ranks} devices get {part} of {images} images each and the last also the remainder: {steps} and {last} \
             batches of {batch}, but all need the same number; give another --batch or another number of devices"
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

/// Exits as clap does for invalid arguments: with a message and status 2.
fn usage_error(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
