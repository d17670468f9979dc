//! burn-train's `Learner` on many ranks.

mod rank;

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;

use burn::data::dataloader::DataLoader;
use burn::tensor::backend::{Backend, DeviceOps};
use burn_train::{
    Learner, LearningComponentsTypes, SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader,
    TrainingComponents, TrainingModel, ValidLoader,
};

use self::rank::{Main, Rank, Settings};
use bonfire_core::internal::lock;
use bonfire_core::{Error, Group};

/// A strategy for burn-train's [`SupervisedTraining`](burn_train::SupervisedTraining): data-parallel training on the
/// devices of one process or of several.
///
/// burn-train's own distributed strategy stays within a process. This one needs a group in which every device of every
/// process is a rank; it then trains as burn's does, and gives the same parameters, bit for bit, on all ranks.
///
/// ```no_run
/// # use bonfire::{DataParallelStrategy, Error, Wgpu, WgpuDevice};
/// # use burn::backend::Autodiff;
/// # use burn_train::{Learner, LearningComponentsTypes, SupervisedTraining, TrainingStrategy};
/// # use std::sync::Arc;
/// # fn fit<LC>(training: SupervisedTraining<LC>, learner: Learner<LC>) -> Result<(), Error>
/// # where LC: LearningComponentsTypes<Backend = Autodiff<Wgpu>> + Send + 'static {
/// // Two devices in each of the processes that `bonfire run` started.
/// let devices = (0..2).map(|replica| WgpuDevice::new(Default::default(), replica)).collect();
/// let strategy = Arc::new(DataParallelStrategy::from_env(devices)?);
/// let result = training.with_training_strategy(TrainingStrategy::Custom(strategy)).launch(learner);
/// # Ok(())
/// # }
/// ```
///
/// # What the ranks do
/// As in burn's strategy, the training samples are cut into one part of equal length for each rank (the last gets what
/// remains), an optimizer step uses the mean of the ranks' gradients, accumulated ones included, and the learning rate's
/// schedule takes as many steps in an iteration as there are ranks. All ranks start with rank 0's parameters.
///
/// Rank 0 alone validates, saves checkpoints, counts metrics and renders; it decides on early stopping. An interruption
/// of any process stops all ranks at the same step. In the other processes metrics, renderer and checkpointer of the
/// training are left alone: give it a renderer that shows nothing and another folder. To resume from a checkpoint, all
/// processes must find rank 0's files.
///
/// The ranks must have equally many batches. They compare what can be known of that before the first step, and whether
/// all have a batch before each: where it differs, the training fails.
///
/// # Failures
/// burn-train has no way to return an error from a training, and a model that was trained halfway must not pass for a
/// trained one. So where a rank fails, all threads of this process end, and `launch` panics with the error's words, as it
/// does in burn's own strategy when a worker fails. The ranks of other processes fail too. [`failure`](Self::failure) has
/// the typed error. A panic in the model's own code goes on as it is.
///
/// # Limits
/// The devices of one process share burn's `RunningState`, in which `BatchNorm` keeps its statistics; the training of such
/// a model is refused unless each process has one device. Those statistics are then each rank's own.
pub struct DataParallelStrategy<B: Backend> {
    /// Empty while a training runs and after one that failed: the threads' handles must be the last ones.
    ranks: Mutex<Vec<(B::Device, Group)>>,
    failure: Mutex<Option<Error>>,
}

impl<B: Backend> DataParallelStrategy<B> {
    /// Trains on these devices, each as the rank that its group handle says. The handles are those of one group, of which
    /// other processes may hold others: [`Builder::connect_ranks`](crate::Builder::connect_ranks) makes them, or, where
    /// this process has all devices, [`Group::threads`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where there is no device, one is there twice, or the groups do not belong together.
    pub fn new(ranks: Vec<(B::Device, Group)>) -> Result<Self, Error> {
        let wrong = |reason: String| Err(Error::argument("data parallel strategy", reason));
        let Some((_, first)) = ranks.first() else { return wrong("give at least one device".into()) };
        for (position, (device, group)) in ranks.iter().enumerate() {
            let before = &ranks[..position];
            if before.iter().any(|(other, _)| other == device) {
                return wrong(format!("{device:?} is there twice; each rank needs a device of its own"));
            }
            if group.world_size() != first.world_size() {
                let (one, other) = (first.world_size(), group.world_size());
                return wrong(format!("groups of {one} and of {other} ranks; give handles of one group"));
            }
            if before.iter().any(|(_, other)| other.rank() == group.rank()) {
                return wrong(format!("rank {} is there twice; give each device a rank of its own", group.rank()));
            }
        }
        Ok(DataParallelStrategy { ranks: Mutex::new(ranks), failure: Mutex::new(None) })
    }

