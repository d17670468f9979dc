//! One rank of a training: burn-train's training loops, with all ranks in lockstep.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::{AutodiffModule, Module};
use burn::optim::GradientsAccumulator;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingItem, TrainingModel, ValidLoader,
};

use super::resume;
use crate::tensor::autodiff::CollectiveBackend;
use crate::train::DataParallel;
use crate::train::agree::{all_gather_values, all_or_none};
use crate::train::record::recordable;
use crate::train::resume::share;
use bonfire_core::internal::RankList;
use bonfire_core::{Error, Group};

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

impl<LC: LearningComponentsTypes> Rank<'_, LC>
where
    LC::Backend: CollectiveBackend,
{
    /// Trains on this device. All ranks must call it concurrently.
    pub fn run(mut self, device: &Device<LC>) -> Result<(TrainingModel<LC>, Processor<LC>), Error> {
        self.compare_settings()?;
        let (mut ddp, first_epoch) = self.prepare(device)?;
        for epoch in first_epoch..=self.settings.last_epoch {
            let progress = Progress::new(epoch, self.settings.last_epoch);
            if self.train_epoch(&mut ddp, &progress)? == Next::Stop {
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
                recordable(ddp.parameters().iter().filter(|parameter| parameter.trained))?;
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

    fn train_epoch(&mut self, ddp: &mut DataParallel<LC::Backend>, epoch: &Progress) -> Result<Next, Error> {
        let world_size = self.group.world_size();
        let mut batches = self.train.iter();
        let mut accumulator = GradientsAccumulator::new();
        let (mut steps, mut accumulated) = (0, 0);
        loop {
            let batch = batches.next();
            let mut progress = batches.progress();
            let next = agree(&self.group, &self.settings.interrupter, batch.is_some(), &progress, steps)?;
            let Some(batch) = batch.filter(|_| next == Next::Step) else {
                if let Some(leader) = &mut self.leader {
                    leader.processor.process_train(LearnerEvent::EndEpoch(epoch.items_processed));
                }
                return Ok(next);
            };
            steps += 1;
            (0..world_size).for_each(|_| self.learner.lr_step());
            accumulated += 1;
            // The exchange is worth it after the last batch of an accumulation only.
            let exchanges = self.settings.accumulation.is_none_or(|accumulation| accumulation <= accumulated);
            let item = if exchanges {
                let step = ddp.step(&self.learner.model(), 1)?;
                // The mean of sums equals the sum of means, and takes one exchange.
                step.accumulate(accumulator.grads());
                accumulated = 0;
                let output = step.model().step(batch);
                self.learner.optimizer_step(step.finish_with(&output.grads)?);
                output.item
            } else {
                let output = self.learner.train_step(batch);
                accumulator.accumulate(&self.learner.model(), output.grads);
                output.item
            };
            if let Some(leader) = &mut self.leader {
                progress.items_processed *= world_size;
                progress.items_total *= world_size;
                let (iteration, rate) = (Some(steps * world_size), Some(self.learner.lr_current()));
                let item = TrainingItem::new(item, progress, epoch.clone(), iteration, rate);
                leader.processor.process_train(LearnerEvent::ProcessedItem(item));
            }
        }
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

/// What all ranks do next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Next {
    Step,
    EndEpoch,
    Stop,
}

/// What a rank reports before a step.
#[derive(Clone, Copy)]
struct RankReport {
    /// Whether it has a batch.
    batch: bool,
    /// Whether it was interrupted.
    stop: bool,
    /// Samples so far in this epoch, including the next batch.
    samples: u64,
    /// The rank's samples in the epoch.
    total: u64,
}

/// Exchanges the ranks' reports and returns what all do next. An interrupted rank stops all.
fn agree(
    group: &Group,
    interrupter: &Interrupter,
    batch: bool,
    progress: &Progress,
    steps: usize,
) -> Result<Next, Error> {
    let (samples, total) = (progress.items_processed as u64, progress.items_total as u64);
    let words = all_gather_values(group, [u64::from(batch), u64::from(interrupter.should_stop()), samples, total])?;
    let report =
        |[batch, stop, samples, total]: [u64; 4]| RankReport { batch: batch == 1, stop: stop == 1, samples, total };
    let reports: Vec<_> = words.into_iter().map(report).collect();
    if let Some(rank) = reports.iter().position(|rank| rank.stop)
        && !interrupter.should_stop()
    {
        interrupter.stop(Some(&format!("rank {rank} was interrupted")));
    }
    next(&reports, steps).map_err(|reason| Error::argument("data parallel strategy", reason))
}

/// Returns what the ranks do after `steps` steps of an epoch, or why they cannot continue.
fn next(reports: &[RankReport], steps: usize) -> Result<Next, String> {
    let ranks_where = |wanted| (0..reports.len()).filter(|&rank| reports[rank].batch == wanted).collect::<Vec<_>>();
    let (with, without) = (ranks_where(true), ranks_where(false));
    const REMEDY: &str = "every rank needs equally many: make the number of training samples a multiple of the number \
                          of ranks";
    if reports.iter().any(|rank| rank.stop) {
        return Ok(Next::Stop);
    }
    if !with.is_empty() && !without.is_empty() {
        let (with, without) = (RankList(&with), RankList(&without));
        return Err(format!("{with} would have more batches in an epoch than the {steps} of {without}; {REMEDY}"));
    }
    if with.is_empty() {
        return Ok(Next::EndEpoch);
    }
    if steps == 0
        && let Some(counts) = estimated_batches(reports)
        && let Some(rank) = counts.iter().position(|count| *count != counts[0])
    {
        let (first, other) = (counts[0], counts[rank]);
        return Err(format!("rank 0 has {first} batches in an epoch and rank {rank} has {other}; {REMEDY}"));
    }
    Ok(Next::Step)
}

/// Estimates each rank's number of batches from the first batch. Batches have equal sizes, unless a rank's only batch
/// is smaller. Returns `None` if the sizes do not allow an estimate.
fn estimated_batches(reports: &[RankReport]) -> Option<Vec<u64>> {
    let size = reports.iter().map(|rank| rank.samples).max().filter(|size| *size > 0)?;
    let count =
        |rank: &RankReport| (rank.samples == size || rank.samples == rank.total).then(|| rank.total.div_ceil(size));
    reports.iter().map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(samples: u64, total: u64) -> RankReport {
        RankReport { batch: true, stop: false, samples, total }
    }

    const DONE: RankReport = RankReport { batch: false, stop: false, samples: 8, total: 8 };

    #[test]
    fn different_numbers_of_batches_are_refused_before_the_first_step() {
        // Two full batches and a partial one, against two.
        let error = next(&[report(4, 8), report(4, 8), report(4, 9)], 0).unwrap_err();
        assert!(error.starts_with("rank 0 has 2 batches in an epoch and rank 2 has 3; "), "{error}");
        // A rank whose only batch is smaller than the batches of the other ranks.
        let error = next(&[report(3, 3), report(4, 5)], 0).unwrap_err();
        assert!(error.contains("rank 0 has 1 batches") && error.contains("rank 1 has 2"), "{error}");
        // Uneven parts with the same number of batches.
        assert_eq!(next(&[report(4, 9), report(4, 12)], 0), Ok(Next::Step));
        // Batches of different sizes do not allow an estimate.
        assert_eq!(next(&[report(4, 9), report(5, 20)], 0), Ok(Next::Step));
    }

    #[test]
    fn a_rank_that_runs_out_of_batches_ends_the_training_of_all() {
        let error = next(&[report(12, 20), DONE, report(12, 20)], 2).unwrap_err();
        assert!(error.starts_with("ranks 0, 2 would have more batches in an epoch than the 2 of rank 1; "), "{error}");
        assert_eq!(next(&[DONE, DONE], 2), Ok(Next::EndEpoch));
    }

    #[test]
    fn one_interrupted_rank_stops_all() {
        let stopped = RankReport { stop: true, ..report(4, 8) };
        assert_eq!(next(&[report(4, 8), stopped, DONE], 1), Ok(Next::Stop));
    }
}
