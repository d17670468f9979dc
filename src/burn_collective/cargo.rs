//! Tensors that take part in an operation: as data of the host, or where their backend has them as long as the operation
//! allows.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, TensorData, TensorMetadata};

use super::data::to_host;
use super::error::CollectiveError;
use crate::tensor::device::serves;
#[cfg(feature = "flex")]
use crate::tensor::flex;
use crate::tensor::host::float;

/// One peer's tensor.
pub(super) enum Cargo<B: Backend> {
    Host(TensorData),
    /// Where its backend has it: on a collective device, or on the host with others who hold it.
    Kept(FloatTensor<B>),
}

impl<B: Backend> Cargo<B> {
    /// A tensor to be reduced on all peers, which may stay where it is.
    pub fn load(tensor: FloatTensor<B>) -> Result<Self, CollectiveError> {
        #[cfg(feature = "flex")]
        let stays = serves::<B>() || flex::shared::<B>(&tensor);
        #[cfg(not(feature = "flex"))]
        let stays = serves::<B>();
        if stays && float(tensor.dtype()).is_some() { Ok(Cargo::Kept(tensor)) } else { Cargo::read(tensor) }
    }

    /// A tensor's data.
    pub fn read(tensor: FloatTensor<B>) -> Result<Self, CollectiveError> {
        to_host::<B>(tensor).map(Cargo::Host)
    }

    /// The tensor's shape and element type.
    pub fn description(&self) -> (Vec<usize>, DType) {
        match self {
            Cargo::Host(data) => (data.shape.to_vec(), data.dtype),
            Cargo::Kept(tensor) => (tensor.shape().to_vec(), tensor.dtype()),
        }
    }

    pub fn into_host(self) -> Result<TensorData, CollectiveError> {
        match self {
            Cargo::Host(data) => Ok(data),
            Cargo::Kept(tensor) => to_host::<B>(tensor),
        }
    }

    /// The tensor on `device`, where it is already if it has never left it.
    pub fn unload(self, device: &B::Device) -> FloatTensor<B> {
        match self {
            Cargo::Host(data) => B::float_from_data(data, device),
            Cargo::Kept(tensor) => tensor,
        }
    }
}
