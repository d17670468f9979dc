//! Benchmarks of collectives on the first GPU, which all ranks share as logical devices, and of kernels between GPUs.
//!
//! ```sh
//! cargo run --release -p bonfire-examples --features nccl --bin gpu_bench -- --out figures
//! ```
//!
//! Ratios are taken within a round, with both sides in turn. Figures are medians over rounds. Times are between events
//! on the GPU, but those of clients are the host's wall time. `scripts/gpu-check` runs this.

#[path = "gpu_bench/api.rs"]
mod api;
#[path = "gpu_bench/kernels.rs"]
mod kernels;
#[cfg(feature = "nccl")]
#[path = "gpu_bench/nccl.rs"]
mod nccl;
#[path = "gpu_bench/paths.rs"]
mod paths;
#[path = "gpu_bench/processes.rs"]
mod processes;
#[path = "gpu_bench/report.rs"]
mod report;
#[path = "gpu_bench/training.rs"]
mod training;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

use crate::paths::Measured;
use crate::report::Report;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Measure collectives on GPUs. Exits with status 1 if a goal is missed or a figure cannot be measured.
#[derive(Parser)]
#[command(name = "gpu_bench")]
struct Args {
    /// What to measure [default: all]
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Folder for gpu_bench.json and gpu_bench.md with all figures
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Rounds of each measurement
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The largest buffer of a rank, in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    largest: u32,
    /// Calls of each measurement of small buffers; fewer of large ones
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    calls: u32,
    /// Print the seconds of calls, for a comparison between processes
    #[arg(long, hide = true)]
    measured: Option<Measured>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    /// Kernels on large buffers, beside what copies show to be possible
    Large,
    /// Kernels on 8 KiB
    Small,
    /// 8 KiB through cubecl's clients
    Clients,
    /// NCCL's time over ours
    #[cfg(feature = "nccl")]
    Nccl,
    /// The sizes for which docs/measurements/gpu.md predicts times
    Predicted,
    /// Computation and collectives at once, with collectives on all multiprocessors and on half of them
    Overlap,
    /// Each form of all_reduce at every size
    Sizes,
    /// Messages between two devices, by kernels and over host memory
    Messages,
    /// Operations on parts of which one is longer than the others, likewise
    Unequal,
    /// Training steps of a model with 150 tensors
    Steps,
    /// What the order of launches adds to a call of two processes
    Order,
    /// Kernels of two processes in two containers; needs root, and `ip` for networks of their own
    Containers,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn,cubecl_runtime=error")).init();
    let args = Args::parse();
    match measure(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &Args) -> Result<bool, Failure> {
    let gpus = bonfire::CudaDevice::gpus()?;
    let extent = kernels::Extent { largest: (args.largest as usize) << 20, calls: args.calls as usize };
    if let Some(measured) = args.measured {
        return measured.print(extent, args.rounds as usize).map(|()| true);
    }
    let mut report = Report::new(args.rounds as usize, args.out.clone());
    for part in Part::value_variants().iter().filter(|part| args.parts.is_empty() || args.parts.contains(part)) {
        match part {
            Part::Large => kernels::large(&mut report, extent),
            Part::Small => kernels::small(&mut report, extent),
            Part::Clients => api::small(&mut report, extent.calls),
            #[cfg(feature = "nccl")]
            Part::Nccl => nccl::compare(&mut report, extent),
            Part::Predicted => kernels::predicted(&mut report, extent, gpus),
            Part::Overlap => api::overlap(&mut report, extent),
            Part::Sizes => kernels::sizes(&mut report, extent),
            Part::Messages => paths::messages(&mut report, extent),
            Part::Unequal => paths::unequal(&mut report, extent),
            Part::Steps => training::steps(&mut report, extent),
            Part::Order => processes::order(&mut report, extent),
            Part::Containers => processes::containers(&mut report, extent),
        }
    }
    report.write()?;
    Ok(report.passed())
}
