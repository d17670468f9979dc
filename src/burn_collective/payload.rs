//! The tensor that a peer passes to an operation: its elements in host memory, or the backend's tensor where the
//! operation can use it in place.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, TensorData, TensorMetadata};

use super::data::to_host;
use super::error::CollectiveError;
use crate::tensor::device::uses_collective_devices;
#[cfg(feature = "flex")]
use crate::tensor::flex;
use crate::tensor::host::float;

/// One peer's tensor.
pub(super) enum Payload<B: Backend> {
    Host(TensorData),
    /// The backend's tensor: on a collective device, or on the host in memory that is shared.
    InPlace(FloatTensor<B>),
}

impl<B: Backend> Payload<B> {
    /// Prepares a tensor for an all-reduce, in place if possible.
    pub fn in_place_or_read(tensor: FloatTensor<B>) -> Result<Self, CollectiveError> {
        #[cfg(feature = "flex")]
        let in_place = uses_collective_devices::<B>() || flex::shared::<B>(&tensor);
        #[cfg(not(feature = "flex"))]
        let in_place = uses_collective_devices::<B>();
        if in_place && float(tensor.dtype()).is_some() { Ok(Payload::InPlace(tensor)) } else { Payload::read(tensor) }
    }

    /// Reads a tensor to host memory.
    pub fn read(tensor: FloatTensor<B>) -> Result<Self, CollectiveError> {
        to_host::<B>(tensor).map(Payload::Host)
    }

    /// Returns the tensor's shape and element type.
    pub fn description(&self) -> (Vec<usize>, DType) {
        match self {
            Payload::Host(data) => (data.shape.to_vec(), data.dtype),
            Payload::InPlace(tensor) => (tensor.shape().to_vec(), tensor.dtype()),
        }
    }

    pub fn into_host(self) -> Result<TensorData, CollectiveError> {
        match self {
            Payload::Host(data) => Ok(data),
            Payload::InPlace(tensor) => to_host::<B>(tensor),
        }
    }

    /// Returns the tensor on `device`. A tensor that was used in place is there already.
    pub fn into_tensor(self, device: &B::Device) -> FloatTensor<B> {
        match self {
            Payload::Host(data) => B::float_from_data(data, device),
            Payload::InPlace(tensor) => tensor,
        }
    }
}
