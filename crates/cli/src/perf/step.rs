//! `bonfire perf step`: how much of the exchange of gradients a training step hides behind its backward pass.

mod chain;

use std::io::Write;
use std::time::{Duration, Instant};

use bonfire::tensor::operation;
use bonfire::train::compression;
use bonfire::{DataParallel, Error, FullyShardedParallel, Group, ReduceOp};
use burn::backend::Flex;
use burn::module::Param;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::Tensor;
use clap::ValueEnum;
use serde::Serialize;

use self::chain::{B, Chain, Model, Pause, Shapes};
use super::args::{Common, Transport};
use super::ranks;
use super::timing::RankError;
use crate::failure::Failure;

/// Measure how much of the exchange of gradients a training step hides behind its backward pass
///
/// The model is a chain of layers whose own arithmetic is small. In the backward pass each layer sleeps, or computes,
/// for its part of the given time, and then its gradient is complete. Four steps are timed in turn: alone (no
/// exchange), the exchange alone (no pauses), both, until all gradients are back, and sync, which exchanges after the
/// backward pass. exposed is (both - alone) / exchange: 0 if the exchange is hidden, 1 if it is not. Gradients are
/// compared with their exact mean. With --sharding full a third of the time is computed in the forward pass, and the
/// exchange is that of the parameters in both passes and of the gradients; there is no sync.
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

    /// Time that the backward pass computes, over all layers; with --sharding full both passes
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

    /// What of the model a rank keeps
    #[arg(long, value_enum, default_value_t = Sharding::None, conflicts_with_all = ["compression", "bucket_bytes"])]
    sharding: Sharding,

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
enum Sharding {
    /// Every rank has the whole model
    None,
    /// Every rank has a part of each layer, which is a block
    Full,
}

/// The steps that are timed.
#[derive(Clone, Copy)]
enum Kind {
    /// Without exchange.
    Alone,
    /// Without computation.
    Exchange,
    /// With the exchange behind the computation.
    Both,
    /// With the exchange after the backward pass.
    Sync,
}

