//! Trainings that go well.

use std::time::Duration;

use bonfire::{DataParallelStrategy, Error, Group};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::ranks;
use burn_train::EarlyStoppingStrategy;
use burn_train::metric::store::EventStoreClient;

use super::{BATCH, Case, EPOCHS, Log, Norm, Sample, WIDTH, all_recorded, assert_near, is_empty, part};
use crate::learner_version::*;

#[test]
fn any_number_of_ranks_trains_as_burns_strategy_for_one_device() {
    // With equal parts, with a rank that has an iteration more, and with ranks that have no samples.
    for (n, count) in [(1, 12), (2, 12), (3, 18), (3, 11), (3, 2)] {
        for accumulation in [None, Some(2), Some(5)] {
            let case = Case::of(count, accumulation);
            let (expected, alone) = case.alone(n, Log::default());
            let folders: Vec<_> = (0..n).map(|_| tempfile::tempdir().unwrap()).collect();
            let logs = ranks(n, |group| {
                let (folder, log) = (folders[group.rank()].path(), Log::default());
                check(case.rank(group, folder, &log, |training| training).expect("no failure"));
                log
            });
            let what = format!("{n} ranks, {count} samples, accumulation {accumulation:?}");
            for log in &logs {
                assert_near(&log.steps().concat(), &expected.steps().concat(), &what);
                assert_eq!(log.steps(), logs[0].steps(), "{what}: the ranks differ");
            }
            let sizes = case.iterations(n).into_iter().map(|batches| batches.iter().map(Vec::len).collect::<Vec<_>>());
            let sizes = vec![sizes.collect::<Vec<_>>(); EPOCHS].concat();
            let mean = |(losses, sizes): (Vec<f32>, Vec<usize>)| {
                let sum: f32 = losses.iter().zip(&sizes).map(|(loss, size)| loss * *size as f32).sum();
                sum / sizes.iter().sum::<usize>() as f32
            };
            let losses: Vec<_> = case.losses(&logs).into_iter().zip(sizes).map(mean).collect();
            assert_near(&losses, &expected.losses(), &what);
            let validated = all_recorded(folders[0].path(), "valid", "Loss");
            assert!(validated.len() >= 3 * EPOCHS, "{validated:?}");
            assert_near(&validated, &all_recorded(alone.path(), "valid", "Loss"), &what);
            if count.is_multiple_of(n * BATCH) {
                let rates = all_recorded(folders[0].path(), "train", "Learning_Rate");
                assert!(rates.len() >= EPOCHS * count / n / BATCH, "{rates:?}");
                assert_near(&rates, &all_recorded(alone.path(), "train", "Learning_Rate"), &what);
            }
            assert!(folders[1..].iter().all(is_empty), "{what}");
        }
    }
}

/// How often a batch of the case counts, by its first input.
fn tokens(case: &Case, inputs: &[f32]) -> usize {
    let first = case.samples.iter().position(|sample| sample.0 == inputs[..WIDTH]).expect("a sample of the case");
    [2, 1, 0, 3][first / BATCH % 4]
}

#[test]
fn a_batch_weighs_what_the_program_says() {
    for (n, count) in [(2, 12), (3, 18), (3, 11)] {
        for accumulation in [None, Some(2)] {
            let case = Case::of(count, accumulation);
            // A device on which each batch is repeated as often as its samples weigh.
            let repeated = |batch: &Vec<Sample>| match batch.first() {
                Some(first) => batch.repeat(tokens(&case, &first.0)),
                None => Vec::new(),
            };
            let iterations = case.iterations(n);
            let whole = iterations.iter().map(|batches| batches.iter().flat_map(repeated).collect());
            let (expected, folder) = (Log::default(), tempfile::tempdir().unwrap());
            let training = case.training(folder.path(), Some(batches(whole.collect()))).metrics((loss(),));
            check(training.launch(learner(0, &expected)));
            let logs = ranks(n, |group| {
                let (log, folder) = (Log::default(), tempfile::tempdir().unwrap());
                let (training, learner) = (case.training(folder.path(), None), learner(group.rank(), &log));
                let strategy = DataParallelStrategy::new(group);
                let training = training.metrics(strategy.averaged(loss()));
                let weight = {
                    let case = case.clone();
                    move |batch: &_| inputs(batch).len() / WIDTH * tokens(&case, &inputs(batch))
                };
                check(strategy.launch_weighted(training, learner, weight).expect("no failure"));
                log
            });
            for log in &logs {
                let what = format!("{n} ranks, {count} samples, accumulation {accumulation:?}");
                assert_near(&log.steps().concat(), &expected.steps().concat(), &what);
            }
        }
    }
}

