//! Data-parallel training with burn-train's `Learner`.
//!
//! # Why a strategy of its own
//! burn's distributed training matches gradients by the order in which they arrive, and the compute server never learns
//! which parameter one belongs to. Between processes this is not enough, so this strategy uses
//! [`DataParallel`](super::DataParallel), which matches gradients by the parameters' places.
//!
//! # What burn's interface imposes
//! Only the public methods of a `Learner` can be used. So the ranks' learners are clones of one, and rank 0's
//! parameters are loaded as a record. Clones share burn's `RunningState`, and no record separates them.
//!
//! burn draws a parameter's initial values at its first use, and clones made before that each draw their own. With
//! burn's own strategy the devices therefore start from different models, unless the program used the weights before,
//! as `model.num_params()` does. This strategy draws once.

mod rank;
mod resume;

use std::panic::{Location, resume_unwind};
use std::sync::{Arc, Mutex};
use std::thread;

use burn::data::dataloader::DataLoader;
use burn::tensor::backend::{Backend, DeviceOps};
use burn_train::{
    Learner, LearningComponentsTypes, LearningResult, SupervisedLearningStrategy, SupervisedTrainingEventProcessor,
    TrainLoader, TrainingComponents, TrainingModel, ValidLoader,
};

use self::rank::{Leader, Rank, Settings};
use bonfire_core::internal::{AgreedOperations, CallSite, lock};
use bonfire_core::{Error, Group};
use bonfire_train::data::for_rank;

/// A strategy for burn-train's [`SupervisedTraining`](burn_train::SupervisedTraining): data-parallel training on the
/// devices of one or several processes.
///
/// Use it where the devices belong to several processes or hosts; in a loop of your own use
/// [`DataParallel`](super::DataParallel) itself. burn-train's own distributed strategy is limited to one process. This
/// one needs a group in which every device of every process is a rank. It trains as burn's strategy does and produces
/// bit-identical parameters on all ranks.
///
/// ```no_run
/// # use bonfire::{DataParallelStrategy, Error, Wgpu, WgpuDevice};
/// # use burn::backend::Autodiff;
/// # use burn_train::{Learner, LearningComponentsTypes, SupervisedTraining, TrainingStrategy};
/// # use std::sync::Arc;
/// # fn fit<LC>(training: SupervisedTraining<LC>, learner: Learner<LC>) -> Result<(), Error>
/// # where LC: LearningComponentsTypes<Backend = Autodiff<Wgpu>> + Send + 'static {
/// // Two devices in each process that `bonfire run` started.
/// let devices = (0..2).map(|replica| WgpuDevice::new(Default::default(), replica)).collect();
/// let strategy = Arc::new(DataParallelStrategy::from_env(devices)?);
/// let result = training.with_training_strategy(TrainingStrategy::Custom(strategy)).launch(learner);
/// # Ok(())
/// # }
/// ```
///
/// # What the ranks do
/// As in burn's strategy, the training samples are split into one part of equal length per rank (the last also gets the
/// remainder). In each iteration each rank trains with one batch, and an optimizer step uses the mean over the samples
/// of all these batches; with accumulation, the sum of these means. The gradients are exchanged during the backward
/// pass, as by [`DataParallel::last_pass`](super::DataParallel::last_pass). The learning rate schedule advances by one
/// for each batch. All ranks start with rank 0's parameters. A [`ShardedDataLoader`](crate::ShardedDataLoader) is not
/// split: each rank gets its part of each global batch, in the epoch that it trains. Build it with the group of any
/// rank of the process, and keep no handle of that.
///
/// Only rank 0 validates, saves checkpoints, computes metrics and renders; it decides on early stopping. Interrupting
/// any process stops all ranks at the same step, and so does its [stop signal](crate::Builder::stop_signal). burn saves
/// nothing then: the last checkpoint is that of the last epoch. Other processes do not use the metrics, renderer and
/// checkpointer of their training: give it a renderer without output, and another folder.
///
/// To resume, only rank 0's process loads a checkpoint: all others take over its epoch, model, optimizer and scheduler,
/// whatever their own `checkpoint` setting and folder say. All processes must have the same number of epochs and the
/// same gradient accumulation; otherwise the training fails before the first step.
///
/// While rank 0 validates, the others wait, for any time. But each validation batch, each checkpoint and each decision
/// on early stopping must end within the group's [deadline](Group::deadline).
///
/// # Ranks with fewer batches
/// A rank whose data ends earlier in an epoch, or that has none at all, takes part in the steps of the others until no
/// rank has a batch left: it receives their mean and stays equal to them. The result is that of one rank which gets the
/// batches of an iteration as one. The numbers of samples are those that the data loaders count in their progress; if
/// one does not count, all batches of an iteration have equal weights.
///
/// A model whose layers communicate, such as one with [`SyncBatchNorm`](crate::SyncBatchNorm), needs equally many
/// batches on all ranks: its layers wait for all ranks. Otherwise the training fails, with [`Error::Mismatch`] on all
/// ranks if the layers use the group of the strategy. Make the number of samples a multiple of the number of ranks.
///
/// # Failures
/// burn-train cannot return an error from a training, and a partly trained model must not pass for a trained one. So if
/// a rank fails, all threads of this process end, and `launch` panics with the text of the error, as with burn's own
/// strategy when a worker fails. The ranks of other processes fail too. [`failure`](Self::failure) returns the typed
/// error. A panic in the model's own code propagates unchanged. The strategy cannot train again after a failure: make a
/// new one.
///
/// # Limits
/// The devices of one process share burn's `RunningState`, in which `BatchNorm` keeps its statistics. Training such a
/// model is refused unless each process has one device. Each rank then has its own statistics.
pub struct DataParallelStrategy<B: Backend> {
    /// Empty during a training and after a failed one: the handles of the threads must be the last ones.
    ranks: Mutex<Vec<(B::Device, Group)>>,
    /// Where the program has made the strategy: burn calls it.
    at: CallSite,
    failure: Mutex<Option<Error>>,
}

