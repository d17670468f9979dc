//! Data-parallel training with burn-train's `Learner`.
//!
//! burn-train's own distributed strategy trains on devices of one process whose backend has collectives. This one
//! trains on the ranks of a group, each of which launches a training of its own.

mod averaged;
mod rank;
mod records;

use std::panic::Location;
use std::sync::{Arc, Mutex};

use burn_train::metric::{Metric, Numeric};
use burn_train::renderer::CliMetricsRenderer;
use burn_train::train::WorkerFailure;
use burn_train::{
    Interrupter, Learner, LearnerModel, LearningResult, SupervisedLearningStrategy, SupervisedTraining,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingError, TrainingStrategy,
    ValidLoader,
};

pub use self::averaged::Averaged;
use self::averaged::Registered;
use self::rank::{Leader, Rank};
use bonfire_core::internal::{AgreedOperations, CallSite, lock};
use bonfire_core::{Error, Group};

const OPERATION: &str = "data parallel strategy";

/// A strategy for burn-train's [`SupervisedTraining`]: data-parallel training on the ranks of a group, on any backend.
///
/// Every rank makes a model, a learner and a training, as for one device, and launches it with the strategy:
///
/// ```no_run
/// # use std::sync::Arc;
/// # use bonfire::{DataParallelStrategy, Group};
/// # use burn::data::dataloader::DataLoader;
/// # use burn::optim::AdamConfig;
/// # use burn_train::metric::{Adaptor, LossInput, LossMetric};
/// # use burn_train::{InferenceStep, Learner, LearnerModel, SupervisedTraining, TrainStep};
/// # fn fit<M: LearnerModel>(
/// #     group: Group,
/// #     model: M,
/// #     train: Arc<dyn DataLoader<<M as TrainStep>::Input>>,
/// #     valid: Arc<dyn DataLoader<<M as InferenceStep>::Input>>,
/// # ) -> Result<M, bonfire::Error>
/// # where
/// #     <M as TrainStep>::Output: Adaptor<LossInput>,
/// #     <M as InferenceStep>::Output: Adaptor<LossInput>,
/// # {
/// let strategy = DataParallelStrategy::new(group);
/// let training = SupervisedTraining::new("folder", train, valid)
///     .metrics(strategy.averaged(LossMetric::new()))
///     .with_default_checkpointers()
///     .num_epochs(10);
/// let learner = Learner::new(model, AdamConfig::new().init(), 1e-3);
/// let result = strategy.launch(training, learner)?;
/// # Ok(result.model)
/// # }
/// ```
///
/// A program calls such a function in the closure of [`launch`](crate::launch()), so its ranks are threads or
/// processes.
///
/// # What the ranks do
/// All ranks have loaders of the same data. As in burn's distributed strategy, each trains on a part of equal length,
/// and the last one also gets the remainder. In an iteration each rank trains with one batch, so batches of `b` samples
/// on `n` ranks are those of `n * b` samples on one device. A [`ShardedDataLoader`](crate::ShardedDataLoader) is not
/// split: each rank gets its part of each global batch, in the epoch that it trains. All else is as on one device: an
/// iteration uses the mean over the samples of all its batches, or over what the program
/// [counts](Self::launch_weighted), gradients of accumulated iterations are added, and the learning rate schedule
/// advances with each step of the optimizer. Gradients are exchanged during the backward pass, as by
/// [`DataParallel::last_pass`](crate::DataParallel::last_pass). All ranks train on the device of their model, start
/// with rank 0's parameters, and end with the same.
///
/// Rank 0 validates, on all of the data, computes metrics, saves checkpoints and decides on early stopping. Its folder
/// is the only one that is written to; the others may have the same, and its renderer the only one that shows anything.
/// Interrupting any rank stops all after the same iteration, and so does its [stop
/// signal](crate::Builder::stop_signal). burn saves nothing then: the last checkpoint is that of the last epoch. While
/// rank 0 validates, the others wait, for any time. But each validation batch, each checkpoint and each decision on
/// early stopping must end within the group's [deadline](Group::deadline).
///
/// To resume, rank 0 loads a checkpoint by [`SupervisedTraining::checkpoint`]. The others take over its epoch, model,
/// optimizer and schedule. They need no checkpoint: leave the setting out where its files are not, or burn panics. All
/// must have the same number of epochs and the same gradient accumulation.
///
/// # Ranks with fewer batches
/// A rank whose data ends earlier in an epoch, or that has none at all, takes part in the steps of the others until no
/// rank has a batch left. The numbers of samples are those that the data loaders count in their progress; if one does
/// not count, all batches of an iteration have equal weights. A model whose layers communicate, such as one with
/// [`SyncBatchNorm`](crate::SyncBatchNorm), needs equally many batches on all ranks. Otherwise the training fails, with
/// [`Error::Mismatch`]: make the number of samples a multiple of the number of ranks.
///
/// # Metrics
/// Metrics of training are over rank 0's own batches, unless they are [`averaged`](Self::averaged) over all ranks.
/// Those of validation are over all of the data.
///
/// # Failures
/// If a rank fails, the training ends on all of them, and each gets an error: from [`launch`](Self::launch), or, for
/// what fails in burn's own code, in burn's `LearningResult::error`. A panic in the model's own code propagates, and
/// the other ranks get [`Error::PeerLost`] once its group is dropped.
///
/// # Limits
/// Make the model on each rank, not as a clone of one: clones share the statistics of burn's `BatchNorm`. Each rank has
/// its own during an epoch. At its end they are averaged, so that rank 0 validates and saves with those of all ranks.
/// For gradient checkpointing make the model on `device.gradient_checkpointing()`: burn does not tell strategies its
/// setting.
pub struct DataParallelStrategy {
    group: Group,
    /// Where the program has made the strategy: burn calls it.
    at: CallSite,
    registered: Registered,
}

