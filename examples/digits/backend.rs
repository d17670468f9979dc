//! burn's backends, as `--backend` names them.

use clap::ValueEnum;

/// What `--help` says about them.
pub const HELP: &str = "\
    Backend: flex and ndarray use f32, ndarray64 f64; wgpu and cuda use GPUs, with a logical device for each rank. \
    With cuda each rank gets its own GPU as long as there are enough";

#[derive(Clone, Copy, ValueEnum)]
pub enum Backend {
    Flex,
    Ndarray,
    Ndarray64,
    Wgpu,
    Cuda,
}
