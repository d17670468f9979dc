//! `bonfire perf step`: how much of the exchange of gradients a training step hides behind its backward pass.

use std::io::Write;
use std::time::{Duration, Instant};

use bonfire::train::compression;
use bonfire::{DataParallel, Error, Group, ReduceOp};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use clap::ValueEnum;
use serde::Serialize;

use super::args::{Common, Transport};
use super::gradients::resnet50;
use super::ranks;
use super::timing::RankError;
use crate::failure::Failure;

type B = Autodiff<Flex>;

/// Measure how much of the exchange of gradients a training step hides behind its backward pass
///
/// The model is a chain of layers whose own arithmetic is small. In the backward pass each layer sleeps, or computes,
/// for its part of the given time, and then its gradient is complete. Three steps are timed: alone (no exchange), the
/// exchange alone (no pauses), and both, until all gradients are back. exposed is (both - alone) / exchange: 0 if the
/// exchange is hidden, 1 if it is not. sync is the step that exchanges after the backward pass. Gradients are compared
/// with their exact mean.
#[derive(clap::Args, Clone)]
#[command(after_help = "Examples:\n  bonfire perf step --transport tcp --ranks 2\n  \
                        bonfire run -n 2 --nodes 2 ... -- bonfire perf step --layers 100 --width 256 --json")]
pub struct StepArgs {
    /// Layers of the model
    #[arg(long, value_name = "N", default_value_t = 25, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    layers: u32,

    /// Inputs and outputs of each layer: a layer has the square of this many parameters
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    width: u32,

    /// Time that the backward pass computes, over all layers
    #[arg(long, value_name = "MS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    compute_ms: u64,

    /// Sizes of the layers; --layers and --width count with square only
    #[arg(long, value_enum, default_value_t = Shapes::Square)]
    sizes: Shapes,

    /// Compute on the CPU instead of sleeping, as without an accelerator
    #[arg(long)]
    busy: bool,

    /// Steps of each kind to time, after two that are not timed
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    steps: u32,

    /// The most bytes in a bucket, instead of the size that the first step measures
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..))]
    bucket_bytes: Option<u32>,

    /// Let gradients travel in fewer bytes
    #[arg(long, value_parser = compression::NAMES, value_name = "TYPE")]
    compression: Option<String>,

    /// Transport between the ranks [default: auto if a launcher has started them, otherwise local]
    #[arg(long, value_enum)]
    transport: Option<Transport>,

    /// Number of ranks; if a launcher has started them, its number counts instead
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Shapes {
    /// --layers matrices of --width by --width
    Square,
    /// 400 parameters from 1 KiB to 2 MiB, 100 MiB in all
    Mixed,
    /// The 161 parameters of ResNet-50
    Resnet50,
}

/// The figures of a measurement. Times are in seconds: the median of the steps on the slowest rank.
#[derive(Serialize)]
struct Figures {
    ranks: usize,
    bytes: usize,
    alone_s: f64,
    exchange_s: f64,
    both_s: f64,
    sync_s: f64,
    exposed: f64,
    wrong: u64,
}

/// Measures and returns the exit status.
pub fn run(args: &StepArgs) -> Result<u8, Failure> {
    let launched = match args.transport {
        Some(Transport::Local) => None,
        _ => ranks::launched().map_err(Failure::with(1))?,
    };
    let default = if launched.is_some() { Transport::Auto } else { Transport::Local };
    let common = Common {
        transport: args.transport.unwrap_or(default),
        ranks: launched.unwrap_or(args.ranks),
        algorithms: None,
        json: args.json,
    };
    ranks::measure(&common, launched.is_some(), |group| args.measure(group))
}

