//! Tensors between ranks: operations with and without gradients, and the communicator, in the tests that both packages
//! share and in those of this one alone; and burn-collective's functions.

#[path = "../common/burn_version.rs"]
mod burn_version;
#[path = "../common/tensor_version.rs"]
mod tensor_version;
#[path = "../../../tests/shared/tensors/mod.rs"]
mod tensors;

mod burn_collective;
mod gradients;
