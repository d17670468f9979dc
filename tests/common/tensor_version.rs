//! What tests of tensors that both packages share need of burn 0.21, beside `burn_version`.
//! `burn-0.22/tests/common/tensor_version.rs` has the same names for burn 0.22.

pub use crate::burn_version::{Inner, inner_device};

use bonfire::tensor::operation;
use burn::backend::Flex;
use burn::tensor::DType;
use burn::tensor::backend::Backend;

pub type DeviceCommunicator = bonfire::DeviceCommunicator<Flex>;

/// A kind of tensors.
pub trait Kind: operation::Kind<Flex> {}

impl<K: operation::Kind<Flex>> Kind for K {}

/// A kind of tensors that can be added.
pub trait Numeric: Kind + burn::tensor::Numeric<Flex> {}

impl<K: Kind + burn::tensor::Numeric<Flex>> Numeric for K {}

/// Whether the device of tensors without autodiff computes in this element type.
pub fn computes_in(dtype: DType) -> bool {
    Flex::supports_dtype(&inner_device(), dtype)
}
