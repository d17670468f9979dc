//! Tensors that take part in an operation: on the host, or on a collective device as long as the operation allows.

use std::any::Any;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, TensorData, TensorMetadata};

use super::data::to_host;
use super::error::CollectiveError;
use crate::dtype::ReduceOp;
use crate::error::Error;
use crate::group::Group;
use crate::tensor::device::{element, serves, start_all_reduce};

/// One peer's tensor.
pub(super) enum Cargo {
    Host(TensorData),
    Device(Box<dyn OnDevice>),
}

impl Cargo {
    /// A tensor to be reduced on all peers, which needs no host.
    pub fn load<B: Backend>(tensor: FloatTensor<B>) -> Result<Cargo, CollectiveError> {
        if serves::<B>() && element(tensor.dtype()).is_some() {
            Ok(Cargo::Device(Box::new(Held::<B>(tensor))))
        } else {
            Cargo::read::<B>(tensor)
        }
    }

    /// A tensor on the host.
    pub fn read<B: Backend>(tensor: FloatTensor<B>) -> Result<Cargo, CollectiveError> {
        to_host::<B>(tensor).map(Cargo::Host)
    }

    /// The tensor's shape and element type.
    pub fn description(&self) -> (Vec<usize>, DType) {
        match self {
            Cargo::Host(data) => (data.shape.to_vec(), data.dtype),
            Cargo::Device(tensor) => tensor.description(),
        }
    }

    pub fn into_host(self) -> Result<TensorData, CollectiveError> {
        match self {
            Cargo::Host(data) => Ok(data),
            Cargo::Device(tensor) => tensor.read(),
        }
    }

    /// The tensor on `device`, where it is already if it has never left it.
    pub fn unload<B: Backend>(self, device: &B::Device) -> Result<FloatTensor<B>, CollectiveError> {
        match self {
            Cargo::Host(data) => Ok(B::float_from_data(data, device)),
            Cargo::Device(tensor) => {
                let tensor: Box<dyn Any> = tensor;
                let held = tensor.downcast::<Held<B>>();
                held.map(|held| held.0).map_err(|_| CollectiveError::Other("the tensor is of another backend".into()))
            }
        }
    }
}

/// A tensor on a collective device, whatever its backend.
pub(super) trait OnDevice: Any + Send {
    fn description(&self) -> (Vec<usize>, DType);
    fn all_reduce(self: Box<Self>, group: &Group, op: ReduceOp) -> Result<Box<dyn OnDevice>, Error>;
    fn read(self: Box<Self>) -> Result<TensorData, CollectiveError>;
}

struct Held<B: Backend>(FloatTensor<B>);

impl<B: Backend> OnDevice for Held<B> {
    fn description(&self) -> (Vec<usize>, DType) {
        (self.0.shape().to_vec(), self.0.dtype())
    }

    fn all_reduce(self: Box<Self>, group: &Group, op: ReduceOp) -> Result<Box<dyn OnDevice>, Error> {
        let dtype = self.0.dtype();
        let element = element(dtype).ok_or_else(|| Error::argument("all_reduce", format!("{dtype:?} is no float")))?;
        let started = start_all_reduce::<B>(group, vec![self.0], element, op, |_| ());
        let mut reduced = started.map_err(|_| Error::io("all_reduce", "the tensor is on no collective device"))??()?;
        let reduced = reduced.pop().ok_or_else(|| Error::io("all_reduce", "the device gave no result"))?;
        Ok(Box::new(Held::<B>(reduced)))
    }

    fn read(self: Box<Self>) -> Result<TensorData, CollectiveError> {
        to_host::<B>(self.0)
    }
}
