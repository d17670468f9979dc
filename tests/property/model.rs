//! The models of random programs, their data and their losses.

use std::collections::HashSet;

use bonfire::{Group, ShardedBlock, SyncBatchNorm, SyncBatchNormConfig};
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};

use crate::program::{Fault, Feature, Program};

pub type B = Autodiff<Flex>;

/// Odd, so that parts are padded.
pub const WIDTH: usize = 5;

/// Of batch normalisation: it keeps rounding from growing where a channel hardly varies.
const EPSILON: f64 = 0.1;

#[derive(Module, Debug)]
pub struct Layer<B: Backend> {
    pub weight: Param<Tensor<B, 2>>,
    pub bias: Param<Tensor<B, 1>>,
}

impl Layer<B> {
    fn new(seed: usize, dtype: DType) -> Layer<B> {
        Layer {
            weight: Param::from_tensor(values([WIDTH, WIDTH], seed, dtype) * 0.5),
            bias: Param::from_tensor(values([WIDTH], seed + 1, dtype) * 0.5),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let (weight, bias) = (self.weight.val().cast(x.dtype()), self.bias.val().cast(x.dtype()));
        (x.matmul(weight) + bias.unsqueeze()).tanh()
    }
}

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    pub layers: Vec<ShardedBlock<Layer<B>>>,
    norm: Option<BatchNorm<B>>,
    sync: Option<SyncBatchNorm<B>>,
    optional: Option<Layer<B>>,
    unused: Layer<B>,
    pub scale: Param<Tensor<B, 1>>,
}

/// Makes the floats of a model those of one type. Running states stay states.
struct Cast(DType);

impl ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let trained = param.is_require_grad();
        let (id, value, mapper) = param.consume();
        let value = Tensor::from_inner(value.inner().cast(self.0)).set_require_grad(trained);
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Numbers in [-1, 1) that depend on the seed.
pub fn values<const D: usize>(shape: [usize; D], seed: usize, dtype: DType) -> Tensor<B, D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f64 / 1001.5 - 1.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape).convert_dtype(dtype), (&Default::default(), dtype))
}

/// The element type of activations, and of most parameters.
pub fn dtype(program: &Program) -> DType {
    if program.has(Feature::Mixed) || program.seed.is_multiple_of(3) { DType::F32 } else { DType::F64 }
}

/// Makes the model of this number. `group` synchronises batch normalisation; without one it is burn's own.
pub fn net(program: &Program, number: usize, group: Option<&Group>) -> Net<B> {
    let (device, dtype) = (Default::default(), dtype(program));
    let of = |i: usize| if program.has(Feature::Mixed) && i % 2 == 1 { DType::BF16 } else { dtype };
    let layer = |i: usize| Layer::new(100 * number + 10 * i + 1, of(i));
    let layers = (0..program.layers).map(|i| ShardedBlock::new(layer(i))).collect();
    let norms = (program.has(Feature::BatchNorm), program.has(Feature::SyncBatchNorm));
    let norm = (norms.0 || norms.1 && group.is_none())
        .then(|| BatchNormConfig::new(WIDTH).with_epsilon(EPSILON).init::<B>(&device));
    let sync = group
        .filter(|_| norms.1)
        .map(|group| SyncBatchNormConfig::new(WIDTH).with_epsilon(EPSILON).init::<B>(group, &device));
    let net = Net {
        layers,
        norm: norm.map(|norm| norm.map(&mut Cast(dtype))),
        sync: sync.map(|sync| sync.map(&mut Cast(dtype))),
        optional: program.has(Feature::Optional).then(|| layer(7)),
        unused: layer(8),
        scale: Param::from_tensor(values([WIDTH], 9 + number, dtype)),
    };
    net.tie(program).freeze(is_frozen(program, 0, 1))
}

impl Net<B> {
    /// Returns the outputs of batches, each with whether it uses the optional layer. With synchronised batch
    /// normalisation they are parts of one batch.
    pub fn forward(&self, program: &Program, batches: Vec<(Tensor<B, 2>, bool)>) -> Vec<Tensor<B, 2>> {
        let (mut parts, optional): (Vec<_>, Vec<_>) = batches.into_iter().unzip();
        for (i, layer) in self.layers.iter().enumerate() {
            let run = |x: Tensor<B, 2>| layer.run(|layer| layer.forward(x));
            parts = parts.into_iter().map(run).collect();
            if i == 0 {
                parts = self.normalise(program, parts);
                if program.has(Feature::Shared) {
                    parts = parts.into_iter().map(run).collect();
                }
            }
        }
        let last = |(x, optional): (Tensor<B, 2>, bool)| {
            let x = self.optional.as_ref().filter(|_| optional).map_or(x.clone(), |layer| layer.forward(x));
            x * self.scale.val().unsqueeze()
        };
        parts.into_iter().zip(optional).map(last).collect()
    }