#[test]
fn batches_of_which_none_counts_and_weights_on_some_ranks_are_errors_on_all() {
    ranks(2, |group| {
        let (log, folder) = (Log::default(), tempfile::tempdir().unwrap());
        let case = Case::of(8, None);
        let all = |group: &Group| (case.training(folder.path(), None), learner(0, &log), group.clone());
        let (training, model, own) = all(&group);
        let strategy = DataParallelStrategy::new(own);
        let error = match group.rank() {
            0 => strategy.launch(training, model).map(drop),
            _ => strategy.launch_weighted(training, model, |_| 1).map(drop),
        };
        let error = error.unwrap_err().to_string();
        assert!(error.contains("rank 1 for 3 epochs") && error.contains("with weights of batches"), "{error}");
        let (training, model, own) = all(&group);
        let error = DataParallelStrategy::new(own).launch_weighted(training, model, |_| 0).map(drop).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert_eq!(log.steps().len(), 0);
    });
}

#[test]
fn ranks_that_are_processes_train_as_burns_strategy_for_one_device() {
    let case = Case::of(8, None);
    if is_child() {
        let log = Log::default();
        let group = Group::from_env().expect("the ranks find each other");
        check(case.rank(group, tempfile::tempdir().unwrap().path(), &log, |training| training).expect("no failure"));
        return log.steps().concat().iter().for_each(send_line);
    }
    for (n, transport) in [(1, "auto"), (2, "shm"), (2, "tcp"), (3, "tcp")] {
        let expected = case.alone(n, Log::default()).0.steps().concat();
        let name = "learner::fit::ranks_that_are_processes_train_as_burns_strategy_for_one_device";
        for process in &mut Process::start_ranks(name, n, transport, "60") {
            let own: Vec<f32> = expected.iter().map(|_| process.read_line().parse().unwrap()).collect();
            assert_near(&own, &expected, transport);
            assert!(process.end().success());
        }
    }
}

#[derive(Clone)]
struct AfterTwo;

impl EarlyStoppingStrategy for AfterTwo {
    fn should_stop(&mut self, epoch: usize, _store: &EventStoreClient) -> bool {
        epoch == 2
    }
}

#[test]
fn rank_0_stops_early_for_all_and_all_resume_from_its_checkpoint() {
    let case = Case::of(12, Some(2));
    let (expected, _folder) = case.alone(2, Log::default());
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let logs = ranks(2, |group| {
        let (rank, log) = (group.rank(), Log::default());
        let stops = |training: Training| {
            let training = checkpoints(training);
            if rank == 0 { training.early_stopping(AfterTwo) } else { training }
        };
        check(case.rank(group.clone(), folders[rank].path(), &log, stops).expect("no failure"));
        let saved = |epoch| folders[rank].path().join(format!("checkpoint/model-{epoch}.{MODEL_FILE}")).exists();
        assert_eq!([1, 2, 3].map(saved), [rank == 0, rank == 0, false]);
        // Another program, whose models begin with other values. Only rank 0 has a checkpoint.
        let resumes = |training| if rank == 0 { checkpoints(training).checkpoint(2) } else { training };
        check(case.rank(group, folders[rank].path(), &log, resumes).expect("no failure"));
        log
    });
    for log in logs {
        assert_near(&log.steps().concat(), &expected.steps().concat(), "stopped and resumed");
    }
}

