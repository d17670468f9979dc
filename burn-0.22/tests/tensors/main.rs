//! Tensors between ranks: operations with and without gradients, the communicator, and burn-collective's functions.

mod burn_collective;
mod communicator;
mod gradients;
mod operations;
