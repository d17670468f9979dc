//! Models with marked blocks, and their training in every form of sharding.

use bonfire::{DeviceMesh, Group, ShardedBlock, Sharding, SyncBatchNormConfig};
use burn::module::Param;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::{EmbeddingConfig, LayerNormConfig, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::{DType, Int, Shape, TensorData, activation};

use crate::burn_version::*;
use crate::model_data::map_floats;

/// Numbers in [-1, 1) that depend on the seed.
pub fn values<const D: usize>(shape: [usize; D], seed: usize, dtype: DType) -> Tensor<D> {
    Tensor::from_data(data(shape.into(), seed, dtype), (&device(), dtype))
}

fn data(shape: Shape, seed: usize, dtype: DType) -> TensorData {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f64 / 1001.5 - 1.0;
    let values: Vec<f64> = (0..shape.num_elements()).map(next).collect();
    TensorData::new(values, shape).convert_dtype(dtype)
}

/// Gives parameters values that are the same in every model, of this type.
pub fn initial<M: Model>(model: M, dtype: DType) -> M {
    let mut seed = 0;
    map_floats(model, |value, trained| {
        seed += 1;
        if !trained {
            return value.convert_dtype(dtype);
        }
        let values = data(value.shape().clone(), seed, DType::F64);
        let scaled = values.iter::<f64>().map(|x| x * 0.4).collect::<Vec<_>>();
        TensorData::new(scaled, values.shape().clone()).convert_dtype(dtype)
    })
}

/// The values of all float parameters, in visiting order.
pub fn floats<M: Model>(model: &M) -> Vec<TensorData> {
    crate::burn_version::floats(model).into_iter().map(|parameter| parameter.data).collect()
}

models! {
    pub struct Layer {
        norm: LayerNorm,
        attention: MultiHeadAttention,
        up: Linear,
        down: Linear,
    }

    /// A small transformer whose embedding is a block, and whose head is in none.
    pub struct Language {
        embedding: ShardedBlock<Embedding>,
        layers: Vec<ShardedBlock<Layer>>,
        norm: LayerNorm,
        head: Linear,
    }

    /// Layers of sizes that do not divide, one of which is used twice, one that contains a block, a frozen weight, a
    /// parameter of one element, one that is not used, and statistics of all ranks.
    pub struct Odd {
        first: Linear,
        twice: ShardedBlock<Linear>,
        norm: ShardedBlock<SyncBatchNorm>,
        outer: ShardedBlock<Outer>,
        unused: Linear,
        scale: Param<Tensor<1>>,
    }

    pub struct Outer {
        before: Linear,
        frozen: Param<Tensor<2>>,
        inner: ShardedBlock<Linear>,
        after: Linear,
    }
}

const WORDS: usize = 11;
const WIDTH: usize = 6;
const LAYERS: usize = 3;

impl Layer {
    fn new() -> Self {
        let device = device();
        Layer {
            norm: LayerNormConfig::new(WIDTH).init(&device),
            attention: MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0).init(&device),
            up: LinearConfig::new(WIDTH, 10).init(&device),
            down: LinearConfig::new(10, WIDTH).with_bias(false).init(&device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let attended = self.attention.forward(MhaInput::self_attn(self.norm.forward(x.clone()))).context;
        let x = x + attended;
        x.clone() + self.down.forward(activation::gelu(self.up.forward(x)))
    }
}

impl Language {
    pub fn new(dtype: DType) -> Self {
        let device = device();
        let model = Language {
            embedding: ShardedBlock::new(EmbeddingConfig::new(WORDS, WIDTH).init(&device)),
            layers: (0..LAYERS).map(|_| ShardedBlock::new(Layer::new())).collect(),
            norm: LayerNormConfig::new(WIDTH).init(&device),
            head: LinearConfig::new(WIDTH, WORDS).init(&device),
        };
        initial(model, dtype)
    }

    /// The loss of the samples with these numbers.
    pub fn loss(&self, samples: std::ops::Range<usize>) -> Tensor<1> {
        let count = samples.len();
        let words: Vec<i32> = samples.flat_map(|i| (0..5).map(move |j| ((i * (j + 3) + j) % WORDS) as i32)).collect();
        let words = Tensor::<2, Int>::from_data(TensorData::new(words, [count, 5]), &device());
        let x = self.embedding.run(|table| embed(table, words));
        let x = self.layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x)));
        self.head.forward(self.norm.forward(x)).powf_scalar(2.0).mean()
    }
}

