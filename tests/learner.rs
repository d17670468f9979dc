//! Bonfire's strategy for burn-train 0.21: the tests that both packages share, and those of this one alone.

#[path = "shared/learner/mod.rs"]
mod learner;
#[path = "common/learner_version.rs"]
mod learner_version;

use bonfire::{DataParallelStrategy, Error};
use bonfire_testing::ranks;
use burn::data::dataset::Dataset;

use learner::{BATCH, Case, Log, Sample, samples};
use learner_version::{loss, sharded_from};

/// Samples of which one cannot be loaded.
struct Broken;

impl Dataset<Sample> for Broken {
    fn get(&self, index: usize) -> Option<Sample> {
        assert!(index != 6, "a truncated image");
        Some(samples(1)[0])
    }

    fn len(&self) -> usize {
        12
    }
}

/// burn 0.22's loaders return errors, which end a training as burn does.
#[test]
fn a_sample_that_cannot_be_loaded_ends_the_training_on_all_ranks() {
    let case = Case::of(12, None);
    let errors = ranks(2, |group| {
        let loader = sharded_from(&group, Broken, 2 * BATCH);
        let (folder, log) = (tempfile::tempdir().unwrap(), Log::default());
        let strategy = DataParallelStrategy::new(group);
        let training = case.training(folder.path(), Some(loader)).metrics(strategy.averaged(loss()));
        strategy.launch(training, learner_version::learner(0, &log)).map(drop).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, Error::Broken { .. }) && error.to_string().contains("a truncated image"), "{error}");
    }
}
