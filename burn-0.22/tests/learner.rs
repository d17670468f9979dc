//! Bonfire's strategy for burn-train 0.22: the tests that both packages share, and those of this one alone.

#[path = "../../tests/shared/learner/mod.rs"]
mod learner;
#[path = "common/learner_version.rs"]
mod learner_version;

use bonfire::DataParallelStrategy;
use bonfire_testing::ranks;

use learner::{Case, Log, samples};
use learner_version::{batches, loss};

/// burn 0.21's loaders return no errors.
#[test]
fn data_that_cannot_be_loaded_ends_the_training_on_all_ranks() {
    let case = Case::of(12, None);
    let errors = ranks(2, |group| {
        let own = if group.rank() == 1 { vec![Vec::new(); 3] } else { vec![samples(2); 3] };
        let (folder, log) = (tempfile::tempdir().unwrap(), Log::default());
        let strategy = DataParallelStrategy::new(group);
        let training = case.training(folder.path(), Some(batches(own))).metrics(strategy.averaged(loss()));
        let result = strategy.launch(training, learner_version::learner(0, &log));
        assert_eq!(log.steps().len(), 0);
        result.unwrap().error.expect("an error").to_string()
    });
    assert!(errors[0].contains("device 1 failed: its training has failed"), "{errors:?}");
    assert!(errors[1].contains("a batch without samples"), "{errors:?}");
}
