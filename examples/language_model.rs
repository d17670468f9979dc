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

#[path = "language_model/command.rs"]
mod command;
#[path = "language_model/data.rs"]
mod data;
#[path = "language_model/form.rs"]
mod form;
#[path = "language_model/model.rs"]
mod model;
#[path = "language_model/train.rs"]
mod train;
#[path = "language_model/writing.rs"]
mod writing;

use std::process::ExitCode;

use bonfire::Group;
use burn::backend::{Autodiff, Flex};

use crate::command::{Args, Failure};
use crate::data::Text;
use crate::train::{Settings, TrainingJob};

fn main() -> ExitCode {
    command::run(train)
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
