//! Tensors on the host, where groups move their elements.
//!
//! The one way from a tensor of any backend and kind to bytes and back. Tensors of Flex are read where they are, others as
//! their backend hands them over. What is read is in one piece and aligned for its elements.

use std::any::Any;

use burn::tensor::backend::Backend;
use burn::tensor::{
    BasicOps, Bool, BoolStore, Bytes, DType as BurnDType, Float, Int, Shape, TensorData, TensorMetadata,
    TensorPrimitive, try_read_sync,
};

use super::device::{Offer, start_all_reduce};
#[cfg(feature = "flex")]
use super::flex;
#[cfg(feature = "flex")]
use super::pool::{self, Suited};
use bonfire_core::internal::{Request, zeroed};
use bonfire_core::{DType, Error, Group, Operation, ReduceOp};

/// Evaluates an expression with `$T` as an integer as wide as elements of type `$dtype`, and aligned as they.
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

/// The kinds of tensors that travel between ranks: [`Float`], [`Int`] and [`Bool`].
pub trait Kind<B: Backend>: BasicOps<B> {
    /// The backend's own tensor; `None` for a quantized one, which does not travel.
    #[doc(hidden)]
    fn plain(tensor: &Self::Primitive) -> Option<&dyn Any>;

    /// Whether elements of this type belong in such tensors.
    #[doc(hidden)]
    fn holds(dtype: BurnDType) -> bool;

    /// Reduces the tensor where it is, on a collective device.
    #[doc(hidden)]
    fn all_reduce_on_device(
        _group: &Group,
        tensor: Self::Primitive,
        _op: ReduceOp,
    ) -> Offer<Self::Primitive, Self::Primitive> {
        Offer::Declined(tensor)
    }
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

    fn all_reduce_on_device(
        group: &Group,
        tensor: TensorPrimitive<B>,
        op: ReduceOp,
    ) -> Offer<TensorPrimitive<B>, TensorPrimitive<B>> {
        let TensorPrimitive::Float(tensor) = tensor else { return Offer::Declined(tensor) };
        let Some(dtype) = float(tensor.dtype()) else { return Offer::Declined(TensorPrimitive::Float(tensor)) };
        let request = Request::new(Operation::AllReduce, dtype).reduction(op).shape(&tensor.shape());
        let gone = || Error::broken("all_reduce", "the device gave no result");
        match start_all_reduce::<B>(group, vec![tensor], request) {
            Offer::Taken(started) => {
                Offer::Taken(started.and_then(|waiting| waiting()?.pop().map(TensorPrimitive::Float).ok_or_else(gone)))
            }
            Offer::Declined(mut tensors) => match tensors.pop() {
                Some(tensor) => Offer::Declined(TensorPrimitive::Float(tensor)),
                None => Offer::Taken(Err(gone())),
            },
        }
    }
}

impl<B: Backend> Kind<B> for Int {
    fn plain(tensor: &B::IntTensorPrimitive) -> Option<&dyn Any> {
        Some(tensor)
    }

