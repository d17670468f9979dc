//! The models of random programs, their data and their losses.

use std::collections::HashSet;

use bonfire::{ShardedBlock, SyncBatchNormConfig};
use burn::module::{Param, ParamId};
use burn::nn::BatchNormConfig;
use burn::optim::GradientsParams;
use burn::tensor::{DType, TensorData};

use crate::burn_version::{floats as parameters, *};
use crate::model_data::{add, map_floats, norm};
use crate::program::{Fault, Feature, Program};

/// Odd, so that parts are padded.
pub const WIDTH: usize = 5;

/// Of batch normalisation: it keeps rounding from growing where a channel hardly varies.
const EPSILON: f64 = 0.1;

models! {
    pub struct Layer {
        pub weight: Param<Tensor<2>>,
        pub bias: Param<Tensor<1>>,
    }

    pub struct Net {
        pub layers: Vec<ShardedBlock<Layer>>,
        norm: Option<BatchNorm>,
        sync: Option<SyncBatchNorm>,
        optional: Option<Layer>,
        unused: Layer,
        pub scale: Param<Tensor<1>>,
    }
}

impl Layer {
    fn new(seed: usize, dtype: DType) -> Layer {
        Layer {
            weight: Param::from_tensor(values([WIDTH, WIDTH], seed, dtype) * 0.5),
            bias: Param::from_tensor(values([WIDTH], seed + 1, dtype) * 0.5),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (weight, bias) = (self.weight.val().cast(x.dtype()), self.bias.val().cast(x.dtype()));
        (x.matmul(weight) + bias.unsqueeze()).tanh()
    }
}

/// Numbers in [-1, 1) that depend on the seed.
pub fn values<const D: usize>(shape: [usize; D], seed: usize, dtype: DType) -> Tensor<D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f64 / 1001.5 - 1.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape).convert_dtype(dtype), (&device(), dtype))
}

/// The element type of activations, and of most parameters.
pub fn dtype(program: &Program) -> DType {
    if program.has(Feature::Mixed) || program.seed.is_multiple_of(3) { DType::F32 } else { DType::F64 }
}

/// Makes the model of this number. Batch normalisation is over all ranks, or burn's own.
pub fn net(program: &Program, number: usize, over_ranks: bool) -> Net {
    let (device, dtype) = (device(), dtype(program));
    let of = |i: usize| if program.has(Feature::Mixed) && i % 2 == 1 { DType::BF16 } else { dtype };
    let layer = |i: usize| Layer::new(100 * number + 10 * i + 1, of(i));
    let layers = (0..program.layers).map(|i| ShardedBlock::new(layer(i))).collect();
    let norms = (program.has(Feature::BatchNorm), program.has(Feature::SyncBatchNorm));
    let norm = (norms.0 || norms.1 && !over_ranks)
        .then(|| -> BatchNorm { BatchNormConfig::new(WIDTH).with_epsilon(EPSILON).init(&device) });
    let sync = (norms.1 && over_ranks)
        .then(|| -> SyncBatchNorm { SyncBatchNormConfig::new(WIDTH).with_epsilon(EPSILON).init(&device) });
    let cast = |data: TensorData, _| data.convert_dtype(dtype);
    let net = Net {
        layers,
        norm: norm.map(|norm| map_floats(norm, cast)),
        sync: sync.map(|sync| map_floats(sync, cast)),
        optional: program.has(Feature::Optional).then(|| layer(7)),
        unused: layer(8),
        scale: Param::from_tensor(values([WIDTH], 9 + number, dtype)),
    };
    net.tie(program).freeze(is_frozen(program, 0, 1))
}

impl Net {
    /// Returns the outputs of batches, each with whether it uses the optional layer. With synchronised batch
    /// normalisation they are parts of one batch.
    pub fn forward(&self, program: &Program, batches: Vec<(Tensor<2>, bool)>) -> Vec<Tensor<2>> {
        let (mut parts, optional): (Vec<_>, Vec<_>) = batches.into_iter().unzip();
        for (i, layer) in self.layers.iter().enumerate() {
            let run = |x: Tensor<2>| layer.run(|layer| layer.forward(x));
            parts = parts.into_iter().map(run).collect();
            if i == 0 {
                parts = self.normalise(program, parts);
                if program.has(Feature::Shared) {
                    parts = parts.into_iter().map(run).collect();
                }
            }
        }
        let last = |(x, optional): (Tensor<2>, bool)| {
            let x = self.optional.as_ref().filter(|_| optional).map_or(x.clone(), |layer| layer.forward(x));
            x * self.scale.val().unsqueeze()
        };
        parts.into_iter().zip(optional).map(last).collect()
    }

    fn normalise(&self, program: &Program, parts: Vec<Tensor<2>>) -> Vec<Tensor<2>> {
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
pub fn batch(program: &Program, (step, rank, pass): (usize, usize, usize), samples: usize) -> (Tensor<2>, bool) {
    let seed = program.seed as usize % 997 + 1000 * step + 100 * rank + 10 * pass;
    (values([samples, WIDTH], seed, dtype(program)), (step + rank + pass) % 3 != 0)
}

/// The loss of outputs, whose penalty is on the weights of this model.
pub fn loss(program: &Program, outputs: Tensor<2>, penalised: &Net) -> Tensor<1> {
    let loss = outputs.powf_scalar(2.0).mean();
    match program.has(Feature::Penalty) {
        true => loss + penalised.scale.val().powf_scalar(2.0).mean() * 0.1,
        false => loss,
    }
}

/// The float parameters that are no running states: what is compared.
pub fn floats(model: &Net) -> Vec<f64> {
    let compared = parameters(model).into_iter().filter(|parameter| !parameter.path.contains("running"));
    compared.flat_map(|parameter| parameter.data.iter::<f64>().collect::<Vec<_>>()).collect()
}

/// Scales gradients down to a norm of all.
pub fn clip_norm(model: &Net, gradients: GradientsParams, max: f64) -> GradientsParams {
    let (norm, mut scaled) = (norm(model, &gradients), GradientsParams::new());
    add(model, &gradients, &mut scaled, if norm > max { max / norm } else { 1.0 });
    scaled
}

/// Returns the parameters that are matrices.
pub fn matrices(model: &Net) -> HashSet<ParamId> {
    let matrices = parameters(model).into_iter().filter(|parameter| parameter.data.shape().num_dims() == 2);
    matrices.map(|parameter| parameter.id).collect()
}
