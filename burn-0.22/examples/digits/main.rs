//! Data-parallel training of a small convolutional network on handwritten digits.
//!
//! As `examples/digits.rs` of the root package, on burn 0.22, and each goes on from the other's checkpoints:
//!
//! ```sh
//! cargo run --release --example digits -- --ranks 2
//! ```

mod backend;
#[path = "../../../examples/digits/checkpoint.rs"]
mod checkpoint;
#[path = "../../../examples/digits/command.rs"]
mod command;
#[path = "../../../examples/digits/data.rs"]
mod data;
#[path = "../../../examples/digits/job.rs"]
mod job;
mod model;
#[path = "../../../examples/digits/progress.rs"]
mod progress;
mod train;

use std::process::ExitCode;

use bonfire::Group;
use burn::tensor::Device;

use crate::backend::Backend;
use crate::command::{Args, Failure};

fn main() -> ExitCode {
    command::run(train)
}

/// Trains as one rank. All ranks of a process train on one device.
fn train(_number: u8, group: Group, args: &Args) -> Result<(), Failure> {
    let device = match args.backend {
        Backend::Flex => Device::flex(),
        #[cfg(feature = "ndarray")]
        #[expect(deprecated, reason = "burn 0.22 still has it")]
        Backend::Ndarray => Device::ndarray(),
        #[cfg(not(feature = "ndarray"))]
        Backend::Ndarray => {
            return Err("this program was built without NdArray: build it with `--features ndarray`".into());
        }
        Backend::Ndarray64 => return only_on_0_21("ndarray"),
        Backend::Wgpu => return only_on_0_21("wgpu"),
        Backend::Cuda => return only_on_0_21("cuda"),
    };
    args.job()?.run(group, device.autodiff()).map(drop)
}

fn only_on_0_21(feature: &str) -> Result<(), Failure> {
    let program = "`digits` for burn 0.21, in the package `bonfire-examples`";
    Err(format!("only {program}, has this backend: build that with `--features {feature}`").into())
}
