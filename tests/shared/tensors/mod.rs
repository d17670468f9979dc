//! Tests of tensors between ranks, over the `burn_version` and the `tensor_version` of each package.

mod checks;
pub mod communicator;
mod experts;
pub mod gradients;
mod operations;

use crate::tensor_version;
