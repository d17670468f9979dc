//! A small transformer that learns to write like "Moby-Dick", byte by byte, on several ranks.
//!
//! Ranks are threads of this process or, if `bonfire run` or another launcher started it, processes. The result does
//! not depend on their number:
//!
//! ```sh
//! cargo run --release -p bonfire-examples --bin language_model -- --ranks 2 --save checkpoints --sample 200
//! ```
//!
//! With `--shard full` each rank keeps a part of the model only, and any form goes on from a checkpoint of another.

#[path = "language_model/data.rs"]
mod data;
#[path = "language_model/form.rs"]
mod form;
#[path = "language_model/model.rs"]
mod model;
#[path = "language_model/train.rs"]
mod train;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use bonfire::{Builder, Group, launch};
use burn::backend::{Autodiff, Flex};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::data::Text;
use crate::form::Shard;
use crate::train::{Settings, TrainingJob};

type Failure = Box<dyn Error + Send + Sync>;

/// Train a small transformer on the bytes of a book, on several ranks at once.
#[derive(Parser)]
#[command(name = "language_model")]
struct Args {
    /// Ranks, each a thread of this process [default: 2]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// Training steps, including those of a resumed run
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Global batch size: sequences of 64 bytes in a step over all ranks
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Seed of the initial weights, of the order of the sequences, and of the sample
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// What is sharded over the ranks
    #[arg(long, value_enum, default_value_t = Shard::None)]
    shard: Shard,
    /// With `full` and `grads`: replicas, and ranks that shard each, as `2x2` [default: 1x the number of ranks]
    #[arg(long, value_name = "REPLICASxRANKS", value_parser = mesh)]
    mesh: Option<[usize; 2]>,
    /// Save checkpoints in this folder, in the background, and after the last step
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    save_every: u32,
    /// Go on from the newest checkpoint in this folder
    #[arg(long, value_name = "FOLDER")]
    resume: Option<PathBuf>,
    /// Write so many bytes after the training
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    sample: usize,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let args = Args::parse();
    let threads = args.ranks.unwrap_or(2);
    let groups = Builder::from_env().and_then(|builder| match (builder.launched(), args.ranks) {
        (Some(launched), Some(_)) => {
            usage_error(&format!("--ranks is for ranks that are threads; {} started them as processes", launched.by))
        }
        (Some(_), None) => builder.connect().map(|group| vec![group]),
        (None, _) => Group::threads(threads.into()),
    });
    let groups = match groups {
        Ok(groups) => groups,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    if (args.batch as usize) < groups[0].world_size() {
        usage_error(&format!("--batch {} is too small: give at least {}", args.batch, groups[0].world_size()));
    }
    let (threads, world_size) = (groups.len(), groups[0].world_size());
    if let Some([replicas, ranks]) = args.mesh {
        if !matches!(args.shard, Shard::Full | Shard::Grads) {
            usage_error("--mesh is for --shard full and --shard grads: give one of them");
        }
        if replicas.checked_mul(ranks) != Some(world_size) {
            usage_error(&format!("--mesh {replicas}x{ranks} is not {world_size} ranks: give factors of {world_size}"));
        }
    }
    match launch::run(groups, move |group| train(group, &args, threads == world_size)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("error: {failed}");
            ExitCode::FAILURE
        }
    }
}

/// Trains as one rank. `alone` says whether all ranks are threads of this process.
fn train(group: Group, args: &Args, alone: bool) -> Result<(), Failure> {
    let job = TrainingJob {
        text: Text::load()?,
        settings: Settings { batch: args.batch as usize, seed: args.seed },
        steps: args.steps,
        shard: args.shard,
        mesh: args.mesh,
        save: args.save.as_deref(),
        save_every: args.save_every as usize,
        resume: args.resume.as_deref(),
        sample: args.sample,
        report: true,
        alone,
    };
    job.run::<Autodiff<Flex>>(group, &Default::default()).map(drop)
}

/// Parses a mesh of two dimensions.
fn mesh(text: &str) -> Result<[usize; 2], String> {
    let sizes = text.split_once('x').and_then(|(replicas, ranks)| Some([replicas.parse().ok()?, ranks.parse().ok()?]));
    sizes.ok_or_else(|| "give replicas and ranks that shard each, such as 2x2".into())
}

/// Exits as clap does for invalid arguments: with a message and status 2.
fn usage_error(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
