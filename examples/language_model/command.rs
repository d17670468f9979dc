//! The command line, and the ranks.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use bonfire::{Builder, Group, launch};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};

pub type Failure = Box<dyn Error + Send + Sync>;

/// Train a small transformer on the bytes of a book, on several ranks at once.
#[derive(Parser)]
#[command(name = "language_model")]
pub struct Args {
    /// Ranks, each a thread of this process [default: 2]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub ranks: Option<u16>,
    /// Training steps, including those of a resumed run
    #[arg(long, default_value_t = 400)]
    pub steps: usize,
    /// Global batch size: sequences of 64 bytes in a step over all ranks
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Seed of the initial weights, of the order of the sequences, and of the sample
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// What is sharded over the ranks
    #[arg(long, value_enum, default_value_t = Shard::None)]
    pub shard: Shard,
    /// With `full` and `grads`: replicas, and ranks that shard each, as `2x2` [default: 1x the number of ranks]
    #[arg(long, value_name = "REPLICASxRANKS", value_parser = mesh)]
    pub mesh: Option<[usize; 2]>,
    /// Save checkpoints in this folder, in the background, after the last step, and at SIGTERM
    #[arg(long, value_name = "FOLDER")]
    pub save: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub save_every: u32,
    /// Go on from the newest checkpoint in this folder
    #[arg(long, value_name = "FOLDER")]
    pub resume: Option<PathBuf>,
    /// Write so many bytes after the training
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub sample: usize,
}

/// What is sharded over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Shard {
    /// Parameters, gradients and the optimizer's state (ZeRO-3)
    Full,
    /// Gradients and the optimizer's state, and parameters between the steps (ZeRO-2)
    Grads,
    /// The optimizer's state (ZeRO-1)
    Optimizer,
    /// Nothing: each rank has all of the model and of the optimizer's state
    None,
}

/// Runs `train` as each rank. It gets the rank's group, and whether all ranks are threads of this process.
pub fn run(train: fn(Group, &Args, bool) -> Result<(), Failure>) -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let args = Args::parse();
    let threads = args.ranks.unwrap_or(2);
    let groups = Builder::from_env().and_then(|builder| match (builder.launched(), args.ranks) {
        (Some(launched), Some(_)) => {
            usage_error(&format!("--ranks is for ranks that are threads; {} started them as processes", launched.by))
        }
        (Some(_), None) => builder.connect().map(|group| vec![group]),
        (None, _) => builder.threads(threads.into()),
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

/// Parses a mesh of two dimensions.
fn mesh(text: &str) -> Result<[usize; 2], String> {
    let sizes = text.split_once('x').and_then(|(replicas, ranks)| Some([replicas.parse().ok()?, ranks.parse().ok()?]));
    sizes.ok_or_else(|| "give replicas and ranks that shard each, such as 2x2".into())
}

/// Exits as clap does for invalid arguments: with a message and status 2.
fn usage_error(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