#[test]
fn a_sharded_loader_is_not_sliced_again_and_goes_on_with_the_epoch_after_the_checkpoint() {
    for (n, count) in [(1, 11), (2, 11), (3, 11), (3, 12)] {
        let case = Case::of(count, None);
        let one = Group::threads(1).unwrap().remove(0);
        let (expected, folder) = (Log::default(), tempfile::tempdir().unwrap());
        let whole = sharded(&one, case.samples.clone(), n * BATCH);
        check(case.training(folder.path(), Some(whole)).launch(learner(0, &expected)));
        assert_eq!(expected.steps().len(), EPOCHS * count.div_ceil(n * BATCH));
        let folder = tempfile::tempdir().unwrap();
        let logs = ranks(n, |group| {
            let (rank, log) = (group.rank(), Log::default());
            let other = tempfile::tempdir().unwrap();
            let folder = if rank == 0 { folder.path() } else { other.path() };
            // Two epochs, and the third by another program, of which only rank 0 has the checkpoint.
            for epochs in [2, EPOCHS] {
                let loader = sharded(&group, case.samples.clone(), n * BATCH);
                let part = Case { epochs, ..case.clone() };
                let resumed = checkpoints(part.training(folder, Some(loader)).metrics((loss(),)));
                let resumed = if rank == 0 && epochs == EPOCHS { resumed.checkpoint(2) } else { resumed };
                let strategy = DataParallelStrategy::new(group.clone());
                check(strategy.launch(resumed, learner(10 * rank, &log)).expect("no failure"));
            }
            log
        });
        for log in &logs {
            assert_near(&log.steps().concat(), &expected.steps().concat(), &format!("{n} ranks, {count} samples"));
        }
    }
}

#[test]
fn validation_may_take_longer_than_the_deadline() {
    // Three batches, each of which ends in time.
    let case = Case { epochs: 1, ..Case::of(4, None) };
    let groups = Group::builder().deadline(Duration::from_secs(8)).threads(2).unwrap();
    std::thread::scope(|scope| {
        for group in groups {
            let case = &case;
            scope.spawn(move || {
                let log = Log { validation: Duration::from_secs(3), ..Log::default() };
                let folder = tempfile::tempdir().unwrap();
                check(case.rank(group, folder.path(), &log, |training| training).expect("no failure"));
            });
        }
    });
}

#[test]
fn a_model_that_normalises_over_all_ranks_trains_as_on_one_device() {
    let case = Case::of(12, None);
    let (expected, _folder) = case.alone(3, Log::of(Norm::Batch));
    let trained = ranks(3, |group| {
        let log = Log::of(Norm::Sync);
        let folder = tempfile::tempdir().unwrap();
        let trained = check(case.rank(group, folder.path(), &log, |training| training).expect("no failure"));
        (log.steps().concat(), trained)
    });
    for (steps, values) in &trained {
        assert_near(steps, &expected.steps().concat(), "steps");
        // With the running statistics.
        assert_eq!(*values, trained[0].1);
    }
}

#[test]
fn statistics_of_batch_norm_are_averaged_at_the_end_of_an_epoch() {
    let case = Case { epochs: 1, ..Case::of(12, None) };
    let log = || Log::of(Norm::Batch);
    let trained = ranks(3, |group| {
        let folder = tempfile::tempdir().unwrap();
        check(case.rank(group, folder.path(), &log(), |training| training).expect("no failure"))
    });
    // The last values of a model are its running statistics, which depend only on the inputs.
    let statistics = |values: &[f32]| values[values.len() - 2 * super::WIDTH..].to_vec();
    let of_rank = |rank| {
        let batches = part(&case.samples, rank, 3).chunks(BATCH).map(<[_]>::to_vec).collect();
        statistics(&values_after(&log(), batches))
    };
    let own = [0, 1, 2].map(of_rank);
    let mean: Vec<_> = (0..own[0].len()).map(|i| own.iter().map(|own| own[i]).sum::<f32>() / 3.0).collect();
    assert!(own.iter().all(|own| *own != mean));
    for values in &trained {
        assert_near(&statistics(values), &mean, "statistics");
        assert_eq!(*values, trained[0]);
    }
}
