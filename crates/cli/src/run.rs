//! `bonfire run`: starts and supervises the ranks of one node.

mod address;
mod args;
#[cfg(unix)]
mod error;
#[cfg(unix)]
mod fate;
#[cfg(unix)]
mod layout;
#[cfg(unix)]
mod memory;
#[cfg(target_os = "linux")]
mod orphans;
#[cfg(unix)]
mod output;
#[cfg(unix)]
mod port;
#[cfg(unix)]
mod rank;
#[cfg(unix)]
mod reports;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
mod sink;
#[cfg(unix)]
mod supervise;

use crate::failure::Failure;
pub use args::Args;

/// Runs the ranks to their end and returns the launcher's exit status.
#[cfg(unix)]
pub fn run(args: &Args) -> Result<u8, Failure> {
    let layout = layout::Layout::new(args).map_err(Failure::with(2))?;
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for warning in bonfire_core::internal::unknown_variables(names) {
        crate::stream::complain(format_args!("bonfire: {warning}"));
    }
    supervise::run(&layout, args).map_err(|error| Failure::with(error.status())(error))
}

#[cfg(not(unix))]
pub fn run(_: &Args) -> Result<u8, Failure> {
    Err(Failure::with(1)(
        "`bonfire run` needs process groups and signals, which this system lacks: start each rank \
         by hand, with the variables that `bonfire run --help` lists",
    ))
}
