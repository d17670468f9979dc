//! What is refused of several models, on all ranks.

use bonfire::train::checkpoint::Named;
use bonfire::{Checkpoints, Error, TrainingState};
use burn::optim::{AdamConfig, SgdConfig};

use super::*;
use crate::checkpoint_version::{Adam, TrainingOf};

type State = TrainingOf<Adam, Net, ()>;

fn state(group: &Group, seed: usize) -> State {
    let model = map_floats(Net::new(seed), |data, _| data.convert_dtype(DType::F32));
    let (model, _) = DataParallel::new(group.clone(), model).unwrap();
    TrainingState::new(model, AdamConfig::new().init(), 0.01, ())
}

/// Runs on two ranks, which get the same errors.
fn refused(expected: &[&str], attempts: impl Fn(&Group, &Path) -> Vec<Error> + Sync) {
    let folder = tempfile::tempdir().unwrap();
    let mut errors = ranks(2, |group| attempts(&group, folder.path()));
    assert_eq!(errors[0], errors[1]);
    let errors = errors.swap_remove(0);
    assert_eq!(errors.len(), expected.len());
    for (error, expected) in errors.iter().zip(expected) {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn what_was_saved_under_other_names_is_refused_and_nothing_changed() {
    let expected = [
        "two trainings are called `a`; give them different names",
        "the name `a/b` has a `/`; give another one",
        "it was saved without `c`, and has `a`, `b`; load one of these",
        "it has trainings with names, `a`, `b`; load each as `Named` with its name",
        "`b`: it was saved for another model: `weight`",
        "it was saved without `a`, and has one training without a name; load it without `Named`",
    ];
    refused(&expected, |group, folder| {
        let (mut x, mut y) = (state(group, 1), state(group, 2));
        let mut checkpoints = Checkpoints::new(group, folder).unwrap();
        let mut errors = vec![
            checkpoints.save((Named("a", &x), Named("a", &y))).unwrap_err(),
            checkpoints.save((Named("a/b", &x), Named("b", &y))).unwrap_err(),
        ];
        checkpoints.save((Named("a", &x), Named("b", &y))).unwrap();
        let before = [weights(&x.model), weights(&y.model)];
        errors.push(checkpoints.load((Named("a", &mut x), Named("c", &mut y))).unwrap_err());
        errors.push(checkpoints.load(&mut x).unwrap_err());
        let layer: Linear = LinearConfig::new(INPUTS, 2).init(&device());
        let (layer, _) = DataParallel::new(group.clone(), layer).unwrap();
        let mut other: TrainingOf<Adam, Linear, ()> = TrainingState::new(layer, AdamConfig::new().init(), 0.01, ());
        errors.push(checkpoints.load((Named("a", &mut y), Named("b", &mut other))).unwrap_err());
        assert_eq!([weights(&x.model), weights(&y.model)], before);
        // In another order, and one of them alone.
        checkpoints.load((Named("b", &mut x), Named("a", &mut y))).unwrap();
        assert_eq!([weights(&y.model), weights(&x.model)], before);
        checkpoints.load(Named("a", &mut x)).unwrap();
        assert_eq!(weights(&x.model), before[0]);
        checkpoints.save(&x).unwrap();
        errors.push(checkpoints.load((Named("a", &mut x), Named("b", &mut y))).unwrap_err());
        errors
    });
}

#[test]
fn anything_that_differs_is_found_without_saving() {
    let expected = ["`b/average/first.bias` of rank 1 differs from rank 0's", "rank 1 at epoch 0, sample 1"];
    refused(&expected, |group, folder| {
        let (mut x, mut y) = (state(group, 1), state(group, 2));
        y.average = Some(y.model.valid());
        let mut checkpoints = Checkpoints::read_only(group, folder).unwrap();
        checkpoints.verify((Named("a", &x), Named("b", &y))).unwrap();
        let other = |data: TensorData, _| data.convert_dtype(DType::F32);
        if group.rank() == 1 {
            let mut net = Net::new(2);
            net.first = Net::new(3).first;
            y.average = Some(map_floats(net, other).valid());
        }
        let mut errors = vec![checkpoints.verify((Named("a", &x), Named("b", &y))).unwrap_err()];
        x.samples = group.rank();
        errors.push(checkpoints.verify((Named("a", &x), Named("b", &y))).unwrap_err());
        assert!(checkpoints.sets().unwrap().is_empty());
        errors
    });
}

#[test]
fn each_model_is_brought_to_the_same_state_when_ranks_are_lost() {
    let results = ranks(3, |group| {
        let rank = group.rank();
        let model = |seed| map_floats(Net::new(seed), |data, _| data.convert_dtype(DType::F32));
        let (maker, mut making) = DataParallel::new(group.clone(), model(1)).unwrap();
        let (judge, mut judging) = DataParallel::new(group.clone(), model(2)).unwrap();
        let mut maker = TrainingState::new(maker, SgdConfig::new().init(), 0.1, ());
        let mut judge = TrainingState::new(judge, SgdConfig::new().init(), 0.1, ());
        let step = |ddp: &DataParallel, net: &Net, step: usize| {
            let own = batch(ddp.group(), step);
            ddp.run(net, [own], |net, own| {
                let output = net.forward(data(&own, INPUTS, 1, DType::F32));
                (output.powi_scalar(2).mean(), own.len())
            })
        };
        let grads = step(&judging, &judge.model, 0).unwrap();
        judge.step(grads, BATCH);
        let grads = step(&making, &maker.model, 0).unwrap();
        if rank == 2 {
            // It leaves before its step of the second model.
            return Vec::new();
        }
        if rank == 1 {
            // As if the exchange had failed on rank 0 only.
            maker.step(grads, BATCH);
        }
        judging.shrink(&mut judge).unwrap();
        making.shrink_to(judging.group(), &mut maker).unwrap();
        assert_eq!((judge.samples, maker.samples, making.group().world_size()), (BATCH, BATCH, 2));
        let grads = step(&judging, &judge.model, 1).unwrap();
        judge.step(grads, BATCH);
        let grads = step(&making, &maker.model, 1).unwrap();
        maker.step(grads, BATCH);
        [weights(&judge.model), weights(&maker.model)].concat()
    });
    assert!(!results[0].is_empty() && results[0] == results[1]);
}
