//! The training loop.

use bonfire::train::{compression, seeded};
use bonfire::{Checkpoints, DataParallel, Error, Group, ShardedOptimizer, TrainingState, partition};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::Failure;
use crate::data::{Digits, PIXELS};
use crate::job::{Outcome, TrainingJob};
use crate::model::Network;
use crate::progress::{Progress, report_stop, report_test};

/// What is the same on all ranks after each step. The user's state are the settings, as text.
type State = TrainingState<Network, String>;

/// A training on one rank.
struct Training {
    state: State,
    /// The optimizer, if its state is sharded. The one in `state` has no state then.
    sharded: Option<ShardedOptimizer>,
    ddp: DataParallel,
    checkpoints: Option<Checkpoints>,
    progress: Progress,
    outcome: Outcome,
}

impl Training {
    /// Saves a checkpoint, if there is a folder for it.
    fn save(&mut self) -> Result<(), Failure> {
        match (&mut self.checkpoints, &self.sharded) {
            (None, _) => {}
            (Some(checkpoints), None) => checkpoints.save(&self.state)?,
            (Some(checkpoints), Some(optimizer)) => checkpoints.save((&self.state, optimizer))?,
        }
        Ok(())
    }
}

impl TrainingJob<'_> {
    /// Trains and tests on `device` as one rank of `group`. Rank 0 reports and saves. If ranks are lost, the others
    /// continue.
    pub fn run(&self, group: Group, device: Device) -> Result<Outcome, Failure> {
        self.check(&group)?;
        let identity = group.rank();
        let model = seeded(&group, self.settings.seed, &device, || Network::new(&device))?;
        let (model, mut ddp) = DataParallel::new(group.clone(), model)?;
        if let Some(compression) = self.compression.and_then(compression::by_name) {
            ddp.set_compression(compression)?;
        }
        let adam = AdamConfig::new();
        let mut state = State::new(model, adam.init(), self.settings.lr, self.settings.to_text()?);
        let mut sharded = self.shard.map(|shard| ShardedOptimizer::new(&ddp, adam.init(), shard)).transpose()?;
        if let Some(folder) = self.resume {
            let mut checkpoints = Checkpoints::read_only(&group, folder)?;
            let found = match &mut sharded {
                Some(optimizer) => checkpoints.load((&mut state, optimizer))?,
                None => checkpoints.load(&mut state)?,
            };
            if !found {
                return Err(format!("there is no checkpoint in {}", folder.display()).into());
            }
            self.settings.check(folder, &state.user)?;
        }
        let checkpoints = self.checkpoints(&group)?;
        let resumed = state.epoch;
        let (progress, outcome) = (Progress::new(self, &group, resumed, state.samples)?, Outcome::default());
        let mut training = Training { state, sharded, ddp, checkpoints, progress, outcome };
        loop {
            let middle = training.progress.sampler.batches() / 2 * self.settings.batch;
            let chaos_step = training.state.epoch == resumed + 1 && training.state.samples == middle;
            if chaos_step && self.chaos == Some(identity) {
                self.kill_self(identity)?;
                return Ok(training.outcome);
            }
            match self.advance(&mut training, &device) {
                Ok(true) => return Ok(training.outcome),
                Ok(false) => {}
                Err(mut failure) => loop {
                    let lost = matches!(
                        failure.downcast_ref(),
                        Some(Error::PeerLost { .. } | Error::Disconnected { .. } | Error::Left { .. })
                    );
                    if !lost {
                        return Err(failure);
                    }
                    // Another rank may be lost meanwhile.
                    match self.continue_without_lost(&mut training, &failure) {
                        Ok(()) => break,
                        Err(next) => failure = next,
                    }
                },
            }
        }
    }

    /// Makes a step, ends an epoch or, after all epochs, runs the test. Returns true after the test, and if the job was
    /// asked to stop, after it has saved.
    fn advance(&self, training: &mut Training, device: &Device) -> Result<bool, Failure> {
        let (digits, test) = &self.data;
        if training.state.epoch >= self.epochs {
            let accuracy = self.test(&training.ddp, test, &training.state.model.valid(), device)?;
            let sharded = training.sharded.as_ref();
            training.outcome.part_bytes = sharded.map(ShardedOptimizer::state_bytes).transpose()?;
            if training.ddp.group().rank() == 0 {
                report_test(accuracy, training.outcome.part_bytes)?;
            }
            return Ok(true);
        }
        let Some(shard) = training.progress.shards.next() else {
            return self.end_epoch(training).map(|()| false);
        };
        let batch = tensors(digits, &shard, device);
        let criterion = CrossEntropyLossConfig::new().init(device);
        let mut output = None;
        let run = |model: &Network, (images, labels): (Tensor<4>, Tensor<1, Int>)| {
            let scores = model.forward(images);
            let loss = criterion.forward(scores.clone(), labels.clone());
            output = Some((scores.inner(), labels.inner(), loss.clone().inner()));
            (loss, shard.len())
        };
        let Training { state, sharded, ddp, .. } = training;
        match sharded {
            None => {
                let gradients = ddp.run(&state.model, [batch], run)?;
                state.step(gradients, self.settings.batch);
            }
            Some(optimizer) => {
                let parts = optimizer.run(&state.model, [batch], run)?;
                optimizer.step(self.settings.lr, &mut state.model, parts)?;
                state.samples += self.settings.batch;
            }
        }
        if let Some((scores, labels, loss)) = output {
            let (loss, right) = (loss.into_scalar::<f64>(), count_right(scores, labels));
            training.progress.count(shard.len(), loss, right);
        }
        if training.checkpoints.is_some() && training.ddp.should_stop() {
            training.save()?;
            training.progress.abandon();
            if training.ddp.group().rank() == 0 {
                report_stop()?;
            }
            return Ok(true);
        }
        Ok(false)
    }

    fn end_epoch(&self, training: &mut Training) -> Result<(), Failure> {
        let Training { state, ddp, progress, .. } = training;
        state.model = ddp.average_states(state.model.clone())?;
        let (means, images) = progress.means();
        let [loss, accuracy] = ddp.mean(&means, images)?;
        state.next_epoch();
        progress.finish();
        training.outcome.losses.push(loss);
        if ddp.group().rank() == 0 {
            progress.report(self, state.epoch, loss, accuracy)?;
        }
        *progress = Progress::new(self, ddp.group(), state.epoch, 0)?;
        training.save()
    }

    /// Continues without the lost ranks, from the step that the remaining ranks have in common.
    fn continue_without_lost(&self, training: &mut Training, cause: &Failure) -> Result<(), Failure> {
        training.progress.abandon();
        if training.sharded.is_some() {
            return Err(
                format!("{cause}; a part of the optimizer's state is lost: resume from the last checkpoint").into()
            );
        }
        let Training { state, ddp, progress, .. } = training;
        let epoch = state.epoch;
        ddp.shrink(state)?;
        let group = ddp.group().clone();
        if group.rank() == 0 {
            let (ranks, epoch) = (group.world_size(), state.epoch + 1);
            let step = state.samples / self.settings.batch;
            eprintln!("{cause}\n{ranks} ranks continue from step {step} of epoch {epoch}");
        }
        training.checkpoints = self.checkpoints(&group)?;
        if state.epoch == epoch {
            progress.resume(self, &group, epoch, state.samples)?;
        } else {
            // The others had ended the epoch.
            *progress = Progress::new(self, &group, state.epoch, state.samples)?;
        }
        Ok(())
    }

    /// Returns the fraction of the test set that `model` classifies correctly. Each rank evaluates its share.
    fn test(&self, ddp: &DataParallel, test: &Digits, model: &Network, device: &Device) -> Result<f64, Failure> {
        let share: Vec<usize> = partition(test.len(), ddp.group().world_size(), ddp.group().rank()).collect();
        let mut right = 0.0;
        if !share.is_empty() {
            let (images, labels) = tensors(test, &share, &device.clone().inner());
            right = count_right(model.forward(images), labels) / share.len() as f64;
        }
        let [accuracy] = ddp.mean(&[right], share.len())?;
        Ok(accuracy)
    }
}

/// Returns the images `[n, 1, 8, 8]` and labels `[n]` of the chosen samples.
fn tensors(digits: &Digits, chosen: &[usize], device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    let images: Vec<f32> = chosen.iter().flat_map(|&i| digits.images[i]).collect();
    let labels: Vec<i64> = chosen.iter().map(|&i| i64::from(digits.labels[i])).collect();
    let side = PIXELS.isqrt();
    let images = Tensor::from_data(TensorData::new(images, [chosen.len(), 1, side, side]), device);
    (images, Tensor::from_data(TensorData::new(labels, [chosen.len()]), device))
}

fn count_right(scores: Tensor<2>, labels: Tensor<1, Int>) -> f64 {
    scores.argmax(1).squeeze_dim::<1>(1).equal(labels).int().sum().into_scalar::<f64>()
}