impl StepArgs {
    /// Measures as one rank. Returns the number of wrong elements over all ranks.
    fn measure(&self, group: &Group) -> Result<u64, RankError> {
        let chain = Chain::new(self);
        let (model, mut parallel) = DataParallel::new(group.clone(), chain.model())?;
        if let Some(bytes) = self.bucket_bytes {
            parallel.set_bucket_bytes(bytes as usize);
        }
        if let Some(compression) = self.compression.as_deref().and_then(compression::by_name) {
            parallel.set_compression(compression)?;
        }
        let input = chain.input(group.rank());
        let pause = Duration::from_millis(self.compute_ms) / chain.shapes.len() as u32;
        let pause = Pause { length: pause, busy: self.busy };
        let none = Pause { length: Duration::ZERO, ..pause };

        let own = |pause: Pause| {
            let grads = chain.forward(&model, input.clone(), pause).sum().backward();
            GradientsParams::from_grads(grads, &model)
        };
        let mut overlapped = |pause: Pause| {
            let step = parallel.step(&model, 1)?;
            let loss = chain.forward(step.model(), input.clone(), pause).sum();
            step.finish(loss.backward())
        };
        let wrong = wrong(group, &model, own(none), overlapped(none)?, self.error())?;
        let alone_s = self.median(group, || {
            own(pause);
            Ok(())
        })?;
        let exchange_s = self.median(group, || overlapped(none).map(drop))?;
        let both_s = self.median(group, || overlapped(pause).map(drop))?;
        let sync_s = self.median(group, || parallel.sync(&model, own(pause), 1).map(drop))?;
        let figures = Figures {
            ranks: group.world_size(),
            bytes: 4 * chain.shapes.iter().map(|[rows, columns]| rows * columns).sum::<usize>(),
            alone_s,
            exchange_s,
            both_s,
            sync_s,
            exposed: (both_s - alone_s) / exchange_s,
            wrong,
        };
        if group.rank() == 0 {
            figures.print(self.json)?;
        }
        Ok(wrong)
    }

    /// Returns by how much of the largest gradient a mean may be wrong: each rank's gradient loses that much once, and
    /// the mean again.
    fn error(&self) -> f64 {
        match self.compression.as_deref() {
            Some("bf16") => 2.0 * f64::powi(2.0, -9),
            Some("f16") => 2.0 * f64::powi(2.0, -12),
            Some(_) => 2.0 * 0.5 / 127.0,
            None => 0.0,
        }
    }

