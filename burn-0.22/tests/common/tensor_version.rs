//! What tests of tensors that both packages share need of burn 0.22, beside `burn_version`.
//! `tests/common/tensor_version.rs` of the root package has the same names for burn 0.21.

pub use crate::burn_version::{Inner, inner_device};
pub use bonfire::DeviceCommunicator;
pub use bonfire::tensor::operation::Kind;
pub use burn::tensor::kind::Numeric;

use burn::tensor::DType;

pub fn computes_in(dtype: DType) -> bool {
    inner_device().supports_dtype(dtype)
}
