//! One rank of a training: burn-train's training loops, with all ranks in lockstep.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::AutodiffBackend;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingItem, TrainingModel, ValidLoader,
};

use super::resume;
use crate::train::DataParallel;
use crate::train::adapter::scaled;
use crate::train::record::recordable;
use crate::train::resume::share;
use bonfire_core::{Error, Group};
use bonfire_train::agree::{all_gather_values, all_or_none};
use bonfire_train::data::at_epoch;
use bonfire_train::step::iteration::{Iteration, Next, RankReport, Stop, agree};
use bonfire_train::step::layers::attempt;

type Inner<LC> = <<LC as LearningComponentsTypes>::Backend as AutodiffBackend>::InnerBackend;

type Device<LC> = burn::tensor::Device<<LC as LearningComponentsTypes>::Backend>;

/// Settings shared by all ranks of this process.
pub(super) struct Settings {
    /// The first epoch of this run. Rank 0's counts.
    pub first_epoch: usize,
    pub last_epoch: usize,
    pub accumulation: Option<usize>,
    pub interrupter: Interrupter,
}

/// What rank 0 needs for its tasks besides training: validation, metrics, checkpoints and early stopping.
pub(super) struct Leader<LC: LearningComponentsTypes> {
    pub valid: ValidLoader<LC>,
    pub processor: SupervisedTrainingEventProcessor<LC>,
    pub checkpointer: Option<LearningCheckpointer<LC>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub store: Arc<EventStoreClient>,
}

/// A rank and its share of the training data.
pub(super) struct Rank<'a, LC: LearningComponentsTypes> {
    pub group: Group,
    pub settings: &'a Settings,
    pub learner: Learner<LC>,
    pub train: TrainLoader<LC>,
    /// On rank 0 only.
    pub leader: Option<Leader<LC>>,
}

/// What rank 0 returns besides its model.
type Processor<LC> = Option<SupervisedTrainingEventProcessor<LC>>;

