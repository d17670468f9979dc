//! The `bonfire` program.

mod doctor;
mod floor;
mod machine;
mod perf;
mod run;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use env_logger::Env;

fn main() -> ExitCode {
    env_logger::Builder::from_env(Env::default().default_filter_or("warn")).init();
    match Cli::parse().command {
        Command::Run(args) => ExitCode::from(run::run(&args)),
        Command::Perf(args) => ExitCode::from(perf::run(&args)),
        Command::Doctor(args) => ExitCode::from(doctor::run(&args)),
        Command::Trace(args) => ExitCode::from(trace::run(&args)),
    }
}

/// Tools for distributed training with burn
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Perf(perf::Args),
    Doctor(doctor::Args),
    Trace(trace::Args),
}
