//! Conversion between tensors and bytes in host memory.
//!
//! All operations on tensors of any backend and kind use it. Tensors of Flex are read in place, others through their
//! backend's data export. Bytes that are read are contiguous and aligned for the elements.

use std::any::Any;

use burn::tensor::backend::Backend;
use burn::tensor::{
    BasicOps, Bool, BoolStore, Bytes, DType as BurnDType, Float, Int, Shape, TensorData, TensorMetadata,
    TensorPrimitive, try_read_sync,
};

use super::device::{self, DeviceCall, PendingTensors, TensorKind, uses_collective_devices};
#[cfg(feature = "flex")]
use super::flex;
#[cfg(feature = "flex")]
use super::pool::{self, GroupPool};
use bonfire_core::internal::zeroed;
use bonfire_core::{DType, Error, Group};

/// Evaluates an expression with `$T` as the unsigned integer of the same size and alignment as elements of `$dtype`.
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

/// A kind of tensors that can be sent between ranks: [`Float`], [`Int`] or [`Bool`].
pub trait Kind<B: Backend>: BasicOps<B, Primitive: Send> {
    /// Returns the backend's primitive tensor; `None` for a quantized one, which cannot be sent.
    #[doc(hidden)]
    fn plain(tensor: &Self::Primitive) -> Option<&dyn Any>;

    /// Whether tensors of this kind may have elements of this type.
    #[doc(hidden)]
    fn holds(dtype: BurnDType) -> bool;

    /// Returns the element type in which a collective device exchanges this tensor. `None` if the tensor is on another
    /// device, or goes through host memory.
    #[doc(hidden)]
    fn device_dtype(_tensor: &Self::Primitive) -> Option<DType> {
        None
    }

    /// Starts an operation on tensors that have a [`device_dtype`](Self::device_dtype).
    #[doc(hidden)]
    fn start_on_device(
        _group: &Group,
        _call: DeviceCall<Self::Primitive>,
    ) -> Result<PendingTensors<Self::Primitive>, Error> {
        Err(not_on_device())
    }
}

fn not_on_device() -> Error {
    Error::broken("an operation on a device", "a tensor is not on a collective device")
}

impl<B: Backend> Kind<B> for Float {
    fn plain(tensor: &TensorPrimitive<B>) -> Option<&dyn Any> {
        match tensor {
            TensorPrimitive::Float(tensor) => Some(tensor),
            TensorPrimitive::QFloat(_) => None,
        }
    }

    fn holds(dtype: BurnDType) -> bool {
        dtype.is_float()
    }

    fn device_dtype(tensor: &TensorPrimitive<B>) -> Option<DType> {
        match tensor {
            TensorPrimitive::Float(tensor) if uses_collective_devices::<B>() => float(tensor.dtype()),
            _ => None,
        }
    }

    fn start_on_device(
        group: &Group,
        call: DeviceCall<TensorPrimitive<B>>,
    ) -> Result<PendingTensors<TensorPrimitive<B>>, Error> {
        let plain = |tensor| match tensor {
            TensorPrimitive::Float(tensor) => Some(tensor),
            TensorPrimitive::QFloat(_) => None,
        };
        let call = call.map(plain).ok_or_else(not_on_device)?;
        let pending = device::start::<B, _>(group, TensorKind::Float, call)?;
        Ok(pending.map(TensorPrimitive::Float))
    }
}

impl<B: Backend> Kind<B> for Int {
    fn plain(tensor: &B::IntTensorPrimitive) -> Option<&dyn Any> {
        Some(tensor)
    }

    fn holds(dtype: BurnDType) -> bool {
        dtype.is_int() || dtype.is_uint()
    }

    fn device_dtype(tensor: &B::IntTensorPrimitive) -> Option<DType> {
        if uses_collective_devices::<B>() { carrier(tensor.dtype()) } else { None }
    }

    fn start_on_device(
        group: &Group,
        call: DeviceCall<B::IntTensorPrimitive>,
    ) -> Result<PendingTensors<B::IntTensorPrimitive>, Error> {
        device::start::<B, _>(group, TensorKind::Int, call)
    }
}

impl<B: Backend> Kind<B> for Bool {
    fn plain(tensor: &B::BoolTensorPrimitive) -> Option<&dyn Any> {
        Some(tensor)
    }

    fn holds(dtype: BurnDType) -> bool {
        dtype.is_bool()
    }
}