impl<LC: LearningComponentsTypes> Rank<'_, LC> {
    /// Trains on this device. All ranks must call it concurrently.
    pub fn run(mut self, device: &Device<LC>) -> Result<(TrainingModel<LC>, Processor<LC>), Error> {
        self.compare_settings()?;
        let (mut ddp, first_epoch) = self.prepare(device)?;
        for epoch in first_epoch..=self.settings.last_epoch {
            let progress = Progress::new(epoch, self.settings.last_epoch);
            if self.train_epoch(&mut ddp, &progress)? {
                break;
            }
            let stop = match &mut self.leader {
                Some(leader) => leader.end_epoch(&self.group, &self.learner, &progress, &self.settings.interrupter)?,
                None => wait_for_leader(&self.group)?,
            };
            if stop {
                break;
            }
        }
        Ok((self.learner.model(), self.leader.map(|leader| leader.processor)))
    }

    /// Fails on all ranks if their trainings would end at different steps.
    fn compare_settings(&self) -> Result<(), Error> {
        // An accumulation over one batch is none.
        let own = [self.settings.last_epoch as u64, self.settings.accumulation.map_or(1, |n| n.max(1)) as u64];
        let all = all_gather_values(&self.group, own)?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let text = |[epochs, accumulation]: [u64; 2]| format!("{epochs} epochs, accumulating {accumulation} batches");
        let (first, other) = (text(all[0]), text(all[rank]));
        let reason =
            format!("rank 0 trains for {first}, rank {rank} for {other}; give all processes the same settings");
        Err(Error::argument("data parallel strategy", reason))
    }

    /// Moves the model to the device and takes over rank 0's parameters, optimizer and scheduler. Returns rank 0's
    /// first epoch too.
    fn prepare(&mut self, device: &Device<LC>) -> Result<(DataParallel<LC::Backend>, usize), Error> {
        self.learner.fork(device);
        self.group.barrier()?;
        // A running state that clones share is on the device of the last fork.
        let misplaced = self.learner.model().devices().iter().any(|other| other != device);
        if let Some(rank) =
            all_gather_values(&self.group, [u8::from(misplaced)])?.iter().position(|misplaced| *misplaced == [1])
        {
            let reason = format!(
                "the model has states, such as batch norm's, that burn shares between the devices of a process, so \
                 rank {rank} does not have them on its device; give each device a process of its own"
            );
            return Err(Error::argument("data parallel strategy", reason));
        }
        let (model, mut ddp) = DataParallel::new(self.group.clone(), self.learner.model())?;
        let record = self.leader.as_ref().map_or(Ok(Vec::new()), |leader| {
            // A new optimizer has no state, so only a resumed one can be converted in a record.
            if self.settings.first_epoch > 1 {
                recordable(ddp.replicas.parameters.iter().filter(|parameter| parameter.trained))?;
            }
            resume::save(&self.learner, self.settings.first_epoch, &leader.store)
        });
        let (model, record) = share(&self.group, model, record, 0)?;
        ddp.describe(&model);
        // Loading runs the parameters' mappings. Without gradients, the learner's parameters are leaves afterwards.
        self.learner.load_model(model.no_grad().into_record());
        let first_epoch = resume::restore(&mut self.learner, record, device);
        Ok((ddp, all_or_none(&self.group, first_epoch)?))
    }

    /// Trains until no rank has a batch left. Returns whether a rank was interrupted before.
    fn train_epoch(&mut self, ddp: &mut DataParallel<LC::Backend>, epoch: &Progress) -> Result<bool, Error> {
        let train = self.train.clone();
        // burn counts epochs from 1.
        let mut batches = at_epoch(epoch.items_processed.saturating_sub(1), || train.iter());
        // As in burn, batches of the last epoch that no step has used count nothing.
        ddp.replicas.steps.forget_passes();
        // Iterations since the last step of the optimizer.
        let mut accumulated = 0;
        let (mut count, mut processed) = (0, 0);
        loop {
            let batch = attempt(|| batches.next())?;
            let progress = batches.progress();
            let samples = progress.items_processed.saturating_sub(processed) as u64;
            processed = progress.items_processed;
            let report = RankReport {
                batch: batch.is_some().then_some(samples),
                stop: self.settings.interrupter.should_stop().then_some(Stop::Interrupted),
                processed: processed as u64,
                total: progress.items_total as u64,
            };
            let iteration = match agree(&self.group, report, ddp.replicas.steps.count())? {
                Next::Iterate(iteration) => iteration,
                next => {
                    let interrupter = &self.settings.interrupter;
                    if let Next::Stop(rank, _) = next
                        && !interrupter.should_stop()
                    {
                        interrupter.stop(Some(&format!("rank {rank} was interrupted")));
                    }
                    if let Some(leader) = &mut self.leader {
                        leader.processor.process_train(LearnerEvent::EndEpoch(epoch.items_processed));
                    }
                    return Ok(next != Next::EndEpoch);
                }
            };
            count += iteration.batches();
            (0..iteration.batches()).for_each(|_| self.learner.lr_step());
            accumulated += 1;
            let ends_step = accumulated >= self.settings.accumulation.unwrap_or(1);
            let item = self.iterate(ddp, &iteration, batch, ends_step.then_some(accumulated))?;
            accumulated *= usize::from(!ends_step);
            if let (Some(leader), Some(item)) = (&mut self.leader, item) {
                let rate = Some(self.learner.lr_current());
                let progress = Progress::new(iteration.processed as usize, iteration.total as usize);
                let item = TrainingItem::new(item, progress, epoch.clone(), Some(count), rate);
                leader.processor.process_train(LearnerEvent::ProcessedItem(item));
            }
        }
    }

    /// Trains with this rank's batch. Without one it takes part in what the other ranks do. `step` is the number of
    /// iterations that a step of the optimizer uses, if this one ends them. Returns the model's output.
    ///
    /// burn adds up the gradients of the batches that it accumulates. Here each iteration contributes the mean over the
    /// samples of all ranks: the weight of a rank's pass is its share of them, so the mean over all passes is that sum
    /// divided by the number of iterations.
    fn iterate(
        &mut self,
        ddp: &DataParallel<LC::Backend>,
        iteration: &Iteration,
        batch: Option<<LC::TrainingModel as TrainStep>::Input>,
        step: Option<usize>,
    ) -> Result<Option<<LC::TrainingModel as TrainStep>::Output>, Error> {
        let (model, share) = (self.learner.model(), iteration.share(self.group.rank()));
        let Some(iterations) = step else {
            let Some(batch) = batch else { return Ok(None) };
            let pass = ddp.pass_of(&model, share)?;
            let output = attempt(|| pass.model().step(batch))?;
            pass.finish_trained(output.grads)?;
            return Ok(Some(output.item));
        };
        let (gradients, item) = match batch {
            Some(batch) => {
                let pass = ddp.last_pass_of(&model, share)?;
                // Its tensors share the parameters' memory, which the optimizer changes in place if it is the only
                // owner.
                drop(model);
                let output = attempt(|| pass.model().step(batch))?;
                (pass.finish_trained(output.grads)?, Some(output.item))
            }
            None => {
                let gradients = ddp.skip(&model)?;
                drop(model);
                (gradients, None)
            }
        };
        let gradients = match iterations {
            1 => gradients,
            _ => {
                let parameters = &ddp.replicas.parameters;
                let all = parameters.take(gradients).0.into_iter();
                parameters
                    .gradients(all.map(|(position, mean)| (position, scaled::<Inner<LC>>(mean, iterations as f64))))
            }
        };
        self.learner.optimizer_step(gradients);
        Ok(item)
    }
}

