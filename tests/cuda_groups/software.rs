//! What only the software driver (`kernels/check --driver`) does or records: faults on request, one hardware queue, how
//! GPUs are connected, and calls of the driver. `scripts/gpu-check` leaves these tests out.

mod faults;
mod follow;
mod messages;
mod order;
mod paths;
mod unusable;
mod windows;

use std::os::unix::fs::symlink;
use std::time::Duration;

use crate::software_driver::with_gpus;
use bonfire_testing::process::Process;

/// Far more than a loaded machine needs to notice a failure, and less than the deadline.
const SOON: Duration = Duration::from_secs(30);
/// Makes kernels the only path.
const KERNELS: (&str, &str) = ("BONFIRE_CUDA", "kernels");

/// Starts the test `name` of this module in a process of its own, with this many GPUs and these variables.
fn start(name: &str, gpus: usize, variables: &[(&str, &str)]) -> Process {
    Process::start(&format!("software::{name}"), &with_gpus(gpus, variables))
}

/// Starts it in as many processes as there are ranks.
fn start_ranks(name: &str, ranks: usize, gpus: usize, variables: &[(&str, &str)]) -> Vec<Process> {
    Process::start_ranks_with(&format!("software::{name}"), ranks, "auto", "60", &with_gpus(gpus, variables))
}

/// A folder with the libraries of `LD_LIBRARY_PATH` but NCCL.
fn libraries_without_nccl() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = std::env::var("LD_LIBRARY_PATH").unwrap();
    for library in path.split(':').filter_map(|from| std::fs::read_dir(from).ok()).flatten() {
        let library = library.unwrap();
        if !library.file_name().to_string_lossy().starts_with("libnccl") {
            let _ = symlink(library.path(), folder.path().join(library.file_name()));
        }
    }
    folder
}
