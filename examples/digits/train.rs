//! The training loop.

use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use bonfire::tensor::autodiff::CollectiveBackend;
use bonfire::{DataParallel, Group, ShardedSampler, partition};
use burn::module::AutodiffModule;
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
}

impl Job<'_> {
    /// Trains and tests on `device` as one rank of `group`. Rank 0 reports and saves.
    pub fn run<B: CollectiveBackend>(&self, group: Group, device: B::Device) -> Result<(), Failure> {
        let (digits, test) = &self.data;
        self.check(&group)?;
        let mut model = Network::<B>::new(&group, self.settings.seed, &device)?;
        let mut optimizer = AdamConfig::new().init();
        let mut start = 0;
        if let Some(path) = self.resume {
            let checkpoint = Checkpoint::read(path, &group)?;
            checkpoint.check(path, &self.settings)?;
            start = checkpoint.epochs;
            (model, optimizer) = checkpoint.restore(model, optimizer, &device)?;
        }
        let (mut model, mut ddp) = DataParallel::new(group.clone(), model)?;

        let sampler = ShardedSampler::new(&group, digits.len(), self.settings.batch)?.seed(self.settings.seed);
        let loss = CrossEntropyLossConfig::new().init(&device);
        for epoch in start..self.epochs {
            let clock = Instant::now();
            let bar = progress_bar(&group, &sampler);
            let (mut seen, mut losses, mut right) = (0, 0.0, 0.0);
            for shard in sampler.epoch(epoch) {
                let (images, labels) = tensors::<B>(digits, &shard, &device);
                let scores = model.forward(images);
                right += count_right(scores.clone().inner(), labels.clone().inner());
                let loss = loss.forward(scores, labels);
                losses += loss.clone().into_scalar().elem::<f64>() * shard.len() as f64;
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let grads = ddp.sync(grads, shard.len())?;
                model = optimizer.step(self.settings.lr, model, grads);
                seen += shard.len();
                bar.inc(1);
            }
            model = ddp.average_states(model)?;
            let [loss, accuracy] = ddp.mean(&[losses / seen as f64, right / seen as f64], seen)?;
            bar.finish_and_clear();
            if group.rank() == 0 {
                let rate = digits.len() as f64 / clock.elapsed().as_secs_f64();
                let (epoch, accuracy) = (epoch + 1, 100.0 * accuracy);
                let epochs = self.epochs;
                let mut out = io::stdout();
                writeln!(out, "epoch {epoch}/{epochs}: loss {loss:.4}, accuracy {accuracy:.1} %, {rate:.0} images/s")?;
                if let Some(path) = self.save {
                    Checkpoint::new(epoch, self.settings.clone(), &model, &optimizer)?.write(path)?;
                }
            }
        }

        let accuracy = 100.0 * self.test(&ddp, test, &model.valid(), &device)?;
        if group.rank() == 0 {
            writeln!(io::stdout(), "test accuracy: {accuracy:.1} %")?;
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