    fn normalise(&self, program: &Program, parts: Vec<Tensor<B, 2>>) -> Vec<Tensor<B, 2>> {
        match (&self.norm, &self.sync) {
            (Some(norm), _) if program.has(Feature::SyncBatchNorm) => {
                let rows = parts.iter().map(|part| part.dims()[0]).collect();
                norm.forward(Tensor::cat(parts, 0)).split_with_sizes(rows, 0)
            }
            (Some(norm), _) => parts.into_iter().map(|part| norm.forward(part)).collect(),
            (None, Some(sync)) => parts.into_iter().map(|part| sync.forward(part)).collect(),
            (None, None) => parts,
        }
    }

    /// Makes the second layer the first one again, if it is its clone: a burn optimizer updates the first holder of a
    /// parameter only.
    pub fn tie(mut self, program: &Program) -> Self {
        if program.has(Feature::Tied) {
            self.layers[1] = self.layers[0].clone();
        }
        self
    }

    /// Freezes the second layer, or unfreezes it.
    pub fn freeze(mut self, frozen: bool) -> Self {
        let Layer { weight, bias } = self.layers[1].clone().into_inner();
        let layer = Layer { weight: weight.set_require_grad(!frozen), bias: bias.set_require_grad(!frozen) };
        self.layers[1] = ShardedBlock::new(layer);
        self
    }
}

/// Whether the second layer is frozen in a step on a rank.
pub fn is_frozen(program: &Program, step: usize, rank: usize) -> bool {
    let refrozen = if program.has(Feature::Refrozen) { step == 1 || step == 2 } else { false };
    let alone = program.fault == Some(Fault::FreezesAlone) && program.ranks > 1 && step == 2 && rank == 0;
    let frozen = program.has(Feature::Frozen) && !(program.has(Feature::Refrozen) && step > 2);
    frozen || refrozen != alone
}

/// The samples of a pass, and whether they use the optional layer.
pub fn batch(program: &Program, (step, rank, pass): (usize, usize, usize), samples: usize) -> (Tensor<B, 2>, bool) {
    let seed = program.seed as usize % 997 + 1000 * step + 100 * rank + 10 * pass;
    (values([samples, WIDTH], seed, dtype(program)), (step + rank + pass) % 3 != 0)
}

/// The loss of outputs, whose penalty is on the weights of this model.
pub fn loss(program: &Program, outputs: Tensor<B, 2>, penalised: &Net<B>) -> Tensor<B, 1> {
    let loss = outputs.powf_scalar(2.0).mean();
    match program.has(Feature::Penalty) {
        true => loss + penalised.scale.val().powf_scalar(2.0).mean() * 0.1,
        false => loss,
    }
}

/// The float parameters that need no state: what is compared, by path.
pub fn floats(model: &Net<B>) -> Vec<f64> {
    struct Floats(Vec<String>, Vec<f64>);
    impl ModuleVisitor<B> for Floats {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if !self.0.iter().any(|name| name.starts_with("running")) {
                self.1.extend(param.val().into_data().iter::<f64>());
            }
        }
    }
    let mut floats = Floats(Vec::new(), Vec::new());
    model.visit(&mut floats);
    floats.1
}

/// Applies a function to each gradient of a model's parameters, given as rows of one, and adds the results to others.
struct Moved<'a, F>(GradientsParams, &'a mut GradientsParams, F);

impl<F: FnMut(Tensor<Flex, 1>) -> Tensor<Flex, 1>> ModuleVisitor<B> for Moved<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.0.remove::<Flex, D>(param.id) {
            let shape = gradient.shape();
            let own = (self.2)(gradient.flatten(0, D - 1)).reshape(shape);
            let sum = self.1.remove::<Flex, D>(param.id).map_or_else(|| own.clone(), |sum| sum + own.clone());
            self.1.register(param.id, sum);
        }
    }
}

/// Adds gradients times a factor to others.
pub fn add(model: &Net<B>, gradients: GradientsParams, sum: &mut GradientsParams, factor: f64) {
    model.visit(&mut Moved(gradients, sum, |gradient: Tensor<Flex, 1>| gradient * factor));
}

/// Scales gradients down to a norm of all.
pub fn clip_norm(model: &Net<B>, gradients: GradientsParams, max: f64) -> GradientsParams {
    let (mut same, mut scaled, mut squares) = (GradientsParams::new(), GradientsParams::new(), 0.0);
    model.visit(&mut Moved(gradients, &mut same, |gradient: Tensor<Flex, 1>| {
        squares += gradient.to_data().iter::<f64>().map(|x| x * x).sum::<f64>();
        gradient
    }));
    let norm = f64::sqrt(squares);
    add(model, same, &mut scaled, if norm > max { max / norm } else { 1.0 });
    scaled
}

/// Returns the parameters that are matrices.
pub fn matrices(model: &Net<B>) -> HashSet<ParamId> {
    struct Matrices(HashSet<ParamId>);
    impl ModuleVisitor<B> for Matrices {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if D == 2 {
                self.0.insert(param.id);
            }
        }
    }
    let mut matrices = Matrices(HashSet::new());
    model.visit(&mut matrices);
    matrices.0
}
