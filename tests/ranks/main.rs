//! Ranks as threads and processes: operations on tensors, and training.
//!
//! One program instead of six: burn's backends are generic, so the compiler would generate them again for each, which
//! takes about a minute. For the same reason f64 is a type of tensors of Flex, whose kernels are compiled once, and the
//! backend NdArray, whose kernels are generic, is only used where a test is about other backends than Flex.

#[path = "../../examples/digits/data.rs"]
mod digits;

#[path = "../common/burn_version.rs"]
mod burn_version;
#[path = "../common/checkpoint_version.rs"]
mod checkpoint_version;
#[cfg(feature = "dataset")]
#[path = "../common/loader_version.rs"]
mod loader_version;
#[path = "../common/model_data.rs"]
mod model_data;
#[path = "../common/scan_version.rs"]
mod scan_version;
#[path = "../shared/mod.rs"]
mod shared;
#[path = "../common/tensor_version.rs"]
mod tensor_version;
#[path = "../shared/tensors/mod.rs"]
mod tensors;

mod checkpoints;
mod communicator;
mod fully_sharded;
mod ndarray;
mod step;

use bonfire_testing::allocation::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
