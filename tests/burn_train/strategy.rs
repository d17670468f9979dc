//! Bonfire's strategy for burn-train.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bonfire::{DataParallelStrategy, Error, Group};
use burn::record::DefaultRecorder;
use burn_train::metric::store::EventStoreClient;
use burn_train::{EarlyStoppingStrategy, Interrupter, SupervisedTraining, TrainingStrategy};

use crate::model::{B, Log, Net, Shape, Steps, devices};
use crate::training::{Components, Training, alone, check};
use bonfire_testing::process::{Process, is_child, send_line};

/// A strategy whose ranks are all in this process, on `count` devices.
pub fn threads(count: usize) -> Arc<DataParallelStrategy<B>> {
    let ranks = devices(count).into_iter().zip(Group::threads(count).unwrap());
    Arc::new(DataParallelStrategy::new(ranks.collect()).unwrap())
}

pub fn custom(strategy: &Arc<DataParallelStrategy<B>>) -> TrainingStrategy<Components> {
    TrainingStrategy::Custom(strategy.clone())
}

/// Two processes of two devices each, which start with different parameters.
fn processes(test: &str, shape: Shape, layers: usize, delay: Duration) {
    let _alone = alone();
    let training = Training::of_steps(50, 4);
    if is_child() {
        let log = Log { delay, ..Log::default() };
        let strategy = Arc::new(DataParallelStrategy::from_env(devices(2)).unwrap());
        let seed = if std::env::var("BONFIRE_RANK").unwrap() == "0" { 1 } else { 2 };
        training.run(Net::new(shape, layers, seed, &log, &Default::default()), custom(&strategy));
        let steps = log.steps.lock().unwrap();
        let bits = |step: &Vec<f32>| step.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (replica, steps) in steps.iter() {
            let bits: Vec<_> = steps.iter().map(bits).collect();
            send_line(serde_json::to_string(&(replica, bits)).unwrap());
        }
        return;
    }
    let mut processes = Process::start_ranks(test, 2, "auto", "120");
    let expected = training.reference(Net::new(shape, layers, 1, &Log::default(), &Default::default()), 4);
    assert_eq!(expected.len(), 50);
    let mut steps = Steps::new();
    for (number, process) in (0u8..).zip(&mut processes) {
        for _ in 0..2 {
            let (replica, bits): (u8, Vec<Vec<u32>>) = serde_json::from_str(&process.read_line()).unwrap();
            let values = bits.into_iter().map(|step| step.into_iter().map(f32::from_bits).collect());
            steps.insert(2 * number + replica, values.collect());
        }
        assert!(process.end().success());
    }
    check(&steps, &[0, 1, 2, 3], &expected);
}

#[test]
fn two_processes_of_two_devices_equal_one_device() {
    let name = "strategy::two_processes_of_two_devices_equal_one_device";
    processes(name, Shape::Chain, 3, Duration::ZERO);
}

#[test]
fn parallel_branches_of_equal_shape_keep_their_gradients_apart() {
    let name = "strategy::parallel_branches_of_equal_shape_keep_their_gradients_apart";
    processes(name, Shape::Branches, 4, Duration::from_millis(20));
}

#[test]
fn accumulation_and_schedule_are_those_of_burn() {
    let _alone = alone();
    for accumulation in [1, 2] {
        let log = Log::default();
        let net = Net::new(Shape::Chain, 2, 1, &log, &Default::default());
        // Five batches in an epoch: the gradients of the last one are left over where two are accumulated.
        let training = Training { decay: 0.97, accumulation, ..Training::of_steps(20, 3) };
        let expected = training.reference(net.clone(), 3);
        assert_eq!(expected.len(), if accumulation == 1 { 20 } else { 8 });
        training.run(net, custom(&threads(3)));
        check(&log.steps.lock().unwrap(), &[0, 1, 2], &expected);
    }
}

#[test]
fn a_strategy_can_train_again() {
    let _alone = alone();
    let strategy = threads(2);
    for _ in 0..2 {
        let log = Log::default();
        let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
        let training = Training::of_steps(3, 2);
        let expected = training.reference(net.clone(), 2);
        training.run(net, custom(&strategy));
        check(&log.steps.lock().unwrap(), &[0, 1], &expected);
    }
}

#[test]
fn rank_0_stops_early_for_all_and_saves() {
    let _alone = alone();
    #[derive(Clone)]
    struct AfterTwo;
    impl EarlyStoppingStrategy for AfterTwo {
        fn should_stop(&mut self, epoch: usize, _store: &EventStoreClient) -> bool {
            epoch == 2
        }
    }
    let log = Log::default();
    let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
    let (_, folder) = Training::of_steps(50, 2).run_with(net, custom(&threads(2)), |training| {
        training.early_stopping(AfterTwo).with_file_checkpointer(DefaultRecorder::new())
    });
    let saved = |epoch| folder.path().join(format!("checkpoint/model-{epoch}.mpk")).exists();
    assert_eq!([1, 2, 3].map(saved), [true, true, false]);
    let steps = log.steps.lock().unwrap();
    assert_eq!(steps.values().map(Vec::len).collect::<Vec<_>>(), [10, 10]);
}

