//! Tensors as elements in host memory, and back.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Backend, DTypeUsage, Dispatch, DispatchDevice, DispatchTensor};
use burn::tensor::kind::{Basic, Kind as Kinds};
use burn::tensor::{
    BoolStore, Bytes, DType as BurnDType, Device, Shape, Tensor, TensorCreationOptions, TensorData, try_read_sync,
};

use bonfire_core::internal::zeroed;
use bonfire_core::{DType, Error, Group};
use bonfire_tensor::HostMemory;

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

/// Returns the element type in which elements of this type are exchanged: bools as `u8`. `None` for quantised ones.
pub(crate) fn carrier(dtype: BurnDType) -> Option<DType> {
    Some(match dtype {
        BurnDType::I8 => DType::I8,
        BurnDType::I16 => DType::I16,
        BurnDType::I32 => DType::I32,
        BurnDType::I64 => DType::I64,
        BurnDType::U8 | BurnDType::Bool(_) => DType::U8,
        BurnDType::U16 => DType::U16,
        BurnDType::U32 => DType::U32,
        BurnDType::U64 => DType::U64,
        dtype => float(dtype)?,
    })
}

/// How tensors are made.
#[derive(Clone, Debug)]
pub(crate) struct TensorSpec {
    /// Without autodiff for tensors of floats.
    pub device: DispatchDevice,
    pub dtype: BurnDType,
    /// The element type in which it is exchanged.
    pub carrier: DType,
}

impl TensorSpec {
    /// Fails for floats on a device with autodiff, and for elements that tensors of this kind do not have or that
    /// cannot be sent.
    pub fn new<K: Basic>(operation: &str, dtype: BurnDType, device: &Device) -> Result<TensorSpec, Error> {
        if K::KIND == Kinds::Float && device.is_autodiff() {
            // Tensors that are not tracked are no exception: not every rank has the tensor.
            let reason = "no gradient flows through this operation, and the device has autodiff: use the one in \
                          `tensor::autodiff`, or pass `tensor.inner()` and `device.inner()`, and the result to \
                          `Tensor::from_inner`";
            return Err(Error::argument(operation, reason));
        }
        let held = match K::KIND {
            Kinds::Float => dtype.is_float(),
            Kinds::Int => dtype.is_int() || dtype.is_uint(),
            Kinds::Bool => dtype.is_bool(),
        };
        let carrier = carrier(dtype).filter(|_| held).ok_or_else(|| {
            let kind = K::name().to_lowercase();
            Error::argument(operation, format!("elements of type {dtype:?} cannot be sent as {kind} tensors"))
        })?;
        Ok(TensorSpec { device: device.as_dispatch().clone(), dtype, carrier })
    }

    /// As [`new`](Self::new), for a tensor that is made on a device, with its default element type or another one.
    pub fn of<K: Basic>(operation: &str, options: impl Into<TensorCreationOptions>) -> Result<TensorSpec, Error> {
        let TensorCreationOptions { device, dtype } = options.into();
        let settings = device.settings();
        let default = match K::KIND {
            Kinds::Float => settings.float_dtype.into(),
            Kinds::Int => settings.int_dtype.into(),
            Kinds::Bool => settings.bool_dtype.into(),
        };
        // Stores of bools are the device's own matter.
        let dtype = dtype.filter(|_| K::KIND != Kinds::Bool).unwrap_or(default);
        // To store it is enough: some devices do not compute in every type that they store.
        if !Dispatch::dtype_usage(device.as_dispatch(), dtype).contains(DTypeUsage::Storage) {
            return Err(Error::argument(operation, format!("{device:?} has no tensors of {dtype:?}")));
        }
        TensorSpec::new::<K>(operation, dtype, &device)
    }

    /// Makes a tensor of any kind.
    pub fn of_kind<const D: usize, K: Basic>(&self, mut bytes: Bytes, shape: impl Into<Shape>) -> Tensor<D, K> {
        let mut dtype = self.dtype;
        if dtype.is_bool() {
            // A byte from a peer is not a valid `bool` until it is normalised.
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
            dtype = BurnDType::Bool(BoolStore::Native);
        }
        let (shape, options) = (shape.into(), (&Device::new(self.device.clone()), self.dtype));
        if bytes.is_empty() {
            // Not every device writes, or reads, tensors without elements.
            return Tensor::empty(shape, options);
        }
        Tensor::from_data(TensorData::from_bytes(bytes, shape, dtype), options)
    }

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

/// A tensor's elements in host memory, contiguous, in memory of their own, and aligned for their type.
pub(crate) struct Source {
    pub bytes: Bytes,
    pub shape: Shape,
    pub spec: TensorSpec,
}

impl Source {
    /// Fails as [`TensorSpec::new`], and if the tensor cannot be read.
    pub fn read<const D: usize, K: Basic>(operation: &str, tensor: Tensor<D, K>) -> Result<Source, Error> {
        let (device, dtype) = (tensor.device(), tensor.dtype());
        if matches!(dtype, BurnDType::QFloat(_)) {
            return Err(Error::argument(operation, "quantized tensors cannot be sent: dequantize it first"));
        }
        // Before it is read, which may take long.
        let spec = TensorSpec::new::<K>(operation, dtype, &device)?;
        if tensor.shape().num_elements() == 0 {
            return Ok(Source { bytes: buffer(operation, spec.carrier, 0)?, shape: tensor.shape(), spec });
        }
        let read = try_read_sync(tensor.into_data_async());
        let data = read.ok_or_else(|| Error::broken(operation, "the backend reads tensors only asynchronously"))?;
        let (bytes, shape, read) = data.map_err(|error| Error::io(operation, error))?.into_parts();
        // Exported floats may have another type than on the device. The result is made from that type.
        let spec = TensorSpec::new::<K>(operation, if read.is_bool() { dtype } else { read }, &device)?;
        let bytes = match read {
            BurnDType::Bool(BoolStore::U32) => {
                Bytes::from_elems(bytes.chunks_exact(4).map(|word| u8::from(word != [0; 4])).collect::<Vec<_>>())
            }
            _ => align(bytes, spec.carrier),
        };
        Ok(Source { bytes, shape, spec })
    }
}

/// Returns the group, with memory for results.
pub(crate) fn memory(group: &Group) -> HostMemory<'_, Bytes> {
    HostMemory { group, allocate: &buffer }
}
