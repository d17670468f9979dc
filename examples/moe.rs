//! A mixture of experts with expert parallelism. Each token is sent to the rank with the expert that the router chose
//! for it, and the result is sent back; gradients take the same routes.
//!
//! ```sh
//! cargo run --release -p bonfire-examples --bin moe -- --ranks 4
//! ```
//! At the end it compares the losses with those of a single rank that has all experts and all tokens.

#[path = "moe/model.rs"]
mod model;

use std::process::ExitCode;
use std::thread;

use bonfire::tensor::operation::all_reduce;
use bonfire::{DeviceCommunicator, Error, Group, ReduceOp};
use burn::backend::{Autodiff, Flex};
use clap::Parser;
use model::{Experts, WIDTH, count, numbers, tokens};

type B = Autodiff<Flex>;

/// Train a mixture of experts whose experts are on different ranks.
#[derive(Parser)]
#[command(name = "moe")]
struct Args {
    /// Ranks, each a thread of this process
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Number of experts on all ranks together
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    experts: u16,
    /// Training steps
    #[arg(long, default_value_t = 60)]
    steps: usize,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let all: usize = (0..args.ranks.into()).map(count).sum();
    println!("{} experts on {} ranks, {all} tokens", args.experts, args.ranks);
    let result = losses(args.ranks.into(), &args, true).and_then(|ours| {
        println!("the same on one rank");
        losses(1, &args, false).map(|one| (ours, one))
    });
    match result {
        Ok((ours, one)) => {
            let difference = ours.iter().zip(&one).map(|(a, b)| (a - b).abs() / b.max(1e-12)).fold(0.0, f64::max);
            println!("over {} steps the loss has a relative difference of at most {difference:.1e}", one.len());
            if difference < 1e-6 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Trains with `ranks` ranks and returns the loss of every step.
fn losses(ranks: usize, args: &Args, progress: bool) -> Result<Vec<f64>, Error> {
    thread::scope(|scope| {
        let threads =
            Group::threads(ranks)?.into_iter().map(|group| scope.spawn(move || train(&group, args, progress)));
        let results: Vec<_> = threads.collect::<Vec<_>>().into_iter().map(thread::ScopedJoinHandle::join).collect();
        let results = results.into_iter().map(|rank| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        results.collect::<Result<Vec<_>, _>>().map(|mut losses| losses.swap_remove(0))
    })
}

fn train(group: &Group, args: &Args, progress: bool) -> Result<Vec<f64>, Error> {
    let (rank, n, experts) = (group.rank(), group.world_size(), usize::from(args.experts));
    let communicator = DeviceCommunicator::<B>::new(group.clone(), Default::default(), None, "ep")?;
    let mut layer = Experts::new(numbers(1, WIDTH * experts, 0.5), experts, group);
    // A single rank has the tokens of all ranks.
    let all = 0..usize::from(args.ranks);
    let [inputs, targets] = if n == 1 { tokens::<B>(all.clone()) } else { tokens(rank..rank + 1) };
    let total = all.map(count).sum::<usize>() as f64;
    let mut losses = Vec::new();
    for step in 0..args.steps {
        let inputs = inputs.clone().require_grad();
        let outputs = layer.forward(inputs.clone(), &communicator)?;
        let loss = (outputs - targets.clone()).powi_scalar(2).sum() / total;
        let own = loss.clone().inner();
        let gradients = layer.gradients(loss, &inputs, group)?;
        layer.update(gradients, 0.3);
        let loss = all_reduce(own, ReduceOp::Sum, group)?.into_data().iter::<f64>().sum();
        if progress && rank == 0 && (step % 10 == 0 || step + 1 == args.steps) {
            println!("step {step:3}: loss {loss:.6}");
        }
        losses.push(loss);
    }
    Ok(losses)
}