    fn holds(dtype: BurnDType) -> bool {
        dtype.is_int() || dtype.is_uint()
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

/// The element type that carries floats of this type.
pub(crate) fn float(dtype: BurnDType) -> Option<DType> {
    match dtype {
        BurnDType::F64 => Some(DType::F64),
        BurnDType::F32 | BurnDType::Flex32 => Some(DType::F32),
        BurnDType::F16 => Some(DType::F16),
        BurnDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// The element type that carries elements of this type: truth values travel as `u8`.
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

/// What a tensor is besides its elements: what a result is made with.
#[derive(Clone)]
pub(crate) struct Form<D> {
    pub device: D,
    /// burn's type of the elements on the device.
    pub dtype: BurnDType,
    /// The type in which they travel.
    pub carrier: DType,
}

impl<D> Form<D> {
    pub fn new<B: Backend<Device = D>, K: Kind<B>>(
        operation: &str,
        dtype: BurnDType,
        device: D,
    ) -> Result<Self, Error> {
        let carrier = carrier(dtype).filter(|_| K::holds(dtype));
        let carrier = carrier.ok_or_else(|| {
            let kind = K::name().to_lowercase();
            Error::argument(operation, format!("elements of type {dtype:?} do not travel as {kind} tensors"))
        })?;
        Ok(Form { device, dtype, carrier })
    }

    /// The tensor with these elements.
    pub fn tensor<B: Backend<Device = D>, K: Kind<B>>(&self, mut bytes: Bytes, shape: Shape) -> K::Primitive {
        let mut dtype = self.dtype;
        if dtype.is_bool() {
            // What a peer sent is no truth value before it was looked at.
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
            dtype = BurnDType::Bool(BoolStore::Native);
        }
        K::from_data(TensorData { bytes, shape, dtype }, &self.device, self.dtype)
    }
}

/// A tensor's elements on the host.
pub(crate) struct Source(Held);

enum Held {
    #[cfg(feature = "flex")]
    Flex(burn::backend::flex::FlexTensor),
    Data(Bytes),
}

impl Source {
    /// Takes the tensor's elements, without a copy where the backend can hand them over or has them on the host.
    pub fn read<B: Backend, K: Kind<B>>(
        operation: &str,
        tensor: K::Primitive,
    ) -> Result<(Source, Form<B::Device>), Error> {
        let quantized = || Error::argument(operation, "quantized tensors do not travel: dequantize it first");
        let plain = K::plain(&tensor).ok_or_else(quantized)?;
        #[cfg(feature = "flex")]
        let flex = flex::piece(plain).map(|(tensor, _)| tensor.clone());
        #[cfg(not(feature = "flex"))]
        let _ = plain;
        let (device, dtype) = (K::device(&tensor), tensor.dtype());
        #[cfg(feature = "flex")]
        if let Some(flex) = flex {
            return Ok((Source(Held::Flex(flex)), Form::new::<B, K>(operation, dtype, device)?));
        }
        let data = data::<B, K>(operation, tensor)?;
        // Floats may come in another type than they have on the device; they go back in that.
        let dtype = if data.dtype.is_bool() { dtype } else { data.dtype };
        let form = Form::new::<B, K>(operation, dtype, device)?;
        Ok((Source(Held::Data(aligned(data, form.carrier))), form))
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            #[cfg(feature = "flex")]
            Held::Flex(tensor) => flex::piece(tensor).map_or(&[], |(_, bytes)| bytes),
            Held::Data(bytes) => bytes,
        }
    }

    /// The elements where they may be written, if nobody else has them.
    pub fn into_own(self) -> Result<Bytes, Source> {
        match self.0 {
            Held::Data(bytes) => Ok(bytes),
            #[cfg(feature = "flex")]
            Held::Flex(tensor) => match flex::whole(tensor) {
                Ok(bytes) => Ok(bytes),
                Err(tensor) => Err(Source(Held::Flex(tensor))),
            },
        }
    }
}

/// The tensor's elements, as its backend hands them over.
pub(crate) fn data<B: Backend, K: BasicOps<B>>(operation: &str, tensor: K::Primitive) -> Result<TensorData, Error> {
    let read = try_read_sync(K::into_data_async(tensor));
    read.ok_or_else(|| Error::broken(operation, "the backend reads tensors only asynchronously"))?
        .map_err(|error| Error::io(operation, error))
}

/// The data's bytes, aligned for elements of type `carrier`, in which they travel.
fn aligned(data: TensorData, carrier: DType) -> Bytes {
    if data.dtype == BurnDType::Bool(BoolStore::U32) {
        let bytes: Vec<u8> = data.bytes.chunks_exact(4).map(|word| u8::from(word != [0; 4])).collect();
        return Bytes::from_elems(bytes);
    }
    align(data.bytes, carrier)
}

/// Backends may hand over bytes from anywhere. Those that do not fit the elements' alignment are copied once.
pub(crate) fn align(bytes: Bytes, dtype: DType) -> Bytes {
    if bytes.as_ptr().addr().is_multiple_of(dtype.size()) {
        return bytes;
    }
    as_wide!(dtype, T => Bytes::from_elems(bytemuck::pod_collect_to_vec::<u8, T>(&bytes)))
}

/// The group that carries an operation on tensors, and where its results go.
#[derive(Clone, Copy)]
pub(crate) struct Via<'a> {
    pub group: &'a Group,
    /// Memory that the ranks of the group reach, if results are to be there.
    #[cfg(feature = "flex")]
    pub memory: Option<&'a Suited>,
}

impl<'a> From<&'a Group> for Via<'a> {
    fn from(group: &'a Group) -> Self {
        Via {
            group,
            #[cfg(feature = "flex")]
            memory: None,
        }
    }
}

impl Via<'_> {
    /// Whether results of the backend go to memory that the ranks reach.
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

    /// Initialised memory for so many elements of a tensor of `B`, aligned for them.
    #[cfg_attr(
        not(feature = "flex"),
        expect(clippy::extra_unused_type_parameters, reason = "only Flex has such memory")
    )]
    pub fn room<B: Backend>(&self, operation: &str, dtype: DType, count: usize) -> Result<Bytes, Error> {
        let bytes = count.checked_mul(dtype.size()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or_else(|| Error::argument(operation, format!("no tensor has {count} elements")))?;
        #[cfg(feature = "flex")]
        if flex::is::<B>() {
            return match self.memory {
                Some(memory) => memory.bytes(operation, self.group, bytes),
                None => pool::bytes(operation, bytes),
            };
        }
        let _ = bytes;
        // Other backends take only what the allocator gave for such elements without a copy.
        as_wide!(dtype, T => zeroed::<T>(operation, count).map(Bytes::from_elems))
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::NdArray;

    use super::*;

    #[test]
    fn truth_values_of_any_width_travel_as_bytes_and_come_back_as_truth_values() {
        let words = TensorData {
            bytes: Bytes::from_elems(vec![0u32, 1, 256, 0]),
            shape: Shape::new([4]),
            dtype: BurnDType::Bool(BoolStore::U32),
        };
        assert_eq!(&aligned(words, DType::U8)[..], [0, 1, 1, 0]);
        let form = Form::new::<NdArray<f64>, Bool>("test", BurnDType::Bool(BoolStore::Native), Default::default()).unwrap();
        let tensor = form.tensor::<NdArray<f64>, Bool>(Bytes::from_elems(vec![0u8, 2, 255, 1]), Shape::new([4]));
        let data = data::<NdArray<f64>, Bool>("test", tensor).unwrap();
        assert_eq!(data.to_vec::<bool>().unwrap(), [false, true, true, true]);
    }

    #[test]
    fn bytes_from_anywhere_are_aligned() {
        let bytes = Bytes::from_bytes_vec(vec![1; 24]);
        let aligned = align(bytes, DType::F64);
        assert!(aligned.as_ptr().addr().is_multiple_of(8));
        assert_eq!(&aligned[..], [1; 24]);
    }

    #[test]
    fn a_kind_holds_its_own_types_only() {
        let form = |dtype| Form::new::<NdArray<f64>, Int>("test", dtype, Default::default());
        assert!(form(BurnDType::U16).is_ok() && form(BurnDType::I64).is_ok());
        assert!(form(BurnDType::F32).is_err() && form(BurnDType::Bool(BoolStore::U8)).is_err());
    }
}
