//! What the ranks agree on before each iteration: which of them have a batch, and how many samples are in it.

use burn::data::dataloader::Progress;
use burn_train::Interrupter;

use bonfire_core::{Error, Group};
use bonfire_train::agree::all_gather_values;

/// What a rank reports.
#[derive(Clone, Copy, Default)]
pub(super) struct RankReport {
    /// The samples in its next batch, as its data loader counts them. `None` if it has no batch left.
    pub batch: Option<u64>,
    /// Whether it was interrupted.
    pub stop: bool,
    /// Samples so far in this epoch, including the next batch.
    pub processed: u64,
    /// The rank's samples in the epoch.
    pub total: u64,
}

/// What all ranks do next.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Next {
    Iterate(Iteration),
    EndEpoch,
    Stop,
}

/// An iteration, in which each rank trains with one batch, or with none if its data has ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Iteration {
    /// The weight of each rank's batch: its samples. 0 without a batch.
    pub weights: Vec<u64>,
    processed: u64,
    total: u64,
}

impl Iteration {
    /// Returns the number of batches.
    pub fn batches(&self) -> usize {
        self.weights.iter().filter(|weight| **weight > 0).count()
    }

    /// Returns a rank's share of the samples of all batches.
    pub fn share(&self, rank: usize) -> f64 {
        self.weights[rank] as f64 / self.weights.iter().sum::<u64>() as f64
    }

    /// Returns the progress of all ranks together.
    pub fn progress(&self) -> Progress {
        Progress::new(self.processed as usize, self.total as usize)
    }
}

/// Exchanges the ranks' reports and returns what all do next. An interrupted rank stops all.
pub(super) fn agree(group: &Group, interrupter: &Interrupter, own: RankReport) -> Result<Next, Error> {
    let batch = own.batch.map_or([0, 0], |samples| [1, samples]);
    let words = [batch[0], batch[1], u64::from(own.stop), own.processed, own.total];
    let report = |[batch, samples, stop, processed, total]: [u64; 5]| RankReport {
        batch: (batch == 1).then_some(samples),
        stop: stop == 1,
        processed,
        total,
    };
    let reports: Vec<_> = all_gather_values(group, words)?.into_iter().map(report).collect();
    if let Some(rank) = reports.iter().position(|rank| rank.stop)
        && !interrupter.should_stop()
    {
        interrupter.stop(Some(&format!("rank {rank} was interrupted")));
    }
    Ok(next(&reports))
}

/// Returns what the ranks do after these reports. All find the same.
fn next(reports: &[RankReport]) -> Next {
    if reports.iter().any(|rank| rank.stop) {
        return Next::Stop;
    }
    if reports.iter().all(|rank| rank.batch.is_none()) {
        return Next::EndEpoch;
    }
    // A loader that does not count says nothing of the other ranks' batches either.
    let counted = reports.iter().all(|rank| rank.batch != Some(0));
    let weight = |rank: &RankReport| rank.batch.map_or(0, |samples| if counted { samples } else { 1 });
    Next::Iterate(Iteration {
        weights: reports.iter().map(weight).collect(),
        processed: reports.iter().map(|rank| rank.processed).sum(),
        total: reports.iter().map(|rank| rank.total).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(batch: Option<u64>, processed: u64, total: u64) -> RankReport {
        RankReport { batch, stop: false, processed, total }
    }

    fn weights(reports: &[RankReport]) -> Vec<u64> {
        match next(reports) {
            Next::Iterate(iteration) => iteration.weights,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn batches_weigh_as_many_samples_as_they_have() {
        let reports = [report(Some(4), 8, 20), report(None, 3, 3), report(Some(1), 5, 5)];
        let Next::Iterate(iteration) = next(&reports) else { panic!("two ranks have a batch") };
        assert_eq!((&iteration.weights[..], iteration.batches()), (&[4, 0, 1][..], 2));
        let progress = iteration.progress();
        assert_eq!((progress.items_processed, progress.items_total), (16, 28));
    }

    #[test]
    fn batches_weigh_the_same_if_a_loader_does_not_count() {
        assert_eq!(weights(&[report(Some(4), 8, 20), report(None, 3, 3), report(Some(0), 0, 0)]), [1, 0, 1]);
    }

    #[test]
    fn the_epoch_ends_once_no_rank_has_a_batch() {
        assert_eq!(next(&[report(None, 4, 4), report(None, 0, 0)]), Next::EndEpoch);
    }

    #[test]
    fn one_interrupted_rank_stops_all() {
        let stopped = RankReport { stop: true, ..RankReport::default() };
        assert_eq!(next(&[report(Some(4), 4, 8), stopped, report(None, 4, 4)]), Next::Stop);
    }
}