impl DataParallelStrategy {
    /// Makes the strategy of this rank. It does not communicate.
    #[track_caller]
    pub fn new(group: Group) -> Self {
        DataParallelStrategy { group, at: Location::caller(), registered: Registered::default() }
    }

    /// Has a metric of training averaged over the ranks, for [`SupervisedTraining::metrics`]: rank 0's display, its log
    /// files, and its decisions on early stopping and checkpoints get the mean, under the metric's name. Average the
    /// same metrics on all ranks.
    ///
    /// The value of an iteration is the mean of the ranks' values of their batches, weighted as the batches are, and
    /// that of an epoch the mean of the ranks' values of the epoch. That is the value over all samples where the metric
    /// is a mean over samples, such as a loss or an accuracy, and not where it is none, such as a perplexity. Rank 0's
    /// last output of an epoch also gets the values of iterations in which it has no batch.
    ///
    /// The other ranks compute the metric on the thread that trains, which waits for the model's output, and each
    /// iteration ends with a further message of 16 bytes for each such metric.
    pub fn averaged<Me: Metric + Numeric>(&self, metric: Me) -> Averaged<Me> {
        Averaged { metric, registered: self.registered.clone() }
    }

    /// Launches a training with this strategy. Ranks other than 0 get a renderer that shows nothing, and no log file,
    /// whatever the training has.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if their models, settings or averaged metrics differ, or if a model is
    /// on several devices; the group remains usable. Otherwise the errors of [`DataParallel`](crate::DataParallel)'s
    /// steps.
    ///
    /// What fails in burn's own code is in the result, on the rank that failed and on the others:
    /// [`LearningResult::error`].
    ///
    /// # Panics
    /// As burn's: on rank 0 if burn cannot load the checkpoint.
    pub fn launch<M: LearnerModel>(
        self,
        training: SupervisedTraining<M>,
        learner: Learner<M>,
    ) -> Result<LearningResult<M>, Error> {
        self.launch_with(training, learner, None)
    }