    /// Trains on these devices in every process that `bonfire run` or a similar launcher started: reads the environment
    /// as [`Group::from_env`] does, and connects all devices of all processes. All processes give equally many devices.
    ///
    /// # Errors
    /// Those of [`Builder::connect_ranks`](crate::Builder::connect_ranks) and [`new`](Self::new).
    #[cfg(unix)]
    pub fn from_env(devices: Vec<B::Device>) -> Result<Self, Error> {
        let groups = crate::Builder::from_env()?.connect_ranks(devices.len())?;
        Self::new(devices.into_iter().zip(groups).collect())
    }

    /// Why the last training failed, if it did.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.failure).clone()
    }
}

impl<LC> SupervisedLearningStrategy<LC> for DataParallelStrategy<LC::Backend>
where
    LC: LearningComponentsTypes + Send + 'static,
{
    /// # Panics
    /// Where a rank fails: see [the type's page](DataParallelStrategy#failures).
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let ranks = std::mem::take(&mut *lock(&self.ranks));
        *lock(&self.failure) = None;
        let Some((first, group)) = ranks.first() else {
            let reason =
                "its groups are gone with an earlier training, which failed or still runs; make a new strategy";
            self.fail(Error::argument("data parallel strategy", reason))
        };
        // Parameters are drawn when they are first used: here once, for all ranks and before any thread could.
        learner.fork(first);
        let parts = split(&train, group.world_size());

        let settings = Settings {
            epochs: starting_epoch..=components.num_epochs,
            accumulation: components.grad_accumulation,
            interrupter: components.interrupter,
        };
        let mut processor = Some(components.event_processor);
        let (mut checkpointer, mut early_stopping) = (components.checkpointer, components.early_stopping);
        let threads = ranks.into_iter().map(|(device, group)| {
            let main = (group.rank() == 0).then(|| processor.take()).flatten().map(|processor| Main {
                valid: valid.to_device(device.inner()),
                processor,
                checkpointer: checkpointer.take(),
                early_stopping: early_stopping.take(),
                store: components.event_store.clone(),
            });
            let train = parts[group.rank()].to_device(&device);
            let rank = Rank::<LC> { group: group.clone(), settings: &settings, learner: learner.clone(), train, main };
            (device, group, rank)
        });
        let threads: Vec<_> = threads.collect();
        drop(learner);

        let outcomes: Vec<_> = thread::scope(|scope| {
            let threads = threads.into_iter().map(|(device, group, rank)| {
                scope.spawn(move || {
                    // This handle lives until the failure is noted, so failures that follow from it come later.
                    let trained = rank.run(&device);
                    if let Err(error) = &trained {
                        lock(&self.failure).get_or_insert_with(|| error.clone());
                    }
                    trained.map(|trained| ((device, group), trained))
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });

        let mut trained = Vec::new();
        let mut failed = None;
        for outcome in outcomes {
            match outcome {
                Ok(Ok(rank)) => trained.push(rank),
                Ok(Err(error)) => failed = Some(error),
                Err(panic) => resume_unwind(panic),
            }
        }
        if let Some(error) = failed {
            self.fail(self.failure().unwrap_or(error));
        }
        let mut models = Vec::new();
        for (rank, (model, main)) in trained {
            lock(&self.ranks).push(rank);
            models.push(model);
            processor = processor.or(main);
        }
        match (models.into_iter().next(), processor) {
            (Some(model), Some(processor)) => (model, processor),
            _ => self.fail(Error::broken("data parallel strategy", "a rank ended without its model")),
        }
    }
}

impl<B: Backend> DataParallelStrategy<B> {
    fn fail(&self, error: Error) -> ! {
        *lock(&self.failure) = Some(error.clone());
        panic!("data-parallel training failed: {error}");
    }
}

/// One part of the samples for each rank, as burn's strategy cuts them. A loader that shuffles draws a seed for each part
/// in turn, so every process cuts all of them.
fn split<B: Backend, O>(loader: &Arc<dyn DataLoader<B, O>>, ranks: usize) -> Vec<Arc<dyn DataLoader<B, O>>> {
    let samples = loader.num_items();
    let start = |rank| if rank == ranks { samples } else { rank * (samples / ranks) };
    (0..ranks).map(|rank| loader.slice(start(rank), start(rank + 1))).collect()
}
