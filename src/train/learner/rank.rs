//! One rank of a training: what burn-train's own loops do, with all ranks in step.

use std::ops::RangeInclusive;
use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::{AutodiffModule, Module};
use burn::optim::GradientsAccumulator;
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader, TrainingItem,
    TrainingModel, ValidLoader,
};

use crate::train::DataParallel;
use crate::train::agree::tell_all;
use bonfire_core::internal::Ranks;
use bonfire_core::{Error, Group};

type Device<LC> = burn::tensor::Device<<LC as LearningComponentsTypes>::Backend>;

/// What all ranks of this process train by.
pub(super) struct Settings {
    pub epochs: RangeInclusive<usize>,
    pub accumulation: Option<usize>,
    pub interrupter: Interrupter,
}

/// What rank 0 does besides training.
pub(super) struct Main<LC: LearningComponentsTypes> {
    pub valid: ValidLoader<LC>,
    pub processor: SupervisedTrainingEventProcessor<LC>,
    pub checkpointer: Option<LearningCheckpointer<LC>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub store: Arc<EventStoreClient>,
}

pub(super) struct Rank<'a, LC: LearningComponentsTypes> {
    pub group: Group,
    pub settings: &'a Settings,
    pub learner: Learner<LC>,
    pub train: TrainLoader<LC>,
    pub main: Option<Main<LC>>,
}

/// What rank 0 gives back besides its model.
type Processor<LC> = Option<SupervisedTrainingEventProcessor<LC>>;

impl<LC: LearningComponentsTypes> Rank<'_, LC> {
    /// Trains on this device, as all ranks do at the same time.
    pub fn run(mut self, device: &Device<LC>) -> Result<(TrainingModel<LC>, Processor<LC>), Error> {
        let mut ddp = self.prepare(device)?;
        for epoch in self.settings.epochs.clone() {
            let progress = Progress::new(epoch, *self.settings.epochs.end());
            if self.train_epoch(&mut ddp, &progress)? == Next::Stop {
                break;
            }
            let main = self.main.as_mut();
            let stop = main.is_some_and(|main| main.end_epoch(&self.learner, &progress, &self.settings.interrupter));
            let mut stop = [u8::from(stop)];
            self.group.broadcast(&mut stop, 0)?;
            if stop == [1] {
                break;
            }
        }
        Ok((self.learner.model(), self.main.map(|main| main.processor)))
    }

    /// Puts the model on the device, with rank 0's parameters.
    fn prepare(&mut self, device: &Device<LC>) -> Result<DataParallel<LC::Backend>, Error> {
        self.learner.fork(device);
        self.group.barrier()?;
        // A running state that clones share is wherever its last fork has put it.
        let split = self.learner.model().devices().iter().any(|other| other != device);
        if let Some(rank) = tell_all(&self.group, [u8::from(split)])?.iter().position(|split| *split == [1]) {
            let reason = format!(
                "the model has states, such as batch norm's, that burn shares between the devices of a process, so \
                 rank {rank} does not have them on its device; give each device a process of its own"
            );
            return Err(Error::argument("data parallel strategy", reason));
        }
        let (model, ddp) = DataParallel::new(self.group.clone(), self.learner.model())?;
        // Mappings of parameters run on the way: without gradients the learner's parameters are leaves afterwards.
        self.learner.load_model(model.no_grad().into_record());
        Ok(ddp)
    }

    fn train_epoch(&mut self, ddp: &mut DataParallel<LC::Backend>, epoch: &Progress) -> Result<Next, Error> {
        let peers = self.group.world_size();
        let mut batches = self.train.iter();
        let mut accumulator = GradientsAccumulator::new();
        let (mut steps, mut accumulated) = (0, 0);
        loop {
            let batch = batches.next();
            let mut progress = batches.progress();
            let next = agree(&self.group, &self.settings.interrupter, batch.is_some(), &progress, steps)?;
            let Some(batch) = batch.filter(|_| next == Next::Step) else {
                if let Some(main) = &mut self.main {
                    main.processor.process_train(LearnerEvent::EndEpoch(epoch.items_processed));
                }
                return Ok(next);
            };
            steps += 1;
            (0..peers).for_each(|_| self.learner.lr_step());
            let output = self.learner.train_step(batch);
            match self.settings.accumulation {
                Some(accumulation) => {
                    accumulator.accumulate(&self.learner.model(), output.grads);
                    accumulated += 1;
                    if accumulation <= accumulated {
                        // The mean of sums is the sum of means, for the cost of one exchange.
                        self.learner.optimizer_step(ddp.sync(accumulator.grads(), 1)?);
                        accumulated = 0;
                    }
                }
                None => self.learner.optimizer_step(ddp.sync(output.grads, 1)?),
            }
            if let Some(main) = &mut self.main {
                progress.items_processed *= peers;
                progress.items_total *= peers;
                let (iteration, rate) = (Some(steps * peers), Some(self.learner.lr_current()));
                let item = TrainingItem::new(output.item, progress, epoch.clone(), iteration, rate);
                main.processor.process_train(LearnerEvent::ProcessedItem(item));
            }
        }
    }
}

