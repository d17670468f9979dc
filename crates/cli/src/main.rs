//! The `bonfire` program.

mod doctor;
mod failure;
mod floor;
mod machine;
mod perf;
mod run;
mod stream;
mod text;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use env_logger::Env;

fn main() -> ExitCode {
    env_logger::Builder::from_env(Env::default().default_filter_or("warn")).init();
    let status = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Perf(args) => perf::run(args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Trace(args) => trace::run(&args),
    };
    ExitCode::from(status.unwrap_or_else(|failure| {
        stream::complain(format_args!("error: {failure}"));
        failure.status
    }))
}

/// Launch, benchmark and diagnose distributed training with Bonfire
///
/// Log messages go to standard error; RUST_LOG sets their level, which is warn unless set.
#[derive(Parser)]
#[command(name = "bonfire", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Perf(perf::Command),
    Doctor(doctor::Args),
    Trace(trace::Args),
}
