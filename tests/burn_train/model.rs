//! Models that record their parameters, and the data on which they train.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bonfire::WgpuDevice;
use burn::backend::Autodiff;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::Linear;
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend, DeviceOps};
use burn::tensor::{Tensor, TensorData};
use burn_train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};

pub type B = Autodiff<bonfire::Wgpu>;

/// Features of an input and of a target.
pub const WIDTH: usize = 4;

/// The parameters after every step, by replica.
pub type Steps = BTreeMap<u8, Vec<Vec<f32>>>;

/// What a model's clones on all devices record.
#[derive(Clone, Default)]
pub struct Log {
    pub steps: Arc<Mutex<Steps>>,
    /// Every step is delayed by up to this, twice.
    pub delay: Duration,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}

/// How the layers are connected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// One after the other, each with a residual connection.
    Chain,
    /// Two parallel branches: burn computes their gradients in no particular order.
    Branches,
}

/// Linear layers of equal shape. With biases the parameters are twice as many as the layers.
#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    layers: Vec<Linear<B>>,
    #[module(skip)]
    shape: Shape,
    #[module(skip)]
    pub log: Log,
}

impl<B: Backend> Net<B> {
    pub fn new(shape: Shape, layers: usize, seed: u32, log: &Log, device: &B::Device) -> Self {
        let mut numbers = Numbers(seed);
        let bias = |shape, numbers: &mut Numbers| match shape {
            Shape::Chain => Some(Param::from_data(TensorData::new(numbers.take(WIDTH), [WIDTH]), device)),
            Shape::Branches => None,
        };
        let layers = (0..layers).map(|_| Linear {
            weight: Param::from_data(TensorData::new(numbers.take(WIDTH * WIDTH), [WIDTH, WIDTH]), device),
            bias: bias(shape, &mut numbers),
        });
        Net { layers: layers.collect(), shape, log: log.clone() }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let through = |x: Tensor<B, 2>, layers: &[Linear<B>]| {
            layers.iter().fold(x, |x, layer| x.clone() + layer.forward(x).tanh() * 0.3)
        };
        match self.shape {
            Shape::Chain => through(x, &self.layers),
            Shape::Branches => {
                let (left, right) = self.layers.split_at(self.layers.len() / 2);
                through(x.clone(), left) * through(x, right)
            }
        }
    }

    pub fn output(&self, batch: Batch<B>) -> RegressionOutput<B> {
        let output = self.forward(batch.inputs);
        let loss = (output.clone() - batch.targets.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Net<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<RegressionOutput<B>> {
        std::thread::sleep(self.log.delay.mul_f64(random()));
        let output = self.output(batch);
        std::thread::sleep(self.log.delay.mul_f64(random()));
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize<AB, O>(self, optimizer: &mut O, lr: f64, grads: GradientsParams) -> Self
    where
        AB: AutodiffBackend,
        O: Optimizer<Self, AB>,
        Self: AutodiffModule<AB>,
    {
        let model = optimizer.step(lr, self, grads);
        let (replica, values) = values(&model);
        model.log.steps.lock().unwrap().entry(replica).or_default().push(values);
        model
    }
}

impl InferenceStep for Net<bonfire::Wgpu> {
    type Input = Batch<bonfire::Wgpu>;
    type Output = RegressionOutput<bonfire::Wgpu>;

    fn step(&self, batch: Self::Input) -> Self::Output {
        self.output(batch)
    }
}

fn replica(device: &impl DeviceOps) -> u8 {
    (device.id().type_id >> 8) as u8
}

/// All parameters of a model, and the replica on which they are.
pub fn values<B: Backend, M: Module<B>>(model: &M) -> (u8, Vec<f32>) {
    struct Values(u8, Vec<f32>);
    impl<B: Backend> ModuleVisitor<B> for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0 = replica(&param.val().device());
            self.1.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut values = Values(0, Vec::new());
    model.visit(&mut values);
    (values.0, values.1)
}

#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    inputs: Tensor<B, 2>,
    targets: Tensor<B, 2>,
}

pub type Sample = ([f32; WIDTH], [f32; WIDTH]);

/// Samples of which no two are equal.
pub fn samples(count: usize) -> Vec<Sample> {
    let mut numbers = Numbers(77);
    let mut row = || std::array::from_fn(|_| numbers.next());
    (0..count).map(|_| (row(), row())).collect()
}

#[derive(Clone)]
pub struct Rows;

impl<B: Backend> Batcher<B, Sample, Batch<B>> for Rows {
    fn batch(&self, samples: Vec<Sample>, device: &B::Device) -> Batch<B> {
        let tensor = |side: fn(&Sample) -> &[f32]| {
            let numbers: Vec<f32> = samples.iter().flat_map(|sample| side(sample).to_vec()).collect();
            Tensor::from_data(TensorData::new(numbers, [samples.len(), WIDTH]), device)
        };
        Batch { inputs: tensor(|sample| &sample.0), targets: tensor(|sample| &sample.1) }
    }
}

/// A loader of all samples in their order.
pub fn loader<B: Backend>(samples: Vec<Sample>, batch: usize, device: &B::Device) -> Arc<dyn DataLoader<B, Batch<B>>> {
    DataLoaderBuilder::new(Rows).batch_size(batch).set_device(device.clone()).build(InMemDataset::new(samples))
}

pub fn devices(count: usize) -> Vec<WgpuDevice> {
    (0..).take(count).map(|replica| WgpuDevice::new(Default::default(), replica)).collect()
}

/// Generates the same numbers from -1 to 1 in every run.
struct Numbers(u32);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// A random number from 0 to 1.
fn random() -> f64 {
    use std::hash::{BuildHasher, Hasher};
    let bits = std::hash::RandomState::new().build_hasher().finish();
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
