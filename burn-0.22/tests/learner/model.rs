//! A model that records what it does, and its data.

use std::fmt;
use std::sync::{Arc, Mutex};

use bonfire::{Group, ShardedDataLoaderBuilder};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, DataLoaderIterator, Progress};
use burn::data::dataset::{DatasetError, InMemDataset};
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor, TensorData};
use burn_train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};

/// Features of an input and of a target.
const WIDTH: usize = 3;

type Before = Arc<dyn Fn(usize) + Send + Sync>;

/// What a rank's model records.
#[derive(Clone, Default)]
pub struct Log {
    losses: Arc<Mutex<Vec<f32>>>,
    steps: Arc<Mutex<Vec<Vec<f32>>>>,
    /// Called before each iteration with the number of steps so far.
    before: Option<Before>,
    is_wide: bool,
}

impl Log {
    pub fn before(mut self, before: impl Fn(usize) + Send + Sync + 'static) -> Log {
        self.before = Some(Arc::new(before));
        self
    }

    /// With a model of another shape.
    pub fn wide(mut self, is_wide: bool) -> Log {
        self.is_wide = is_wide;
        self
    }

    /// The loss of each batch.
    pub fn losses(&self) -> Vec<f32> {
        self.losses.lock().unwrap().clone()
    }

    /// The parameters after each step of the optimizer.
    pub fn steps(&self) -> Vec<Vec<f32>> {
        self.steps.lock().unwrap().clone()
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}

#[derive(Module, Debug)]
pub struct Net {
    hidden: Linear,
    head: Linear,
    #[module(skip)]
    log: Log,
}

fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0).collect()
}

struct Fill(usize);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(|old| {
            let data = TensorData::new(values(old.shape().num_elements(), seed), old.dims());
            Tensor::from_data(data, &old.device()).require_grad()
        })
    }
}

impl Net {
    pub fn new(seed: usize, log: &Log) -> Net {
        let device = Device::flex().autodiff();
        let width = if log.is_wide { 7 } else { 5 };
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        Net { hidden: linear(WIDTH, width), head: linear(width, WIDTH), log: log.clone() }.map(&mut Fill(seed))
    }

    fn output(&self, batch: Batch) -> RegressionOutput {
        let output = self.head.forward(self.hidden.forward(batch.inputs).tanh());
        let loss = (output.clone() - batch.targets.clone()).powf_scalar(2.0).mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        if let Some(before) = &self.log.before {
            before(self.log.steps().len());
        }
        let output = self.output(batch);
        self.log.losses.lock().unwrap().push(output.loss.clone().into_scalar());
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, gradients: GradientsParams) -> Self {
        let net = optimizer.step(rate, self, gradients);
        net.log.steps.lock().unwrap().push(parameters(&net));
        net
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.output(batch)
    }
}

fn parameters(net: &Net) -> Vec<f32> {
    struct Flatten(Vec<f32>);
    impl ModuleVisitor for Flatten {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut all = Flatten(Vec::new());
    net.visit(&mut all);
    all.0
}

#[derive(Clone, Debug)]
pub struct Batch {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

pub type Sample = ([f32; WIDTH], [f32; WIDTH]);

/// Samples of which no two are equal.
pub fn samples(count: usize) -> Vec<Sample> {
    let numbers = values(2 * WIDTH * count, 77);
    let row = |at: usize| std::array::from_fn(|i| numbers[at * WIDTH + i]);
    (0..count).map(|sample| (row(2 * sample), row(2 * sample + 1))).collect()
}

#[derive(Clone)]
struct Rows;

impl Batcher<Sample, Batch> for Rows {
    fn batch(&self, samples: Vec<Sample>, device: &Device) -> Batch {
        let tensor = |side: fn(&Sample) -> &[f32]| {
            let numbers: Vec<f32> = samples.iter().flat_map(|sample| side(sample).to_vec()).collect();
            Tensor::from_data(TensorData::new(numbers, [samples.len(), WIDTH]), device)
        };
        Batch { inputs: tensor(|sample| &sample.0), targets: tensor(|sample| &sample.1) }
    }
}

/// A loader of all samples in their order.
pub fn loader(samples: Vec<Sample>, batch: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows).batch_size(batch).build(InMemDataset::new(samples))
}

/// A loader of this rank's parts of the batches of all ranks, which differ between epochs.
pub fn sharded(group: &Group, samples: Vec<Sample>, batch: usize) -> Arc<dyn DataLoader<Batch>> {
    let builder = ShardedDataLoaderBuilder::new(Rows).batch_size(batch).shuffle(4).num_workers(2);
    builder.build(group, InMemDataset::new(samples))
}

/// Batches of any lengths. One without samples cannot be loaded.
#[derive(Clone)]
pub struct Batches(pub Vec<Vec<Sample>>);

impl Batches {
    pub fn loader(self) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(BatchLoader { batches: self.0, device: Device::flex() })
    }
}

struct BatchLoader {
    batches: Vec<Vec<Sample>>,
    device: Device,
}

impl DataLoader<Batch> for BatchLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        Box::new(BatchIterator { loader: self, next: 0 })
    }

    fn num_items(&self) -> usize {
        self.batches.iter().map(Vec::len).sum()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(BatchLoader { batches: self.batches.clone(), device: device.clone() })
    }

    /// Every part has all batches.
    fn slice(&self, _start: usize, _end: usize) -> Arc<dyn DataLoader<Batch>> {
        self.to_device(&self.device)
    }
}

struct BatchIterator<'a> {
    loader: &'a BatchLoader,
    next: usize,
}

impl Iterator for BatchIterator<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let samples = self.loader.batches.get(self.next)?.clone();
        self.next += 1;
        if samples.is_empty() {
            return Some(Err(DatasetError::new(std::io::Error::other("a batch without samples"))));
        }
        Some(Ok(Rows.batch(samples, &self.loader.device)))
    }
}

impl DataLoaderIterator<Batch> for BatchIterator<'_> {
    fn progress(&self) -> Progress {
        let count = |batches: &[Vec<Sample>]| batches.iter().map(Vec::len).sum();
        Progress::new(count(&self.loader.batches[..self.next]), count(&self.loader.batches), None)
    }
}
