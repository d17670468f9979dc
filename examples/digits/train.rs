//! The training loop.

use std::fs;
use std::io::{self, Write};
use std::iter::Skip;
use std::path::Path;
use std::time::Instant;

use bonfire::train::{Epoch, compression, seeded};
use bonfire::{
    Builder, Checkpoints, DataParallel, Error, Group, ShardedOptimizer, ShardedSampler, Sharding, TrainingState,
    partition,
};
use burn::module::{AutodiffModule, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Failure;
use crate::checkpoint::Settings;
use crate::data::{Digits, PIXELS};
use crate::model::Network;

/// A training job, the same on all ranks.
pub struct TrainingJob<'a> {
    /// The training set and the test set.
    pub data: (Digits, Digits),
    pub settings: Settings,
    pub epochs: usize,
    pub save: Option<&'a Path>,
    pub resume: Option<&'a Path>,
    /// Over which ranks the optimizer's state is sharded, if it is.
    pub shard: Option<Sharding>,
    /// The encoding in which gradients travel, if not their own.
    pub compression: Option<&'a str>,
    /// The rank to kill in the middle of the second epoch of this run.
    pub chaos: Option<usize>,
}

/// The results of a training.
#[derive(Default)]
pub struct Outcome {
    /// The mean loss of every epoch.
    pub losses: Vec<f64>,
    /// Bytes of this rank's part of the optimizer's state, if it was sharded.
    pub part_bytes: Option<usize>,
}

/// What is the same on all ranks after each step. The user's state are the settings, as text.
pub type State<B> = TrainingState<B, Network<B>, OptimizerAdaptor<Adam, Network<B>, B>, f64, String>;

/// A training on one rank.
struct Training<B: AutodiffBackend> {
    state: State<B>,
    /// The optimizer, if its state is sharded. The one in `state` has no state then.
    sharded: Option<ShardedOptimizer<Adam, Network<B>, B>>,
    ddp: DataParallel<B>,
    checkpoints: Option<Checkpoints>,
    sampler: ShardedSampler,
    /// This rank's remaining shards of the epoch's batches.
    shards: Skip<Epoch>,
    /// Start, progress and metrics of this epoch, on this rank.
    clock: Instant,
    bar: ProgressBar,
    seen: usize,
    losses: f64,
    right: f64,
    outcome: Outcome,
}

impl<B: AutodiffBackend> Training<B> {
    fn begin_epoch(&mut self) {
        (self.clock, self.seen, self.losses, self.right) = (Instant::now(), 0, 0.0, 0.0);
        self.resume_epoch();
    }

    /// Sets the shards and the progress bar to the batch at which all ranks are.
    fn resume_epoch(&mut self) {
        self.shards = self.sampler.epoch(self.state.epoch).skip(self.state.batch);
        self.bar = progress_bar(self.ddp.group(), &self.sampler);
        self.bar.set_position(self.state.batch as u64);
    }
}

