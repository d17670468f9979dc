//! Ranks whose data ends at different times.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use bonfire::{DataParallelStrategy, Error, Group};

use crate::model::{B, Log, Net, Sample, Shape, devices, samples};
use crate::strategy::{custom, fails, threads};
use crate::training::{Training, alone, check};

/// Runs `rank` for each rank on a thread, with a strategy of its own, as processes of one device each do.
fn each_rank<T: Send>(count: usize, rank: impl Fn(Group, Arc<DataParallelStrategy<B>>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let rank = &rank;
        let ranks = devices(count).into_iter().zip(Group::threads(count).unwrap()).map(|(device, group)| {
            let strategy = DataParallelStrategy::new(vec![(device, group.clone())]).unwrap();
            scope.spawn(move || rank(group, Arc::new(strategy)))
        });
        let threads: Vec<_> = ranks.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A training of which each rank gets exactly its own samples.
fn training_of(own: &[Sample], ranks: usize, accumulation: usize) -> Training {
    // Each process splits its own data.
    Training { samples: own.repeat(ranks), validation: 3, batch: 2, epochs: 2, decay: 0.97, accumulation }
}

/// The number of losses that burn-train has recorded in an epoch.
fn recorded(folder: &Path, split: &str, epoch: usize) -> usize {
    let file = folder.join(split).join(format!("epoch-{epoch}")).join("Loss.log");
    std::fs::read_to_string(file).map_or(0, |losses| losses.lines().count())
}

#[test]
fn ranks_with_0_1_and_4_batches_train_as_one_rank_with_all_of_them() {
    let _alone = alone();
    let all = samples(8);
    for order in [[0, 1, 2], [2, 0, 1]] {
        // No batch; one of a single sample; four, of which the last has a single sample.
        let parts = order.map(|part| [&all[..0], &all[..1], &all[1..]][part]);
        for accumulation in [1, 2] {
            let log = Log::default();
            let net = || Net::new(Shape::Chain, 2, 1, &log, &Default::default());
            let expected = training_of(&[], 3, accumulation).reference_of(net(), &parts);
            assert_eq!(expected.len(), 8 / accumulation);
            each_rank(3, |group, strategy| {
                let own = training_of(parts[group.rank()], 3, accumulation);
                let (_, folder) = own.run_with(net(), custom(&strategy), |training| training);
                // Rank 0 records its own losses.
                let batches = if group.rank() == 0 { [0, 1, 4][order[0]] } else { 0 };
                assert_eq!([1, 2].map(|epoch| recorded(folder.path(), "train", epoch)), [batches; 2]);
                let validated = if group.rank() == 0 { 3 } else { 0 };
                assert_eq!([1, 2].map(|epoch| recorded(folder.path(), "valid", epoch)), [validated; 2]);
            });
            let difference = check(&log.steps.lock().unwrap(), &[0, 1, 2], &expected);
            assert!(difference < 1e-6, "they differ from one rank by {difference:e}");
        }
    }
}

#[test]
fn any_number_of_samples_can_be_split() {
    let _alone = alone();
    // 0, 0 and 2 samples; 3, 3 and 4; 3, 3 and 5, of which one rank has a third batch.
    for count in [2, 10, 11] {
        let log = Log::default();
        let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
        let training = Training { samples: samples(count), batch: 2, epochs: 2, ..Training::of_steps(1, 1) };
        let expected = training.reference(net.clone(), 3);
        training.run(net, custom(&threads(3)));
        check(&log.steps.lock().unwrap(), &[0, 1, 2], &expected);
    }
}

#[test]
fn layers_that_communicate_need_equally_many_batches() {
    let _alone = alone();
    let all = samples(6);
    for accumulation in [1, 2] {
        let failures = each_rank(2, |group, strategy| {
            let own = training_of(&all[..2 + 4 * group.rank()], 2, accumulation);
            let net = Net::new(Shape::Chain, 1, 1, &Log::default(), &Default::default()).synced(&group);
            drop(group);
            let text = fails(&own, net, &strategy);
            let failure = strategy.failure().unwrap();
            assert!(text.contains(&failure.to_string()), "{text}");
            failure
        });
        for failure in failures {
            println!("{failure}");
            assert!(matches!(failure, Error::Mismatch { .. }), "{failure}");
        }
    }
}
