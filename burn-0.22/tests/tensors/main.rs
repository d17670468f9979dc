//! Tensors between ranks: operations with and without gradients, and the communicator.

mod communicator;
mod gradients;
mod operations;
