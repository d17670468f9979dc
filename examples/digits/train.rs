//! The training loop.

use std::io::{self, Write};
use std::iter::Skip;
use std::path::Path;
use std::time::Instant;

use bonfire::tensor::autodiff::{CollectiveBackend, attempt};
use bonfire::train::Epoch;
use bonfire::{Builder, DataParallel, Group, ReduceOp, ShardedSampler, Sharding, partition};
use burn::module::{AutodiffModule, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Failure;
use crate::checkpoint::{Checkpoint, Settings};
use crate::data::{Digits, PIXELS};
use crate::model::Network;
use crate::optimizer::Updates;

/// What to train, the same on all ranks.
pub struct Job<'a> {
    /// The training set and the test set.
    pub data: (Digits, Digits),
    pub settings: Settings,
    pub epochs: usize,
    pub save: Option<&'a Path>,
    pub resume: Option<&'a Path>,
    /// Among which ranks the optimizer's state is dealt out, if at all.
    pub shard: Option<Sharding>,
    /// Which rank dies in the middle of the second epoch.
    pub chaos: Option<usize>,
}

/// What came of it.
#[derive(Default)]
pub struct Outcome {
    /// The mean loss of every epoch.
    pub losses: Vec<f64>,
    /// Bytes of this rank's part of the optimizer's state, where it was dealt out.
    pub part_bytes: Option<usize>,
}

/// A training under way on one rank.
struct Training<B: CollectiveBackend> {
    model: Network<B>,
    optimizer: Updates<B>,
    ddp: DataParallel<B>,
    sampler: ShardedSampler,
    /// What is left of this epoch.
    shards: Skip<Epoch>,
    /// Epochs that were reported, and how many were trained before this run.
    epochs: usize,
    resumed: usize,
    /// Of this epoch so far, on this rank.
    clock: Instant,
    bar: ProgressBar,
    seen: usize,
    losses: f64,
    right: f64,
    outcome: Outcome,
}

impl<B: CollectiveBackend> Training<B> {
    /// Steps of this epoch so far: the same on all ranks, whoever of them was lost.
    fn steps(&self) -> usize {
        self.optimizer.steps(&self.ddp) as usize - (self.epochs - self.resumed) * self.sampler.batches()
    }

    fn begin_epoch(&mut self) {
        (self.clock, self.seen, self.losses, self.right) = (Instant::now(), 0, 0.0, 0.0);
        self.deal();
    }

    /// The shards and the progress from where all ranks are.
    fn deal(&mut self) {
        self.shards = self.sampler.epoch(self.epochs).skip(self.steps());
        self.bar = progress_bar(self.ddp.group(), &self.sampler);
        self.bar.set_position(self.steps() as u64);
    }
}

