//! Element types, and memory for tensors.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::{Bytes, DType as BurnDType, Shape, TensorData};

use bonfire_core::internal::zeroed;
use bonfire_core::{DType, Error};

/// Runs `$body` with `$T` as the unsigned integer that is as wide as an element of `$dtype`.
macro_rules! as_wide {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype.size() {
            1 => {
                type $T = u8;
                $body
            }
            2 => {
                type $T = u16;
                $body
            }
            4 => {
                type $T = u32;
                $body
            }
            _ => {
                type $T = u64;
                $body
            }
        }
    };
}

/// Returns the element type in which floats are exchanged. `None` for what is no float, or quantised.
pub(crate) fn float(dtype: BurnDType) -> Option<DType> {
    match dtype {
        BurnDType::F64 => Some(DType::F64),
        BurnDType::F32 | BurnDType::Flex32 => Some(DType::F32),
        BurnDType::F16 => Some(DType::F16),
        BurnDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// How tensors are made.
#[derive(Clone, Debug)]
pub(crate) struct TensorSpec {
    /// Without autodiff.
    pub device: DispatchDevice,
    pub dtype: BurnDType,
    /// The element type in which it is exchanged.
    pub carrier: DType,
}

impl TensorSpec {
    /// Makes a tensor of floats.
    pub fn tensor(&self, bytes: Bytes, shape: Shape) -> DispatchTensor {
        let data = TensorData::from_bytes(bytes, shape, self.dtype);
        Dispatch::float_from_data(data, &self.device)
    }
}

/// Returns zeros in host memory, aligned for elements of this type.
///
/// # Errors
/// [`Error::Io`] if there is not so much memory.
pub(crate) fn buffer(operation: &str, dtype: DType, elements: usize) -> Result<Bytes, Error> {
    // Backends adopt memory without a copy only if it was allocated with the layout of such elements.
    as_wide!(dtype, T => zeroed::<T>(operation, elements).map(Bytes::from_elems))
}

/// Returns the bytes, in memory that is aligned for elements of this type.
pub(crate) fn align(bytes: Bytes, dtype: DType) -> Bytes {
    if bytes.as_ptr().addr().is_multiple_of(dtype.size()) {
        return bytes;
    }
    as_wide!(dtype, T => Bytes::from_elems(bytemuck::pod_collect_to_vec::<u8, T>(&bytes)))
}