impl<B: Backend> DataParallelStrategy<B> {
    /// Makes a strategy that trains on these devices, each as the rank of its group handle. Does not communicate. All
    /// handles belong to one group, which may have ranks in other processes. Get them from
    /// [`Builder::connect_ranks`](crate::Builder::connect_ranks), or, if this process has all devices, from
    /// [`Group::threads`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no device, a device or a rank occurs twice, or world sizes differ.
    #[track_caller]
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
        Ok(DataParallelStrategy { ranks: Mutex::new(ranks), at: Location::caller(), failure: Mutex::new(None) })
    }

    /// Makes a strategy for processes that `bonfire run` or a similar launcher started. Reads the environment as
    /// [`Group::from_env`] does and connects all devices of all processes; blocks until they are connected. All
    /// processes must pass the same number of devices.
    ///
    /// # Errors
    /// The errors of [`Builder::connect_ranks`](crate::Builder::connect_ranks) and [`new`](Self::new).
    #[cfg(unix)]
    #[track_caller]
    pub fn from_env(devices: Vec<B::Device>) -> Result<Self, Error> {
        let groups = crate::Builder::from_env()?.connect_ranks(devices.len())?;
        Self::new(devices.into_iter().zip(groups).collect())
    }

    /// Returns the error of the last training, if it failed. The error stays until the next training begins.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.failure).clone()
    }
}

impl<LC> SupervisedLearningStrategy<LC> for DataParallelStrategy<LC::Backend>
where
    LC: LearningComponentsTypes + Send + 'static,
{
    /// # Panics
    /// If a rank fails: see [failures](DataParallelStrategy#failures). On rank 0's process, if burn cannot load the
    /// checkpoint.
    fn train(
        &self,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        mut components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        // burn loads a checkpoint before `fit`, from the folder of this process.
        if !lock(&self.ranks).iter().any(|(_, group)| group.rank() == 0) {
            components.checkpoint = None;
        }
        Lockstep(self).train(learner, train, valid, components)
    }

    /// # Panics
    /// If a rank fails: see [failures](DataParallelStrategy#failures).
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        Lockstep(self).fit(components, learner, train, valid, starting_epoch)
    }
}

