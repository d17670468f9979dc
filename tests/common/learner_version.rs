//! What the shared tests of `DataParallelStrategy` need of burn 0.21. `burn-0.22/tests/common/learner_version.rs` has
//! the same names for burn 0.22.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bonfire::{Group, ShardedDataLoaderBuilder, SyncBatchNorm, SyncBatchNormConfig};
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, DataLoaderIterator, Progress};
use burn::data::dataset::{Dataset, InMemDataset};
use burn::lr_scheduler::exponential::{ExponentialLrScheduler, ExponentialLrSchedulerConfig};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, Optimizer, Sgd, SgdConfig};
use burn::record::DefaultRecorder;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Tensor, TensorData};
use burn_train::metric::{LearningRateMetric, LossMetric, MetricDefinition};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn_train::{
    InferenceStep, Learner, LearningComponentsMarker, LearningResult, RegressionOutput, SupervisedTraining,
    TrainOutput, TrainStep,
};

use crate::learner::{Log, Norm, Sample, WIDTH, values};

type B = Autodiff<Flex>;
type Components = LearningComponentsMarker<B, ExponentialLrScheduler, Net<B>, OptimizerAdaptor<Sgd<Flex>, Net<B>, B>>;

pub type Training = SupervisedTraining<Components>;
pub type Trained = LearningResult<Net<Flex>>;
pub type Loader = Arc<dyn DataLoader<B, Batch<B>>>;

/// The ending of a checkpoint's files.
pub const MODEL_FILE: &str = "mpk";
/// Whether burn-train records the value of a metric for an epoch, after those of its batches.
pub const HAS_FINAL_VALUES: bool = false;

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    hidden: Linear<B>,
    head: Linear<B>,
    norm: Option<BatchNorm<B>>,
    synced: Option<SyncBatchNorm<B>>,
    #[module(skip)]
    log: Log,
}

struct Fill(usize);

impl<B: Backend> ModuleMapper<B> for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(|old| {
            let data = TensorData::new(values(old.shape().num_elements(), seed), old.dims());
            Tensor::from_data(data, &old.device()).require_grad()
        })
    }
}

impl Net<B> {
    fn new(seed: usize, log: &Log) -> Self {
        let device = Default::default();
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
}

impl<B: Backend> Net<B> {
    fn output(&self, batch: Batch<B>) -> RegressionOutput<B> {
        let inputs = self.norm.iter().fold(batch.inputs, |x, norm| norm.forward(x));
        let inputs = self.synced.iter().fold(inputs, |x, norm| norm.forward(x));
        let output = self.head.forward(self.hidden.forward(inputs).tanh());
        let loss = (output.clone() - batch.targets.clone()).powf_scalar(2.0).mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Net<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<RegressionOutput<B>> {
        self.log.begin_iteration();
        let output = self.output(batch);
        self.log.add_loss(output.loss.clone().into_scalar().elem());
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize<AB, O>(self, optimizer: &mut O, rate: f64, gradients: GradientsParams) -> Self
    where
        AB: AutodiffBackend,
        O: Optimizer<Self, AB>,
        Self: AutodiffModule<AB>,
    {
        let net = optimizer.step(rate, self, gradients);
        net.log.add_step(all_values::<B>(&net));
        net
    }
}

impl InferenceStep for Net<Flex> {
    type Input = Batch<Flex>;
    type Output = RegressionOutput<Flex>;

    fn step(&self, batch: Batch<Flex>) -> RegressionOutput<Flex> {
        std::thread::sleep(self.log.validation);
        self.output(batch)
    }
}

fn all_values<B: Backend>(net: &Net<B>) -> Vec<f32> {
    struct Flatten(Vec<f32>);
    impl<B: Backend> ModuleVisitor<B> for Flatten {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut all = Flatten(Vec::new());
    net.visit(&mut all);
    all.0
}

/// The inputs of a batch.
pub fn inputs(batch: &Batch<B>) -> Vec<f32> {
    batch.inputs.to_data().iter().collect()
}

/// The values of a new model after forward passes in training.
pub fn values_after(log: &Log, batches: Vec<Vec<Sample>>) -> Vec<f32> {
    let net = Net::new(0, log);
    for batch in batches {
        net.output(Rows.batch(batch, &Default::default()));
    }
    all_values(&net.valid())
}

pub fn learner(seed: usize, log: &Log) -> Learner<Components> {
    // With momentum, and without a normalisation that would hide a wrong factor.
    let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.8))).init();
    Learner::new(Net::new(seed, log), optimizer, ExponentialLrSchedulerConfig::new(0.05, 0.9).init().unwrap())
}

pub fn training(folder: &Path, train: Loader, valid: Vec<Sample>, batch: usize) -> Training {
    let valid = DataLoaderBuilder::new(Rows).batch_size(batch).build(InMemDataset::new(valid));
    SupervisedTraining::new(folder, train, valid).renderer(Counting(Arc::default())).with_application_logger(None)
}

pub fn checkpoints(training: Training) -> Training {
    training.with_file_checkpointer(DefaultRecorder::new())
}

pub fn loss() -> LossMetric<Flex> {
    LossMetric::new()
}

pub fn rate() -> LearningRateMetric {
    LearningRateMetric::new()
}

/// Returns all values of a model that was trained to the end.
pub fn check(trained: Trained) -> Vec<f32> {
    all_values(&trained.model)
}

/// Counts the values that are shown.
pub fn shown_by(training: Training, count: Arc<AtomicUsize>) -> Training {
    training.renderer(Counting(count))
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

    fn render_train(&mut self, _item: TrainingProgress, _progress: Vec<ProgressType>) {
        self.add();
    }

    fn render_valid(&mut self, _item: TrainingProgress, _progress: Vec<ProgressType>) {
        self.add();
    }
}

impl MetricsRendererEvaluation for Counting {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn render_test(&mut self, _item: EvaluationProgress, _progress: Vec<ProgressType>) {}
}

impl MetricsRenderer for Counting {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _definition: MetricDefinition) {
        self.add();
    }
}