/// What rank 0 tells the other ranks at the end of an epoch: it is still validating or saving.
const WORKING: u8 = 0;
/// All ranks go on with the next epoch.
const GO_ON: u8 = 1;
/// All ranks stop early.
const STOP: u8 = 2;

impl<LC: LearningComponentsTypes> Leader<LC> {
    /// Validates and saves a checkpoint. Returns whether the training should stop early.
    ///
    /// The other ranks wait meanwhile, and validation may take any time. So they hear from this rank after each batch:
    /// only one that takes longer than the deadline, and not all of them together, is a hang.
    fn end_epoch(
        &mut self,
        group: &Group,
        learner: &Learner<LC>,
        progress: &Progress,
        interrupter: &Interrupter,
    ) -> Result<bool, Error> {
        let tell = |word: u8| group.broadcast(&mut [word], 0);
        let epoch = progress.items_processed;
        let model = learner.model().valid();
        let mut batches = self.valid.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            iteration += 1;
            let output = model.step(batch);
            let item = TrainingItem::new(output, batches.progress(), progress.clone(), Some(iteration), None);
            self.processor.process_valid(LearnerEvent::ProcessedItem(item));
            tell(WORKING)?;
            if interrupter.should_stop() {
                break;
            }
        }
        self.processor.process_valid(LearnerEvent::EndEpoch(epoch));
        if let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.checkpoint(learner, epoch, &self.store);
            tell(WORKING)?;
        }
        let stop = self.early_stopping.as_mut().is_some_and(|strategy| strategy.should_stop(epoch, &self.store));
        tell(if stop { STOP } else { GO_ON })?;
        Ok(stop)
    }
}

/// Waits until rank 0 has ended an epoch. Returns whether the training should stop early.
fn wait_for_leader(group: &Group) -> Result<bool, Error> {
    let mut word = [WORKING];
    while word == [WORKING] {
        group.broadcast(&mut word, 0)?;
    }
    Ok(word == [STOP])
}