impl<LC: LearningComponentsTypes> Main<LC> {
    /// Validates and saves; says whether the training should end here.
    fn end_epoch(&mut self, learner: &Learner<LC>, progress: &Progress, interrupter: &Interrupter) -> bool {
        let epoch = progress.items_processed;
        let model = learner.model().valid();
        let mut batches = self.valid.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            iteration += 1;
            let output = model.step(batch);
            let item = TrainingItem::new(output, batches.progress(), progress.clone(), Some(iteration), None);
            self.processor.process_valid(LearnerEvent::ProcessedItem(item));
            if interrupter.should_stop() {
                break;
            }
        }
        self.processor.process_valid(LearnerEvent::EndEpoch(epoch));
        if let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.checkpoint(learner, epoch, &self.store);
        }
        self.early_stopping.as_mut().is_some_and(|strategy| strategy.should_stop(epoch, &self.store))
    }
}

/// What all ranks do next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Next {
    Step,
    EndEpoch,
    Stop,
}

/// What a rank knows before a step.
#[derive(Clone, Copy)]
struct Ready {
    batch: bool,
    stop: bool,
    /// Samples so far in this epoch, the next batch included, and all of the rank's samples.
    samples: u64,
    of: u64,
}

/// Decides together what comes next. An interrupted rank stops all.
fn agree(
    group: &Group,
    interrupter: &Interrupter,
    batch: bool,
    progress: &Progress,
    steps: usize,
) -> Result<Next, Error> {
    let (samples, of) = (progress.items_processed as u64, progress.items_total as u64);
    let words = tell_all(group, [u64::from(batch), u64::from(interrupter.should_stop()), samples, of])?;
    let ready = |[batch, stop, samples, of]: [u64; 4]| Ready { batch: batch == 1, stop: stop == 1, samples, of };
    let ready: Vec<_> = words.into_iter().map(ready).collect();
    if let Some(rank) = ready.iter().position(|rank| rank.stop)
        && !interrupter.should_stop()
    {
        interrupter.stop(Some(&format!("rank {rank} was interrupted")));
    }
    next(&ready, steps).map_err(|reason| Error::argument("data parallel strategy", reason))
}

/// What the ranks do after so many steps of an epoch, or why they cannot go on.
fn next(ready: &[Ready], steps: usize) -> Result<Next, String> {
    let having = |wanted| (0..ready.len()).filter(|&rank| ready[rank].batch == wanted).collect::<Vec<_>>();
    let (with, without) = (having(true), having(false));
    const REMEDY: &str = "every rank needs equally many: make the number of training samples a multiple of the number \
                          of ranks";
    if ready.iter().any(|rank| rank.stop) {
        return Ok(Next::Stop);
    }
    if !with.is_empty() && !without.is_empty() {
        let (with, without) = (Ranks(&with), Ranks(&without));
        return Err(format!("{with} would have more batches in an epoch than the {steps} of {without}; {REMEDY}"));
    }
    if with.is_empty() {
        return Ok(Next::EndEpoch);
    }
    if steps == 0
        && let Some(counts) = forecast(ready)
        && let Some(rank) = counts.iter().position(|count| *count != counts[0])
    {
        let (first, other) = (counts[0], counts[rank]);
        return Err(format!("rank 0 has {first} batches in an epoch and rank {rank} has {other}; {REMEDY}"));
    }
    Ok(Next::Step)
}

/// The number of batches of each rank, as far as the first batch tells it: batches are of equal size, unless one is all
/// that a rank has.
fn forecast(ready: &[Ready]) -> Option<Vec<u64>> {
    let size = ready.iter().map(|rank| rank.samples).max().filter(|size| *size > 0)?;
    let count = |rank: &Ready| (rank.samples == size || rank.samples == rank.of).then(|| rank.of.div_ceil(size));
    ready.iter().map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(samples: u64, of: u64) -> Ready {
        Ready { batch: true, stop: false, samples, of }
    }

    const DONE: Ready = Ready { batch: false, stop: false, samples: 8, of: 8 };

    #[test]
    fn different_numbers_of_batches_are_refused_before_the_first_step() {
        // Two full batches and a part of one, against two.
        let error = next(&[ready(4, 8), ready(4, 8), ready(4, 9)], 0).unwrap_err();
        assert!(error.starts_with("rank 0 has 2 batches in an epoch and rank 2 has 3; "), "{error}");
        // A rank whose only batch is smaller than the others'.
        let error = next(&[ready(3, 3), ready(4, 5)], 0).unwrap_err();
        assert!(error.contains("rank 0 has 1 batches") && error.contains("rank 1 has 2"), "{error}");
        // Uneven parts with equally many batches.
        assert_eq!(next(&[ready(4, 9), ready(4, 12)], 0), Ok(Next::Step));
        // Batches of different sizes tell nothing yet.
        assert_eq!(next(&[ready(4, 9), ready(5, 20)], 0), Ok(Next::Step));
    }

    #[test]
    fn a_rank_that_runs_out_of_batches_ends_the_training_of_all() {
        let error = next(&[ready(12, 20), DONE, ready(12, 20)], 2).unwrap_err();
        assert!(error.starts_with("ranks 0, 2 would have more batches in an epoch than the 2 of rank 1; "), "{error}");
        assert_eq!(next(&[DONE, DONE], 2), Ok(Next::EndEpoch));
    }

    #[test]
    fn one_interrupted_rank_stops_all() {
        let stopped = Ready { stop: true, ..ready(4, 8) };
        assert_eq!(next(&[ready(4, 8), stopped, DONE], 1), Ok(Next::Stop));
    }
}
