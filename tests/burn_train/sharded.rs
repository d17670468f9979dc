//! A loader that is sharded already.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bonfire::{DataParallelStrategy, Error, Group};
use burn::data::dataset::{Dataset, InMemDataset};

use crate::model::{B, Loader, Log, Net, Sample, Shape, devices, samples, sharded};
use crate::strategy::custom;
use crate::training::{Training, alone, check};

const BATCH: usize = 2;

/// A strategy of ranks in this process, which no handle outlives, and its loader of these samples.
fn strategy_with(ranks: usize, samples: impl Dataset<Sample> + 'static) -> (Arc<DataParallelStrategy<B>>, Loader) {
    let groups = Group::threads(ranks).unwrap();
    // That of any rank.
    let loader = sharded(&groups[ranks - 1], samples, ranks * BATCH);
    let strategy = DataParallelStrategy::new(devices(ranks).into_iter().zip(groups).collect()).unwrap();
    (Arc::new(strategy), loader)
}

#[test]
fn a_sharded_loader_is_not_sliced_again() {
    let _alone = alone();
    // In the last batch of all ranks each has one sample, or the first has two.
    for count in [10, 11, 12] {
        let all = samples(count);
        let log = Log::default();
        let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
        let training = Training { samples: Vec::new(), batch: BATCH, epochs: 2, ..Training::of_steps(1, 1) };
        let mut parts = [Vec::new(), Vec::new()];
        for batch in all.chunks(2 * BATCH) {
            let (first, second) = batch.split_at(batch.len().div_ceil(2));
            parts[0].extend_from_slice(first);
            parts[1].extend_from_slice(second);
        }
        let expected = training.reference_of(net.clone(), &[&parts[0], &parts[1]]);
        assert_eq!(expected.len(), 6);
        let (strategy, loader) = strategy_with(2, InMemDataset::new(all));
        let folder = tempfile::tempdir().unwrap();
        training.run_loaded(folder.path(), loader, net, custom(&strategy), |training| training);
        check(&log.steps.lock().unwrap(), &[0, 1], &expected);
    }
}

/// Samples of which one cannot be loaded.
struct Broken(usize);

impl Dataset<Sample> for Broken {
    fn get(&self, index: usize) -> Option<Sample> {
        assert!(index != self.0, "a truncated image");
        Some(samples(1)[0])
    }

    fn len(&self) -> usize {
        12
    }
}

#[test]
fn a_sample_that_cannot_be_loaded_and_a_panic_of_the_model_end_the_training_on_all_ranks() {
    let _alone = alone();
    let failure = |broken, log: Log| {
        let net = Net::new(Shape::Chain, 1, 1, &log, &Default::default());
        let training = Training { batch: BATCH, ..Training::of_steps(3, 2) };
        let (strategy, loader) = strategy_with(2, Broken(broken));
        let folder = tempfile::tempdir().unwrap();
        let run = || training.run_loaded(folder.path(), loader, net, custom(&strategy), |training| training);
        catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        strategy.failure().unwrap()
    };
    // Sample 6 is of rank 1, in the second batch.
    let error = failure(6, Log::default());
    let text = error.to_string();
    assert!(matches!(error, Error::Broken { .. }) && text.contains("on rank 1: a truncated image"), "{text}");
    // No handle of the loader's keeps the group of the rank that is lost.
    let panics = |replica, steps| assert!((replica, steps) != (1, 1), "the model gives up");
    let error = failure(12, Log { before: Some(panics), ..Log::default() });
    assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error}");
}
