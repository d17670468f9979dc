//! Programs whose data are uneven, that evaluate, stop early, or resume.

use std::path::Path;

use bonfire::{Checkpoints, Error, ShardedSampler, SyncBatchNormConfig, TrainingState, launch};
use burn::optim::{AdamConfig, SgdConfig};

use super::*;

/// Samples of the data set: the last batch of an epoch is smaller.
const SAMPLES: usize = 46;

#[test]
fn a_training_stops_early() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        let (mut best, mut steps) = (f64::INFINITY, 0);
        for step in 0..STEPS {
            let grads = ddp.run(&model, [batch(&group, step)], |net, own| (net.loss(&own), own.len())).unwrap();
            model = optimizer.step(0.05, model, grads);
            steps += 1;
            let held_out = own(&group, 1000..1013);
            let [loss] = ddp.mean(&[number(&model.loss(&held_out))], held_out.len()).unwrap();
            // Patience of one evaluation. All ranks have the same mean, and stop in the same step.
            if loss > best {
                break;
            }
            best = loss;
        }
        assert!(steps < STEPS, "it does not stop");
        [vec![steps as f64, best], weights(&model)].concat()
    });
}

#[test]
fn rank_0_alone_evaluates() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        let mut losses = [0.0; STEPS / 10];
        for step in 0..STEPS {
            let grads = ddp.run(&model, [batch(&group, step)], |net, own| (net.loss(&own), own.len())).unwrap();
            model = optimizer.step(0.1, model, grads);
            if group.rank() == 0 && step % 10 == 9 {
                let all: Vec<usize> = (1000..1013).collect();
                losses[step / 10] = number(&model.loss(&all));
            }
        }
        group.broadcast(&mut losses, 0).unwrap();
        [losses.to_vec(), weights(&model)].concat()
    });
}

#[test]
fn the_last_batch_is_smaller_and_shards_may_be_empty() {
    equals_one_rank(|group| {
        let (model, ddp) = DataParallel::new(group, Net::new(1)).unwrap();
        let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.01, ());
        // Batches of two: the third rank has no sample.
        let sampler = ShardedSampler::new(ddp.group(), 5, 2).unwrap().seed(3);
        while state.epoch < STEPS / sampler.batches() {
            for own in sampler.epoch(state.epoch).unwrap() {
                let own = (!own.is_empty()).then_some(own);
                let grads = ddp.run(&state.model, own, |net, own| (net.loss(&own), own.len())).unwrap();
                state.step(grads, 2);
            }
            state.next_epoch();
        }
        weights(&state.model)
    });
}

#[test]
fn a_rank_whose_data_end_early_joins_the_others() {
    // One rank alone has the batches of all.
    let batches = |group: &Group, rank: usize| -> Vec<Vec<usize>> {
        let count = 40 + rank * 5;
        (0..count).map(|step| own(group, BATCH * step..BATCH * step + 6)).collect()
    };
    let train = |group: Group, uneven: bool| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        let all = batches(&group, if uneven { group.rank() } else { 0 });
        for batch in all {
            let grads = ddp.run(&model, [batch], |net, own| (net.loss(&own), own.len())).unwrap();
            model = optimizer.step(0.1, model, grads);
        }
        while let Some(grads) = ddp.join(&model).unwrap() {
            model = optimizer.step(0.1, model, grads);
        }
        weights(&model)
    };
    let even = ranks(3, |group| train(group, false));
    let uneven = ranks(3, |group| train(group, true));
    assert!(uneven.iter().all(|weights| *weights == uneven[0]));
    assert_ne!(even[0], uneven[0]);
    // What the last steps do, on one rank with the samples of those that still have some.
    let expected = ranks(1, |group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        for step in 0..STEPS {
            let present = (0..3).filter(|rank| step < 40 + rank * 5);
            let samples = present.flat_map(|rank| partition(6, 3, rank).map(move |i| BATCH * step + i));
            let own: Vec<usize> = samples.collect();
            let grads = ddp.run(&model, [own], |net, own| (net.loss(&own), own.len())).unwrap();
            model = optimizer.step(0.1, model, grads);
        }
        weights(&model)
    });
    for (found, expected) in uneven[0].iter().zip(&expected[0]) {
        assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
    }
}