#[test]
fn all_ranks_resume_from_rank_0s_checkpoint() {
    let _alone = alone();
    let whole = Training { decay: 0.97, ..Training::of_steps(20, 2) };
    let half = Training { epochs: 2, ..whole.clone() };
    if is_child() {
        let rank: usize = std::env::var("BONFIRE_RANK").unwrap().parse().unwrap();
        let strategy = Arc::new(DataParallelStrategy::from_env(devices(1)).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let run = |training: &Training, strategy: &Arc<DataParallelStrategy<B>>, seed, from: Option<usize>| {
            let log = Log::default();
            let net = Net::new(Shape::Chain, 2, seed, &log, &Default::default());
            training.run_in(folder.path(), net, custom(strategy), |training| {
                let training = training.with_file_checkpointer(DefaultRecorder::new());
                from.into_iter().fold(training, SupervisedTraining::checkpoint)
            });
            let steps = log.steps.lock().unwrap().remove(&0).unwrap();
            steps.iter().map(|step| step.iter().map(|x| x.to_bits()).collect()).collect::<Vec<Vec<_>>>()
        };
        let uninterrupted = run(&whole, &strategy, 1, None);
        run(&half, &strategy, 1, None);
        if rank == 1 {
            // Only rank 0 saves. This process has a checkpoint of another training, and an earlier one.
            run(&Training { epochs: 1, ..whole.clone() }, &threads(1), 9, None);
        }
        let resumed = run(&whole, &strategy, 7 + rank as u32, Some([2, 1][rank]));
        send_line(serde_json::to_string(&(uninterrupted, resumed)).unwrap());

        let net = Net::new(Shape::Chain, 1, 1, &Log::default(), &Default::default());
        send_line(fails(&Training { epochs: 1 + rank, ..whole }, net, &strategy));
        return;
    }
    let mut processes = Process::start_ranks("strategy::all_ranks_resume_from_rank_0s_checkpoint", 2, "auto", "120");
    for process in &mut processes {
        let (uninterrupted, resumed): (Vec<Vec<u32>>, Vec<Vec<u32>>) =
            serde_json::from_str(&process.read_line()).unwrap();
        assert_eq!(uninterrupted.len(), 20);
        assert!(uninterrupted[10..] == resumed, "the resumed training is another one");
        let text = process.read_line();
        let expected = "rank 0 trains for 1 epochs, accumulating 1 batches, rank 1 for 2 epochs";
        assert!(text.contains(expected), "{text}");
        assert!(process.end().success());
    }
}

#[test]
fn validation_may_take_longer_than_the_deadline() {
    let _alone = alone();
    let groups = Group::builder().deadline(Duration::from_secs(10)).threads(2).unwrap();
    let strategy = DataParallelStrategy::new(devices(2).into_iter().zip(groups).collect()).unwrap();
    let log = Log { validation: Duration::from_secs(2), ..Log::default() };
    let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
    let training = Training { validation: 6, epochs: 2, ..Training::of_steps(3, 2) };
    training.run(net, custom(&Arc::new(strategy)));
    assert_eq!(log.steps.lock().unwrap().values().map(Vec::len).collect::<Vec<_>>(), [6, 6]);
}

#[test]
fn an_interruption_stops_all_ranks_at_the_same_step() {
    let _alone = alone();
    static INTERRUPTER: Mutex<Option<Interrupter>> = Mutex::new(None);
    let interrupt = |replica, steps| {
        if (replica, steps) == (2, 7) {
            INTERRUPTER.lock().unwrap().as_ref().unwrap().stop(Some("a test"));
        }
    };
    let log = Log { before: Some(interrupt), delay: Duration::from_millis(5), ..Log::default() };
    let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
    Training::of_steps(50, 3).run_with(net, custom(&threads(3)), |training| {
        *INTERRUPTER.lock().unwrap() = Some(training.interrupter());
        training
    });
    let steps = log.steps.lock().unwrap();
    // The others may have been about to decide on the same step, or to take it.
    let counts: Vec<_> = steps.values().map(Vec::len).collect();
    assert!(counts == [7; 3] || counts == [8; 3], "{counts:?}");
}

/// Runs a training that fails, and returns the message of its panic.
pub fn fails(training: &Training, net: Net<B>, strategy: &Arc<DataParallelStrategy<B>>) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| training.run(net, custom(strategy)))).unwrap_err();
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap()
}

#[test]
fn running_statistics_need_a_process_for_each_device() {
    let _alone = alone();
    let log = Log::default();
    let net = || Net::new(Shape::Chain, 1, 1, &log, &Default::default()).normed();
    let text = fails(&Training::of_steps(3, 2), net(), &threads(2));
    assert!(text.contains("give each device a process of its own"), "{text}");
    Training::of_steps(3, 1).run(net(), custom(&threads(1)));
    assert_eq!(log.steps.lock().unwrap()[&0].len(), 3);
}

#[test]
fn a_panic_in_the_model_ends_all_ranks_and_propagates() {
    let _alone = alone();
    let panics = |replica, steps| assert!((replica, steps) != (1, 1), "the model gives up");
    let log = Log { before: Some(panics), ..Log::default() };
    let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
    let strategy = threads(2);
    assert_eq!(fails(&Training::of_steps(3, 2), net, &strategy), "the model gives up");
    assert!(matches!(strategy.failure(), Some(Error::PeerLost { peer: 1, .. })), "{:?}", strategy.failure());
}

#[test]
fn invalid_groups_and_devices_are_rejected() {
    let refused = |devices: Vec<_>, groups: Vec<Group>, expected: &str| {
        let strategy = DataParallelStrategy::<B>::new(devices.into_iter().zip(groups).collect());
        let error = strategy.map(drop).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let groups = |count| Group::threads(count).unwrap();
    refused(Vec::new(), Vec::new(), "at least one device");
    refused([devices(1), devices(1)].concat(), groups(2), "is there twice");
    refused(devices(2), vec![groups(2).remove(0), groups(2).remove(0)], "rank 0 is there twice");
    refused(devices(2), vec![groups(2).remove(0), groups(3).remove(1)], "groups of 2 and of 3 ranks");
}