#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    inputs: Tensor<B, 2>,
    targets: Tensor<B, 2>,
}

#[derive(Clone)]
struct Rows;

impl<B: Backend> Batcher<B, Sample, Batch<B>> for Rows {
    fn batch(&self, samples: Vec<Sample>, device: &B::Device) -> Batch<B> {
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
    sharded_from(group, InMemDataset::new(samples), batch)
}

/// As [`sharded`], of any data set.
pub fn sharded_from(group: &Group, samples: impl Dataset<Sample> + 'static, batch: usize) -> Loader {
    let builder = ShardedDataLoaderBuilder::<B, Sample, Batch<B>>::new(group, Rows);
    builder.batch_size(batch).shuffle(4).num_workers(2).build(samples)
}

/// A loader of these batches, of any lengths. Every part of it has all batches.
pub fn batches(batches: Vec<Vec<Sample>>) -> Loader {
    Arc::new(BatchLoader(batches))
}

struct BatchLoader(Vec<Vec<Sample>>);

impl DataLoader<B, Batch<B>> for BatchLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch<B>> + 'a> {
        Box::new(BatchIterator { batches: &self.0, next: 0 })
    }

    fn num_items(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    fn to_device(&self, _device: &<B as burn::tensor::backend::BackendTypes>::Device) -> Loader {
        Arc::new(BatchLoader(self.0.clone()))
    }

    fn slice(&self, _start: usize, _end: usize) -> Loader {
        Arc::new(BatchLoader(self.0.clone()))
    }
}

struct BatchIterator<'a> {
    batches: &'a [Vec<Sample>],
    next: usize,
}

impl Iterator for BatchIterator<'_> {
    type Item = Batch<B>;

    fn next(&mut self) -> Option<Batch<B>> {
        let samples = self.batches.get(self.next)?.clone();
        self.next += 1;
        Some(Rows.batch(samples, &Default::default()))
    }
}

impl DataLoaderIterator<Batch<B>> for BatchIterator<'_> {
    fn progress(&self) -> Progress {
        let count = |batches: &[Vec<Sample>]| batches.iter().map(Vec::len).sum();
        Progress::new(count(&self.batches[..self.next]), count(self.batches))
    }
}
