//! What the shared tests of `DataParallelStrategy` need of burn 0.22. `tests/common/learner_version.rs` of the root
//! package has the same names for burn 0.21.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bonfire::{Group, ShardedDataLoaderBuilder, SyncBatchNorm, SyncBatchNormConfig};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, DataLoaderIterator, Progress};
use burn::data::dataset::{DatasetError, InMemDataset};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn_train::metric::{LearningRateMetric, LossMetric, MetricDefinition};
use burn_train::renderer::{
    CliMetricsRenderer, EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use burn_train::{
    InferenceStep, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};

use crate::learner::{Log, Norm, Sample, WIDTH, values};

pub type Training = SupervisedTraining<Net>;
pub type Trained = LearningResult<Net>;
pub type Loader = Arc<dyn DataLoader<Batch>>;

/// The ending of a checkpoint's files.
pub const MODEL_FILE: &str = "bpk";
/// Whether burn-train records the value of a metric for an epoch, after those of its batches.
pub const HAS_FINAL_VALUES: bool = true;

#[derive(Module, Debug)]
pub struct Net {
    hidden: Linear,
    head: Linear,
    norm: Option<BatchNorm>,
    synced: Option<SyncBatchNorm>,
    #[module(skip)]
    log: Log,
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
    fn new(seed: usize, log: &Log) -> Net {
        let device = Device::flex().autodiff();
        let width = if log.is_wide { 7 } else { 5 };
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        let net = Net {
            hidden: linear(WIDTH, width),
            head: linear(width, WIDTH),
            norm: None,
            synced: None,
            log: log.clone(),
        };
        let net = net.map(&mut Fill(seed));
        match &log.norm {
            Norm::None => net,
            Norm::Batch => Net { norm: Some(BatchNormConfig::new(WIDTH).init(&device)), ..net },
            Norm::Sync => Net { synced: Some(SyncBatchNormConfig::new(WIDTH).init(&device)), ..net },
        }
    }

    fn output(&self, batch: Batch) -> RegressionOutput {
        let inputs = self.norm.iter().fold(batch.inputs, |x, norm| norm.forward(x));
        let inputs = self.synced.iter().fold(inputs, |x, norm| norm.forward(x));
        let output = self.head.forward(self.hidden.forward(inputs).tanh());
        let loss = (output.clone() - batch.targets.clone()).powf_scalar(2.0).mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        self.log.begin_iteration();
        let output = self.output(batch);
        self.log.add_loss(output.loss.clone().into_scalar());
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, gradients: GradientsParams) -> Self {
        let net = optimizer.step(rate, self, gradients);
        net.log.add_step(all_values(&net));
        net
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        std::thread::sleep(self.log.validation);
        self.output(batch)
    }
}

fn all_values(net: &Net) -> Vec<f32> {
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

/// The inputs of a batch.
pub fn inputs(batch: &Batch) -> Vec<f32> {
    batch.inputs.to_data().iter().collect()
}

/// The values of a new model after forward passes in training.
pub fn values_after(log: &Log, batches: Vec<Vec<Sample>>) -> Vec<f32> {
    let net = Net::new(0, log);
    for batch in batches {
        net.output(Rows.batch(batch, &Device::flex().autodiff()));
    }
    all_values(&net.valid())
}

pub fn learner(seed: usize, log: &Log) -> Learner<Net> {
    // With momentum, and without a normalisation that would hide a wrong factor.
    let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.8))).init();
    Learner::new(Net::new(seed, log), optimizer, ExponentialLrSchedulerConfig::new(0.05, 0.9).init().unwrap())
}

pub fn training(folder: &Path, train: Loader, valid: Vec<Sample>, batch: usize) -> Training {
    SupervisedTraining::new(folder, train, loader(valid, batch))
        .renderer(Box::new(CliMetricsRenderer::new()))
        .with_application_logger(None)
}

pub fn checkpoints(training: Training) -> Training {
    training.with_default_checkpointers()
}

pub fn loss() -> LossMetric {
    LossMetric::new()
}

pub fn rate() -> LearningRateMetric {
    LearningRateMetric::new()
}

/// Returns all values of a model that was trained to the end.
pub fn check(trained: Trained) -> Vec<f32> {
    assert!(trained.error.is_none() && trained.interrupted.is_none());
    all_values(&trained.model)
}

/// Counts the values that are shown.
pub fn shown_by(training: Training, count: Arc<AtomicUsize>) -> Training {
    training.renderer(Box::new(Counting(count)))
}

struct Counting(Arc<AtomicUsize>);

impl Counting {
    fn add(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl MetricsRendererTraining for Counting {
    fn update_train(&mut self, _state: MetricState) {
        self.add();
    }

    fn update_valid(&mut self, _state: MetricState) {
        self.add();
    }
}

impl MetricsRendererEvaluation for Counting {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl TrainingProgressLogger for Counting {
    fn start(&mut self, _epochs: usize, _first: usize, _items: Option<usize>, _label: Option<&str>) {
        self.add();
    }

    fn update_epoch(&mut self, _epoch: usize) {
        self.add();
    }

    fn start_split(&mut self, _split: &str, _items: usize) {
        self.add();
    }

    fn update_split(&mut self, _items: usize) {
        self.add();
    }

    fn end_split(&mut self) {
        self.add();
    }

    fn end(&mut self) {
        self.add();
    }

    fn log_event_training(&mut self, _event: String) {
        self.add();
    }
}

impl EvaluationProgressLogger for Counting {
    fn start_global_progress(&mut self, _tests: usize) {}

    fn start_test(&mut self, _name: &str, _items: usize) {}

    fn update_test_progress(&mut self, _items: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRenderer for Counting {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _definition: MetricDefinition) {
        self.add();
    }
}

#[derive(Clone, Debug)]
pub struct Batch {
    inputs: Tensor<2>,
    targets: Tensor<2>,
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
pub fn loader(samples: Vec<Sample>, batch: usize) -> Loader {
    DataLoaderBuilder::new(Rows).batch_size(batch).build(InMemDataset::new(samples))
}

/// A loader of this rank's parts of the batches of all ranks, which differ between epochs.
pub fn sharded(group: &Group, samples: Vec<Sample>, batch: usize) -> Loader {
    let builder = ShardedDataLoaderBuilder::new(group, Rows).batch_size(batch).shuffle(4).num_workers(2);
    builder.build(InMemDataset::new(samples))
}

/// A loader of these batches, of any lengths. One without samples cannot be loaded. Every part of it has all batches.
pub fn batches(batches: Vec<Vec<Sample>>) -> Loader {
    Arc::new(BatchLoader { batches, device: Device::flex() })
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

    fn to_device(&self, device: &Device) -> Loader {
        Arc::new(BatchLoader { batches: self.batches.clone(), device: device.clone() })
    }

    fn slice(&self, _start: usize, _end: usize) -> Loader {
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