/// The figures of a measurement. Times are in seconds: the median of the steps on the slowest rank.
#[derive(Serialize)]
struct Figures {
    ranks: usize,
    bytes: usize,
    alone_s: f64,
    exchange_s: f64,
    both_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sync_s: Option<f64>,
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
        let chain = Chain::new(self.sizes, self.layers as usize, self.width as usize);
        let pause = Duration::from_millis(self.compute_ms) / chain.shapes.len() as u32;
        let pauses = |forward, backward| Pause { forward, backward, busy: self.busy };
        match self.sharding {
            Sharding::None => self.measure_replicas(group, &chain, pauses(Duration::ZERO, pause)),
            Sharding::Full => self.measure_parts(group, &chain, pauses(pause / 3, pause * 2 / 3)),
        }
    }

    fn measure_replicas(&self, group: &Group, chain: &Chain, pause: Pause) -> Result<u64, RankError> {
        let (model, mut parallel) = DataParallel::new(group.clone(), chain.model())?;
        if let Some(bytes) = self.bucket_bytes {
            parallel.set_bucket_bytes(bytes as usize);
        }
        if let Some(compression) = self.compression.as_deref().and_then(compression::by_name) {
            parallel.set_compression(compression)?;
        }
        let input = chain.input(group.rank());
        let loss = |model: &Model, pause: Pause| (chain.forward(model, input.clone(), pause).sum(), 1);
        let overlapped = |pause: Pause| parallel.run(&model, [pause], loss);
        let own = |pause: Pause| own(chain, &model, group, pause);
        let wrong = wrong(group, &model, own(none(pause)), overlapped(none(pause))?, self.error())?;
        let kinds = [Kind::Alone, Kind::Exchange, Kind::Both, Kind::Sync];
        let [alone, exchange, both, sync] = self.medians(group, kinds, |kind| {
            match kind {
                Kind::Alone => Ok(own(pause)),
                Kind::Exchange => overlapped(none(pause)),
                Kind::Both => overlapped(pause),
                Kind::Sync => parallel.sync(&model, own(pause), 1),
            }
            .map(drop)
        })?;
        self.print(group, chain, [alone, exchange, both], Some(sync), wrong)
    }

    fn measure_parts(&self, group: &Group, chain: &Chain, pause: Pause) -> Result<u64, RankError> {
        let (parts, parallel) = FullyShardedParallel::new(group.clone(), chain.model())?;
        let whole = parallel.gather(&parts)?;
        let input = chain.input(group.rank());
        let optimizer = SgdConfig::new().init::<B, Model>();
        let loss = |model: &Model, pause: Pause| (chain.forward(model, input.clone(), pause).sum(), 1);
        let overlapped = |pause: Pause| parallel.run(&parts, [pause], loss)?.for_optimizer(&optimizer);
        let own = |pause: Pause| own(chain, &whole, group, pause);
        let joined = joined(group, &whole, overlapped(none(pause))?)?;
        let wrong = wrong(group, &whole, own(none(pause)), joined, 0.0)?;
        let times = self.medians(group, [Kind::Alone, Kind::Exchange, Kind::Both], |kind| {
            match kind {
                Kind::Exchange => overlapped(none(pause)),
                Kind::Both => overlapped(pause),
                _ => Ok(own(pause)),
            }
            .map(drop)
        })?;
        self.print(group, chain, times, None, wrong)
    }

    fn print(
        &self,
        group: &Group,
        chain: &Chain,
        [alone_s, exchange_s, both_s]: [f64; 3],
        sync_s: Option<f64>,
        wrong: u64,
    ) -> Result<u64, RankError> {
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

    /// Returns the median time of a step of each kind, in seconds, on the slowest rank. The kinds take turns, so that
    /// whatever else the machine does concerns all of them.
    fn medians<const N: usize>(
        &self,
        group: &Group,
        kinds: [Kind; N],
        mut step: impl FnMut(Kind) -> Result<(), Error>,
    ) -> Result<[f64; N], Error> {
        const WARM_UP: u32 = 2;
        let mut times = [const { Vec::new() }; N];
        for round in 0..WARM_UP + self.steps {
            for (kind, times) in kinds.into_iter().zip(&mut times) {
                group.barrier()?;
                let start = Instant::now();
                step(kind)?;
                if round >= WARM_UP {
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
        let mut medians = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        group.all_reduce(&mut medians, ReduceOp::Max)?;
        Ok(medians)
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
            ("step without exchange", Some(self.alone_s)),
            ("exchange without computation", Some(self.exchange_s)),
            ("step with the exchange behind the computation", Some(self.both_s)),
            ("step with the exchange after the backward pass", self.sync_s),
        ];
        for (name, seconds) in rows.into_iter().filter_map(|(name, seconds)| Some((name, seconds?))) {
            writeln!(out, "{:>10.2} ms  {name}", 1e3 * seconds)?;
        }
        writeln!(out, "{:>10.1} %   of the exchange exposed", 100.0 * self.exposed)?;
        writeln!(out, "{:>10}     wrong elements", self.wrong)?;
        Ok(())
    }
}

/// Returns the pause of a step that computes nothing.
fn none(pause: Pause) -> Pause {
    Pause { forward: Duration::ZERO, backward: Duration::ZERO, ..pause }
}

/// Returns this rank's own gradients.
fn own(chain: &Chain, model: &Model, group: &Group, pause: Pause) -> GradientsParams {
    let grads = chain.forward(model, chain.input(group.rank()), pause).sum().backward();
    GradientsParams::from_grads(grads, model)
}

/// Returns the weights of the layers.
fn weights(model: &Model) -> impl Iterator<Item = Param<Tensor<B, 2>>> {
    model.iter().map(|layer| layer.clone().into_inner())
}

/// Returns whole gradients, from the parts of all ranks.
fn joined(group: &Group, whole: &Model, parts: GradientsParams) -> Result<GradientsParams, Error> {
    let mut joined = GradientsParams::new();
    for weight in weights(whole) {
        let Some(part) = parts.get::<Flex, 2>(weight.id) else { continue };
        let all = operation::all_gather(part, 0, group)?;
        joined.register(weight.id, all.narrow(0, 0, weight.dims()[0]));
    }
    Ok(joined)
}

/// Compares this rank's result with the mean of the ranks' own gradients in f64. Returns the number of elements, over
/// all ranks, that differ by more than `error` times the model's largest gradient and the rounding of the additions.
fn wrong(
    group: &Group,
    model: &Model,
    own: GradientsParams,
    result: GradientsParams,
    error: f64,
) -> Result<u64, Error> {
    let values = |grads: &GradientsParams, weight: &Param<Tensor<B, 2>>| {
        grads.get::<Flex, 2>(weight.id).map(|grad| grad.into_data().iter::<f64>().collect::<Vec<_>>())
    };
    let largest = |values: &[f64]| values.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    let mut of_layers: Vec<f64> =
        weights(model).map(|weight| largest(&values(&own, &weight).unwrap_or_default())).collect();
    group.all_reduce(&mut of_layers, ReduceOp::Max)?;
    let error = error * largest(&of_layers);
    let mut wrong = [0];
    for (weight, largest) in weights(model).zip(of_layers) {
        let mut mean = values(&own, &weight).unwrap_or_default();
        group.all_reduce(&mut mean, ReduceOp::Mean)?;
        let tolerance = largest * group.world_size() as f64 * f64::from(f32::EPSILON) + 1.01 * error;
        let result = values(&result, &weight).unwrap_or_default();
        let close = result.iter().zip(&mean).filter(|(a, b)| (**a - **b).abs() <= tolerance).count();
        wrong[0] += (mean.len() - close) as u64;
    }
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok(wrong[0])
}

#[cfg(test)]
mod tests {
    use bonfire::ShardedBlock;
    use burn::tensor::TensorData;

    use super::*;

    #[test]
    fn a_wrong_gradient_is_counted() {
        let group = Group::threads(1).unwrap().remove(0);
        let weight = Param::from_data(TensorData::from([[1.0f32, 2.0]]), &Default::default());
        let (id, model) = (weight.id, vec![ShardedBlock::new(weight)]);
        let grads = |values: [f32; 2]| {
            let mut grads = GradientsParams::new();
            grads.register(id, Tensor::<Flex, 2>::from_data([values], &Default::default()));
            grads
        };
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.0, 2.0]), 0.0), Ok(0));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.0, 2.001]), 0.0), Ok(1));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), GradientsParams::new(), 0.0), Ok(2));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.015, 2.0]), 1.0 / 127.0), Ok(0));
        assert_eq!(wrong(&group, &model, grads([1.0, 2.0]), grads([1.017, 2.0]), 1.0 / 127.0), Ok(1));
    }
}
