//! Tensors that take part in an operation: as data of the host, or where their backend has them as long as the operation
//! allows.

use std::any::Any;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Float, TensorData, TensorMetadata, TensorPrimitive};

use super::data::to_host;
use super::error::CollectiveError;
use crate::tensor::device::serves;
#[cfg(feature = "flex")]
use crate::tensor::flex;
use crate::tensor::host::float;
use crate::tensor::operation::carry;
use bonfire_core::{Error, Group, ReduceOp};

/// One peer's tensor.
pub(super) enum Cargo {
    Host(TensorData),
    Kept(Box<dyn Kept>),
}

impl Cargo {
    /// A tensor to be reduced on all peers, which may stay where it is.
    pub fn load<B: Backend>(tensor: FloatTensor<B>) -> Result<Cargo, CollectiveError> {
        #[cfg(feature = "flex")]
        let stays = serves::<B>() || flex::shared::<B>(&tensor);
        #[cfg(not(feature = "flex"))]
        let stays = serves::<B>();
        if stays && float(tensor.dtype()).is_some() {
            Ok(Cargo::Kept(Box::new(Held::<B>(tensor))))
        } else {
            Cargo::read::<B>(tensor)
        }
    }

    /// A tensor's data.
    pub fn read<B: Backend>(tensor: FloatTensor<B>) -> Result<Cargo, CollectiveError> {
        to_host::<B>(tensor).map(Cargo::Host)
    }

    /// The tensor's shape and element type.
    pub fn description(&self) -> (Vec<usize>, DType) {
        match self {
            Cargo::Host(data) => (data.shape.to_vec(), data.dtype),
            Cargo::Kept(tensor) => tensor.description(),
        }
    }

    pub fn into_host(self) -> Result<TensorData, CollectiveError> {
        match self {
            Cargo::Host(data) => Ok(data),
            Cargo::Kept(tensor) => tensor.read(),
        }
    }

    /// The tensor on `device`, where it is already if it has never left it.
    pub fn unload<B: Backend>(self, device: &B::Device) -> Result<FloatTensor<B>, CollectiveError> {
        match self {
            Cargo::Host(data) => Ok(B::float_from_data(data, device)),
            Cargo::Kept(tensor) => {
                let tensor: Box<dyn Any> = tensor;
                let held = tensor.downcast::<Held<B>>();
                held.map(|held| held.0).map_err(|_| CollectiveError::Other("the tensor is of another backend".into()))
            }
        }
    }
}

/// A tensor where its backend has it: on a collective device, or on the host with others who hold it.
pub(super) trait Kept: Any + Send {
    fn description(&self) -> (Vec<usize>, DType);
    fn all_reduce(self: Box<Self>, group: &Group, op: ReduceOp) -> Result<Cargo, Error>;
    fn read(self: Box<Self>) -> Result<TensorData, CollectiveError>;
}

struct Held<B: Backend>(FloatTensor<B>);

impl<B: Backend> Kept for Held<B> {
    fn description(&self) -> (Vec<usize>, DType) {
        (self.0.shape().to_vec(), self.0.dtype())
    }

    fn all_reduce(self: Box<Self>, group: &Group, op: ReduceOp) -> Result<Cargo, Error> {
        let reduced = carry::all_reduce::<B, Float>(group.into(), TensorPrimitive::Float(self.0), op)?;
        Ok(Cargo::Kept(Box::new(Held::<B>(reduced.tensor()))))
    }

    fn read(self: Box<Self>) -> Result<TensorData, CollectiveError> {
        to_host::<B>(self.0)
    }
}
