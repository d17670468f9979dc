//! Programs that look at the gradients of a step as a whole: they clip them, and leave out steps that are not finite.

use bonfire::Sharding;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};

use super::*;

/// The steps of a training, and the one in which the last rank's loss is not finite.
const FEW: usize = 20;
const SPOILED: usize = 6;

/// The loss of a rank's samples. It spoils the gradient of one parameter, in one pass of the last rank.
fn spoiled(net: &Net, samples: &[usize], group: &Group, step: usize) -> Tensor<1> {
    let loss = net.loss(samples);
    let is_last_pass = samples.contains(&(BATCH * (step + 1) - 1));
    if step != SPOILED || !is_last_pass {
        return loss;
    }
    assert_eq!(group.rank(), group.world_size() - 1);
    let bias = net.second.bias.as_ref().unwrap().val();
    loss + bias.sum() * f64::NAN
}

/// Runs a program on one to three ranks. Its numbers must be those of one rank that makes all steps but the spoiled
/// one. `train` gets the steps to make.
fn leaves_out(train: impl Fn(Group, &[usize]) -> Vec<f64> + Sync) {
    let all: Vec<usize> = (0..FEW).collect();
    let others: Vec<usize> = (0..FEW).filter(|step| *step != SPOILED).collect();
    let expected = ranks(1, |group| train(group, &others)).remove(0);
    for n in 1..=3 {
        for (rank, found) in ranks(n, |group| train(group, &all)).into_iter().enumerate() {
            for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let difference = (found - expected).abs();
                assert!(difference < 1e-9, "{n} ranks, rank {rank}, number {place}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn a_step_with_a_gradient_that_is_not_finite_changes_no_rank() {
    leaves_out(|group, steps| {
        let (mut model, mut ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        ddp.skip_non_finite();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for &step in steps {
            let own = batch(&group, step);
            let run = |net: &Net, own: &[usize]| (spoiled(net, own, &group, step), own.len());
            let grads = ddp.run(&model, own.chunks(2), run).unwrap();
            assert_eq!(grads.is_empty(), step == SPOILED);
            model = optimizer.step(0.05, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn a_synced_gradient_that_is_not_finite_changes_no_rank() {
    leaves_out(|group, steps| {
        let (mut model, mut ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        ddp.skip_non_finite();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for &step in steps {
            let own = batch(&group, step);
            let grads = spoiled(&model, &own, &group, step).backward();
            let grads = ddp.sync(&model, GradientsParams::from_grads(grads, &model), own.len()).unwrap();
            model = optimizer.step(0.05, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn parts_of_a_gradient_that_is_not_finite_change_no_rank() {
    leaves_out(|group, steps| {
        let (mut model, mut ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: ShardedAdam<Net> =
            ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
        // Also of an optimizer that there is already.
        ddp.skip_non_finite();
        for &step in steps {
            let own = batch(&group, step);
            let run = |net: &Net, own: &[usize]| (spoiled(net, own, &group, step), own.len());
            let parts = optimizer.run(&model, own.chunks(3), run).unwrap();
            optimizer.step(0.05, &mut model, parts.clip_norm(10.0).unwrap()).unwrap();
        }
        weights(&model)
    });
    leaves_out(|group, steps| {
        let (mut model, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(1)).unwrap();
        let fsdp = fsdp.skip_non_finite();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for &step in steps {
            // The third rank has fewer passes than the others.
            let own = batch(&group, step);
            let run = |net: &Net, own: &[usize]| (spoiled(net, own, &group, step), own.len());
            let parts = fsdp.run(&model, own.chunks(3), run).unwrap();
            model = optimizer.step(0.05, model, parts.for_optimizer(&optimizer).unwrap());
        }
        weights(&fsdp.gather(&model).unwrap())
    });
}

#[test]
fn an_error_of_a_rank_is_not_hidden_by_a_gradient_that_is_not_finite() {
    let results = ranks(3, |group| {
        let (model, mut ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        ddp.skip_non_finite();
        let own = batch(&group, SPOILED);
        // Rank 0's gradient is not finite, and rank 1 fails.
        let run = |net: &Net, own: &Vec<usize>| match group.rank() {
            0 => Ok((net.loss(own) * f64::NAN, own.len())),
            1 => Err("on purpose".into()),
            _ => Ok((net.loss(own), own.len())),
        };
        ddp.try_run(&model, [&own], run).map(|_| ())
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank 1's own code has failed: on purpose"), "{error}");
    }
}

#[test]
fn ranks_that_do_not_all_leave_out_steps_are_an_error() {
    let results = ranks(3, |group| {
        let (model, mut ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        if group.rank() == 2 {
            ddp.skip_non_finite();
        }
        ddp.run(&model, [batch(&group, 0)], |net, own| (net.loss(&own), own.len())).map(|_| ())
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("of rank 0 and rank 2 one leaves out steps"), "{error}");
    }
}

#[test]
fn whole_gradients_are_clipped_by_their_global_norm() {
    let of_parts = ranks(2, |group| {
        let (mut model, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        let mut norms = Vec::new();
        for step in 0..FEW {
            let own = batch(&group, step);
            let parts = fsdp.run(&model, [own], |net, own| (net.loss(&own), own.len())).unwrap();
            norms.push(parts.norm().unwrap());
            let parts = parts.clip_norm(0.05).unwrap();
            model = optimizer.step(0.5, model, parts.for_optimizer(&optimizer).unwrap());
        }
        [norms, weights(&fsdp.gather(&model).unwrap())].concat()
    });
    let whole = |group: Group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        let mut norms = Vec::new();
        for step in 0..FEW {
            let own = batch(&group, step);
            let grads = ddp.run(&model, [own], |net, own| (net.loss(&own), own.len())).unwrap();
            let norm = ddp.norm(&grads).unwrap();
            let grads = ddp.clip_norm(grads, 0.05).unwrap();
            assert!((ddp.norm(&grads).unwrap() - norm.min(0.05)).abs() < 1e-12);
            norms.push(norm);
            model = optimizer.step(0.5, model, grads);
        }
        assert!(norms.iter().any(|norm| *norm > 0.05) && norms.iter().all(|norm| *norm > 0.0));
        [norms, weights(&model)].concat()
    };
    equals_one_rank(whole);
    let found = ranks(2, whole).remove(0);
    assert!(found.iter().zip(&of_parts[0]).all(|(whole, parts)| (whole - parts).abs() < 1e-9));
}
