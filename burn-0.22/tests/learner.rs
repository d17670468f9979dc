//! Bonfire's strategy for burn-train 0.22: any number of ranks trains as burn's strategy for one device does with the
//! batches of all of them.

#[path = "learner/model.rs"]
mod model;

use std::path::Path;
use std::sync::Arc;

use bonfire::{DataParallelStrategy, Error, Group};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::ranks;
use burn::data::dataloader::DataLoader;
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn_train::metric::store::EventStoreClient;
use burn_train::metric::{LearningRateMetric, LossMetric};
use burn_train::renderer::CliMetricsRenderer;
use burn_train::{EarlyStoppingStrategy, Interrupter, Learner, LearningResult, SupervisedTraining};
use tempfile::TempDir;

use model::{Batch, Batches, Log, Net, Sample, loader, samples, sharded};

const BATCH: usize = 2;
const EPOCHS: usize = 3;

/// A training on these samples.
#[derive(Clone)]
struct Training {
    samples: Vec<Sample>,
    accumulation: Option<usize>,
    epochs: usize,
}

impl Training {
    fn of(count: usize, accumulation: Option<usize>) -> Training {
        Training { samples: samples(count), accumulation, epochs: EPOCHS }
    }

    fn learner(&self, seed: usize, log: &Log) -> Learner<Net> {
        // With momentum, and without a normalisation that would hide a wrong factor.
        let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.8))).init();
        Learner::new(Net::new(seed, log), optimizer, ExponentialLrSchedulerConfig::new(0.05, 0.9).init().unwrap())
    }

    fn training(&self, folder: &Path, train: Option<Arc<dyn DataLoader<Batch>>>) -> SupervisedTraining<Net> {
        let train = train.unwrap_or_else(|| loader(self.samples.clone(), BATCH));
        let training = SupervisedTraining::new(folder, train, loader(samples(5), BATCH))
            .metrics((LossMetric::new(),))
            .metric_train(LearningRateMetric::new())
            .num_epochs(self.epochs)
            .renderer(Box::new(CliMetricsRenderer::new()))
            .with_application_logger(None);
        self.accumulation.into_iter().fold(training, SupervisedTraining::grads_accumulation)
    }

    /// The samples of each rank's batches, in each iteration of an epoch.
    fn iterations(&self, ranks: usize) -> Vec<Vec<Vec<Sample>>> {
        let count = self.samples.len();
        // The last rank also gets the remainder.
        let start = |rank| if rank == ranks { count } else { rank * (count / ranks) };
        let parts: Vec<_> = (0..ranks).map(|rank| &self.samples[start(rank)..start(rank + 1)]).collect();
        let longest = parts.iter().map(|part| part.len()).max().unwrap();
        let of_rank = |part: &&[Sample], at| part.iter().skip(at).take(BATCH).copied().collect();
        (0..longest).step_by(BATCH).map(|at| parts.iter().map(|part| of_rank(part, at)).collect()).collect()
    }

    /// burn's own strategy, on one device that gets the batches of all ranks at once.
    fn alone(&self, ranks: usize) -> (Log, TempDir) {
        let (log, folder) = (Log::default(), tempfile::tempdir().unwrap());
        let batches = Batches(self.iterations(ranks).iter().map(|batches| batches.concat()).collect());
        let result = self.training(folder.path(), Some(batches.loader())).launch(self.learner(0, &log));
        assert!(result.error.is_none() && result.interrupted.is_none());
        (log, folder)
    }

    /// Trains on this rank, whose model begins with other values than rank 0's.
    fn rank(
        &self,
        group: Group,
        folder: &Path,
        log: &Log,
        settings: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
    ) -> Result<LearningResult<Net>, Error> {
        let learner = self.learner(10 * group.rank(), log);
        DataParallelStrategy::new(group).launch(settings(self.training(folder, None)), learner)
    }

    /// The losses of each iteration, from those of the ranks' own batches.
    fn global_losses(&self, logs: &[Log]) -> Vec<f32> {
        let mut own: Vec<_> = logs.iter().map(|log| log.losses().into_iter()).collect();
        let mut losses = Vec::new();
        for _ in 0..self.epochs {
            for batches in self.iterations(logs.len()) {
                let of_rank = |(losses, batch): (&mut std::vec::IntoIter<f32>, &Vec<Sample>)| match batch.len() {
                    0 => 0.0,
                    count => losses.next().expect("a loss of each batch") * count as f32,
                };
                let sum: f32 = own.iter_mut().zip(&batches).map(of_rank).sum();
                losses.push(sum / batches.concat().len() as f32);
            }
        }
        assert!(own.iter().all(|losses| losses.len() == 0));
        losses
    }
}

fn assert_near(own: &[f32], expected: &[f32], what: &str) {
    assert_eq!(own.len(), expected.len(), "{what}");
    let worst = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5, "{what}: the greatest difference is {worst}");
}

