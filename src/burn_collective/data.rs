//! Tensors in host memory, and the group's operations on them.

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, DType, Float, TensorData, TensorPrimitive};

use super::error::CollectiveError;
use crate::tensor::host::{self, align, float};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Element, Error, Group, Operation, ReduceOp};
use bytemuck::cast_slice_mut;

/// Reads the tensor's elements, without a copy where the backend can export them.
pub(super) fn to_host<B: Backend>(tensor: B::FloatTensorPrimitive) -> Result<TensorData, CollectiveError> {
    let data = host::data::<B, Float>("reading a tensor", TensorPrimitive::Float(tensor));
    match data {
        Ok(data) if float(data.dtype).is_some() => Ok(data),
        Ok(data) => Err(CollectiveError::Other(format!("tensors of {:?} cannot be reduced", data.dtype))),
        Err(error) => Err(CollectiveError::Other(error.to_string())),
    }
}

/// Allocates a tensor to receive into.
pub(super) fn empty(shape: &[usize], dtype: DType) -> Result<TensorData, CollectiveError> {
    let bytes = shape.iter().try_fold(dtype.size(), |bytes, dim| bytes.checked_mul(*dim));
    match bytes {
        Some(_) if float(dtype).is_some() => {
            Ok(TensorData { dtype, ..TensorData::full_dtype(shape.to_vec(), 0.0, dtype) })
        }
        _ => Err(CollectiveError::Other(format!("a tensor of shape {shape:?} and {dtype:?} cannot be received"))),
    }
}

pub(super) fn all_reduce(group: &Group, data: &mut TensorData, op: ReduceOp) -> Result<(), Error> {
    let request = request(Operation::AllReduce, data)?.reduction(op);
    group.operate(request, None, bytes(data, request.dtype()))
}

pub(super) fn reduce(group: &Group, data: &mut TensorData, op: ReduceOp, root: usize) -> Result<(), Error> {
    let request = request(Operation::Reduce, data)?.reduction(op).root(root);
    group.operate(request, None, bytes(data, request.dtype()))
}

/// Returns the request for an operation on a tensor in host memory. It has the tensor's shape, as that of a tensor that
/// is used in place: which of the two a tensor is depends on its memory, and the peers' calls must be equal.
fn request(operation: Operation, data: &TensorData) -> Result<Request<'static>, Error> {
    let dtype =
        float(data.dtype).ok_or_else(|| Error::argument(operation, format!("{:?} is not a float type", data.dtype)))?;
    Ok(Request::new(operation, dtype).shape(&data.shape))
}

/// Converts 16-bit elements to f32, for sums over nodes. Other elements are unchanged.
pub(super) fn widen(data: TensorData) -> TensorData {
    match data.dtype {
        DType::F16 | DType::BF16 => data.convert_dtype(DType::F32),
        _ => data,
    }
}

/// Converts back to the type before [`widen`]. This is the only rounding of 16-bit elements.
pub(super) fn narrow(data: TensorData, dtype: DType) -> TensorData {
    if data.dtype == dtype { data } else { data.convert_dtype(dtype) }
}

/// Divides [widened](widen) elements.
pub(super) fn divide(data: &mut TensorData, by: usize) {
    match data.dtype {
        DType::F64 => elements::<f64>(data).iter_mut().for_each(|x| *x /= by as f64),
        _ => elements::<f32>(data).iter_mut().for_each(|x| *x /= by as f32),
    }
}

fn elements<T: Element>(data: &mut TensorData) -> &mut [T] {
    let bytes = bytes(data, T::DTYPE);
    // An empty buffer may not be aligned.
    if bytes.is_empty() { &mut [] } else { cast_slice_mut(bytes) }
}

/// Returns the elements' bytes, aligned for the elements.
fn bytes(data: &mut TensorData, dtype: bonfire_core::DType) -> &mut [u8] {
    data.bytes = align(std::mem::replace(&mut data.bytes, Bytes::from_elems(Vec::<u8>::new())), dtype);
    &mut data.bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_overflow_are_refused() {
        assert!(empty(&[usize::MAX, 2], DType::F32).is_err());
        assert!(empty(&[2], DType::I32).is_err());
        assert_eq!(empty(&[2, 0], DType::F64).unwrap().num_elements(), 0);
    }
}
