//! What only the software driver (`kernels/check --driver`) does or records: faults on request, one hardware queue, how
//! GPUs are connected, and calls of the driver. `scripts/gpu-check` leaves these tests out.

mod faults;
mod order;
mod paths;

use bonfire_testing::process::Process;

/// Starts the test `name` of this module in a process of its own, with this many GPUs and these variables.
fn start(name: &str, gpus: usize, variables: &[(&str, &str)]) -> Process {
    let gpus = gpus.to_string();
    let counts = [("SHIM_GPUS", &gpus[..]), ("BONFIRE_TEST_GPUS", &gpus[..])];
    let variables: Vec<_> = counts.iter().chain(variables).map(|(name, value)| (*name, (*value).to_owned())).collect();
    Process::start(&format!("software::{name}"), &variables)
}
