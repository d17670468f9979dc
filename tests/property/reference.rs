//! Programs on plain burn: one process, one thread, the data of all ranks.

use std::slice;

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};

use crate::burn_version::*;
use crate::model::{self, Net};
use crate::program::{Feature, Program, STEPS};

pub const RATE: f64 = 0.05;

/// The norm of all gradients, and of each, to which programs clip, and the limit of their elements.
pub const NORM: f64 = 0.05;
const EACH: f32 = 0.02;
const VALUE: f32 = 0.01;

fn clipping(program: &Program) -> Option<GradientClippingConfig> {
    match program {
        _ if program.has(Feature::ClipEach) => Some(GradientClippingConfig::Norm(EACH)),
        _ if program.has(Feature::ClipValues) => Some(GradientClippingConfig::Value(VALUE)),
        _ => None,
    }
}

pub fn sgd(program: &Program) -> SgdOf<Net> {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: false };
    SgdConfig::new().with_momentum(Some(momentum)).with_gradient_clipping(clipping(program)).init()
}

/// Its epsilon keeps rounding from the first update of a gradient that is nearly 0.
pub fn adam(program: &Program) -> AdamOf<Net> {
    AdamConfig::new().with_epsilon(1e-2).with_grad_clipping(clipping(program)).init()
}

/// The optimizer of a model, or both: one of them updates the matrices.
pub struct Optimizers {
    pub sgd: SgdOf<Net>,
    pub adam: AdamOf<Net>,
}

impl Optimizers {
    pub fn new(program: &Program) -> Optimizers {
        Optimizers { sgd: sgd(program), adam: adam(program) }
    }

    pub fn step(&mut self, program: &Program, model: Net, mut gradients: GradientsParams) -> Net {
        if program.has(Feature::ClipNorm) {
            gradients = model::clip_norm(&model, gradients, NORM);
        }
        if program.has(Feature::TwoOptimizers) {
            let mut of_matrices = GradientsParams::new();
            for id in model::matrices(&model) {
                if let Some(gradient) = remove_gradient::<2>(&mut gradients, id) {
                    of_matrices.register(id, gradient);
                }
            }
            let model = self.sgd.step(RATE, model, of_matrices);
            return self.adam.step(RATE, model, gradients);
        }
        match program.adam {
            true => self.adam.step(RATE, model, gradients),
            false => self.sgd.step(RATE, model, gradients),
        }
    }
}

/// Returns the parameters of all models after the last step. `None` if a step has no samples.
pub fn train(program: &Program) -> Option<Vec<f64>> {
    let joined = program.has(Feature::TwoInABackward);
    let mut models: Vec<Net> = (0..program.models()).map(|number| model::net(program, number, false)).collect();
    let mut optimizers: Vec<_> = models.iter().map(|_| Optimizers::new(program)).collect();
    for step in 0..STEPS {
        models = models.into_iter().map(|net| net.freeze(model::is_frozen(program, step, 1))).collect();
        // By model. With one backward pass for all, those of the first.
        let losses: Vec<_> = match joined {
            true => vec![loss(program, &models, step)?],
            false => models.iter().map(|net| loss(program, slice::from_ref(net), step)).collect::<Option<_>>()?,
        };
        let mut gradients: Vec<_> = losses.iter().map(Tensor::backward).collect();
        let of_models = models
            .iter()
            .enumerate()
            .map(|(number, net)| GradientsParams::from_module(&mut gradients[if joined { 0 } else { number }], net));
        let of_models: Vec<_> = of_models.collect();
        let updated = models.into_iter().zip(&mut optimizers).zip(of_models);
        let updated =
            updated.map(|((net, optimizers), gradients)| optimizers.step(program, net, gradients).tie(program));
        models = updated.collect();
    }
    Some(models.iter().flat_map(model::floats).collect())
}

/// Returns the loss of a step: the mean over all passes of all ranks, each with its weight. The models run one after
/// the other.
fn loss(program: &Program, models: &[Net], step: usize) -> Option<Tensor<1>> {
    let ranks = &program.passes[step];
    let total: usize = ranks.iter().flatten().map(|(_, weight)| weight).sum();
    let passes = ranks.iter().map(Vec::len).max().unwrap_or(0);
    let of_pass = |pass: usize| {
        let own = ranks.iter().enumerate().filter_map(move |(rank, passes)| Some((rank, *passes.get(pass)?)));
        let (weights, batches): (Vec<usize>, Vec<_>) =
            own.map(|(rank, (samples, weight))| (weight, model::batch(program, (step, rank, pass), samples))).unzip();
        let optional: Vec<bool> = batches.iter().map(|(_, optional)| *optional).collect();
        let outputs = models.iter().fold(batches, |batches, net| {
            net.forward(program, batches).into_iter().zip(optional.iter().copied()).collect()
        });
        let weighted = outputs.into_iter().zip(weights).map(move |((outputs, _), weight)| {
            model::loss(program, outputs, &models[models.len() - 1]) * (weight as f64 / total as f64)
        });
        weighted.collect::<Vec<_>>()
    };
    (0..passes).flat_map(of_pass).reduce(|a, b| a + b)
}
