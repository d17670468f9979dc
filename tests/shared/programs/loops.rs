//! Programs with one model.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::Param;
use burn::nn::LinearConfig;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};

use bonfire::Error;
use bonfire_testing::ranks;

use super::*;

#[test]
fn a_layer_is_unfrozen_later() {
    equals_one_rank(|group| {
        let mut net = Net::new(1);
        net.first = trains(net.first, false);
        let (mut model, ddp) = DataParallel::new(group.clone(), net).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for step in 0..STEPS {
            if step == 20 {
                model.first = trains(model.first, true);
            }
            let grads = ddp.run(&model, [batch(&group, step)], |net, own| (net.loss(&own), own.len())).unwrap();
            model = optimizer.step(0.01, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn a_layer_is_frozen_later() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        for step in 0..STEPS {
            if step == 20 {
                model.first = trains(model.first, false);
            }
            let grads = ddp.run(&model, [batch(&group, step)], |net, own| (net.loss(&own), own.len())).unwrap();
            model = optimizer.step(0.1, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn one_layer_is_used_twice() {
    models! {
        struct Tied {
            linear: Linear,
        }
    }
    equals_one_rank(|group| {
        let tied = known(Tied { linear: LinearConfig::new(INPUTS, INPUTS).init(&device()) }, 3);
        let (mut model, ddp) = DataParallel::new(group.clone(), tied).unwrap();
        let mut optimizer: AdamOf<Tied> = AdamConfig::new().init();
        for step in 0..STEPS {
            let loss = |tied: &Tied, own: Vec<usize>| {
                let once = tied.linear.forward(inputs(&own)).tanh();
                (tied.linear.forward(once).powf_scalar(2.0).mean(), own.len())
            };
            let grads = ddp.run(&model, [batch(&group, step)], loss).unwrap();
            model = optimizer.step(0.01, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn a_cloned_layer_is_refused_on_all_ranks() {
    models! {
        #[allow(dead_code, reason = "it is refused before its first step")]
        struct Cloned {
            first: Linear,
            second: Linear,
        }
    }
    for error in ranks(3, |group| {
        let linear: Linear = LinearConfig::new(INPUTS, INPUTS).init(&device());
        DataParallel::new(group, Cloned { first: linear.clone(), second: linear }).err().unwrap()
    }) {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("`first.weight` and `second.weight` are one parameter"), "{error}");
    }
}

#[test]
fn a_penalty_is_computed_with_the_model_itself() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        for step in 0..STEPS {
            let penalty = || model.second.weight.val().powf_scalar(2.0).sum() * 0.25;
            let loss = |net: &Net, own: Vec<usize>| (net.loss(&own) + penalty(), own.len());
            let grads = ddp.run(&model, [batch(&group, step)], loss).unwrap();
            model = optimizer.step(0.1, model, grads);
        }
        weights(&model)
    });
}

/// Moves the gradient of one parameter to another set.
fn split(grads: &mut GradientsParams, to: &mut GradientsParams, parameter: &Param<Tensor<2>>) {
    if let Some(gradient) = remove_gradient::<2>(grads, parameter.id) {
        to.register(parameter.id, gradient);
    }
}

#[test]
fn two_optimizers_share_a_model() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut slow: SgdOf<Net> = SgdConfig::new().init();
        let mut fast: AdamOf<Net> = AdamConfig::new().init();
        for step in 0..STEPS {
            let own = batch(&group, step);
            let mut grads = ddp.run(&model, [own], |net, own| (net.loss(&own), own.len())).unwrap();
            let mut of_first = GradientsParams::new();
            split(&mut grads, &mut of_first, &model.first.weight);
            model = fast.step(0.02, slow.step(0.05, model, of_first), grads);
        }
        weights(&model)
    });
}

#[test]
fn gradients_are_accumulated_and_clipped() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let clipping = GradientClippingConfig::Norm(0.05);
        let mut optimizer: AdamOf<Net> = AdamConfig::new().with_grad_clipping(Some(clipping)).init();
        for step in 0..STEPS {
            // Micro-batches of other sizes: the rest of the last one is smaller.
            let own = batch(&group, step);
            let grads = ddp.run(&model, own.chunks(2), |net, own| (net.loss(own), own.len())).unwrap();
            model = optimizer.step(0.01, model, grads);
        }
        weights(&model)
    });
}

/// A sequence of one to five tokens.
fn length(sample: usize) -> usize {
    1 + sample * 7 % 5
}

#[test]
fn the_loss_is_a_mean_over_tokens() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: SgdOf<Net> = SgdConfig::new().init();
        for step in 0..STEPS {
            let tokens = |samples: &[usize]| -> Vec<usize> {
                samples.iter().flat_map(|i| (0..length(*i)).map(move |token| 5 * i + token)).collect()
            };
            let own = batch(&group, step);
            let batches = own.chunks(2).map(tokens);
            let grads = ddp.run(&model, batches, |net, tokens| (net.loss(&tokens), tokens.len())).unwrap();
            model = optimizer.step(0.1, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn a_rate_falls_with_a_schedule_and_the_best_model_is_kept() {
    use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
    equals_one_rank(|group| {
        let (model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let schedule = CosineAnnealingLrSchedulerConfig::new(0.05, STEPS).init().unwrap();
        let mut state = bonfire::TrainingState::new(model, AdamConfig::new().init(), schedule, ());
        let mut best = (f64::INFINITY, Vec::new());
        for step in 0..STEPS {
            let mut loss = 0.0;
            let own = batch(&group, step);
            let grads = ddp.run(&state.model, [&own], |net, own| {
                let own_loss = net.loss(own);
                loss = number(&own_loss);
                (own_loss, own.len())
            });
            let [loss] = ddp.mean(&[loss], own.len()).unwrap();
            if loss < best.0 {
                best = (loss, weights(&state.model));
            }
            state.step(grads.unwrap(), BATCH);
        }
        [vec![best.0], best.1, weights(&state.model)].concat()
    });
}