/// The element type in which floats of this type are sent; `None` for other types.
pub(crate) fn float(dtype: BurnDType) -> Option<DType> {
    match dtype {
        BurnDType::F64 => Some(DType::F64),
        BurnDType::F32 | BurnDType::Flex32 => Some(DType::F32),
        BurnDType::F16 => Some(DType::F16),
        BurnDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// The element type in which elements of this type are sent: bools are sent as `u8`.
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

/// Everything but shape and elements that is needed to make a tensor.
#[derive(Clone)]
pub(crate) struct TensorSpec<D> {
    pub device: D,
    /// The element type on the device.
    pub dtype: BurnDType,
    /// The element type in which they are sent.
    pub carrier: DType,
}

impl<D> TensorSpec<D> {
    pub fn new<B: Backend<Device = D>, K: Kind<B>>(
        operation: &str,
        dtype: BurnDType,
        device: D,
    ) -> Result<Self, Error> {
        let carrier = carrier(dtype).filter(|_| K::holds(dtype));
        let carrier = carrier.ok_or_else(|| {
            let kind = K::name().to_lowercase();
            Error::argument(operation, format!("elements of type {dtype:?} cannot be sent as {kind} tensors"))
        })?;
        Ok(TensorSpec { device, dtype, carrier })
    }

    /// Makes a tensor of these elements.
    pub fn tensor<B: Backend<Device = D>, K: Kind<B>>(&self, mut bytes: Bytes, shape: Shape) -> K::Primitive {
        if bytes.is_empty() {
            // On CUDA burn does not write every shape without elements.
            return K::empty(shape, &self.device, self.dtype);
        }
        let mut dtype = self.dtype;
        if dtype.is_bool() {
            // A byte from a peer is not a valid `bool` until it is normalised.
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
            dtype = BurnDType::Bool(BoolStore::Native);
        }
        K::from_data(TensorData { bytes, shape, dtype }, &self.device, self.dtype)
    }
}

/// Refuses float tensors of a backend with autodiff, on the ranks that pass a tensor and on those that only receive
/// one: the result would have no gradient. Tensors that are not tracked are no exception. burn says of leaves whether
/// they are tracked, but not of tensors computed from them, and not every rank has the tensor.
pub(crate) fn refuse_autodiff<B: Backend, K: Kind<B>>(operation: &str, device: &B::Device) -> Result<(), Error> {
    if K::holds(BurnDType::F32) && B::ad_enabled(device) {
        let reason = "no gradient flows through this operation, and the backend has autodiff: use the one in \
                      `tensor::autodiff`, or pass `tensor.inner()`, and the result to `Tensor::from_inner`";
        return Err(Error::argument(operation, reason));
    }
    Ok(())
}

/// A tensor's elements in host memory.
pub(crate) struct Source(SourceData);

enum SourceData {
    #[cfg(feature = "flex")]
    Flex(burn::backend::flex::FlexTensor),
    Data(Bytes),
}

impl Source {
    /// Reads the tensor's elements, without a copy where the backend exports them or keeps them in host memory.
    pub fn read<B: Backend, K: Kind<B>>(
        operation: &str,
        tensor: K::Primitive,
    ) -> Result<(Source, TensorSpec<B::Device>), Error> {
        let quantized = || Error::argument(operation, "quantized tensors cannot be sent: dequantize it first");
        let plain = K::plain(&tensor).ok_or_else(quantized)?;
        #[cfg(feature = "flex")]
        let flex = flex::contiguous_bytes(plain).map(|(tensor, _)| tensor.clone());
        #[cfg(not(feature = "flex"))]
        let _ = plain;
        let (device, dtype) = (K::device(&tensor), tensor.dtype());
        #[cfg(feature = "flex")]
        if let Some(flex) = flex {
            return Ok((Source(SourceData::Flex(flex)), TensorSpec::new::<B, K>(operation, dtype, device)?));
        }
        if tensor.shape().num_elements() == 0 && K::device_dtype(&tensor).is_some() {
            // Before it reads a tensor, burn may launch a kernel, which CUDA refuses for no elements.
            let spec = TensorSpec::new::<B, K>(operation, dtype, device)?;
            return Ok((Source(SourceData::Data(Bytes::from_bytes_vec(Vec::new()))), spec));
        }
        let data = data::<B, K>(operation, tensor)?;
        // Exported floats may have another type than on the device. The result is made from that type.
        let dtype = if data.dtype.is_bool() { dtype } else { data.dtype };
        let spec = TensorSpec::new::<B, K>(operation, dtype, device)?;
        Ok((Source(SourceData::Data(aligned(data, spec.carrier))), spec))
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            #[cfg(feature = "flex")]
            SourceData::Flex(tensor) => flex::contiguous_bytes(tensor).map_or(&[], |(_, bytes)| bytes),
            SourceData::Data(bytes) => bytes,
        }
    }

    /// Returns the elements as owned memory if no other tensor shares them, otherwise `self` unchanged.
    pub fn into_owned(self) -> Result<Bytes, Source> {
        match self.0 {
            SourceData::Data(bytes) => Ok(bytes),
            #[cfg(feature = "flex")]
            SourceData::Flex(tensor) => match flex::into_memory(tensor) {
                Ok(bytes) => Ok(bytes),
                Err(tensor) => Err(Source(SourceData::Flex(tensor))),
            },
        }
    }
}

/// Exports the tensor's elements from its backend.
pub(crate) fn data<B: Backend, K: BasicOps<B>>(operation: &str, tensor: K::Primitive) -> Result<TensorData, Error> {
    let read = try_read_sync(K::into_data_async(tensor));
    read.ok_or_else(|| Error::broken(operation, "the backend reads tensors only asynchronously"))?
        .map_err(|error| Error::io(operation, error))
}

/// Returns the data's bytes as elements of type `carrier`, aligned for them.
fn aligned(data: TensorData, carrier: DType) -> Bytes {
    if data.dtype == BurnDType::Bool(BoolStore::U32) {
        let bytes: Vec<u8> = data.bytes.chunks_exact(4).map(|word| u8::from(word != [0; 4])).collect();
        return Bytes::from_elems(bytes);
    }
    align(data.bytes, carrier)
}

/// Aligns bytes for elements of type `dtype`. Copies them only if they are not aligned: backends may export bytes at
/// any address.
pub(crate) fn align(bytes: Bytes, dtype: DType) -> Bytes {
    if bytes.as_ptr().addr().is_multiple_of(dtype.size()) {
        return bytes;
    }
    as_wide!(dtype, T => Bytes::from_elems(bytemuck::pod_collect_to_vec::<u8, T>(&bytes)))
}

/// What an operation on tensors runs with: the group, and the memory for results.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub group: &'a Group,
    /// Allocate results from this pool of the group's memory.
    #[cfg(feature = "flex")]
    pub memory: Option<&'a GroupPool>,
}

