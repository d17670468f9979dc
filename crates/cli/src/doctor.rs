//! `bonfire doctor`: what this machine has, how fast it is, and what stands in the way of a run.

mod devices;
mod findings;
#[cfg(unix)]
mod launchers;
mod network;
mod system;

use crate::failure::{Failure, print};
use crate::machine::Machine;
use findings::Findings;

/// Look at this machine: processors, memory, network, limits, launchers, GPUs
///
/// Measures for about a second, so let nothing else run meanwhile. For each problem it says what to do.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct Args {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

const EXIT_STATUS: &str = "\
Exit status:
  0  Bonfire can run here, though there may be warnings
  1  it cannot";

/// Examines the machine and returns the exit status.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let machine = Machine::this();
    let mut findings = Findings::default();
    system::processors(&machine, &mut findings);
    system::memory(&machine, &mut findings);
    #[cfg(unix)]
    system::limits(&mut findings);
    network::interfaces(&machine, &mut findings);
    network::loopback(&mut findings);
    #[cfg(unix)]
    launchers::variables(|name| std::env::var(name).ok(), &mut findings);
    #[cfg(unix)]
    launchers::recognised(bonfire::Builder::from_env(), &mut findings);
    devices::devices(&machine, &mut findings);
    print(&if args.json { findings.json() } else { findings.text() })?;
    Ok(u8::from(!findings.runs()))
}
