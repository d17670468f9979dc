//! The command line, and the ranks.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use bonfire::train::compression;
use bonfire::{Builder, Group, Sharding, launch};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};

use crate::backend::{self, Backend};
use crate::checkpoint::Settings;
use crate::data::Digits;
use crate::job::TrainingJob;

pub type Failure = Box<dyn Error + Send + Sync>;

/// Train a small convolutional network on handwritten digits, on several ranks at once.
#[derive(Parser)]
#[command(name = "digits")]
pub struct Args {
    /// Ranks, each a thread of this process [default: 2]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// Passes over the training images, including those of a resumed run
    #[arg(long, default_value_t = 15)]
    epochs: usize,
    /// Global batch size: images in a step over all ranks
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Seed of the initial weights and of the order of the images
    #[arg(long, default_value_t = 42)]
    seed: u64,
    #[arg(long, value_enum, default_value_t = Backend::Flex, help = backend::HELP)]
    pub backend: Backend,
    /// Learning rate
    #[arg(long, default_value_t = 0.001, value_parser = learning_rate)]
    lr: f64,
    /// Save a checkpoint in this folder after every epoch, and at SIGTERM
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,
    /// Resume from the newest checkpoint in this folder
    #[arg(long, value_name = "FOLDER")]
    resume: Option<PathBuf>,
    /// Shard the optimizer's state (ZeRO-1) over blocks of this many ranks, or over all ranks if no number is given
    #[arg(long, value_name = "RANKS", conflicts_with = "chaos")]
    shard: Option<Option<usize>>,
    /// Let gradients travel in fewer bytes
    #[arg(long, value_parser = compression::NAMES, value_name = "TYPE", conflicts_with = "shard")]
    compression: Option<String>,
    /// Kill this rank, by default 0, in the middle of an epoch; the others continue without it. With `bonfire run`, add
    /// `--tolerate 1`
    #[arg(long, value_name = "RANK", num_args = 0..=1, default_missing_value = "0")]
    chaos: Option<usize>,
}

impl Args {
    /// Returns the job that the arguments describe, with the digits.
    pub fn job(&self) -> Result<TrainingJob<'_>, Failure> {
        let backend = self.backend.to_possible_value().map(|value| value.get_name().to_owned());
        let settings = Settings {
            batch: self.batch as usize,
            seed: self.seed,
            lr: self.lr,
            backend: backend.unwrap_or_default(),
            shard: self.shard.is_some(),
        };
        Ok(TrainingJob {
            data: Digits::load()?,
            settings,
            epochs: self.epochs,
            save: self.save.as_deref(),
            resume: self.resume.as_deref(),
            shard: self.shard.map(|ranks| ranks.map_or(Sharding::All, Sharding::Blocks)),
            compression: self.compression.as_deref(),
            chaos: self.chaos,
        })
    }
}

/// Runs `train` as each rank. It gets the number of the rank within this process, and the rank's group.
pub fn run(train: fn(u8, Group, &Args) -> Result<(), Failure>) -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let args = Args::parse();
    let threads = args.ranks.unwrap_or(2);
    // An interactive shell in a cluster's job counts as a single rank, too.
    let alone = |ranks: Option<usize>| ranks == Some(1) && std::env::var_os("BONFIRE_RANK").is_none();
    let groups = Builder::from_env().and_then(|builder| match (builder.launched(), args.ranks) {
        (Some(launched), Some(_)) if alone(launched.world_size) => Group::threads(threads.into()),
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
    if let Some(rank) = args.chaos.filter(|rank| *rank >= groups[0].world_size() || groups[0].world_size() == 1) {
        usage_error(&format!("--chaos needs rank {rank} and another: there are {} ranks", groups[0].world_size()));
    }
    let first = groups[0].rank();
    match launch::run(groups, move |group| train((group.rank() - first) as u8, group, &args)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("error: {failed}");
            ExitCode::FAILURE
        }
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(lr) if lr > 0.0 && f64::is_finite(lr) => Ok(lr),
        _ => Err("give a number above 0".into()),
    }
}

/// Exits as clap does for invalid arguments: with a message and status 2.
fn usage_error(message: &str) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
