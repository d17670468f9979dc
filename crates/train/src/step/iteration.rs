//! What ranks that train in lockstep agree on: before the training its settings, and before each iteration which of
//! them have a batch, what it weighs, and whether one of them wants to stop.

use serde::{Deserialize, Serialize};

use crate::agree::all_gather_values;
use bonfire_core::internal::{answer_stop, stop_is_requested};
use bonfire_core::{Error, Group};

/// What must be the same on all ranks for their trainings to make the same steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The number of the last epoch.
    pub epochs: usize,
    /// The iterations whose gradients a step of the optimizer uses.
    pub accumulation: usize,
    /// The names of the metrics that are averaged over the ranks.
    pub averaged: Vec<String>,
    /// Whether the program weighs batches.
    pub weighs: bool,
}

impl Settings {
    /// Fails on all ranks, with the group still usable, if the settings of two ranks differ.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in that case. Otherwise those of [`Group::all_gather_value`].
    #[track_caller]
    pub fn check(&self, group: &Group, operation: &'static str) -> Result<(), Error> {
        let all = group.all_gather_value(self)?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let (first, other) = (all[0].text(), all[rank].text());
        let reason = format!("rank 0 trains for {first}, rank {rank} for {other}; give all ranks the same settings");
        Err(Error::argument(operation, reason))
    }

    fn text(&self) -> String {
        let averaged = if self.averaged.is_empty() { "no metric".into() } else { self.averaged.join(", ") };
        let weighs = if self.weighs { ", with weights of batches" } else { "" };
        let Settings { epochs, accumulation, .. } = self;
        format!("{epochs} epochs, accumulating {accumulation} batches and averaging {averaged}{weighs}")
    }
}

/// Why a rank ends its training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stop {
    /// It was interrupted, or its process was asked to stop.
    Interrupted,
    /// It has failed.
    Failed,
}

/// What a batch weighs in the mean over the ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BatchWeight {
    /// Its samples, or what the program gives it.
    Known(u64),
    /// Its data loader does not count samples.
    Unknown,
}

/// What a rank reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankReport {
    /// Its next batch. `None` if it has no batch left.
    pub batch: Option<BatchWeight>,
    /// Why it wants to stop, if it does.
    pub stop: Option<Stop>,
    /// Samples so far in this epoch, including the next batch.
    pub processed: u64,
    /// The rank's samples in the epoch.
    pub total: u64,
}

/// What all ranks do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// They train with one batch each.
    Iterate(Iteration),
    /// No rank has a batch left.
    EndEpoch,
    /// This rank wants to stop. Of several, the lowest that has failed, or else the lowest.
    Stop(usize, Stop),
}

/// An iteration, in which each rank trains with one batch, or with none if its data has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Iteration {
    /// The weight of each rank's batch. 0 without a batch.
    pub weights: Vec<u64>,
    /// Samples of all ranks so far in this epoch, including this iteration's.
    pub processed: u64,
    /// The samples of all ranks in the epoch.
    pub total: u64,
}

impl Iteration {
    /// Returns a rank's share of the weight of all batches; 0 if none of them counts.
    pub fn share(&self, rank: usize) -> f64 {
        self.weights[rank] as f64 / self.weights.iter().sum::<u64>().max(1) as f64
    }
}

/// Exchanges the ranks' reports and returns what all do next. A signal that asks this process to stop counts as an
/// interruption, from the first call on. `steps` is the number of this rank's steps so far.
///
/// # Errors
/// Those of [`Group::all_gather`].
#[track_caller]
pub fn agree(group: &Group, own: RankReport, steps: u64) -> Result<Next, Error> {
    let batch = match own.batch {
        None => [0, 0],
        Some(BatchWeight::Unknown) => [1, 0],
        Some(BatchWeight::Known(weight)) => [2, weight],
    };
    let stop = own.stop.or(stop_is_requested().then_some(Stop::Interrupted));
    let stop = stop.map_or(0, |stop| 1 + u64::from(stop == Stop::Failed));
    let report = |[batch, weight, stop, processed, total]: [u64; 5]| RankReport {
        batch: [None, Some(BatchWeight::Unknown), Some(BatchWeight::Known(weight))][batch.min(2) as usize],
        stop: [None, Some(Stop::Interrupted), Some(Stop::Failed)][stop.min(2) as usize],
        processed,
        total,
    };
    let all = all_gather_values(group, [batch[0], batch[1], stop, own.processed, own.total])?;
    let next = next(&all.into_iter().map(report).collect::<Vec<_>>());
    answer_stop(steps, matches!(next, Next::Stop(..)));
    Ok(next)
}