impl<'a> From<&'a Group> for Context<'a> {
    fn from(group: &'a Group) -> Self {
        Context {
            group,
            #[cfg(feature = "flex")]
            memory: None,
        }
    }
}

impl Context<'_> {
    /// Whether results of the backend go to the group's memory.
    #[cfg_attr(
        not(feature = "flex"),
        expect(clippy::extra_unused_type_parameters, reason = "only Flex has such memory")
    )]
    pub fn has_memory<B: Backend>(&self) -> bool {
        #[cfg(feature = "flex")]
        let has = self.memory.is_some() && flex::is::<B>();
        #[cfg(not(feature = "flex"))]
        let has = false;
        has
    }

    /// As [`buffer`], in the context's memory.
    pub fn buffer<B: Backend>(&self, operation: &str, dtype: DType, count: usize) -> Result<Bytes, Error> {
        #[cfg(feature = "flex")]
        if let Some(memory) = self.memory
            && flex::is::<B>()
        {
            return memory.bytes(operation, self.group, bytes(operation, dtype, count)?);
        }
        buffer::<B>(operation, dtype, count)
    }
}

/// Returns initialised memory of unspecified contents for `count` elements of a tensor of `B`, aligned for them.
#[cfg_attr(not(feature = "flex"), expect(clippy::extra_unused_type_parameters, reason = "only Flex has such memory"))]
pub(crate) fn buffer<B: Backend>(operation: &str, dtype: DType, count: usize) -> Result<Bytes, Error> {
    let bytes = bytes(operation, dtype, count)?;
    #[cfg(feature = "flex")]
    if flex::is::<B>() {
        return pool::bytes(operation, bytes);
    }
    let _ = bytes;
    // Other backends adopt memory without a copy only if it was allocated with the layout of such elements.
    as_wide!(dtype, T => zeroed::<T>(operation, count).map(Bytes::from_elems))
}

/// Returns the bytes of so many elements.
fn bytes(operation: &str, dtype: DType, count: usize) -> Result<usize, Error> {
    let bytes = count.checked_mul(dtype.size()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.ok_or_else(|| Error::argument(operation, format!("no tensor has {count} elements")))
}

#[cfg(test)]
mod tests {
    use burn::backend::NdArray;

    use super::*;

    #[test]
    fn bools_of_any_width_are_sent_as_bytes_and_normalised() {
        let words = TensorData {
            bytes: Bytes::from_elems(vec![0u32, 1, 256, 0]),
            shape: Shape::new([4]),
            dtype: BurnDType::Bool(BoolStore::U32),
        };
        assert_eq!(&aligned(words, DType::U8)[..], [0, 1, 1, 0]);
        let spec =
            TensorSpec::new::<NdArray<f64>, Bool>("test", BurnDType::Bool(BoolStore::Native), Default::default())
                .unwrap();
        let tensor = spec.tensor::<NdArray<f64>, Bool>(Bytes::from_elems(vec![0u8, 2, 255, 1]), Shape::new([4]));
        let data = data::<NdArray<f64>, Bool>("test", tensor).unwrap();
        assert_eq!(data.to_vec::<bool>().unwrap(), [false, true, true, true]);
    }

    #[test]
    fn unaligned_bytes_are_copied_to_aligned_memory() {
        let bytes = Bytes::from_bytes_vec(vec![1; 24]);
        let aligned = align(bytes, DType::F64);
        assert!(aligned.as_ptr().addr().is_multiple_of(8));
        assert_eq!(&aligned[..], [1; 24]);
    }

    #[test]
    fn a_kind_holds_only_its_own_types() {
        let spec = |dtype| TensorSpec::new::<NdArray<f64>, Int>("test", dtype, Default::default());
        assert!(spec(BurnDType::U16).is_ok() && spec(BurnDType::I64).is_ok());
        assert!(spec(BurnDType::F32).is_err() && spec(BurnDType::Bool(BoolStore::U8)).is_err());
    }
}
