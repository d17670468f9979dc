//! A small transformer that learns to write like "Moby-Dick", byte by byte, on several ranks.
//!
//! As `examples/language_model.rs` of the root package, on burn 0.22, and each goes on from the other's checkpoints:
//!
//! ```sh
//! cargo run --release --example language_model -- --ranks 2 --save checkpoints --sample 200
//! ```

#[path = "../../../examples/language_model/command.rs"]
mod command;
#[path = "../../../examples/language_model/data.rs"]
mod data;
mod form;
mod model;
mod train;
#[path = "../../../examples/language_model/writing.rs"]
mod writing;

use std::process::ExitCode;

use bonfire::Group;
use burn::tensor::Device;

use crate::command::{Args, Failure};
use crate::data::Text;

fn main() -> ExitCode {
    command::run(train)
}

/// Trains as one rank. `alone` says whether all ranks are threads of this process.
fn train(group: Group, args: &Args, alone: bool) -> Result<(), Failure> {
    train::run(&group, args, &Text::load()?, &Device::flex().autodiff(), alone)
}