/// Returns what the ranks do after these reports. All find the same.
fn next(reports: &[RankReport]) -> Next {
    for stop in [Stop::Failed, Stop::Interrupted] {
        if let Some(rank) = reports.iter().position(|rank| rank.stop == Some(stop)) {
            return Next::Stop(rank, stop);
        }
    }
    if reports.iter().all(|rank| rank.batch.is_none()) {
        return Next::EndEpoch;
    }
    // A loader that does not count says nothing of the other ranks' batches either.
    let known = reports.iter().all(|rank| rank.batch != Some(BatchWeight::Unknown));
    let weight = |rank: &RankReport| match rank.batch {
        Some(BatchWeight::Known(weight)) if known => weight,
        Some(_) => 1,
        None => 0,
    };
    Next::Iterate(Iteration {
        weights: reports.iter().map(weight).collect(),
        processed: reports.iter().map(|rank| rank.processed).sum(),
        total: reports.iter().map(|rank| rank.total).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use BatchWeight::{Known, Unknown};

    fn report(batch: Option<BatchWeight>, processed: u64, total: u64) -> RankReport {
        RankReport { batch, stop: None, processed, total }
    }

    #[test]
    fn batches_weigh_as_many_samples_as_they_have() {
        let reports = [report(Some(Known(4)), 8, 20), report(None, 3, 3), report(Some(Known(1)), 5, 5)];
        let Next::Iterate(iteration) = next(&reports) else { panic!("two ranks have a batch") };
        assert_eq!(iteration, Iteration { weights: vec![4, 0, 1], processed: 16, total: 28 });
        assert_eq!([0, 1, 2].map(|rank| iteration.share(rank)), [0.8, 0.0, 0.2]);
    }

    #[test]
    fn batches_weigh_the_same_if_a_loader_does_not_count() {
        let reports = [report(Some(Known(4)), 8, 20), report(None, 3, 3), report(Some(Unknown), 0, 0)];
        let Next::Iterate(iteration) = next(&reports) else { panic!("two ranks have a batch") };
        assert_eq!(iteration.weights, [1, 0, 1]);
    }

    #[test]
    fn a_batch_that_the_program_does_not_count_has_no_share() {
        let iterate = |weights: [u64; 2]| match next(&weights.map(|weight| report(Some(Known(weight)), 4, 8))) {
            Next::Iterate(iteration) => [0, 1].map(|rank| iteration.share(rank)),
            next => panic!("{next:?}"),
        };
        assert_eq!(iterate([3, 0]), [1.0, 0.0]);
        assert_eq!(iterate([0, 0]), [0.0, 0.0]);
    }

    #[test]
    fn the_epoch_ends_once_no_rank_has_a_batch() {
        assert_eq!(next(&[report(None, 4, 4), report(None, 0, 0)]), Next::EndEpoch);
    }

    #[test]
    fn one_rank_that_stops_stops_all_and_failures_come_first() {
        let stops = |stop| RankReport { stop: Some(stop), ..report(Some(Known(4)), 4, 8) };
        let (interrupted, failed) = (stops(Stop::Interrupted), stops(Stop::Failed));
        assert_eq!(next(&[report(None, 4, 4), interrupted]), Next::Stop(1, Stop::Interrupted));
        assert_eq!(next(&[interrupted, report(None, 4, 4), failed]), Next::Stop(2, Stop::Failed));
    }
}
