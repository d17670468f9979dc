//! One rank of a training: burn-train's training loops, with all ranks in lockstep.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::{AutodiffModule, Module};
use burn::tensor::backend::{AutodiffBackend, DeviceOps};
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingItem, ValidLoader,
};

use super::averaged::{Outputs, Registered};
use super::{InputOf, OPERATION, WeightFn, resume};
use crate::train::DataParallel;
use crate::train::adapter::scaled;
use crate::train::record::recordable;
use crate::train::resume::share;
use bonfire_core::{Error, Group};
use bonfire_train::agree::all_or_none;
use bonfire_train::data::{at_epoch, for_rank};
use bonfire_train::step::iteration::{BatchWeight, Iteration, Next, RankReport, Settings, Stop, agree};
use bonfire_train::step::layers::attempt;

type Inner<LC> = <<LC as LearningComponentsTypes>::Backend as AutodiffBackend>::InnerBackend;

type Output<LC> = <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Output;

/// What rank 0 needs for its tasks besides training: validation, metrics, checkpoints and early stopping. The other
/// ranks have it too, and do not use it.
pub(super) struct Leader<LC: LearningComponentsTypes> {
    pub valid: ValidLoader<LC>,
    pub processor: SupervisedTrainingEventProcessor<LC>,
    pub checkpointer: Option<LearningCheckpointer<LC>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub store: Arc<EventStoreClient>,
}

/// A rank of a training.
pub(super) struct Rank<'a, LC: LearningComponentsTypes> {
    pub group: &'a Group,
    pub learner: Learner<LC>,
    /// The first and the last one. Rank 0's first one counts.
    pub epochs: [usize; 2],
    pub accumulation: Option<usize>,
    /// What a batch weighs; its samples otherwise.
    pub weight: Option<&'a WeightFn<InputOf<LC>>>,
    pub interrupter: &'a Interrupter,
}

