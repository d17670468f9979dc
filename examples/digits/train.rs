//! The training loop.

use std::io::{self, Write};
use std::iter::Skip;
use std::path::Path;
use std::time::Instant;

use bonfire::tensor::autodiff::{CollectiveBackend, attempt};
use bonfire::train::Epoch;
use bonfire::{DataParallel, Group, ReduceOp, ShardedSampler, partition};
use burn::module::{AutodiffModule, Module};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Failure;
use crate::checkpoint::{Checkpoint, Settings};
use crate::data::{Digits, PIXELS};
use crate::model::Network;

/// What to train, the same on all ranks.
pub struct Job<'a> {
    /// The training set and the test set.
    pub data: (Digits, Digits),
    pub settings: Settings,
    pub epochs: usize,
    pub save: Option<&'a Path>,
    pub resume: Option<&'a Path>,
    /// Which rank dies in the middle of the second epoch.
    pub chaos: Option<usize>,
}

/// A training under way on one rank.
struct Training<B: CollectiveBackend, O> {
    model: Network<B>,
    optimizer: O,
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
}

impl<B: CollectiveBackend, O: Optimizer<Network<B>, B>> Training<B, O> {
    /// Steps of this epoch so far: the same on all ranks, whoever of them was lost.
    fn steps(&self) -> usize {
        self.ddp.steps() as usize - (self.epochs - self.resumed) * self.sampler.batches()
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
    /// Trains and tests on `device` as one rank of `group`. Rank 0 reports and saves. Where ranks are lost, the others go on.
    pub fn run<B: CollectiveBackend>(&self, group: Group, device: B::Device) -> Result<(), Failure> {
        self.check(&group)?;
        let mut model = Network::<B>::new(&group, self.settings.seed, &device)?;
        let mut optimizer = AdamConfig::new().init();
        let mut resumed = 0;
        if let Some(path) = self.resume {
            let checkpoint = Checkpoint::read(path, &group)?;
            checkpoint.check(path, &self.settings)?;
            resumed = checkpoint.epochs;
            (model, optimizer) = checkpoint.restore(model, optimizer, &device)?;
        }
        let identity = group.rank();
        let (sampler, bar) = (self.sampler(&group)?, ProgressBar::hidden());
        let (model, ddp) = DataParallel::new(group, model)?;
        let shards = sampler.epoch(resumed).skip(ddp.steps() as usize);
        let (clock, epochs) = (Instant::now(), resumed);
        let (seen, losses, right) = (0, 0.0, 0.0);
        let mut training =
            Training { model, optimizer, ddp, sampler, shards, epochs, resumed, clock, bar, seen, losses, right };
        training.begin_epoch();
        loop {
            let middle = training.epochs == resumed + 1 && training.steps() == training.sampler.batches() / 2;
            if middle && self.chaos == Some(identity) {
                return self.die(identity);
            }
            match self.advance(&mut training, &device) {
                Ok(true) => return Ok(()),
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
    fn advance<B, O>(&self, training: &mut Training<B, O>, device: &B::Device) -> Result<bool, Failure>
    where
        B: CollectiveBackend,
        O: Optimizer<Network<B>, B>,
    {
        let (digits, test) = &self.data;
        if training.epochs >= self.epochs {
            let accuracy = 100.0 * self.test(&training.ddp, test, &training.model.valid(), device)?;
            if training.ddp.group().rank() == 0 {
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
        let grads = training.ddp.sync(grads, shard.len())?;
        training.model = training.optimizer.step(self.settings.lr, training.model.clone(), grads);
        training.seen += shard.len();
        training.right += count_right(scores.inner(), labels.inner());
        training.losses += loss.into_scalar().elem::<f64>() * shard.len() as f64;
        training.bar.inc(1);
        Ok(false)
    }

    fn end_epoch<B, O>(&self, training: &mut Training<B, O>) -> Result<(), Failure>
    where
        B: CollectiveBackend,
        O: Optimizer<Network<B>, B>,
    {
        let Training { ddp, seen, losses, right, .. } = training;
        training.model = ddp.average_states(training.model.clone())?;
        let count = (*seen).max(1) as f64;
        let [loss, accuracy] = ddp.mean(&[*losses / count, *right / count], *seen)?;
        training.bar.finish_and_clear();
        training.epochs += 1;
        if ddp.group().rank() == 0 {
            let rate = self.data.0.len() as f64 / training.clock.elapsed().as_secs_f64();
            let (epoch, epochs, accuracy) = (training.epochs, self.epochs, 100.0 * accuracy);
            let mut out = io::stdout();
            writeln!(out, "epoch {epoch}/{epochs}: loss {loss:.4}, accuracy {accuracy:.1} %, {rate:.0} images/s")?;
            if let Some(path) = self.save {
                let Training { model, optimizer, .. } = training;
                Checkpoint::new(epoch, self.settings.clone(), model, optimizer)?.write(path)?;
            }
        }
        training.begin_epoch();
        Ok(())
    }

    /// Goes on without ranks that were lost, from where all others are.
    fn go_on<B, O>(&self, training: &mut Training<B, O>, cause: &Failure, device: &B::Device) -> Result<(), Failure>
    where
        B: CollectiveBackend,
        O: Optimizer<Network<B>, B>,
    {
        training.bar.abandon();
        let Training { model, optimizer, ddp, .. } = training;
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
        if std::env::var_os("BONFIRE_RANK").is_some() {
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