impl Odd {
    pub fn new(dtype: DType) -> Self {
        let device = device();
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        let frozen = Param::from_tensor(values([7, 7], 5, dtype));
        let model = Odd {
            first: linear(5, 7),
            twice: ShardedBlock::new(linear(7, 7)),
            norm: ShardedBlock::new(SyncBatchNormConfig::new(7).init(&device)),
            outer: ShardedBlock::new(Outer {
                before: linear(7, 7),
                frozen: frozen.set_require_grad(false),
                inner: ShardedBlock::new(linear(7, 3)),
                after: linear(3, 1),
            }),
            unused: linear(2, 9),
            scale: Param::from_tensor(Tensor::ones([1], &device)),
        };
        initial(model, dtype)
    }

    pub fn loss(&self, samples: std::ops::Range<usize>) -> Tensor<1> {
        let dtype = self.scale.val().dtype();
        let rows = samples.map(|i| values([1, 5], i, dtype)).collect();
        let x = self.first.forward(Tensor::cat(rows, 0)).tanh();
        let x = self.twice.run(|linear| linear.forward(x)).tanh();
        let x = self.norm.run(|norm| norm.forward(x));
        let x = self.twice.run(|linear| linear.forward(x)).tanh();
        let x = self.outer.run(|outer| {
            let x = outer.before.forward(x).matmul(outer.frozen.val()).tanh();
            outer.after.forward(outer.inner.run(|inner| inner.forward(x)))
        });
        (x * self.scale.val().unsqueeze()).powf_scalar(2.0).mean()
    }
}

/// How a model is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    Replicas,
    /// ZeRO-1.
    Optimizer,
    /// ZeRO-1 within groups of so many ranks, which do not follow one another.
    OptimizerOn(usize),
    /// ZeRO-2.
    Gradients,
    /// ZeRO-3.
    Full,
    /// ZeRO-3 within groups of so many ranks.
    Hybrid(usize),
}

/// Trains with Adam. Returns the mean loss of each step over all ranks, and the parameters.
pub fn train<M: Model>(
    group: Group,
    form: Form,
    steps: usize,
    model: M,
    loss: impl Fn(&M, usize) -> Tensor<1>,
) -> (Vec<f64>, Vec<TensorData>) {
    const RATE: f64 = 0.01;
    let mut losses = Vec::new();
    let number = |loss: &Tensor<1>| loss.clone().into_data().iter::<f64>().next().unwrap();
    if let Form::Replicas | Form::Optimizer | Form::OptimizerOn(_) = form {
        let (mut model, ddp) = DataParallel::new(group.clone(), model).unwrap();
        let mut optimizer: AdamOf<M> = AdamConfig::new().init();
        let mut sharded = match form {
            Form::OptimizerOn(ranks) => {
                let replicas = group.world_size() / ranks;
                let mesh = DeviceMesh::new(group, [("shard", ranks), ("replicate", replicas)]).unwrap();
                ShardedOptimizer::on_mesh(&ddp, AdamConfig::new().init(), &mesh).unwrap()
            }
            _ => ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap(),
        };
        for step in 0..steps {
            if form == Form::Replicas {
                let running = ddp.last_pass(&model, 1).unwrap();
                let loss = loss(running.model(), step);
                losses.push(number(&loss));
                let grads = running.finish(&mut loss.backward()).unwrap();
                model = optimizer.step(RATE, model, grads);
            } else {
                let parts = sharded.run(&model, [()], |model, ()| {
                    let loss = loss(model, step);
                    losses.push(number(&loss));
                    (loss, 1)
                });
                sharded.step(RATE, &mut model, parts.unwrap()).unwrap();
            }
        }
        return (losses.iter().map(|loss| ddp.mean(&[*loss], 1).unwrap()[0]).collect(), floats(&model));
    }
    let mesh = match form {
        Form::Hybrid(ranks) => {
            let replicas = group.world_size() / ranks;
            DeviceMesh::new(group, [("replicate", replicas), ("shard", ranks)]).unwrap()
        }
        _ => group.into(),
    };
    let (mut model, mut fsdp) = FullyShardedParallel::new(mesh, model).unwrap();
    if form == Form::Gradients {
        fsdp = fsdp.keep_gathered();
    }
    let mut optimizer: AdamOf<M> = AdamConfig::new().init();
    for step in 0..steps {
        let running = fsdp.last_pass(&model, 1).unwrap();
        let loss = loss(running.model(), step);
        losses.push(number(&loss));
        let parts = running.finish(&mut loss.backward()).unwrap();
        model = optimizer.step(RATE, model, parts.for_optimizer(&optimizer).unwrap());
    }
    let whole = fsdp.gather(&model).unwrap();
    (losses.iter().map(|loss| fsdp.mean(&[*loss], 1).unwrap()[0]).collect(), floats(&whole))
}
