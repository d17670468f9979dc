//! The command line, the ranks, and the times.

use std::process::ExitCode;
use std::time::Instant;

use bonfire::train::compression;
use bonfire::{Error, Group, ReduceOp, ShardedSampler, println};
use clap::Parser;

use crate::data::Digits;

pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Measure what the exchange of gradients costs in the training of a large network
#[derive(Parser, Clone)]
#[command(name = "overlap")]
pub struct Args {
    /// Ranks, as threads, where no launcher has started this process as a rank
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Neurons of each hidden layer: 2,304 make 10.8 million parameters in all
    #[arg(long, default_value_t = 2304, value_parser = clap::value_parser!(u16).range(1..=16_384))]
    pub hidden: u16,
    /// Hidden layers after the first
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub layers: u16,
    /// Images of a batch, over all ranks
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1500))]
    batch: u16,
    /// Let gradients travel in fewer bytes
    #[arg(long, value_parser = compression::NAMES, value_name = "TYPE")]
    pub compression: Option<String>,
    /// Steps of each kind to time
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    steps: u16,
}

/// How gradients are exchanged.
#[derive(Clone, Copy)]
pub enum Exchange {
    None,
    AfterBackward,
    DuringBackward,
}

/// Runs `rank` as each rank.
pub fn run(rank: fn(&Group, &Args) -> Result<(), Failure>) -> ExitCode {
    env_logger::init();
    let args = Args::parse();
    let ranks = usize::from(args.ranks);
    match bonfire::launch(ranks, move |group| rank(&group, &args)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("error: {failed}");
            ExitCode::FAILURE
        }
    }
}

/// Times steps with each exchange, on these samples, and prints the medians.
pub fn measure(
    group: &Group,
    args: &Args,
    parameters: usize,
    digits: &Digits,
    mut step: impl FnMut(Exchange, &[usize]) -> Result<(), Error>,
) -> Result<(), Failure> {
    let sampler = ShardedSampler::new(group, digits.len(), args.batch.into())?.drop_last();
    let shards: Vec<_> = sampler.epoch(0)?.collect();
    let mut shards = shards.iter().cycle();
    let mut median = |exchange: Exchange| {
        let mut times = Vec::new();
        for round in 0..2 + args.steps {
            let Some(shard) = shards.next() else { break };
            group.barrier()?;
            let start = Instant::now();
            step(exchange, shard)?;
            if round >= 2 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_by(f64::total_cmp);
        let mut median = [times[times.len() / 2]];
        group.all_reduce(&mut median, ReduceOp::Max)?;
        Ok::<f64, Error>(1e3 * median[0])
    };
    let alone = median(Exchange::None)?;
    let after = median(Exchange::AfterBackward)?;
    let during = median(Exchange::DuringBackward)?;
    println!("{parameters} parameters, {} ranks, batches of {}", group.world_size(), args.batch);
    println!("step without exchange:                    {alone:8.1} ms");
    println!("with the exchange after the backward pass:{after:8.1} ms");
    println!("with the exchange during the backward pass:{during:7.1} ms");
    Ok(())
}
