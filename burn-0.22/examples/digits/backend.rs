//! burn's backends, as `--backend` names them.

use clap::ValueEnum;

/// What `--help` says about them.
pub const HELP: &str = "Backend: flex or ndarray, both in f32. The others are those of the program for burn 0.21";

#[derive(Clone, Copy, ValueEnum)]
pub enum Backend {
    Flex,
    Ndarray,
    Ndarray64,
    Wgpu,
    Cuda,
}
