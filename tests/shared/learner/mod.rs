//! `DataParallelStrategy` for burn-train's `Learner`, over the `learner_version` of each package: any number of ranks
//! trains as burn's strategy for one device does with the batches of all of them.

mod ends;
mod fit;
mod metrics;
mod samples;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bonfire::{DataParallelStrategy, Error, Group};
use tempfile::TempDir;

pub use self::samples::{Sample, WIDTH, part, samples, values};
use crate::learner_version::*;

pub const BATCH: usize = 2;
pub const EPOCHS: usize = 3;

type Before = Arc<dyn Fn(usize) + Send + Sync>;

/// The normalisation of a model's inputs.
#[derive(Clone, Default)]
pub enum Norm {
    #[default]
    None,
    /// burn's, over this rank's batch.
    Batch,
    /// Over the batches of all ranks.
    Sync,
}

/// What a rank's model is, and what it records.
#[derive(Clone, Default)]
pub struct Log {
    losses: Arc<Mutex<Vec<f32>>>,
    steps: Arc<Mutex<Vec<Vec<f32>>>>,
    before: Option<Before>,
    /// How long each batch of validation takes at least.
    pub validation: Duration,
    pub norm: Norm,
    /// Whether the model has another shape.
    pub is_wide: bool,
}

impl Log {
    pub fn of(norm: Norm) -> Log {
        Log { norm, ..Log::default() }
    }

    /// Calls `before` before each iteration with the number of steps so far.
    pub fn before(mut self, before: impl Fn(usize) + Send + Sync + 'static) -> Log {
        self.before = Some(Arc::new(before));
        self
    }

    pub fn begin_iteration(&self) {
        let steps = self.steps.lock().unwrap().len();
        self.before.iter().for_each(|before| before(steps));
    }

    pub fn add_loss(&self, loss: f32) {
        self.losses.lock().unwrap().push(loss);
    }

    pub fn add_step(&self, parameters: Vec<f32>) {
        self.steps.lock().unwrap().push(parameters);
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

/// A training on these samples.
#[derive(Clone)]
pub struct Case {
    pub samples: Vec<Sample>,
    pub accumulation: Option<usize>,
    pub epochs: usize,
}

impl Case {
    pub fn of(count: usize, accumulation: Option<usize>) -> Case {
        Case { samples: samples(count), accumulation, epochs: EPOCHS }
    }

    /// On these batches, or on a loader of the samples.
    pub fn training(&self, folder: &Path, train: Option<Loader>) -> Training {
        let train = train.unwrap_or_else(|| loader(self.samples.clone(), BATCH));
        let training = training(folder, train, samples(5), BATCH).num_epochs(self.epochs);
        self.accumulation.into_iter().fold(training, Training::grads_accumulation)
    }

    /// The samples of each rank's batches, in each iteration of an epoch.
    pub fn iterations(&self, ranks: usize) -> Vec<Vec<Vec<Sample>>> {
        let parts: Vec<_> = (0..ranks).map(|rank| part(&self.samples, rank, ranks)).collect();
        let longest = parts.iter().map(|part| part.len()).max().unwrap();
        let of_rank = |part: &&[Sample], at| part.iter().skip(at).take(BATCH).copied().collect();
        (0..longest).step_by(BATCH).map(|at| parts.iter().map(|part| of_rank(part, at)).collect()).collect()
    }

    /// burn's own strategy, on one device that gets the batches of all ranks at once.
    pub fn alone(&self, ranks: usize, log: Log) -> (Log, TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let whole = batches(self.iterations(ranks).iter().map(|batches| batches.concat()).collect());
        let training = self.training(folder.path(), Some(whole)).metrics((loss(),)).metric_train(rate());
        check(training.launch(learner(0, &log)));
        (log, folder)
    }

    /// Trains on this rank, whose model begins with other values than rank 0's.
    pub fn rank(
        &self,
        group: Group,
        folder: &Path,
        log: &Log,
        settings: impl FnOnce(Training) -> Training,
    ) -> Result<Trained, Error> {
        let learner = learner(10 * group.rank(), log);
        let training = self.training(folder, None).metrics((loss(),)).metric_train(rate());
        DataParallelStrategy::new(group).launch(settings(training), learner)
    }

    /// The losses of each rank's batches in each iteration, from the logs of the ranks. 0 where there is no batch.
    pub fn losses(&self, logs: &[Log]) -> Vec<Vec<f32>> {
        let mut own: Vec<_> = logs.iter().map(|log| log.losses().into_iter()).collect();
        let mut losses = Vec::new();
        for _ in 0..self.epochs {
            for batches in self.iterations(logs.len()) {
                let of_rank = |(own, batch): (&mut std::vec::IntoIter<f32>, &Vec<Sample>)| match batch.len() {
                    0 => 0.0,
                    _ => own.next().expect("a loss of each batch"),
                };
                losses.push(own.iter_mut().zip(&batches).map(of_rank).collect());
            }
        }
        assert!(own.iter().all(|losses| losses.len() == 0));
        losses
    }
}

pub fn assert_near(own: &[f32], expected: &[f32], what: &str) {
    assert_eq!(own.len(), expected.len(), "{what}");
    let worst = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5, "{what}: the greatest difference is {worst}");
}

/// What burn-train has recorded of a metric in an epoch: values, and what stands beside each.
pub fn recorded(folder: &Path, split: &str, epoch: usize, metric: &str) -> Vec<(f32, String)> {
    let file = folder.join(split).join(format!("epoch-{epoch}")).join(format!("{metric}.log"));
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let entry = |line: &str| {
        let (value, beside) = line.split_once(',').unwrap();
        (value.parse().unwrap(), beside.to_owned())
    };
    text.lines().map(entry).collect()
}

/// The values that burn-train has recorded of a metric in all epochs.
pub fn all_recorded(folder: &Path, split: &str, metric: &str) -> Vec<f32> {
    (1..=EPOCHS).flat_map(|epoch| recorded(folder, split, epoch, metric)).map(|(value, _)| value).collect()
}

pub fn is_empty(folder: &TempDir) -> bool {
    folder.path().read_dir().unwrap().next().is_none()
}