/// What burn-train has recorded of a metric in all epochs.
fn recorded(folder: &Path, metric: &str) -> Vec<f32> {
    let files =
        (1..=EPOCHS).map(|epoch| folder.join(format!("{}.log", metric.replace("epoch", &format!("epoch-{epoch}")))));
    let text: String = files.filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    text.lines().map(|line| line.split(',').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn any_number_of_ranks_trains_as_burns_strategy_for_one_device() {
    // With equal parts, with a rank that has an iteration more, and with ranks that have no samples.
    for (n, count) in [(1, 12), (2, 12), (3, 18), (3, 11), (3, 2)] {
        for accumulation in [None, Some(2), Some(5)] {
            let training = Training::of(count, accumulation);
            let (expected, alone) = training.alone(n);
            let folders: Vec<_> = (0..n).map(|_| tempfile::tempdir().unwrap()).collect();
            let logs = ranks(n, |group| {
                let (folder, log) = (folders[group.rank()].path(), Log::default());
                let result = training.rank(group, folder, &log, |training| training).expect("no failure");
                assert!(result.error.is_none() && result.interrupted.is_none());
                log
            });
            let what = format!("{n} ranks, {count} samples, accumulation {accumulation:?}");
            for log in &logs {
                assert_near(&log.steps().concat(), &expected.steps().concat(), &what);
                assert_eq!(log.steps(), logs[0].steps(), "{what}: the ranks differ");
            }
            assert_near(&training.global_losses(&logs), &expected.losses(), &what);
            let validated = recorded(folders[0].path(), "valid/epoch/Loss");
            assert!(validated.len() >= 3 * EPOCHS, "{validated:?}");
            assert_near(&validated, &recorded(alone.path(), "valid/epoch/Loss"), &what);
            if count.is_multiple_of(n * BATCH) {
                let metric = "train/epoch/Learning_Rate";
                let rates = recorded(folders[0].path(), metric);
                assert!(rates.len() >= EPOCHS * count / n / BATCH, "{rates:?}");
                assert_near(&rates, &recorded(alone.path(), metric), &what);
            }
            assert!(folders[1..].iter().all(|folder| folder.path().read_dir().unwrap().next().is_none()), "{what}");
        }
    }
}

#[test]
fn ranks_that_are_processes_train_as_burns_strategy_for_one_device() {
    let training = Training::of(8, None);
    if is_child() {
        let log = Log::default();
        let group = Group::from_env().expect("the ranks find each other");
        training.rank(group, tempfile::tempdir().unwrap().path(), &log, |training| training).expect("no failure");
        return log.steps().concat().iter().for_each(send_line);
    }
    let expected = training.alone(2).0.steps().concat();
    for transport in ["shm", "tcp"] {
        let name = "ranks_that_are_processes_train_as_burns_strategy_for_one_device";
        for process in &mut Process::start_ranks(name, 2, transport, "60") {
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
    let whole = Training::of(12, Some(2));
    let (expected, _folder) = whole.alone(2);
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let logs = ranks(2, |group| {
        let (rank, log) = (group.rank(), Log::default());
        let stops = |training: SupervisedTraining<Net>| {
            let training = training.with_default_checkpointers();
            if rank == 0 { training.early_stopping(AfterTwo) } else { training }
        };
        whole.rank(group.clone(), folders[rank].path(), &log, stops).expect("no failure");
        let saved = |epoch| folders[rank].path().join(format!("checkpoint/model-{epoch}.bpk")).exists();
        assert_eq!([1, 2, 3].map(saved), [rank == 0, rank == 0, false]);
        // Another program, whose models begin with other values. Only rank 0 has a checkpoint.
        let resumes = |training: SupervisedTraining<Net>| {
            if rank == 0 { training.with_default_checkpointers().checkpoint(2) } else { training }
        };
        whole.rank(group, folders[rank].path(), &log, resumes).expect("no failure");
        log
    });
    for log in logs {
        assert_near(&log.steps().concat(), &expected.steps().concat(), "stopped and resumed");
    }
}

#[test]
fn a_sharded_loader_is_not_sliced_again_and_goes_on_with_the_epoch_after_the_checkpoint() {
    for (n, count) in [(1, 11), (2, 11), (3, 11), (3, 12)] {
        let training = Training::of(count, None);
        let one = Group::threads(1).unwrap().remove(0);
        let (expected, folder) = (Log::default(), tempfile::tempdir().unwrap());
        let whole = sharded(&one, training.samples.clone(), n * BATCH);
        training.training(folder.path(), Some(whole)).launch(training.learner(0, &expected));
        assert_eq!(expected.steps().len(), EPOCHS * count.div_ceil(n * BATCH));
        let folder = tempfile::tempdir().unwrap();
        let logs = ranks(n, |group| {
            let (rank, log) = (group.rank(), Log::default());
            let other = tempfile::tempdir().unwrap();
            let folder = if rank == 0 { folder.path() } else { other.path() };
            // Two epochs, and the third by another program, of which only rank 0 has the checkpoint.
            for epochs in [2, EPOCHS] {
                let loader = sharded(&group, training.samples.clone(), n * BATCH);
                let part = Training { epochs, ..training.clone() };
                let resumed = part.training(folder, Some(loader)).with_default_checkpointers();
                let resumed = if rank == 0 && epochs == EPOCHS { resumed.checkpoint(2) } else { resumed };
                let learner = part.learner(10 * rank, &log);
                let result = DataParallelStrategy::new(group.clone()).launch(resumed, learner).expect("no failure");
                assert!(result.error.is_none());
            }
            log
        });
        for log in &logs {
            assert_near(&log.steps().concat(), &expected.steps().concat(), &format!("{n} ranks, {count} samples"));
        }
    }
}

#[test]
fn interrupting_a_rank_stops_all_after_the_same_iteration() {
    let training = Training::of(24, None);
    // As burn's, a training that was interrupted before makes one iteration.
    for (interrupts, at) in [(0, Some(5)), (2, Some(5)), (1, None)] {
        let steps = ranks(3, |group| {
            let (rank, interrupter) = (group.rank(), Interrupter::new());
            let mut log = Log::default();
            if rank == interrupts {
                let interrupter = interrupter.clone();
                match at {
                    Some(at) => {
                        log = log.before(move |steps| {
                            if steps == at {
                                interrupter.stop(Some("a test"))
                            }
                        })
                    }
                    None => interrupter.stop(Some("a test")),
                }
            }
            let settings = |training: SupervisedTraining<Net>| training.with_interrupter(interrupter);
            let result = training.rank(group, tempfile::tempdir().unwrap().path(), &log, settings).unwrap();
            let reason = result.interrupted.expect("it was interrupted").reason.expect("a reason");
            let other = format!("rank {interrupts} was interrupted");
            assert_eq!(reason, if rank == interrupts { "a test" } else { &other });
            log.steps().len()
        });
        assert_eq!(steps, [at.map_or(1, |at| at + 1); 3]);
    }
}

#[test]
fn data_that_cannot_be_loaded_ends_the_training_on_all_ranks() {
    let training = Training::of(12, None);
    let errors = ranks(2, |group| {
        let own = if group.rank() == 1 { Batches(vec![Vec::new(); 3]) } else { Batches(vec![samples(2); 3]) };
        let (folder, log) = (tempfile::tempdir().unwrap(), Log::default());
        let learner = training.learner(0, &log);
        let result =
            DataParallelStrategy::new(group).launch(training.training(folder.path(), Some(own.loader())), learner);
        assert_eq!(log.steps().len(), 0);
        result.unwrap().error.expect("an error").to_string()
    });
    assert!(errors[0].contains("device 1 failed: its training has failed"), "{errors:?}");
    assert!(errors[1].contains("a batch without samples"), "{errors:?}");
}

#[test]
fn settings_and_models_that_differ_are_errors_on_all_ranks() {
    let launch = |training: &Training, group: Group, log: &Log| {
        training.rank(group, tempfile::tempdir().unwrap().path(), log, |training| training).map(drop)
    };
    ranks(2, |group| {
        let other = Training { epochs: 1 + group.rank(), ..Training::of(4, Some(2)) };
        let error = launch(&other, group.clone(), &Log::default()).unwrap_err().to_string();
        let expected = "rank 0 trains for 1 epochs, accumulating 2 batches, rank 1 for 2 epochs";
        assert!(error.contains(expected), "{error}");
        let wide = Log::default().wide(group.rank() == 1);
        let error = launch(&Training::of(4, None), group.clone(), &wide).unwrap_err().to_string();
        assert!(error.contains("`hidden.weight`"), "{error}");
        // The group is as good as before.
        launch(&Training::of(4, None), group, &Log::default()).unwrap();
    });
}

#[test]
fn a_panic_of_the_model_is_an_error_on_the_other_ranks() {
    let training = Training::of(12, None);
    let groups = Group::threads(2).unwrap();
    let failures = std::thread::scope(|scope| {
        let threads = groups.into_iter().map(|group| {
            let training = &training;
            scope.spawn(move || {
                let fails = group.rank() == 1;
                let log = Log::default().before(move |steps| assert!(!fails || steps < 2, "the model gives up"));
                training.rank(group, tempfile::tempdir().unwrap().path(), &log, |training| training).map(drop)
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    assert!(matches!(failures[0], Ok(Err(Error::PeerLost { peer: 1, .. }))), "{:?}", failures[0]);
    assert!(failures[1].is_err());
}