impl Job<'_> {
    /// Trains and tests on `device` as one rank of `group`. Rank 0 reports and saves. Where ranks are lost, the others
    /// go on.
    pub fn run<B: CollectiveBackend>(&self, group: Group, device: B::Device) -> Result<Outcome, Failure> {
        self.check(&group)?;
        let mut model = Network::<B>::new(&group, self.settings.seed, &device)?;
        let mut saved = None;
        if let Some(path) = self.resume {
            let checkpoint = Checkpoint::read(path, &group)?;
            checkpoint.check(path, &self.settings)?;
            model = checkpoint.model(model, &device)?;
            saved = Some(checkpoint);
        }
        let resumed = saved.as_ref().map_or(0, |checkpoint| checkpoint.epochs);
        let identity = group.rank();
        let (sampler, bar) = (self.sampler(&group)?, ProgressBar::hidden());
        let (model, ddp) = DataParallel::new(group, model)?;
        let mut optimizer = Updates::new(&ddp, self.shard)?;
        if let Some(checkpoint) = saved {
            optimizer.load(&checkpoint.optimizer, &device)?;
        }
        let (clock, epochs) = (Instant::now(), resumed);
        let (seen, losses, right, outcome) = (0, 0.0, 0.0, Outcome::default());
        let shards = sampler.epoch(resumed).skip(seen);
        let mut training = Training {
            model,
            optimizer,
            ddp,
            sampler,
            shards,
            epochs,
            resumed,
            clock,
            bar,
            seen,
            losses,
            right,
            outcome,
        };
        training.begin_epoch();
        loop {
            let middle = training.epochs == resumed + 1 && training.steps() == training.sampler.batches() / 2;
            if middle && self.chaos == Some(identity) {
                self.die(identity)?;
                return Ok(training.outcome);
            }
            match self.advance(&mut training, &device) {
                Ok(true) => return Ok(training.outcome),
                Ok(false) => {}
                Err(mut failure) => loop {
                    let lost = matches!(
                        failure.downcast_ref(),
                        Some(bonfire::Error::PeerLost { .. } | bonfire::Error::Left { .. })
                    );
                    if !lost {
                        return Err(failure);
                    }
                    // Another may be lost on the way.
                    match self.go_on(&mut training, &failure, &device) {
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

    /// A step, or what ends an epoch, or, after all of them, the test: true when that is done.
    fn advance<B: CollectiveBackend>(&self, training: &mut Training<B>, device: &B::Device) -> Result<bool, Failure> {
        let (digits, test) = &self.data;
        if training.epochs >= self.epochs {
            let accuracy = 100.0 * self.test(&training.ddp, test, &training.model.valid(), device)?;
            training.outcome.part_bytes = training.optimizer.part_bytes()?;
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
        let (images, labels) = tensors::<B>(digits, &shard, device);
        let (model, loss) = (&training.model, CrossEntropyLossConfig::new().init(device));
        // The norms call collectives.
        let (scores, loss, grads) = attempt(|| {
            let scores = model.forward(images);
            let loss = loss.forward(scores.clone(), labels.clone());
            let grads = GradientsParams::from_grads(loss.backward(), model);
            (scores, loss, grads)
        })?;
        let Training { model, optimizer, ddp, .. } = training;
        optimizer.step(self.settings.lr, model, ddp, grads, shard.len())?;
        training.seen += shard.len();
        training.right += count_right(scores.inner(), labels.inner());
        training.losses += loss.into_scalar().elem::<f64>() * shard.len() as f64;
        training.bar.inc(1);
        Ok(false)
    }

    fn end_epoch<B: CollectiveBackend>(&self, training: &mut Training<B>) -> Result<(), Failure> {
        let Training { ddp, seen, losses, right, .. } = training;
        training.model = ddp.average_states(training.model.clone())?;
        let count = (*seen).max(1) as f64;
        let [loss, accuracy] = ddp.mean(&[*losses / count, *right / count], *seen)?;
        let state = self.save.map(|_| training.optimizer.save(ddp.group())).transpose()?;
        training.bar.finish_and_clear();
        training.epochs += 1;
        training.outcome.losses.push(loss);
        if ddp.group().rank() == 0 {
            let rate = self.data.0.len() as f64 / training.clock.elapsed().as_secs_f64();
            let (epoch, epochs, accuracy) = (training.epochs, self.epochs, 100.0 * accuracy);
            let mut out = io::stdout();
            writeln!(out, "epoch {epoch}/{epochs}: loss {loss:.4}, accuracy {accuracy:.1} %, {rate:.0} images/s")?;
            if let Some((path, state)) = self.save.zip(state) {
                Checkpoint::new(epoch, self.settings.clone(), &training.model, state)?.write(path)?;
            }
        }
        training.begin_epoch();
        Ok(())
    }

    /// Goes on without ranks that were lost, from where all others are.
    fn go_on<B: CollectiveBackend>(
        &self,
        training: &mut Training<B>,
        cause: &Failure,
        device: &B::Device,
    ) -> Result<(), Failure> {
        training.bar.abandon();
        let Training { model, optimizer, ddp, .. } = training;
        let Updates::Whole(optimizer) = optimizer else {
            return Err(
                format!("{cause}; a part of the optimizer's state is lost: start from the last checkpoint").into()
            );
        };
        ddp.shrink(model, optimizer)?;
        let group = ddp.group().clone();
        // Some may have been told the epoch's result, and others not.
        let mut reported = [training.epochs as u64];
        group.all_reduce(&mut reported, ReduceOp::Min)?;
        training.epochs = reported[0] as usize;
        // The norms hold the old group.
        training.model = Network::random(&group, device).load_record(training.model.clone().into_record());
        training.sampler = self.sampler(&group)?;
        training.deal();
        if group.rank() == 0 {
            eprintln!(
                "{cause}\n{} of the ranks go on from step {} of epoch {}",
                group.world_size(),
                training.steps(),
                training.epochs + 1
            );
        }
        Ok(())
    }

    /// Ends this rank as a failing machine would. A thread can only leave.
    fn die(&self, rank: usize) -> Result<(), Failure> {
        eprintln!("rank {rank} dies now, as --chaos says");
        #[cfg(unix)]
        if Builder::from_env().is_ok_and(|builder| builder.launched().is_some()) {
            signal_hook::low_level::raise(signal_hook::consts::SIGKILL)?;
        }
        Ok(())
    }

    /// Refuses what would fail only later.
    fn check(&self, group: &Group) -> Result<(), Failure> {
        let (batch, ranks) = (self.settings.batch, group.world_size());
        let tail = self.data.0.len() % batch;
        // The norms of all ranks take part in every step, and convolutions want at least one image.
        if (1..ranks).contains(&tail) {
            return Err(format!(
                "batches of {batch} leave {tail} images, too few for {ranks} ranks: give another --batch"
            )
            .into());
        }
        match self.save {
            Some(path) if group.rank() == 0 => Checkpoint::try_place(path),
            _ => Ok(()),
        }
    }

    /// The part of the test set that `model` gets right: each rank looks at its share.
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

/// The images `[n, 1, 8, 8]` and labels `[n]` of the chosen samples.
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

/// Rank 0's progress on a terminal, nothing elsewhere.
fn progress_bar(group: &Group, sampler: &ShardedSampler) -> ProgressBar {
    if group.rank() != 0 {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} step {pos}/{len}, {eta} left in this epoch");
    ProgressBar::new(sampler.batches() as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