impl TrainingJob<'_> {
    /// Trains and tests on `device` as one rank of `group`. Rank 0 reports and saves. If ranks are lost, the others
    /// continue.
    pub fn run<B: AutodiffBackend>(&self, group: Group, device: B::Device) -> Result<Outcome, Failure> {
        self.check(&group)?;
        let identity = group.rank();
        let (sampler, bar) = (self.sampler(&group)?, ProgressBar::hidden());
        let model = seeded(&group, self.settings.seed, &device, || Network::<B>::new(&group, &device))?;
        let (model, mut ddp) = DataParallel::new(group.clone(), model)?;
        if let Some(compression) = self.compression.and_then(compression::by_name) {
            ddp.set_compression(compression)?;
        }
        let adam = AdamConfig::new();
        let mut state = State::new(model, adam.init(), self.settings.lr, self.settings.to_text()?);
        let mut sharded = self.shard.map(|shard| ShardedOptimizer::new(&ddp, adam.init(), shard)).transpose()?;
        if let Some(folder) = self.resume {
            let mut checkpoints = Checkpoints::new(&group, folder)?;
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
        let (clock, outcome) = (Instant::now(), Outcome::default());
        let (seen, losses, right) = (0, 0.0, 0.0);
        let shards = sampler.epoch(resumed).skip(state.batch);
        let mut training =
            Training { state, sharded, ddp, checkpoints, sampler, shards, clock, bar, seen, losses, right, outcome };
        training.begin_epoch();
        loop {
            let chaos_step =
                training.state.epoch == resumed + 1 && training.state.batch == training.sampler.batches() / 2;
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
                    match self.continue_without_lost(&mut training, &failure, &device) {
                        Ok(()) => break,
                        Err(next) => failure = next,
                    }
                },
            }
        }
    }

    fn sampler(&self, group: &Group) -> Result<ShardedSampler, Failure> {
        Ok(ShardedSampler::new(group, self.data.0.len(), self.settings.batch)?.seed(self.settings.seed))
    }

    fn checkpoints(&self, group: &Group) -> Result<Option<Checkpoints>, Failure> {
        Ok(self.save.map(|folder| Checkpoints::new(group, folder)).transpose()?)
    }

    /// Makes a step, ends an epoch or, after all epochs, runs the test. Returns true after the test.
    fn advance<B: AutodiffBackend>(&self, training: &mut Training<B>, device: &B::Device) -> Result<bool, Failure> {
        let (digits, test) = &self.data;
        if training.state.epoch >= self.epochs {
            let accuracy = 100.0 * self.test(&training.ddp, test, &training.state.model.valid(), device)?;
            let sharded = training.sharded.as_ref();
            training.outcome.part_bytes = sharded.map(ShardedOptimizer::state_bytes).transpose()?;
            if training.ddp.group().rank() == 0 {
                if let Some(bytes) = training.outcome.part_bytes {
                    writeln!(io::stdout(), "the optimizer's state on this rank: {:.1} KiB", bytes as f64 / 1024.0)?;
                }
                writeln!(io::stdout(), "test accuracy: {accuracy:.1} %")?;
            }
            return Ok(true);
        }
        let Some(shard) = training.shards.next() else {
            return self.end_epoch(training).map(|()| false);
        };
        let batch = tensors::<B>(digits, &shard, device);
        let criterion = CrossEntropyLossConfig::new().init(device);
        let mut output = None;
        let run = |model: &Network<B>, (images, labels): (Tensor<B, 4>, Tensor<B, 1, Int>)| {
            let scores = model.forward(images);
            let loss = criterion.forward(scores.clone(), labels.clone());
            output = Some((scores.inner(), labels.inner(), loss.clone().inner()));
            (loss, shard.len())
        };
        let Training { state, sharded, ddp, .. } = training;
        match sharded {
            None => {
                let gradients = ddp.run(&state.model, [batch], run)?;
                state.step(gradients);
            }
            Some(optimizer) => {
                let parts = optimizer.run(&state.model, [batch], run)?;
                optimizer.step(self.settings.lr, &mut state.model, parts)?;
                state.batch += 1;
            }
        }
        if let Some((scores, labels, loss)) = output {
            training.right += count_right(scores, labels);
            training.losses += loss.into_scalar().elem::<f64>() * shard.len() as f64;
        }
        training.seen += shard.len();
        training.bar.inc(1);
        Ok(false)
    }

    fn end_epoch<B: AutodiffBackend>(&self, training: &mut Training<B>) -> Result<(), Failure> {
        let Training { state, ddp, seen, losses, right, .. } = training;
        state.model = ddp.average_states(state.model.clone())?;
        let count = (*seen).max(1) as f64;
        let [loss, accuracy] = ddp.mean(&[*losses / count, *right / count], *seen)?;
        state.next_epoch();
        training.bar.finish_and_clear();
        training.outcome.losses.push(loss);
        if ddp.group().rank() == 0 {
            let rate = self.data.0.len() as f64 / training.clock.elapsed().as_secs_f64();
            let (epoch, epochs, accuracy) = (state.epoch, self.epochs, 100.0 * accuracy);
            let mut out = io::stdout();
            writeln!(out, "epoch {epoch}/{epochs}: loss {loss:.4}, accuracy {accuracy:.1} %, {rate:.0} images/s")?;
        }
        training.begin_epoch();
        match (&mut training.checkpoints, &training.sharded) {
            (None, _) => {}
            (Some(checkpoints), None) => checkpoints.save(&training.state)?,
            (Some(checkpoints), Some(optimizer)) => checkpoints.save((&training.state, optimizer))?,
        }
        Ok(())
    }

    /// Continues without the lost ranks, from the step that the remaining ranks have in common.
    fn continue_without_lost<B: AutodiffBackend>(
        &self,
        training: &mut Training<B>,
        cause: &Failure,
        device: &B::Device,
    ) -> Result<(), Failure> {
        training.bar.abandon();
        if training.sharded.is_some() {
            return Err(
                format!("{cause}; a part of the optimizer's state is lost: resume from the last checkpoint").into()
            );
        }
        let Training { state, ddp, .. } = training;
        let epoch = state.epoch;
        ddp.shrink(state)?;
        let group = ddp.group().clone();
        // The batch norms refer to the old group.
        state.model = Network::new(&group, device).load_record(state.model.clone().into_record());
        if group.rank() == 0 {
            let (ranks, batch, epoch) = (group.world_size(), state.batch, state.epoch + 1);
            eprintln!("{cause}\n{ranks} ranks continue from step {batch} of epoch {epoch}");
        }
        training.sampler = self.sampler(&group)?;
        training.checkpoints = self.checkpoints(&group)?;
        if training.state.epoch == epoch {
            training.resume_epoch();
        } else {
            // The others had ended the epoch.
            training.begin_epoch();
        }
        Ok(())
    }

    /// Kills this rank as a failing machine would. A thread can only leave the group.
    fn kill_self(&self, rank: usize) -> Result<(), Failure> {
        eprintln!("rank {rank} is killed now, because of --chaos");
        #[cfg(unix)]
        if Builder::from_env().is_ok_and(|builder| builder.launched().is_some()) {
            signal_hook::low_level::raise(signal_hook::consts::SIGKILL)?;
        }
        Ok(())
    }

    /// Fails early for settings that would fail later.
    fn check(&self, group: &Group) -> Result<(), Failure> {
        let (batch, ranks) = (self.settings.batch, group.world_size());
        let tail = self.data.0.len() % batch;
        // The batch norms of all ranks take part in every step, and convolutions need at least one image.
        if (1..ranks).contains(&tail) {
            return Err(format!(
                "batches of {batch} leave {tail} images, too few for {ranks} ranks: give another --batch"
            )
            .into());
        }
        match self.save {
            Some(folder) if group.rank() == 0 => {
                fs::create_dir_all(folder).map_err(|e| format!("cannot save in {}: {e}", folder.display()).into())
            }
            _ => Ok(()),
        }
    }

    /// Returns the fraction of the test set that `model` classifies correctly. Each rank evaluates its share.
    fn test<B: AutodiffBackend>(
        &self,
        ddp: &DataParallel<B>,
        test: &Digits,
        model: &Network<B::InnerBackend>,
        device: &B::Device,
    ) -> Result<f64, Failure> {
        let share: Vec<usize> = partition(test.len(), ddp.group().world_size(), ddp.group().rank()).collect();
        let mut right = 0.0;
        if !share.is_empty() {
            let (images, labels) = tensors(test, &share, device);
            right = count_right(model.forward(images), labels) / share.len() as f64;
        }
        let [accuracy] = ddp.mean(&[right], share.len())?;
        Ok(accuracy)
    }
}

/// Returns the images `[n, 1, 8, 8]` and labels `[n]` of the chosen samples.
fn tensors<B: Backend>(digits: &Digits, chosen: &[usize], device: &B::Device) -> (Tensor<B, 4>, Tensor<B, 1, Int>) {
    let images: Vec<f32> = chosen.iter().flat_map(|&i| digits.images[i]).collect();
    let labels: Vec<i64> = chosen.iter().map(|&i| i64::from(digits.labels[i])).collect();
    let side = PIXELS.isqrt();
    let images = Tensor::from_data(TensorData::new(images, [chosen.len(), 1, side, side]), device);
    (images, Tensor::from_data(TensorData::new(labels, [chosen.len()]), device))
}

fn count_right<B: Backend>(scores: Tensor<B, 2>, labels: Tensor<B, 1, Int>) -> f64 {
    scores.argmax(1).squeeze_dim::<1>(1).equal(labels).int().sum().into_scalar().elem()
}

/// Returns a progress bar for rank 0's terminal, and a hidden one on other ranks.
fn progress_bar(group: &Group, sampler: &ShardedSampler) -> ProgressBar {
    if group.rank() != 0 {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} step {pos}/{len}, {eta} left in this epoch");
    ProgressBar::new(sampler.batches() as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
