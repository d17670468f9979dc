//! The loop of a training over samples, on burn alone and with Bonfire.

use std::cell::Cell;

use burn::optim::{AdamConfig, GradientsParams};

use super::*;

/// A model, and what it learns.
pub trait Learns: Model + Sized + 'static {
    fn new() -> Self;

    /// The mean loss of these samples, which are padded to the longest of them.
    fn loss(&self, samples: &[usize]) -> Tensor<1>;

    /// What that is a mean over.
    fn weight(samples: &[usize]) -> usize;
}

/// Without Bonfire: all samples of a step in one batch.
pub fn plain<M: Learns>() -> Vec<f64> {
    let mut model = M::new();
    let mut optimizer: AdamOf<M> = AdamConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let samples = all(step);
        let loss = model.loss(&samples);
        losses.push(number(&loss));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(RATE, model, grads);
    }
    [weights(&model), losses].concat()
}

/// With Bonfire: each rank has its own samples, in micro-batches with lengths of their own.
pub fn with_bonfire<M: Learns>(group: Group) -> Vec<f64> {
    let (mut model, ddp) = DataParallel::new(group.clone(), M::new()).unwrap();
    let mut optimizer: AdamOf<M> = AdamConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let samples = uneven(&group, step);
        let mut of_samples = 0.0;
        let grads = ddp.run(&model, samples.chunks(2), |model, samples| {
            let loss = model.loss(samples);
            of_samples += number(&loss) * M::weight(samples) as f64;
            (loss, M::weight(samples))
        });
        model = optimizer.step(RATE, model, grads.unwrap());
        let weight = M::weight(&samples);
        losses.extend(ddp.mean(&[of_samples / weight as f64], weight).unwrap());
    }
    [weights(&model), losses].concat()
}

/// With Bonfire, in a form.
pub fn in_form<M: Learns>(group: Group, form: Form) -> Vec<f64> {
    if form == Form::Replicas {
        return with_bonfire::<M>(group);
    }
    let mut trained = Trained::new(&group, form, DType::F64, M::new());
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let samples = uneven(&group, step);
        let of_samples = Cell::new(0.0);
        trained.run(form.batches(&samples), |model, samples| {
            let loss = model.loss(samples);
            of_samples.set(of_samples.get() + number(&loss) * M::weight(samples) as f64);
            (loss, M::weight(samples))
        });
        let weight = M::weight(&samples);
        losses.extend(mean(&group, [of_samples.get() / weight as f64], weight));
    }
    [weights(&trained.whole()), losses].concat()
}