#[test]
fn batches_are_normalised_over_uneven_ranks() {
    models! {
        struct Normed {
            first: Linear,
            norm: SyncBatchNorm,
            second: Linear,
        }
    }
    equals_one_rank(|group| {
        let Net { first, second } = Net::new(1);
        let norm = in_f64(SyncBatchNormConfig::new(HIDDEN).init(&device()));
        let (mut model, ddp) = DataParallel::new(group.clone(), Normed { first, norm, second }).unwrap();
        let mut optimizer: AdamOf<Normed> = AdamConfig::new().init();
        for step in 0..STEPS {
            let loss = |net: &Normed, own: Vec<usize>| {
                let hidden = net.norm.forward(net.first.forward(inputs(&own))).tanh();
                ((net.second.forward(hidden) - targets(&own)).powf_scalar(2.0).mean(), own.len())
            };
            let grads = ddp.run(&model, [batch(&group, step)], loss).unwrap();
            model = optimizer.step(0.01, model, grads);
        }
        weights(&model)
    });
}

/// Trains to the end of an epoch, from the newest checkpoint and at most so many steps. Saves one at the end.
fn epochs(group: Group, folder: &Path, batch: usize, epochs: usize, most: usize) -> (usize, Vec<f64>) {
    let (model, ddp) = DataParallel::new(group, Net::new(1)).unwrap();
    let mut state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
    let mut checkpoints = Checkpoints::new(ddp.group(), folder).unwrap();
    checkpoints.load(&mut state).unwrap();
    let sampler = ShardedSampler::new(ddp.group(), SAMPLES, batch).unwrap().seed(3);
    let mut steps = 0;
    while state.epoch < epochs && steps < most {
        for own in sampler.epoch(state.epoch).unwrap().after(state.samples).take(most - steps) {
            let own = (!own.is_empty()).then_some(own);
            let grads = ddp.run(&state.model, own, |net, own| (net.loss(&own), own.len())).unwrap();
            state.step(grads, batch);
            steps += 1;
        }
        if state.samples >= SAMPLES {
            state.next_epoch();
        }
    }
    checkpoints.save(&state).unwrap();
    (steps, weights(&state.model))
}

#[test]
fn a_training_goes_on_with_other_ranks_and_batches_and_again_after_its_end() {
    let run = |worlds: [usize; 3]| {
        let folder = tempfile::tempdir().unwrap();
        // Stopped in the middle of the second epoch, gone on, and begun again when all was done.
        let parts = [(10, 7), (4, usize::MAX), (4, usize::MAX)].into_iter().zip(worlds);
        let ended = parts.map(|((batch, most), n)| {
            let mut ended = ranks(n, |group| epochs(group, folder.path(), batch, 3, most));
            assert!(ended.iter().all(|end| *end == ended[0]), "{worlds:?}");
            ended.remove(0)
        });
        ended.collect::<Vec<_>>()
    };
    let expected = run([1, 1, 1]);
    // 20 samples of the second epoch were used; 26 and an epoch of 46 are left.
    assert_eq!(expected.iter().map(|(steps, _)| *steps).collect::<Vec<_>>(), [7, 7 + 12, 0]);
    for worlds in [[2, 3, 1], [3, 2, 2]] {
        for ((steps, found), (expected_steps, expected)) in run(worlds).iter().zip(&expected) {
            assert_eq!(steps, expected_steps);
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-9, "{worlds:?}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn a_training_that_had_ended_may_be_launched_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = || {
        let path = folder.path().to_path_buf();
        launch::run(Group::threads(2).unwrap(), move |group| Ok::<_, Error>(epochs(group, &path, 10, 1, usize::MAX)))
    };
    let (first, again) = (run().unwrap(), run().unwrap());
    for (rank, ((steps, trained), (more, unchanged))) in first.into_iter().zip(again).enumerate() {
        assert_eq!((steps, more), (5, 0), "rank {rank}");
        assert_eq!(trained, unchanged, "rank {rank}");
    }
}
