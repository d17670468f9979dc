//! Ranks as threads and processes: operations on tensors, and training.
//!
//! One program instead of six: burn's backends are generic, so the compiler would generate them again for each, which
//! takes about a minute. For the same reason f64 is a type of tensors of Flex, whose kernels are compiled once, and the
//! backend NdArray, whose kernels are generic, is only used where a test is about other backends than Flex.

#[path = "../../examples/digits/data.rs"]
mod digits;

mod chaos;
mod checkpoints;
mod communicator;
mod compression;
mod data_parallel;
mod fully_sharded;
mod gradients;
mod mesh;
mod mismatch;
mod races;
mod randomness;
mod sharded;
mod step;
mod sync_batch_norm;
mod tensors;
mod training_state;
mod verify;

use bonfire_testing::allocation::Counting;
use burn::backend::{Autodiff, Flex};
use burn::module::{ModuleMapper, Param};
use burn::tensor::{DType, Tensor};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Converts parameters and states to f64, in which sums of different order agree to 1e-12.
struct InF64;

impl ModuleMapper<Autodiff<Flex>> for InF64 {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Autodiff<Flex>, D>>,
    ) -> Param<Tensor<Autodiff<Flex>, D>> {
        let trained = param.is_require_grad();
        let (id, tensor, mapper) = param.consume();
        let tensor = Tensor::from_inner(tensor.inner().cast(DType::F64)).set_require_grad(trained);
        Param::from_mapped_value(id, tensor, mapper)
    }
}
