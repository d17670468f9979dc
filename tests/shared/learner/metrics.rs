//! Metrics, display and log files: of one rank, and averaged over all.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bonfire::{DataParallelStrategy, Error, Group};
use bonfire_testing::ranks;
use burn_train::EarlyStoppingStrategy;
use burn_train::metric::store::{Aggregate, EventStoreClient, Split};

use super::{BATCH, Case, EPOCHS, Log, assert_near, is_empty, recorded};
use crate::learner_version::*;

/// What early stopping sees of the loss of training in each epoch.
#[derive(Clone, Default)]
struct Sees(Arc<Mutex<Vec<f32>>>);

impl EarlyStoppingStrategy for Sees {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        let loss = store.find_metric("Loss", epoch, Aggregate::Mean, &Split::Train);
        self.0.lock().unwrap().push(loss.map_or(f32::NAN, |loss| loss as f32));
        false
    }
}

fn averaged(case: &Case, group: Group, folder: &Path, log: &Log, sees: &Sees) -> Result<Trained, Error> {
    let learner = learner(10 * group.rank(), log);
    // burn's store panics where a metric has no values.
    let has_values = HAS_FINAL_VALUES || case.samples.len() >= group.world_size();
    let strategy = DataParallelStrategy::new(group);
    let training = case.training(folder, None).metrics(strategy.averaged(loss()));
    strategy.launch(if has_values { training.early_stopping(sees.clone()) } else { training }, learner)
}

/// A value, and the number of samples that it is the mean of.
type Mean = (f32, usize);

fn mean(values: impl IntoIterator<Item = Mean>) -> Mean {
    let (sum, count) =
        values.into_iter().fold((0.0, 0), |(sum, all), (value, count)| (sum + value * count as f32, all + count));
    (sum / count as f32, count)
}

#[test]
fn averaged_metrics_are_those_of_all_ranks_samples() {
    // Of the last ones rank 0 has fewer batches than others, or none.
    for (n, count) in [(1, 12), (2, 12), (3, 18), (3, 11), (3, 2)] {
        let case = Case::of(count, None);
        let (alone, alone_folder) = case.alone(n, Log::default());
        let (folders, sees): (Vec<_>, _) = ((0..n).map(|_| tempfile::tempdir().unwrap()).collect(), Sees::default());
        let logs = ranks(n, |group| {
            let (folder, log) = (folders[group.rank()].path(), Log::default());
            let sees = if group.rank() == 0 { sees.clone() } else { Sees::default() };
            check(averaged(&case, group, folder, &log, &sees).expect("no failure"));
            log
        });
        let what = format!("{n} ranks, {count} samples");
        assert_near(&logs[n - 1].steps().concat(), &alone.steps().concat(), &what);
        assert!(folders[1..].iter().all(is_empty), "{what}");
        let (iterations, losses) = (case.iterations(n), case.losses(&logs));
        for epoch in 1..=EPOCHS {
            let losses = &losses[(epoch - 1) * iterations.len()..epoch * iterations.len()];
            let of_ranks: Vec<Vec<Mean>> = iterations
                .iter()
                .zip(losses)
                .map(|(batches, losses)| losses.iter().copied().zip(batches.iter().map(Vec::len)).collect())
                .collect();
            // One for each of rank 0's batches. The last one also has the iterations after it.
            let mut entries: Vec<Vec<Mean>> = Vec::new();
            for iteration in &of_ranks {
                if iteration[0].1 > 0 {
                    entries.push(Vec::new());
                }
                entries.last_mut().into_iter().for_each(|entry| entry.extend(iteration));
            }
            let expected: Vec<_> = entries.into_iter().map(mean).collect();
            let mut found = recorded(folders[0].path(), "train", epoch, "Loss");
            let of_epoch = if HAS_FINAL_VALUES {
                let (last, beside) = found.pop().expect("the value of the epoch");
                assert_eq!(beside, "final");
                let of_rank = |rank: usize| {
                    let own: Vec<_> = of_ranks.iter().map(|ranks| ranks[rank]).filter(|own| own.1 > 0).collect();
                    let sum: f32 = own.iter().map(|own| own.0).sum();
                    (if own.is_empty() { 0.0 } else { sum / own.len() as f32 }, own.iter().map(|own| own.1).sum())
                };
                assert_near(&[last], &[mean((0..n).map(of_rank)).0], &what);
                last
            } else {
                mean(expected.iter().copied()).0
            };
            let values: Vec<_> = found.iter().map(|(value, _)| *value).collect();
            let counts: Vec<usize> = found.iter().map(|(_, count)| count.parse().unwrap()).collect();
            assert_near(&values, &expected.iter().map(|entry| entry.0).collect::<Vec<_>>(), &what);
            assert_eq!(counts, expected.iter().map(|entry| entry.1).collect::<Vec<_>>(), "{what}");
            if HAS_FINAL_VALUES || count >= n {
                assert_near(&sees.0.lock().unwrap()[epoch - 1..epoch], &[of_epoch], &what);
            }
            if count.is_multiple_of(n * BATCH) {
                let alone = recorded(alone_folder.path(), "train", epoch, "Loss");
                assert_near(
                    &values,
                    &alone.iter().map(|(value, _)| *value).take(values.len()).collect::<Vec<_>>(),
                    &what,
                );
            }
            // Rank 0 validates alone.
            let validated = |folder: &Path| recorded(folder, "valid", epoch, "Loss");
            let values = |entries: Vec<(f32, String)>| entries.into_iter().map(|(value, _)| value).collect::<Vec<_>>();
            assert_near(&values(validated(folders[0].path())), &values(validated(alone_folder.path())), &what);
        }
    }
}

