//! Tensors of burn 0.22: their elements in host memory, and hooks in their graphs.

pub(crate) mod hook;
pub(crate) mod host;
pub(crate) mod sum;
