//! State that one number of ranks saves, in one form, and another loads.

use std::path::Path;

use bonfire::{Checkpoints, Group, Sharding, TrainingState};
use bonfire_testing::ranks;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, TensorData};

use super::{Odd, bits, gradients, wave};
use crate::burn_version::*;
use crate::checkpoint_version::{Adam, OTHER_OPTIMIZER_IN_SLICES, TrainingOf};

/// Takes steps with the same gradients on all ranks, of so few bits that the mean over any number of them is exact in
/// f32.
fn advance(model: &mut Odd, optimizer: &mut impl Advance<Odd>, steps: std::ops::Range<usize>) {
    for step in steps {
        let grads = step_gradients(model, step);
        optimizer.advance(0.01, model, grads, 1).unwrap();
    }
}

/// The smallest parameter has its first gradient in the last step.
fn step_gradients(model: &Odd, step: usize) -> GradientsParams {
    gradients(model, |position, i| (position > 0 || step == 5).then(|| few_bits(position, i, step)))
}

fn few_bits(position: usize, i: usize, step: usize) -> f64 {
    (wave(0, step, position, i) * 1e6).round() / f64::from(1 << 20)
}

type State = TrainingOf<Adam, Odd, ()>;

/// Runs six steps with a checkpoint after the third, or resumes from that. Returns the model at the end.
fn six_steps(group: Group, sharding: Sharding, folder: &Path, resume: bool) -> Vec<TensorData> {
    let (model, ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
    let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), sharding).unwrap();
    let mut state = State::new(model, AdamConfig::new().init(), 0.01, ());
    let mut checkpoints = Checkpoints::new(ddp.group(), folder).unwrap();
    if resume {
        assert!(checkpoints.load((&mut state, &mut optimizer)).unwrap());
    } else {
        advance(&mut state.model, &mut optimizer, 0..3);
        state.samples = 3;
        checkpoints.save((&state, &optimizer)).unwrap();
    }
    assert_eq!(state.samples, 3);
    advance(&mut state.model, &mut optimizer, 3..6);
    bits(&state.model)
}

#[test]
fn a_training_can_be_resumed_on_any_number_of_ranks_bit_for_bit() {
    let whole =
        ranks(1, |group| six_steps(group, Sharding::None, tempfile::tempdir().unwrap().path(), false)).remove(0);
    for (n, sharding) in [(4, Sharding::Blocks(2)), (3, Sharding::All), (4, Sharding::None), (1, Sharding::None)] {
        let folder = tempfile::tempdir().unwrap();
        let saved = ranks(n, |group| six_steps(group, sharding, folder.path(), false));
        assert!(saved.iter().all(|bits| *bits == whole), "{n} ranks, {sharding:?}");
        for (m, new) in [
            (n, sharding),
            (1, Sharding::None),
            (4, Sharding::All),
            (6, Sharding::Blocks(3)),
            (4, Sharding::Blocks(2)),
            (2, Sharding::None),
        ] {
            let resumed = ranks(m, |group| six_steps(group, new, folder.path(), true));
            let same = resumed.iter().all(|bits| *bits == whole);
            assert!(same, "{n} ranks, {sharding:?}, resumed on {m}, {new:?}: the result is another one");
        }
    }
}

#[test]
fn state_is_loaded_with_and_without_sharding() {
    let folder = tempfile::tempdir().unwrap();
    let whole = ranks(3, |group| six_steps(group, Sharding::All, folder.path(), false)).remove(0);
    let again = tempfile::tempdir().unwrap();
    let plain = ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
        let mut state = State::new(model, AdamConfig::new().init(), 0.01, ());
        assert!(Checkpoints::new(ddp.group(), folder.path()).unwrap().load(&mut state).unwrap());
        Checkpoints::new(ddp.group(), again.path()).unwrap().save(&state).unwrap();
        for step in 3..6 {
            let grads = step_gradients(&state.model, step);
            let grads = ddp.sync(&state.model, grads, 1).unwrap();
            state.step(grads, 1);
        }
        bits(&state.model)
    });
    assert!(plain.iter().all(|bits| *bits == whole));
    let sharded = ranks(4, |group| six_steps(group, Sharding::Blocks(2), again.path(), true));
    assert!(sharded.iter().all(|bits| *bits == whole));
}

#[test]
fn state_of_another_optimizer_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| six_steps(group, Sharding::All, folder.path(), false));
    ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
        let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        let mut optimizer = ShardedOptimizer::new(&ddp, sgd(), Sharding::All).unwrap();
        let mut state = TrainingState::new(model, sgd(), 0.01, ());
        advance(&mut state.model, &mut optimizer, 0..1);
        let (before, bytes) = (bits(&state.model), optimizer.state_bytes().unwrap());
        let error = Checkpoints::new(ddp.group(), folder.path()).unwrap().load((&mut state, &mut optimizer));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(OTHER_OPTIMIZER_IN_SLICES), "{error}");
        assert_eq!((bits(&state.model), optimizer.state_bytes().unwrap()), (before, bytes));
    });
}