    /// As [`launch`](Self::launch), where a batch weighs what `weight` says, and not its samples: what the loss of the
    /// batch is a mean over, such as the number of its tokens. Averaged metrics have the same weights. All ranks launch
    /// so, or none. `weight` is called on the thread that trains, and must not wait for the device: have the batcher
    /// count. A batch of weight 0 counts nothing.
    ///
    /// # Errors
    /// Those of [`launch`](Self::launch). [`Error::InvalidArgument`] on all ranks also if no rank's batch counts in a
    /// step.
    ///
    /// # Panics
    /// As [`launch`](Self::launch).
    pub fn launch_weighted<M: LearnerModel>(
        self,
        training: SupervisedTraining<M>,
        learner: Learner<M>,
        weight: impl Fn(&InputOf<M>) -> usize + Send + Sync + 'static,
    ) -> Result<LearningResult<M>, Error> {
        self.launch_with(training, learner, Some(Box::new(weight)))
    }

    fn launch_with<M: LearnerModel>(
        self,
        training: SupervisedTraining<M>,
        learner: Learner<M>,
        weight: Option<WeightFn<InputOf<M>>>,
    ) -> Result<LearningResult<M>, Error> {
        let training = match self.group.rank() {
            0 => training,
            // It shows only what happens, and nothing does: burn's other one takes the terminal at once.
            _ => training.renderer(Box::new(CliMetricsRenderer::new())).with_application_logger(None),
        };
        let strategy = Arc::new(Strategy { of: self, weight, failure: Mutex::default() });
        let custom = TrainingStrategy::Custom(strategy.clone());
        let result = training.with_training_strategy(custom).launch(learner);
        lock(&strategy.failure).take().map_or(Ok(result), Err)
    }
}

/// What the model trains on.
type InputOf<M> = <M as TrainStep>::Input;

/// What a batch weighs.
type WeightFn<I> = Box<dyn Fn(&I) -> usize + Send + Sync>;

/// What burn calls in one training.
struct Strategy<I> {
    of: DataParallelStrategy,
    weight: Option<WeightFn<I>>,
    failure: Mutex<Option<Error>>,
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Strategy<InputOf<M>> {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.of.group.rank() == 0 {
            return WithEvents(self).train(learner, train, valid, components);
        }
        let interrupter = components.interrupter.clone();
        let first_epoch = components.checkpoint.unwrap_or(0) + 1;
        let (model, processor) = self.fit(components, learner, train, valid, first_epoch);
        LearningResult {
            model: model.valid(),
            renderer: burn_train::EventProcessorTraining::renderer(processor),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let DataParallelStrategy { group, at, registered } = &self.of;
        let _call = group.enter_at("DataParallelStrategy", at);
        let interrupter = components.interrupter;
        let mut leader = Leader {
            valid,
            processor: components.event_processor,
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
            store: components.event_store,
        };
        let mut rank = Rank {
            group,
            learner,
            epochs: [first_epoch, components.num_epochs],
            accumulation: components.grad_accumulation,
            weight: self.weight.as_ref(),
            interrupter: &interrupter,
        };
        if let Err(error) = rank.run(train, &mut leader, registered) {
            // burn, too, must take the training for one that has failed.
            fail(&interrupter, group.rank(), error.to_string());
            *lock(&self.failure) = Some(error);
        }
        (rank.learner.model(), leader.processor)
    }
}

/// Stops a training with the error of a rank.
fn fail(interrupter: &Interrupter, rank: usize, message: String) {
    interrupter.fail(TrainingError::Workers(vec![WorkerFailure { device_id: rank, message }]));
}

/// The strategy with burn's own `train`, which sends events for the start and the end.
struct WithEvents<'a, I>(&'a Strategy<I>);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for WithEvents<'_, InputOf<M>> {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        self.0.fit(components, learner, train, valid, first_epoch)
    }
}
