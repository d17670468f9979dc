//! Programs with several models.

use burn::nn::LinearConfig;
use burn::optim::{AdamConfig, SgdConfig};

use super::*;

#[test]
fn a_frozen_teacher_trains_a_student() {
    equals_one_rank(|group| {
        let frozen = |net: Net| Net { first: trains(net.first, false), second: trains(net.second, false) };
        // Distributed like any model, and never stepped.
        let (teacher, _teaching) = DataParallel::new(group.clone(), frozen(Net::new(7))).unwrap();
        let (mut student, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for step in 0..STEPS {
            let loss = |net: &Net, own: Vec<usize>| {
                let taught = teacher.forward(inputs(&own)).detach();
                ((net.forward(inputs(&own)) - taught).powf_scalar(2.0).mean(), own.len())
            };
            let grads = ddp.run(&student, [batch(&group, step)], loss).unwrap();
            student = optimizer.step(0.01, student, grads);
        }
        [weights(&student), weights(&teacher)].concat()
    });
}

#[test]
fn a_generator_and_a_critic_train_in_turn() {
    equals_one_rank(|group| {
        let square = |outputs| known(LinearConfig::new(INPUTS, outputs).init(&device()), outputs);
        let (mut generator, making) = DataParallel::new(group.clone(), square(INPUTS)).unwrap();
        let (mut critic, judging) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut maker: AdamOf<Linear> = AdamConfig::new().init();
        let mut judge: AdamOf<Net> = AdamConfig::new().init();
        for step in 0..STEPS {
            let noise = |own: &[usize]| rows(own, INPUTS, 5);
            let apart = |critic: &Net, own: Vec<usize>| {
                let made = generator.forward(noise(&own)).detach();
                let real = (critic.forward(inputs(&own)) - 1.0).powf_scalar(2.0).mean();
                (real + critic.forward(made).powf_scalar(2.0).mean(), own.len())
            };
            let grads = judging.run(&critic, [batch(&group, step)], apart).unwrap();
            critic = judge.step(0.01, critic, grads);
            let deceives = |generator: &Linear, own: Vec<usize>| {
                ((critic.forward(generator.forward(noise(&own))) - 1.0).powf_scalar(2.0).mean(), own.len())
            };
            let grads = making.run(&generator, [batch(&group, step)], deceives).unwrap();
            generator = maker.step(0.01, generator, grads);
        }
        [weights(&generator), weights(&critic)].concat()
    });
}

#[test]
fn an_encoder_and_a_decoder_train_with_one_backward_pass() {
    equals_one_rank(|group| {
        let layer = |inputs, outputs| known(LinearConfig::new(inputs, outputs).init(&device()), inputs);
        let (mut encoder, encoding) = DataParallel::new(group.clone(), layer(INPUTS, 2)).unwrap();
        let (mut decoder, decoding) = DataParallel::new(group.clone(), layer(2, INPUTS)).unwrap();
        let mut of_encoder: AdamOf<Linear> = AdamConfig::new().init();
        let mut of_decoder: SgdOf<Linear> = SgdConfig::new().init();
        for step in 0..STEPS {
            let own = batch(&group, step);
            let encodes = encoding.last_pass(&encoder, own.len()).unwrap();
            let decodes = decoding.last_pass(&decoder, own.len()).unwrap();
            let output = decodes.model().forward(encodes.model().forward(inputs(&own)).tanh());
            let mut grads = (output - inputs(&own)).powf_scalar(2.0).mean().backward();
            let grads = (encodes.finish(&mut grads).unwrap(), decodes.finish(&mut grads).unwrap());
            encoder = of_encoder.step(0.01, encoder, grads.0);
            decoder = of_decoder.step(0.1, decoder, grads.1);
        }
        [weights(&encoder), weights(&decoder)].concat()
    });
}

#[test]
fn adapters_train_on_a_frozen_base() {
    models! {
        struct Adapted {
            base: Linear,
            down: Linear,
            up: Linear,
        }
    }
    equals_one_rank(|group| {
        let layer = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(&device());
        let mut adapted =
            known(Adapted { base: layer(INPUTS, INPUTS), down: layer(INPUTS, 2), up: layer(2, INPUTS) }, 4);
        adapted.base = trains(adapted.base, false);
        let (mut model, ddp) = DataParallel::new(group.clone(), adapted).unwrap();
        let mut optimizer: AdamOf<Adapted> = AdamConfig::new().init();
        for step in 0..STEPS {
            let loss = |net: &Adapted, own: Vec<usize>| {
                let x = inputs(&own);
                let output = net.base.forward(x.clone()) + net.up.forward(net.down.forward(x));
                ((output - rows(&own, INPUTS, 9)).powf_scalar(2.0).mean(), own.len())
            };
            let grads = ddp.run(&model, [batch(&group, step)], loss).unwrap();
            model = optimizer.step(0.01, model, grads);
        }
        weights(&model)
    });
}

#[test]
fn an_average_and_a_target_follow_the_model() {
    equals_one_rank(|group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        let (mut average, mut target) = (weights(&model), model.clone());
        for step in 0..STEPS {
            if step % 10 == 0 {
                target = model.clone();
            }
            let loss = |net: &Net, own: Vec<usize>| {
                let expected = target.forward(inputs(&own)).detach() * 0.9 + targets(&own);
                ((net.forward(inputs(&own)) - expected).powf_scalar(2.0).mean(), own.len())
            };
            let grads = ddp.run(&model, [batch(&group, step)], loss).unwrap();
            model = optimizer.step(0.01, model, grads);
            average.iter_mut().zip(weights(&model)).for_each(|(old, new)| *old = 0.9 * *old + 0.1 * new);
        }
        [weights(&model), average].concat()
    });
}
