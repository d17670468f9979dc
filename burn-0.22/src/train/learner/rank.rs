//! One rank of a training: burn-train's training loops, with all ranks in lockstep.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearnerModel, LearningCheckpointer, SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingItem,
    ValidLoader,
};

use super::averaged::{Outputs, Registered};
use super::records::share;
use super::{InputOf, OPERATION, WeightFn, fail};
use crate::train::DataParallel;
use crate::train::adapter::{handle, opened, scaled};
use crate::train::model::Parameters;
use crate::train::pass::{Form, means};
use bonfire_core::{Error, Group};
use bonfire_train::agree::{all_gather_values, all_or_none};
use bonfire_train::data::{at_epoch, for_rank};
use bonfire_train::parameters::check_same_model;
use bonfire_train::step::iteration::{BatchWeight, Iteration, Next, RankReport, Settings, Stop, agree};
use bonfire_train::step::layers::attempt;

/// The outputs of a model in training.
type OutputsOf<M> = Outputs<<M as TrainStep>::Output>;

/// What rank 0 needs for its tasks besides training: validation, metrics, checkpoints and early stopping. The other
/// ranks have it too, and do not use it.
pub(super) struct Leader<M: LearnerModel> {
    pub valid: ValidLoader<M>,
    pub processor: SupervisedTrainingEventProcessor<M>,
    pub checkpointer: Option<LearningCheckpointer<M>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub store: Arc<EventStoreClient>,
}

/// A rank of a training.
pub(super) struct Rank<'a, M: LearnerModel> {
    pub group: &'a Group,
    pub learner: Learner<M>,
    /// The first and the last one. Rank 0's first one counts.
    pub epochs: [usize; 2],
    pub accumulation: Option<usize>,
    /// What a batch weighs; its samples otherwise.
    pub weight: Option<&'a WeightFn<InputOf<M>>>,
    pub interrupter: &'a Interrupter,
}