/// The strategy with burn's own `train`.
struct Lockstep<'a, B: Backend>(&'a DataParallelStrategy<B>);

impl<LC> SupervisedLearningStrategy<LC> for Lockstep<'_, LC::Backend>
where
    LC: LearningComponentsTypes + Send + 'static,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let strategy = self.0;
        let ranks = std::mem::take(&mut *lock(&strategy.ranks));
        *lock(&strategy.failure) = None;
        let Some((first, _)) = ranks.first() else {
            let reason =
                "its groups are gone with an earlier training, which failed or still runs; make a new strategy";
            strategy.fail(Error::argument("data parallel strategy", reason))
        };
        // burn initialises parameters at their first use. This does it once for all ranks, before any thread can.
        learner.fork(first);
        let parts = split(&train, &ranks);

        let settings = Settings {
            first_epoch: starting_epoch,
            last_epoch: components.num_epochs,
            accumulation: components.grad_accumulation,
            interrupter: components.interrupter,
        };
        let mut processor = Some(components.event_processor);
        let (mut checkpointer, mut early_stopping) = (components.checkpointer, components.early_stopping);
        let threads = ranks.into_iter().map(|(device, group)| {
            let leader = (group.rank() == 0).then(|| processor.take()).flatten().map(|processor| Leader {
                valid: valid.to_device(device.inner()),
                processor,
                checkpointer: checkpointer.take(),
                early_stopping: early_stopping.take(),
                store: components.event_store.clone(),
            });
            let train = parts[group.rank()].to_device(&device);
            let rank =
                Rank::<LC> { group: group.clone(), settings: &settings, learner: learner.clone(), train, leader };
            (device, group, rank)
        });
        let threads: Vec<_> = threads.collect();
        drop(learner);
        // Loaders may have handles of the groups.
        drop((train, parts));

        let outcomes: Vec<_> = thread::scope(|scope| {
            let threads = threads.into_iter().map(|(device, group, rank)| {
                scope.spawn(move || {
                    let _call = group.enter_at("DataParallelStrategy", strategy.at);
                    // `group` lives until the failure is recorded, so failures that follow from it are recorded later.
                    let trained = rank.run(&device);
                    if let Err(error) = &trained {
                        lock(&strategy.failure).get_or_insert_with(|| error.clone());
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
            strategy.fail(strategy.failure().unwrap_or(error));
        }
        let mut models = Vec::new();
        for (rank, (model, returned)) in trained {
            lock(&strategy.ranks).push(rank);
            models.push(model);
            processor = processor.or(returned);
        }
        match (models.into_iter().next(), processor) {
            (Some(model), Some(processor)) => (model, processor),
            _ => strategy.fail(Error::broken("data parallel strategy", "a rank ended without its model")),
        }
    }
}

impl<B: Backend> DataParallelStrategy<B> {
    fn fail(&self, error: Error) -> ! {
        *lock(&self.failure) = Some(error.clone());
        panic!("data-parallel training failed: {error}");
    }
}

/// Splits the samples into one part per rank of the group, as burn's strategy does. A shuffling loader draws a seed for
/// each part in turn, so every process must make all parts. A loader that is sharded already is not sliced.
fn split<B: Backend, O>(
    loader: &Arc<dyn DataLoader<B, O>>,
    own: &[(B::Device, Group)],
) -> Vec<Arc<dyn DataLoader<B, O>>> {
    let (samples, ranks) = (loader.num_items(), own[0].1.world_size());
    let start = |rank| if rank == ranks { samples } else { rank * (samples / ranks) };
    let slice = |rank| {
        // The parts of other processes' ranks are not used.
        let (_, group) = own.iter().find(|(_, group)| group.rank() == rank).unwrap_or(&own[0]);
        for_rank(group, || loader.slice(start(rank), start(rank + 1)))
    };
    (0..ranks).map(slice).collect()
}
