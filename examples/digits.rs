//! Data-parallel training of a small convolutional network on handwritten digits.
//!
//! Ranks are threads of this process or, if `bonfire run` or another launcher started it, processes:
//!
//! ```sh
//! cargo run --release -p bonfire-examples --bin digits -- --ranks 2
//! ```

#[path = "digits/backend.rs"]
mod backend;
#[path = "digits/checkpoint.rs"]
mod checkpoint;
#[path = "digits/command.rs"]
mod command;
#[path = "digits/data.rs"]
mod data;
#[path = "digits/job.rs"]
mod job;
#[path = "digits/model.rs"]
mod model;
#[path = "digits/progress.rs"]
mod progress;
#[path = "digits/train.rs"]
mod train;

use std::process::ExitCode;

use bonfire::Group;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::{Autodiff, Flex};

use crate::backend::Backend;
use crate::command::{Args, Failure};

fn main() -> ExitCode {
    command::run(train)
}

/// Trains as one rank, whose number within this process is `number`.
fn train(
    #[allow(unused, reason = "only some backends have several devices")] number: u8,
    group: Group,
    args: &Args,
) -> Result<(), Failure> {
    let job = args.job()?;
    let outcome = match args.backend {
        Backend::Flex => job.run::<Autodiff<Flex>>(group, Default::default()),
        #[cfg(feature = "ndarray")]
        Backend::Ndarray => job.run::<Autodiff<NdArray<f32>>>(group, Default::default()),
        #[cfg(feature = "ndarray")]
        Backend::Ndarray64 => job.run::<Autodiff<NdArray<f64>>>(group, Default::default()),
        #[cfg(not(feature = "ndarray"))]
        Backend::Ndarray | Backend::Ndarray64 => {
            Err("this program was built without NdArray: build it with `--features ndarray`".into())
        }
        #[cfg(feature = "wgpu")]
        Backend::Wgpu => {
            let device = bonfire::WgpuDevice::new(Default::default(), number);
            job.run::<Autodiff<bonfire::Wgpu>>(group, device)
        }
        #[cfg(not(feature = "wgpu"))]
        Backend::Wgpu => Err("this program was built without wgpu: build it with `--features wgpu`".into()),
        #[cfg(feature = "cuda")]
        Backend::Cuda => {
            let device = bonfire::CudaDevice::of_rank(group.by_host()?.rank())?;
            job.run::<Autodiff<bonfire::Cuda>>(group, device)
        }
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda => Err("this program was built without cuda: build it with `--features cuda`".into()),
    };
    outcome.map(drop)
}
