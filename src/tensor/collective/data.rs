//! Tensors on the host: where level 1 reduces them.

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, DType, TensorData, try_read_sync};
use bytemuck::{cast_slice_mut, pod_collect_to_vec, try_cast_slice_mut};
use half::{bf16, f16};

use super::error::CollectiveError;
use crate::dtype::{Element, ReduceOp};
use crate::error::Error;
use crate::group::Group;
use crate::tensor::device::element;

/// The tensor's elements, without a copy where the backend can hand them over.
pub(super) fn to_host<B: Backend>(tensor: B::FloatTensorPrimitive) -> Result<TensorData, CollectiveError> {
    let unreadable = |reason: String| CollectiveError::Other(format!("a tensor cannot be read: {reason}"));
    match try_read_sync(B::float_into_data(tensor)) {
        Some(Ok(data)) if element(data.dtype).is_some() => Ok(data),
        Some(Ok(data)) => Err(CollectiveError::Other(format!("tensors of {:?} cannot be reduced", data.dtype))),
        Some(Err(error)) => Err(unreadable(error.to_string())),
        None => Err(unreadable("this platform cannot wait for the device".into())),
    }
}

/// A tensor to receive into.
pub(super) fn empty(shape: &[usize], dtype: DType) -> Result<TensorData, CollectiveError> {
    let bytes = shape.iter().try_fold(dtype.size(), |bytes, dim| bytes.checked_mul(*dim));
    match bytes {
        Some(_) if element(dtype).is_some() => {
            Ok(TensorData { dtype, ..TensorData::full_dtype(shape.to_vec(), 0.0, dtype) })
        }
        _ => Err(CollectiveError::Other(format!("a tensor of shape {shape:?} and {dtype:?} cannot be received"))),
    }
}

pub(super) fn all_reduce(group: &Group, data: &mut TensorData, op: ReduceOp) -> Result<(), Error> {
    match data.dtype {
        DType::F64 => group.all_reduce(elements::<f64>(data), op),
        DType::F16 => group.all_reduce(elements::<f16>(data), op),
        DType::BF16 => group.all_reduce(elements::<bf16>(data), op),
        _ => group.all_reduce(elements::<f32>(data), op),
    }
}

pub(super) fn reduce(group: &Group, data: &mut TensorData, op: ReduceOp, root: usize) -> Result<(), Error> {
    match data.dtype {
        DType::F64 => group.reduce(elements::<f64>(data), op, root),
        DType::F16 => group.reduce(elements::<f16>(data), op, root),
        DType::BF16 => group.reduce(elements::<bf16>(data), op, root),
        _ => group.reduce(elements::<f32>(data), op, root),
    }
}

/// The same elements with room for sums over nodes: 16-bit ones as f32.
pub(super) fn widen(data: TensorData) -> TensorData {
    match data.dtype {
        DType::F16 | DType::BF16 => data.convert_dtype(DType::F32),
        _ => data,
    }
}

/// Back to the type that [`widen`] got: the one rounding of 16-bit elements.
pub(super) fn narrow(data: TensorData, dtype: DType) -> TensorData {
    if data.dtype == dtype { data } else { data.convert_dtype(dtype) }
}

/// Divides widened elements.
pub(super) fn divide(data: &mut TensorData, by: usize) {
    match data.dtype {
        DType::F64 => elements::<f64>(data).iter_mut().for_each(|x| *x /= by as f64),
        _ => elements::<f32>(data).iter_mut().for_each(|x| *x /= by as f32),
    }
}

fn elements<T: Element>(data: &mut TensorData) -> &mut [T] {
    // Backends may hand over bytes from anywhere. Those that do not fit the element's alignment are copied once.
    if try_cast_slice_mut::<u8, T>(&mut data.bytes).is_err() {
        data.bytes = Bytes::from_elems(pod_collect_to_vec::<u8, T>(&data.bytes));
    }
    cast_slice_mut(&mut data.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_absurd_shapes_is_refused() {
        assert!(empty(&[usize::MAX, 2], DType::F32).is_err());
        assert!(empty(&[2], DType::I32).is_err());
        assert_eq!(empty(&[2, 0], DType::F64).unwrap().num_elements(), 0);
    }
}
