//! `bonfire doctor`: what this machine has, how fast it is, and what prevents or slows a run.

mod devices;
mod findings;
#[cfg(unix)]
mod launchers;
mod network;
mod system;

use crate::failure::Failure;
use crate::machine::Machine;
use crate::stream::print;
use findings::Findings;

/// Check this machine: processors, memory, network, limits, launchers, GPUs
///
/// The check measures for about a second: run nothing else meanwhile. Each problem is printed with its remedy.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct Args {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

const EXIT_STATUS: &str = "\
Exit status:
  0  Bonfire can run here; there may be warnings
  1  Bonfire cannot run here";

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
    #[cfg(unix)]
    launchers::misspelled(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()), &mut findings);
    devices::devices(&machine, &mut findings);
    print(&if args.json { findings.json() } else { findings.text() })?;
    Ok(u8::from(!findings.runs()))
}