impl<M: LearnerModel> Rank<'_, M> {
    /// Trains. All ranks must call it concurrently.
    pub fn run(&mut self, train: TrainLoader<M>, leader: &mut Leader<M>, registered: &Registered) -> Result<(), Error> {
        let mut outputs: OutputsOf<M> = all_or_none(self.group, Outputs::new(registered))?;
        let ddp = self.prepare(&leader.store, outputs.averaged())?;
        let device = self.learner.model().devices().remove(0);
        let train = self.part(train).to_device(&device);
        let samples = all_gather_values(self.group, [train.num_items() as u64])?;
        let total_items = samples.as_flattened().iter().sum::<u64>() as usize;
        leader.valid = leader.valid.to_device(&device.inner());
        let is_leader = self.group.rank() == 0;
        for epoch in self.epochs[0]..=self.epochs[1] {
            if is_leader {
                let start = LearnerEvent::StartSplit { epoch_number: epoch, total_items };
                self.interrupter.fail_on_error(leader.processor.process_train(start));
            }
            let stops = self.train_epoch(&ddp, epoch, &train, &mut outputs, leader)?;
            if is_leader {
                self.interrupter.fail_on_error(leader.processor.process_train(LearnerEvent::EndSplit(epoch)));
            }
            // Clones of a model share running statistics, such as batch norm's: this changes the learner's.
            drop(ddp.average_states(self.learner.model())?);
            if stops || self.end_epoch(&ddp, epoch, is_leader.then_some(&mut *leader))? {
                break;
            }
        }
        Ok(())
    }

    /// Moves the model to its device and takes over rank 0's parameters, optimizer, schedule and first epoch.
    fn prepare(&mut self, store: &EventStoreClient, averaged: Vec<String>) -> Result<DataParallel, Error> {
        let accumulation = self.accumulation.unwrap_or(1);
        Settings { epochs: self.epochs[1], accumulation, averaged, weighs: self.weight.is_some() }
            .check(self.group, OPERATION)?;
        let device = match &self.learner.model().devices()[..] {
            [device] if device.is_autodiff() => Ok(device.clone()),
            [device] => Ok(device.clone().autodiff()),
            devices => Err(Error::argument(OPERATION, format!("the model is on {devices:?}; put it on one device"))),
        };
        self.learner.fork(&all_or_none(self.group, device)?);
        check_same_model(self.group, OPERATION, &Parameters::of(&self.learner.model()).0)?;
        share(self.group, &mut self.learner, store)?;
        let mut first_epoch = [self.epochs[0] as u64];
        self.group.broadcast(&mut first_epoch, 0)?;
        self.epochs[0] = first_epoch[0] as usize;
        // The learner has the same parameters as the model that is returned.
        DataParallel::new(self.group.clone(), self.learner.model()).map(|(_, ddp)| ddp)
    }

    /// Returns this rank's part of the samples, as burn's distributed strategy does. A shuffling loader draws a seed
    /// for each part in turn, so every rank makes all parts. A loader that is sharded already is not sliced.
    fn part(&self, train: TrainLoader<M>) -> TrainLoader<M> {
        let (samples, ranks) = (train.num_items(), self.group.world_size());
        if ranks == 1 {
            return train;
        }
        let start = |rank| if rank == ranks { samples } else { rank * (samples / ranks) };
        let slice = |rank| for_rank(self.group, || train.slice(start(rank), start(rank + 1)));
        let mut parts: Vec<_> = (0..ranks).map(slice).collect();
        parts.swap_remove(self.group.rank())
    }

    /// Trains until no rank has a batch left. Returns whether a rank wants to stop.
    fn train_epoch(
        &mut self,
        ddp: &DataParallel,
        epoch: usize,
        train: &TrainLoader<M>,
        outputs: &mut OutputsOf<M>,
        leader: &mut Leader<M>,
    ) -> Result<bool, Error> {
        // burn counts epochs from 1.
        let mut batches = at_epoch(epoch.saturating_sub(1), || train.iter());
        // As in burn, iterations of the last epoch that no step has used count nothing.
        ddp.replicas.steps.forget_passes();
        // Iterations since the last step of the optimizer.
        let mut accumulated = 0;
        let (mut count, mut processed) = (0, 0);
        loop {
            count += 1;
            let batch = batches.next().transpose().unwrap_or_else(|error| {
                self.interrupter.fail(error);
                None
            });
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
            // The others compute these values while batches are loaded.
            if count > 1 {
                outputs.add_up(self.group, self.interrupter)?;
            }
            let next = self.agree(ddp, report)?;
            let is_leader = self.group.rank() == 0;
            if is_leader && (batch.is_some() || !matches!(next, Next::Iterate(_))) {
                outputs.leave(&mut leader.processor, self.interrupter);
            }
            let Next::Iterate(iteration) = next else {
                outputs.end_epoch(self.group, self.interrupter)?;
                return Ok(next != Next::EndEpoch);
            };
            accumulated += 1;
            let ends_epoch = iteration.processed == iteration.total;
            let ends_step = ends_epoch || accumulated >= self.accumulation.unwrap_or(1);
            let item = self.iterate(ddp, &iteration, batch, ends_step.then_some(accumulated))?;
            accumulated *= usize::from(!ends_step);
            if let Some(item) = item {
                let progress =
                    Progress::new(iteration.processed as usize, iteration.total as usize, progress.unit.clone());
                let item = TrainingItem::new(item, progress, Some(count), Some(self.learner.lr_current()));
                outputs.enter(item, iteration.weights[self.group.rank()]);
            }
        }
    }

    fn weigh(&self, batch: &InputOf<M>, samples: u64) -> BatchWeight {
        match self.weight {
            Some(weight) => BatchWeight::Known(weight(batch) as u64),
            None if samples == 0 => BatchWeight::Unknown,
            None => BatchWeight::Known(samples),
        }
    }

    /// Why this rank wants to stop.
    fn stop(&self) -> Option<Stop> {
        let why = if self.interrupter.error().is_some() { Stop::Failed } else { Stop::Interrupted };
        self.interrupter.should_stop().then_some(why)
    }

    /// Exchanges the ranks' reports. If another rank wants to stop, it stops this one.
    fn agree(&self, ddp: &DataParallel, report: RankReport) -> Result<Next, Error> {
        let next = agree(self.group, report, ddp.replicas.steps.count())?;
        match next {
            Next::Stop(..) if self.interrupter.should_stop() => {}
            Next::Stop(rank, Stop::Interrupted) => self.interrupter.stop(Some(&format!("rank {rank} was interrupted"))),
            Next::Stop(rank, Stop::Failed) => {
                fail(self.interrupter, rank, "its training has failed; that rank has the error".into());
            }
            _ => {}
        }
        Ok(next)
    }

    /// Trains with this rank's batch. Without one it takes part in what the other ranks do. `step` is the number of
    /// iterations that a step of the optimizer uses, if this one ends them. Returns the model's output.
    ///
    /// burn adds up the gradients of the iterations that it accumulates. Here each contributes the mean over the
    /// samples of all ranks: the weight of a rank's pass is its share of them, so the mean over all passes is that sum
    /// divided by the number of iterations.
    fn iterate(
        &mut self,
        ddp: &DataParallel,
        iteration: &Iteration,
        batch: Option<InputOf<M>>,
        step: Option<usize>,
    ) -> Result<Option<<M as TrainStep>::Output>, Error> {
        let (model, replicas) = (self.learner.model(), &ddp.replicas);
        let (outcome, item) = match batch {
            Some(batch) => {
                let open = replicas.begin(&model, step.is_some())?.weigh(iteration.share(self.group.rank()))?;
                // Its tensors share the parameters' memory, which the optimizer changes in place if it is the only
                // owner.
                drop(model);
                let output = attempt(|| TrainStep::step(&open.model, batch))?;
                (open.finish_trained(output.grads)?, Some(output.item))
            }
            None if step.is_some() => (Some(replicas.skip(&model)?), None),
            None => (None, None),
        };
        if let Some(iterations) = step {
            let mut means = means(outcome)?;
            if iterations > 1 {
                let sum = |mean| handle(scaled(opened(mean), iterations as f64));
                means.gradients.iter_mut().for_each(|mean| *mean = mean.take().map(sum));
            }
            self.learner.lr_step();
            self.learner.optimizer_step(replicas.parameters.means(means));
        }
        Ok(item)
    }

    /// Waits while rank 0, which has the leader, validates, saves a checkpoint and decides on early stopping. Returns
    /// whether the training stops.
    fn end_epoch(&self, ddp: &DataParallel, epoch: usize, mut leader: Option<&mut Leader<M>>) -> Result<bool, Error> {
        match &mut leader {
            Some(leader) => self.validate(epoch, leader)?,
            None => drop(wait_for_leader(self.group)?),
        }
        let report = RankReport { stop: self.stop(), ..RankReport::default() };
        if self.agree(ddp, report)? != Next::EndEpoch {
            return Ok(true);
        }
        let Some(leader) = leader else { return wait_for_leader(self.group) };
        if let Some(checkpointer) = &mut leader.checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, &leader.store);
            tell(self.group, WORKING)?;
        }
        let early_stopping = leader.early_stopping.as_mut();
        let stops = early_stopping.is_some_and(|strategy| strategy.should_stop(epoch, &leader.store));
        tell(self.group, if stops { STOP } else { GO_ON })?;
        Ok(stops)
    }

    /// Validates on rank 0. The other ranks wait meanwhile, and validation may take any time. So they hear from this
    /// rank after each batch: only one that takes longer than the deadline, and not all of them together, is a hang.
    fn validate(&self, epoch: usize, leader: &mut Leader<M>) -> Result<(), Error> {
        let (processor, interrupter) = (&mut leader.processor, self.interrupter);
        let start = LearnerEvent::StartSplit { epoch_number: epoch, total_items: leader.valid.num_items() };
        interrupter.fail_on_error(processor.process_valid(start));
        let model = self.learner.model().valid();
        let mut batches = leader.valid.iter();
        for count in 1.. {
            let batch = match batches.next() {
                Some(Ok(batch)) => batch,
                Some(Err(error)) => {
                    interrupter.fail(error);
                    break;
                }
                None => break,
            };
            let output = InferenceStep::step(&model, batch);
            let item = TrainingItem::new(output, batches.progress(), Some(count), None);
            interrupter.fail_on_error(processor.process_valid(LearnerEvent::ProcessedItem(item)));
            tell(self.group, WORKING)?;
            if interrupter.should_stop() {
                break;
            }
        }
        interrupter.fail_on_error(processor.process_valid(LearnerEvent::EndSplit(epoch)));
        interrupter.fail_on_error(processor.process_train(LearnerEvent::EndEpoch(epoch)));
        if leader.checkpointer.is_some() || leader.early_stopping.is_some() {
            interrupter.fail_on_error(processor.flush());
        }
        tell(self.group, GO_ON)
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
