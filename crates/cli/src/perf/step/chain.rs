//! The model of `bonfire perf step`.

use std::time::{Duration, Instant};

use bonfire::ShardedBlock;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use clap::ValueEnum;

use crate::perf::gradients::resnet50;

pub type B = Autodiff<Flex>;

/// A block for each layer, which only full sharding gathers.
pub type Model = Vec<ShardedBlock<Param<Tensor<B, 2>>>>;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Shapes {
    /// --layers matrices of --width by --width
    Square,
    /// 400 parameters from 1 KiB to 2 MiB, 100 MiB in all
    Mixed,
    /// The 161 parameters of ResNet-50
    Resnet50,
}

/// A model of matrices, one after the other.
pub struct Chain {
    /// Rows and columns.
    pub shapes: Vec<[usize; 2]>,
}

/// The rows of each matrix of mixed sizes.
const ROWS: usize = 64;

impl Chain {
    /// Makes a chain of these sizes; a square one of so many layers and columns.
    pub fn new(sizes: Shapes, layers: usize, width: usize) -> Chain {
        let shapes = match sizes {
            Shapes::Square => vec![[width; 2]; layers],
            Shapes::Mixed => mixed(),
            // Each is a multiple of 8 elements.
            Shapes::Resnet50 => resnet50().into_iter().map(|elements| [8, elements / 8]).collect(),
        };
        Chain { shapes }
    }

    pub fn model(&self) -> Model {
        let device = Default::default();
        let weight = |shape: &[usize; 2]| {
            // Around 1 / rows, so that numbers keep their size through any number of layers.
            let scale = 1.0 / shape[0] as f32;
            let values = (0..shape[0] * shape[1]).map(|i| scale * ((i * 7919 % 1013) as f32 / 1013.0 + 0.5));
            ShardedBlock::new(Param::from_data(TensorData::new(values.collect::<Vec<_>>(), *shape), &device))
        };
        self.shapes.iter().map(weight).collect()
    }

    /// One row, different on each rank.
    pub fn input(&self, rank: usize) -> Tensor<B, 2> {
        let width = self.shapes[0][0];
        let values = (0..width).map(|i| 1.0 + ((i + 31 * rank) % 17) as f32 / 16.0);
        Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), [1, width]), &Default::default())
    }

    /// In the forward pass each layer pauses last. In the backward pass it pauses first, and then its gradient is
    /// complete.
    pub fn forward(&self, model: &Model, input: Tensor<B, 2>, pause: Pause) -> Tensor<B, 2> {
        model.iter().zip(&self.shapes).fold(input, |x, (layer, [rows, columns])| {
            layer.run(|weight| {
                let y = x.clone().matmul(weight.val());
                // Of the size of x, like y itself: numbers must not grow from layer to layer.
                paused(if rows == columns { y } else { (x + y.mean_dim(1)) * 0.5 }, pause)
            })
        })
    }
}

/// 400 matrices from 1 KiB to 2 MiB, 100 MiB in all, in an order without pattern.
fn mixed() -> Vec<[usize; 2]> {
    const COUNT: usize = 400;
    let (least, most, total) = (1usize << 10, 2usize << 20, 100usize << 20);
    // Between the ends the sizes grow as a power, whose exponent gives the total.
    let size = |i: usize, exponent: f64| {
        let part = (i as f64 / (COUNT - 1) as f64).powf(exponent);
        let bytes = least as f64 + part * (most - least) as f64;
        (bytes / (4 * ROWS) as f64).round() as usize * 4 * ROWS
    };
    let sum = |exponent: f64| (0..COUNT).map(|i| size(i, exponent)).sum::<usize>();
    let (mut low, mut high) = (0.1, 100.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if sum(middle) > total { low = middle } else { high = middle }
    }
    // 149 and 400 have no common factor, so every size occurs once.
    (0..COUNT).map(|i| [ROWS, size(i * 149 % COUNT, high) / (4 * ROWS)]).collect()
}

/// How long a layer computes.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    pub forward: Duration,
    /// Before its gradient is complete.
    pub backward: Duration,
    /// On the CPU, instead of sleeping.
    pub busy: bool,
}

impl Pause {
    fn take(self, length: Duration) {
        let start = Instant::now();
        if !self.busy {
            std::thread::sleep(length);
        }
        let mut x = 1.0f64;
        while start.elapsed() < length {
            for _ in 0..100 {
                x = std::hint::black_box(x * 1.000_000_1 + 1e-9);
            }
        }
    }
}

/// The backward step that pauses.
#[derive(Debug)]
struct Paused;

impl Backward<Flex, 1> for Paused {
    type State = Pause;

    fn backward(self, ops: Ops<Pause, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        ops.state.take(ops.state.backward);
        unary::<Flex, _>(ops.parents, ops.node, gradients, |gradient| gradient);
    }
}

fn paused(x: Tensor<B, 2>, pause: Pause) -> Tensor<B, 2> {
    pause.take(pause.forward);
    let x = x.into_primitive().tensor();
    let out = match Paused.prepare::<NoCheckpointing>([x.node.clone()]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(pause, x.primitive),
        OpsKind::UnTracked(prepared) => prepared.finish(x.primitive),
    };
    Tensor::from_primitive(TensorPrimitive::Float(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_sizes_are_those_that_the_help_says() {
        let bytes: Vec<usize> = mixed().iter().map(|[rows, columns]| 4 * rows * columns).collect();
        assert_eq!((bytes.len(), bytes.iter().min(), bytes.iter().max()), (400, Some(&1024), Some(&(2 << 20))));
        let total = bytes.iter().sum::<usize>() as f64 / f64::from(100 << 20);
        assert!((0.999..1.001).contains(&total), "{total}");
    }

    #[test]
    fn the_rows_of_resnet50_lose_no_element() {
        assert!(resnet50().iter().all(|elements| elements % 8 == 0));
    }
}