impl<LC: LearningComponentsTypes> Rank<'_, LC> {
    /// Trains. All ranks must call it concurrently.
    pub fn run(
        &mut self,
        train: TrainLoader<LC>,
        leader: &mut Leader<LC>,
        registered: &Registered,
    ) -> Result<(), Error> {
        let mut outputs = all_or_none(self.group, Outputs::<Output<LC>>::new(registered))?;
        let mut ddp = self.prepare(&leader.store, outputs.averaged())?;
        let device = self.learner.model().devices().remove(0);
        let train = self.part(train).to_device(&device);
        leader.valid = leader.valid.to_device(device.inner());
        for epoch in self.epochs[0]..=self.epochs[1] {
            let progress = Progress::new(epoch, self.epochs[1]);
            let stops = self.train_epoch(&mut ddp, &progress, &train, &mut outputs, leader)?;
            // Clones of a model share running statistics, such as batch norm's: this changes the learner's.
            drop(ddp.average_states(self.learner.model())?);
            if stops {
                break;
            }
            let is_leader = self.group.rank() == 0;
            let stops = if is_leader { self.end_epoch(&progress, leader) } else { wait_for_leader(self.group) };
            if stops? {
                break;
            }
        }
        Ok(())
    }

    /// Moves the model to its device and takes over rank 0's parameters, optimizer, schedule and first epoch.
    fn prepare(&mut self, store: &EventStoreClient, averaged: Vec<String>) -> Result<DataParallel<LC::Backend>, Error> {
        // An accumulation over one batch is none, and burn takes one over no batch for the same.
        let accumulation = self.accumulation.map_or(1, |batches| batches.max(1));
        Settings { epochs: self.epochs[1], accumulation, averaged, weighs: self.weight.is_some() }
            .check(self.group, OPERATION)?;
        let device = match &self.learner.model().devices()[..] {
            [device] => Ok(device.clone()),
            devices => Err(Error::argument(OPERATION, format!("the model is on {devices:?}; put it on one device"))),
        };
        let device = all_or_none(self.group, device)?;
        // burn initialises parameters at their first use, which this is.
        self.learner.fork(&device);
        let (model, mut ddp) = DataParallel::new(self.group.clone(), self.learner.model())?;
        let record = if self.group.rank() == 0 {
            // A new optimizer has no state, so only a resumed one can be converted in a record.
            let trained = ddp.replicas.parameters.iter().filter(|parameter| parameter.trained);
            let checked = if self.epochs[0] > 1 { recordable(trained) } else { Ok(()) };
            checked.and_then(|()| resume::save(&self.learner, self.epochs[0], store))
        } else {
            Ok(Vec::new())
        };
        let (model, record) = share(self.group, model, record, 0)?;
        ddp.describe(&model);
        // Loading runs the parameters' mappings. Without gradients, the learner's parameters are leaves afterwards.
        self.learner.load_model(model.no_grad().into_record());
        let first_epoch = resume::restore(&mut self.learner, record, &device);
        self.epochs[0] = all_or_none(self.group, first_epoch)?;
        Ok(ddp)
    }

    /// Returns this rank's part of the samples, as burn's distributed strategy does. A shuffling loader draws a seed
    /// for each part in turn, so every rank makes all parts. A loader that is sharded already is not sliced.
    fn part(&self, train: TrainLoader<LC>) -> TrainLoader<LC> {
        let (samples, ranks) = (train.num_items(), self.group.world_size());
        if ranks == 1 {
            return train;
        }
        let start = |rank| if rank == ranks { samples } else { rank * (samples / ranks) };
        let slice = |rank| for_rank(self.group, || train.slice(start(rank), start(rank + 1)));
        let mut parts: Vec<_> = (0..ranks).map(slice).collect();
        parts.swap_remove(self.group.rank())
    }

    /// Trains until no rank has a batch left. Returns whether a rank was interrupted before.
    fn train_epoch(
        &mut self,
        ddp: &mut DataParallel<LC::Backend>,
        epoch: &Progress,
        train: &TrainLoader<LC>,
        outputs: &mut Outputs<Output<LC>>,
        leader: &mut Leader<LC>,
    ) -> Result<bool, Error> {
        // burn counts epochs from 1.
        let mut batches = at_epoch(epoch.items_processed.saturating_sub(1), || train.iter());
        // As in burn, batches of the last epoch that no step has used count nothing.
        ddp.replicas.steps.forget_passes();
        // Iterations since the last step of the optimizer.
        let mut accumulated = 0;
        let (mut count, mut processed) = (0, 0);
        loop {
            count += 1;
            let batch = attempt(|| batches.next())?;
            let progress = batches.progress();
            let samples = progress.items_processed.saturating_sub(processed) as u64;
            processed = progress.items_processed;
            let report = RankReport {
                batch: batch.as_ref().map(|batch| self.weigh(batch, samples)),
                // burn looks at the interrupter after an iteration.
                stop: if count > 1 || batch.is_none() { self.stop() } else { None },
                processed: processed as u64,
                total: progress.items_total as u64,
            };
            if count > 1 {
                outputs.add_up(self.group)?;
            }
            let next = agree(self.group, report, ddp.replicas.steps.count())?;
            if self.group.rank() == 0 && (batch.is_some() || !matches!(next, Next::Iterate(_))) {
                outputs.leave(&mut leader.processor);
            }
            let iteration = match next {
                Next::Iterate(iteration) => iteration,
                next => {
                    if let Next::Stop(rank, _) = next
                        && !self.interrupter.should_stop()
                    {
                        self.interrupter.stop(Some(&format!("rank {rank} was interrupted")));
                    }
                    outputs.end_epoch();
                    if self.group.rank() == 0 {
                        leader.processor.process_train(LearnerEvent::EndEpoch(epoch.items_processed));
                    }
                    return Ok(next != Next::EndEpoch);
                }
            };
            self.learner.lr_step();
            accumulated += 1;
            let ends_step = accumulated >= self.accumulation.unwrap_or(1);
            let item = self.iterate(ddp, &iteration, batch, ends_step.then_some(accumulated))?;
            accumulated *= usize::from(!ends_step);
            if let Some(item) = item {
                let rate = Some(self.learner.lr_current());
                let progress = Progress::new(iteration.processed as usize, iteration.total as usize);
                let item = TrainingItem::new(item, progress, epoch.clone(), Some(count), rate);
                outputs.enter(item, iteration.weights[self.group.rank()]);
            }
        }
    }

    fn weigh(&self, batch: &InputOf<LC>, samples: u64) -> BatchWeight {
        match self.weight {
            Some(weight) => BatchWeight::Known(weight(batch) as u64),
            None if samples == 0 => BatchWeight::Unknown,
            None => BatchWeight::Known(samples),
        }
    }

    /// Why this rank wants to stop.
    fn stop(&self) -> Option<Stop> {
        self.interrupter.should_stop().then_some(Stop::Interrupted)
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
        batch: Option<InputOf<LC>>,
        step: Option<usize>,
    ) -> Result<Option<Output<LC>>, Error> {
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

    /// Validates and saves a checkpoint, on rank 0. Returns whether the training should stop early.
    ///
    /// The other ranks wait meanwhile, and validation may take any time. So they hear from this rank after each batch:
    /// only one that takes longer than the deadline, and not all of them together, is a hang.
    fn end_epoch(&self, progress: &Progress, leader: &mut Leader<LC>) -> Result<bool, Error> {
        let epoch = progress.items_processed;
        let model = self.learner.model().valid();
        let mut batches = leader.valid.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            iteration += 1;
            let output = model.step(batch);
            let item = TrainingItem::new(output, batches.progress(), progress.clone(), Some(iteration), None);
            leader.processor.process_valid(LearnerEvent::ProcessedItem(item));
            tell(self.group, WORKING)?;
            if self.interrupter.should_stop() {
                break;
            }
        }
        leader.processor.process_valid(LearnerEvent::EndEpoch(epoch));
        if let Some(checkpointer) = &mut leader.checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, &leader.store);
            tell(self.group, WORKING)?;
        }
        let early_stopping = leader.early_stopping.as_mut();
        let stops = early_stopping.is_some_and(|strategy| strategy.should_stop(epoch, &leader.store));
        tell(self.group, if stops { STOP } else { GO_ON })?;
        Ok(stops)
    }
}

/// What rank 0 tells the other ranks at the end of an epoch: it is still validating or saving.
const WORKING: u8 = 0;
/// All ranks go on.
const GO_ON: u8 = 1;
/// All ranks stop early.
const STOP: u8 = 2;

fn tell(group: &Group, word: u8) -> Result<(), Error> {
    group.broadcast(&mut [word], 0)
}

/// Waits until rank 0 has done its work. Returns whether the training stops early.
fn wait_for_leader(group: &Group) -> Result<bool, Error> {
    let mut word = [WORKING];
    while word == [WORKING] {
        group.broadcast(&mut word, 0)?;
    }
    Ok(word == [STOP])
}