    /// Returns the median time of a step, in seconds, on the slowest rank.
    fn median(&self, group: &Group, mut step: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
        const WARM_UP: u32 = 2;
        let mut times = Vec::new();
        for round in 0..WARM_UP + self.steps {
            group.barrier()?;
            let start = Instant::now();
            step()?;
            if round >= WARM_UP {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_by(f64::total_cmp);
        let mut median = [times[times.len() / 2]];
        group.all_reduce(&mut median, ReduceOp::Max)?;
        Ok(median[0])
    }
}

impl Figures {
    fn print(&self, json: bool) -> Result<(), RankError> {
        let mut out = std::io::stdout().lock();
        if json {
            writeln!(out, "{}", serde_json::to_string(self).map_err(std::io::Error::from)?)?;
            return Ok(());
        }
        let mib = self.bytes as f64 / f64::from(1 << 20);
        writeln!(out, "{} ranks, {mib:.1} MiB of gradients", self.ranks)?;
        let rows = [
            ("step without exchange", self.alone_s),
            ("exchange without computation", self.exchange_s),
            ("step with the exchange behind the backward pass", self.both_s),
            ("step with the exchange after the backward pass", self.sync_s),
        ];
        for (name, seconds) in rows {
            writeln!(out, "{:>10.2} ms  {name}", 1e3 * seconds)?;
        }
        writeln!(out, "{:>10.1} %   of the exchange exposed", 100.0 * self.exposed)?;
        writeln!(out, "{:>10}     wrong elements", self.wrong)?;
        Ok(())
    }
}

/// A model of matrices, one after the other.
struct Chain {
    /// Rows and columns.
    shapes: Vec<[usize; 2]>,
}

/// The rows of each matrix of mixed sizes.
const ROWS: usize = 64;

impl Chain {
    fn new(args: &StepArgs) -> Chain {
        let shapes = match args.sizes {
            Shapes::Square => vec![[args.width as usize; 2]; args.layers as usize],
            Shapes::Mixed => mixed(),
            // Each is a multiple of 8 elements.
            Shapes::Resnet50 => resnet50().into_iter().map(|elements| [8, elements / 8]).collect(),
        };
        Chain { shapes }
    }

    fn model(&self) -> Vec<Param<Tensor<B, 2>>> {
        let device = Default::default();
        let weight = |shape: &[usize; 2]| {
            // Around 1 / rows, so that numbers keep their size through any number of layers.
            let scale = 1.0 / shape[0] as f32;
            let values = (0..shape[0] * shape[1]).map(|i| scale * ((i * 7919 % 1013) as f32 / 1013.0 + 0.5));
            Param::from_data(TensorData::new(values.collect::<Vec<_>>(), *shape), &device)
        };
        self.shapes.iter().map(weight).collect()
    }

    /// One row, different on each rank.
    fn input(&self, rank: usize) -> Tensor<B, 2> {
        let width = self.shapes[0][0];
        let values = (0..width).map(|i| 1.0 + ((i + 31 * rank) % 17) as f32 / 16.0);
        Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), [1, width]), &Default::default())
    }

    /// In the backward pass each layer pauses first, and then its gradient is complete.
    fn forward(&self, model: &[Param<Tensor<B, 2>>], input: Tensor<B, 2>, pause: Pause) -> Tensor<B, 2> {
        model.iter().zip(&self.shapes).fold(input, |x, (weight, [rows, columns])| {
            let y = x.clone().matmul(weight.val());
            // Of the size of x, like y itself: numbers must not grow from layer to layer.
            paused(if rows == columns { y } else { (x + y.mean_dim(1)) * 0.5 }, pause)
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

/// What a layer does in the backward pass before its gradient is complete.
#[derive(Clone, Copy, Debug)]
struct Pause {
    length: Duration,
    busy: bool,
}

impl Pause {
    fn take(self) {
        let start = Instant::now();
        if !self.busy {
            std::thread::sleep(self.length);
        }
        let mut x = 1.0f64;
        while start.elapsed() < self.length {
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
        ops.state.take();
        unary::<Flex, _>(ops.parents, ops.node, gradients, |gradient| gradient);
    }
}

fn paused(x: Tensor<B, 2>, pause: Pause) -> Tensor<B, 2> {
    let x = x.into_primitive().tensor();
    let out = match Paused.prepare::<NoCheckpointing>([x.node.clone()]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(pause, x.primitive),
        OpsKind::UnTracked(prepared) => prepared.finish(x.primitive),
    };
    Tensor::from_primitive(TensorPrimitive::Float(out))
}

/// Compares this rank's result with the mean of the ranks' own gradients in f64. Returns the number of elements, over
/// all ranks, that differ by more than `error` times the model's largest gradient and the rounding of the additions.
fn wrong(
    group: &Group,
    model: &[Param<Tensor<B, 2>>],
    own: GradientsParams,
    result: GradientsParams,
    error: f64,
) -> Result<u64, Error> {
    let values = |grads: &GradientsParams, weight: &Param<Tensor<B, 2>>| {
        grads.get::<Flex, 2>(weight.id).map(|grad| grad.into_data().iter::<f64>().collect::<Vec<_>>())
    };
    let largest = |values: &[f64]| values.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    let mut of_layers: Vec<f64> =
        model.iter().map(|weight| largest(&values(&own, weight).unwrap_or_default())).collect();
    group.all_reduce(&mut of_layers, ReduceOp::Max)?;
    let error = error * largest(&of_layers);
    let mut wrong = [0];
    for (weight, largest) in model.iter().zip(of_layers) {
        let mut mean = values(&own, weight).unwrap_or_default();
        group.all_reduce(&mut mean, ReduceOp::Mean)?;
        let tolerance = largest * group.world_size() as f64 * f64::from(f32::EPSILON) + 1.01 * error;
        let result = values(&result, weight).unwrap_or_default();
        let close = result.iter().zip(&mean).filter(|(a, b)| (**a - **b).abs() <= tolerance).count();
        wrong[0] += (mean.len() - close) as u64;
    }
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok(wrong[0])
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

    #[test]
    fn a_wrong_gradient_is_counted() {
        let group = Group::threads(1).unwrap().remove(0);
        let model = [Param::from_data(TensorData::from([[1.0f32, 2.0]]), &Default::default())];
        let grads = |values: [f32; 2]| {
            let mut grads = GradientsParams::new();
            grads.register(model[0].id, Tensor::<Flex, 2>::from_data([values], &Default::default()));
            grads
        };
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.0, 2.0]), 0.0), Ok(0));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.0, 2.001]), 0.0), Ok(1));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), GradientsParams::new(), 0.0), Ok(2));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.015, 2.0]), 1.0 / 127.0), Ok(0));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.017, 2.0]), 1.0 / 127.0), Ok(1));
    }
}
