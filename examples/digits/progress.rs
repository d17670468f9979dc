//! A rank's way through an epoch.

use std::io::{self, Write};
use std::time::Instant;

use bonfire::train::Epoch;
use bonfire::{Group, ShardedSampler};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Failure;
use crate::job::TrainingJob;

/// This rank's shards of an epoch's batches, the progress bar, and the metrics.
pub struct Progress {
    pub sampler: ShardedSampler,
    /// This rank's remaining shards of the epoch's batches.
    pub shards: Epoch,
    bar: ProgressBar,
    /// Start and metrics of this epoch, on this rank.
    clock: Instant,
    seen: usize,
    losses: f64,
    right: f64,
}

impl Progress {
    /// Begins this epoch behind its first samples.
    pub fn new(job: &TrainingJob<'_>, group: &Group, epoch: usize, samples: usize) -> Result<Self, Failure> {
        let sampler = job.sampler(group)?;
        let shards = sampler.epoch(epoch)?.after(samples);
        let bar = progress_bar(group, &sampler, shards.len());
        Ok(Progress { sampler, shards, bar, clock: Instant::now(), seen: 0, losses: 0.0, right: 0.0 })
    }

    /// Goes on on the ranks of another group. What was measured remains.
    pub fn resume(
        &mut self,
        job: &TrainingJob<'_>,
        group: &Group,
        epoch: usize,
        samples: usize,
    ) -> Result<(), Failure> {
        let Progress { clock, seen, losses, right, .. } = *self;
        *self = Progress { clock, seen, losses, right, ..Progress::new(job, group, epoch, samples)? };
        Ok(())
    }

    /// Counts a batch of this rank: its number of images, its mean loss, and how many it classified correctly.
    pub fn count(&mut self, images: usize, loss: f64, right: f64) {
        self.right += right;
        self.losses += loss * images as f64;
        self.seen += images;
        self.bar.inc(1);
    }

    /// Returns this rank's mean loss and its fraction of correct classifications, and of how many images they are.
    pub fn means(&self) -> ([f64; 2], usize) {
        let count = self.seen.max(1) as f64;
        ([self.losses / count, self.right / count], self.seen)
    }

    /// Removes the progress bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Leaves the progress bar as it is.
    pub fn abandon(&self) {
        self.bar.abandon();
    }

    /// Prints a completed epoch of the job: the means over all ranks.
    pub fn report(&self, job: &TrainingJob<'_>, epoch: usize, loss: f64, accuracy: f64) -> io::Result<()> {
        let rate = job.data.0.len() as f64 / self.clock.elapsed().as_secs_f64();
        let (epochs, accuracy) = (job.epochs, 100.0 * accuracy);
        let mut out = io::stdout();
        writeln!(out, "epoch {epoch}/{epochs}: loss {loss:.4}, accuracy {accuracy:.1} %, {rate:.0} images/s")
    }
}

/// Prints the accuracy on the test set, and the bytes of this rank's part of the optimizer's state.
pub fn report_test(accuracy: f64, part_bytes: Option<usize>) -> io::Result<()> {
    let mut out = io::stdout();
    if let Some(bytes) = part_bytes {
        writeln!(out, "the optimizer's state on this rank: {:.1} KiB", bytes as f64 / 1024.0)?;
    }
    writeln!(out, "test accuracy: {:.1} %", 100.0 * accuracy)
}

/// Prints how to go on with a job that was asked to stop.
pub fn report_stop() -> io::Result<()> {
    writeln!(io::stdout(), "stopped, and saved: go on with --resume")
}

/// Returns a progress bar for rank 0's terminal, and a hidden one on other ranks. `left` batches are to come.
fn progress_bar(group: &Group, sampler: &ShardedSampler, left: usize) -> ProgressBar {
    if group.rank() != 0 {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} step {pos}/{len}, {eta} left in this epoch");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(sampler.batches() as u64).with_style(style);
    bar.set_position((sampler.batches() - left) as u64);
    bar
}
