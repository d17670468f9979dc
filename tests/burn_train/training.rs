//! Trainings through burn-train, and the reference loop that they must match.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bonfire::{DataParallelStrategy, Error, Group, WgpuDevice};
use burn::backend::Flex;
use burn::data::dataloader::batcher::Batcher;
use burn::lr_scheduler::exponential::{ExponentialLrScheduler, ExponentialLrSchedulerConfig};
use burn::module::Module;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn_train::metric::{LossMetric, MetricDefinition};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn_train::{Learner, LearningComponentsMarker, SupervisedTraining, TrainingStrategy};

use crate::model::{B, Net, Rows, Sample, Steps, loader, samples, values};

pub type Sgd = burn::optim::adaptor::OptimizerAdaptor<burn::optim::Sgd<bonfire::Wgpu>, Net<B>, B>;
pub type Components = LearningComponentsMarker<B, ExponentialLrScheduler, Net<B>, Sgd>;

const RATE: f64 = 0.05;

/// With momentum, and without a normalisation that would hide a wrong factor.
fn optimizer() -> Sgd {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.8))).init()
}

/// Lets one test run at a time: burn has one server for gradients in a process, and all tests train on the same
/// devices, because each new one compiles every kernel.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A training over `samples`, which the strategy distributes over its devices in batches of `batch`.
#[derive(Clone)]
pub struct Training {
    pub samples: Vec<Sample>,
    pub batch: usize,
    pub epochs: usize,
    /// What the learning rate is multiplied by in each step of its schedule.
    pub decay: f64,
    /// Batches whose gradients are accumulated for a step of the optimizer.
    pub accumulation: usize,
}

impl Training {
    /// A training of `steps` steps of the optimizer on each of `ranks` devices.
    pub fn of_steps(steps: usize, ranks: usize) -> Training {
        let (batch, epochs) = (2, if steps.is_multiple_of(5) { steps / 5 } else { 1 });
        let samples = samples(ranks * batch * steps / epochs);
        Training { samples, batch, epochs, decay: 1.0, accumulation: 1 }
    }

    /// Trains with a strategy of burn's, and returns the parameters of the trained model.
    pub fn run(&self, model: Net<B>, strategy: TrainingStrategy<Components>) -> Vec<f32> {
        let folder = tempfile::tempdir().unwrap();
        let training = self.training(folder.path()).metrics((LossMetric::<Flex>::new(),));
        values(&training.with_training_strategy(strategy).launch(self.learner(model)).model).1
    }

    /// Trains on this rank with Bonfire's strategy, and returns the parameters of the trained model.
    pub fn run_rank(&self, group: Group, model: Net<B>) -> Result<Vec<f32>, Error> {
        let folder = tempfile::tempdir().unwrap();
        let strategy = DataParallelStrategy::new(group);
        let training = self.training(folder.path()).metrics(strategy.averaged(LossMetric::<Flex>::new()));
        Ok(values(&strategy.launch(training, self.learner(model))?.model).1)
    }

    fn training(&self, folder: &Path) -> SupervisedTraining<Components> {
        let train = loader(self.samples.clone(), self.batch, &Default::default());
        let valid = loader(samples(1), 1, &Default::default());
        let training = SupervisedTraining::new(folder, train, valid)
            .num_epochs(self.epochs)
            .renderer(Silent)
            .with_application_logger(None);
        if self.accumulation > 1 { training.grads_accumulation(self.accumulation) } else { training }
    }

    fn learner(&self, model: Net<B>) -> Learner<Components> {
        Learner::new(model, optimizer(), ExponentialLrSchedulerConfig::new(RATE, self.decay).init().unwrap())
    }

    /// The parameters after every step of a plain loop on one device that gets the batches of all `ranks` at once.
    pub fn reference(&self, model: Net<B>, ranks: usize) -> Vec<Vec<f32>> {
        // The last rank also gets the remainder.
        let start = |rank| if rank == ranks { self.samples.len() } else { rank * (self.samples.len() / ranks) };
        let parts: Vec<_> = (0..ranks).map(|rank| &self.samples[start(rank)..start(rank + 1)]).collect();
        let device = WgpuDevice::default();
        let (mut model, mut optimizer) = (model.fork(&device), optimizer());
        let (mut steps, mut iterations) = (Vec::new(), 0);
        let longest = parts.iter().map(|part| part.len()).max().unwrap();
        for _ in 0..self.epochs {
            let mut sum = GradientsAccumulator::new();
            for (batches, start) in (1..).zip((0..longest).step_by(self.batch)) {
                let of_rank = |part: &&[Sample]| part.iter().skip(start).take(self.batch).copied().collect::<Vec<_>>();
                let of_ranks: Vec<_> = parts.iter().flat_map(of_rank).collect();
                let loss = model.output(Rows.batch(of_ranks, &device)).loss;
                sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
                if batches % self.accumulation == 0 {
                    model = optimizer.step(RATE * self.decay.powi(iterations), model, sum.grads());
                    steps.push(values(&model).1);
                }
                iterations += 1;
            }
        }
        steps
    }
}

/// The greatest difference between any two values.
fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len(), "the numbers of steps differ");
    let pairs = a.iter().zip(b).flat_map(|(a, b)| {
        assert_eq!(a.len(), b.len(), "the numbers of parameters differ");
        a.iter().zip(b)
    });
    pairs.map(|(a, b)| if a.is_nan() || b.is_nan() { f32::INFINITY } else { (a - b).abs() }).fold(0.0, f32::max)
}

/// Checks that all devices have taken the same steps, and that these match the expected ones.
pub fn check(steps: &Steps, replicas: &[u8], expected: &[Vec<f32>]) {
    let replicas_seen: Vec<_> = steps.keys().copied().collect();
    assert_eq!(replicas_seen, replicas);
    let first = &steps[&replicas[0]];
    let difference = difference(first, expected);
    println!("{} devices: at most {difference:e} from one device in {} steps", replicas.len(), expected.len());
    assert!(difference < 1e-4, "the devices differ from one device by {difference:e}");
    for (replica, own) in steps {
        assert!(own == first, "device {replica} has other parameters than device {}", replicas[0]);
    }
}

/// A renderer that shows nothing.
struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _state: MetricState) {}
    fn update_valid(&mut self, _state: MetricState) {}
    fn render_train(&mut self, _item: TrainingProgress, _progress: Vec<ProgressType>) {}
    fn render_valid(&mut self, _item: TrainingProgress, _progress: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
    fn render_test(&mut self, _item: EvaluationProgress, _progress: Vec<ProgressType>) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _definition: MetricDefinition) {}
}