#[test]
fn other_metrics_are_those_of_rank_0_and_are_shown_and_recorded_once() {
    let case = Case::of(12, None);
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let shown = [(); 3].map(|()| Arc::new(AtomicUsize::new(0)));
    let logs = ranks(3, |group| {
        let (rank, log) = (group.rank(), Log::default());
        let settings = |training| shown_by(training, shown[rank].clone());
        check(case.rank(group, folders[rank].path(), &log, settings).expect("no failure"));
        log
    });
    let shown = shown.map(|shown| shown.load(Ordering::SeqCst));
    // Two metrics in training, and the loss of three batches in validation.
    assert!(shown[0] >= EPOCHS * (2 * 2 + 3) && shown[1..] == [0, 0], "{shown:?}");
    assert!(!is_empty(&folders[0]) && is_empty(&folders[1]) && is_empty(&folders[2]));
    for epoch in 1..=EPOCHS {
        let found = recorded(folders[0].path(), "train", epoch, "Loss");
        let found: Vec<_> = found.iter().map(|(value, _)| *value).take(2).collect();
        assert_near(&found, &logs[0].losses()[2 * (epoch - 1)..2 * epoch], "rank 0's own losses");
    }
}

#[test]
fn metrics_that_only_some_ranks_average_are_an_error_on_all() {
    let case = Case::of(4, None);
    ranks(2, |group| {
        let (folder, log) = (tempfile::tempdir().unwrap(), Log::default());
        let error = if group.rank() == 0 {
            averaged(&case, group.clone(), folder.path(), &log, &Sees::default()).map(drop).unwrap_err()
        } else {
            case.rank(group.clone(), folder.path(), &log, |training| training).map(drop).unwrap_err()
        };
        let expected = "accumulating 1 batches and averaging Loss, rank 1 for 3 epochs, accumulating 1 batches and \
                        averaging no metric; give all ranks the same settings";
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(expected), "{error}");
        assert!(log.losses().is_empty());
        // The group is as good as before.
        check(averaged(&case, group, folder.path(), &log, &Sees::default()).expect("no failure"));
    });
}
