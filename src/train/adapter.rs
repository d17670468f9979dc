//! burn's tensors for the engine of `bonfire-train`.

use std::future::Future;
use std::mem::replace;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use burn::tensor::backend::{AutodiffBackend, Backend, ExecutionError};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{
    Bytes, DType as BurnDType, Float, FloatDType, Scalar, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive,
    try_read_sync,
};

use super::model::Parameter;
use crate::tensor::device::{DeviceCall, PendingTensors, Target, TensorKind, connect, start, uses_collective_devices};
#[cfg(feature = "flex")]
use crate::tensor::flex;
use crate::tensor::host::{Source, TensorSpec, align, buffer, float};
use bonfire_core::{DType, Error, Group};
use bonfire_train::lane::{Call, Completion, Elements, Input, Lane, Memory, Pending, Read, Tensor as Handle, Tensors};

/// The tensors of a model's parameters. `I` is the backend without gradients.
pub(super) struct BurnTensors<I: Backend> {
    /// By position, the whole shape of the parameter, and how tensors are made for it.
    parameters: Arc<[(Shape, TensorSpec<I::Device>)]>,
}

impl<I: Backend> BurnTensors<I> {
    pub fn of<B: AutodiffBackend<InnerBackend = I, Device = I::Device>>(
        parameters: &[Parameter<B>],
    ) -> Arc<dyn Tensors> {
        let of = |Parameter { shape, dtype, element, device, .. }: &Parameter<B>| {
            (shape.clone(), TensorSpec { device: device.clone(), dtype: *dtype, carrier: *element })
        };
        Arc::new(BurnTensors::<I> { parameters: parameters.iter().map(of).collect() })
    }

    /// Returns how tensors of this element type are made on the device of the parameter at a position.
    fn spec(&self, position: usize, dtype: DType) -> TensorSpec<I::Device> {
        let own = &self.parameters[position].1;
        let wide = if dtype == DType::F64 { BurnDType::F64 } else { BurnDType::F32 };
        let burn = if dtype == own.carrier { own.dtype } else { wide };
        TensorSpec { device: own.device.clone(), dtype: burn, carrier: dtype }
    }
}

/// Returns the handle of a tensor.
pub(super) fn handle<I: Backend>(tensor: FloatTensor<I>) -> Handle {
    Arc::new(tensor)
}

/// Returns the tensor of a handle. The engine gets handles from this adapter only.
pub(super) fn opened<I: Backend>(handle: Handle) -> FloatTensor<I> {
    let tensor = handle.downcast::<FloatTensor<I>>();
    Arc::unwrap_or_clone(tensor.unwrap_or_else(|_| unreachable!("a tensor of another adapter")))
}

/// Returns a tensor of one dimension, for burn's operations.
pub(super) fn flat<I: Backend>(tensor: FloatTensor<I>) -> Tensor<I, 1> {
    let elements = tensor.shape().num_elements();
    Tensor::from_primitive(TensorPrimitive::Float(I::float_reshape(tensor, Shape::new([elements]))))
}

/// Multiplies a tensor. 16-bit elements are multiplied in f32.
pub(super) fn scaled<I: Backend>(tensor: FloatTensor<I>, factor: f64) -> FloatTensor<I> {
    let factor = Scalar::from(factor);
    let narrow = match tensor.dtype() {
        BurnDType::F16 => FloatDType::F16,
        BurnDType::BF16 => FloatDType::BF16,
        _ => return I::float_mul_scalar(tensor, factor),
    };
    I::float_cast(I::float_mul_scalar(I::float_cast(tensor, FloatDType::F32), factor), narrow)
}

impl<I: Backend> Tensors for BurnTensors<I> {
    fn fits(&self, position: usize, tensor: &Handle) -> bool {
        let (shape, spec) = &self.parameters[position];
        let tensor = tensor.downcast_ref::<FloatTensor<I>>();
        tensor.is_some_and(|tensor| tensor.shape() == *shape && tensor.dtype() == spec.dtype)
    }

    fn cast(&self, position: usize, tensor: Handle, dtype: DType) -> Handle {
        handle::<I>(I::float_cast(opened::<I>(tensor), self.spec(position, dtype).dtype.into()))
    }

    fn scale(&self, tensor: Handle, _: DType, factor: f64) -> Handle {
        handle::<I>(scaled::<I>(opened::<I>(tensor), factor))
    }

    fn add(&self, one: Handle, other: Handle) -> Handle {
        handle::<I>(I::float_add(opened::<I>(one), opened::<I>(other)))
    }

    fn sum(&self, tensor: Handle, dtype: DType) -> Handle {
        let tensor = opened::<I>(tensor);
        handle::<I>(I::float_sum(match dtype {
            DType::F16 | DType::BF16 => I::float_cast(tensor, FloatDType::F32),
            _ => tensor,
        }))
    }

    fn read(&self, tensor: Handle) -> Box<dyn Read> {
        let tensor = opened::<I>(tensor);
        // Before it reads a tensor, burn may launch a kernel, which CUDA refuses for no elements.
        if tensor.shape().num_elements() == 0 {
            return Box::new(Reading::Read(Ok(Elements::Owned(Box::new(Host(Bytes::from_bytes_vec(Vec::new())))))));
        }
        // Tensors of Flex are in host memory, perhaps in that of other tensors.
        #[cfg(feature = "flex")]
        if flex::is::<I>() {
            let source = Source::read::<I, Float>("reading a tensor", TensorPrimitive::Float(tensor));
            return Box::new(Reading::Read(source.map(|(source, _)| match source.into_owned() {
                Ok(bytes) => Elements::Owned(Box::new(Host(bytes))),
                Err(source) => Elements::Shared(Box::new(source)),
            })));
        }
        Box::new(Reading::InFlight(Box::pin(I::float_into_data(tensor))))
    }

    fn memory(&self, dtype: DType, elements: usize) -> Result<Box<dyn Memory>, Error> {
        Ok(Box::new(Host(buffer::<I>("gathering tensors", dtype, elements)?)))
    }

    fn tensor(&self, position: usize, shape: &[usize], dtype: DType, memory: Box<dyn Memory>) -> Handle {
        let memory: Box<dyn std::any::Any> = memory;
        let memory = memory.downcast::<Host>().unwrap_or_else(|_| unreachable!("memory of another adapter"));
        let shape = Shape::from(shape.to_vec());
        handle::<I>(self.spec(position, dtype).tensor::<I, Float>(memory.0, shape).tensor())
    }

    fn sums_of_squares(&self, tensors: &[(Handle, DType)]) -> Result<Option<Vec<f64>>, Error> {
        if !uses_collective_devices::<I>() {
            return Ok(None);
        }
        let mut sums = vec![0.0; tensors.len()];
        // One read for all of one type, in which the device adds them.
        for wide in [DType::F32, DType::F64] {
            let is_wide = |place: &usize| (tensors[*place].1 == DType::F64) == (wide == DType::F64);
            let places: Vec<usize> = (0..tensors.len()).filter(is_wide).collect();
            let squares = places.iter().map(|place| {
                let tensor = flat::<I>(opened::<I>(tensors[*place].0.clone()));
                let tensor = if wide == DType::F64 { tensor } else { tensor.cast(FloatDType::F32) };
                (tensor.clone() * tensor).sum()
            });
            let squares: Vec<_> = squares.collect();
            if !squares.is_empty() {
                let data = Tensor::cat(squares, 0).try_into_data().map_err(|e| Error::io("reading norms", e))?;
                places.into_iter().zip(data.iter::<f64>()).for_each(|(place, sum)| sums[place] = sum);
            }
        }
        Ok(Some(sums))
    }

    fn device_lane(&self, group: &Group) -> Result<Option<Box<dyn Lane>>, Error> {
        if !uses_collective_devices::<I>() {
            return Ok(None);
        }
        // Now, since operations begin in the backward pass: burn-autodiff holds a lock there that other ranks of this
        // process may need before they begin the same.
        if let Some((_, spec)) = self.parameters.first() {
            connect::<I>(group, &spec.device)?;
        }
        let tensors = BurnTensors::<I> { parameters: self.parameters.clone() };
        Ok(Some(Box::new(DeviceLane { group: group.clone(), tensors })))
    }
}

/// A tensor's elements in host memory.
struct Host(Bytes);

impl Memory for Host {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl AsRef<[u8]> for Source {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

type DataFuture = Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>;

/// A tensor that is being read.
enum Reading {
    InFlight(DataFuture),
    Read(Result<Elements, Error>),
}

impl Reading {
    fn read(data: Result<TensorData, ExecutionError>) -> Reading {
        let owned = data.map(|data| {
            let element = float(data.dtype).unwrap_or(DType::F32);
            Elements::Owned(Box::new(Host(align(data.bytes, element))))
        });
        Reading::Read(owned.map_err(|error| Error::io("reading a tensor", error)))
    }
}

impl Read for Reading {
    fn is_ready(&mut self) -> bool {
        // Polling it starts a read that is not started yet.
        if let Reading::InFlight(future) = self
            && let Poll::Ready(data) = future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            drop(replace(self, Reading::read(data)));
        }
        matches!(self, Reading::Read(_))
    }

    fn wait(self: Box<Self>) -> Result<Elements, Error> {
        match *self {
            Reading::Read(elements) => elements,
            Reading::InFlight(future) => match try_read_sync(future) {
                Some(data) => Reading::wait(Box::new(Reading::read(data))),
                None => Err(Error::broken("reading a tensor", "the backend reads tensors only asynchronously")),
            },
        }
    }
}

/// Operations on the memory of a collective device, by its server. No host tensor is made.
struct DeviceLane<I: Backend> {
    group: Group,
    tensors: BurnTensors<I>,
}

impl<I: Backend> Lane for DeviceLane<I> {
    fn group(&self) -> &Group {
        &self.group
    }

    fn is_on_host(&self) -> bool {
        false
    }

    #[track_caller]
    fn start(&mut self, call: Call) -> Result<Box<dyn Pending>, Error> {
        let Call { request, bytes, factor, sources, targets } = call;
        let spec = |position| self.tensors.spec(position, request.dtype());
        let sources = sources.into_iter().map(|source| {
            let tensor = match source.input {
                Input::Tensor(tensor) if factor != 1.0 => scaled::<I>(opened::<I>(tensor), factor),
                Input::Tensor(tensor) => opened::<I>(tensor),
                Input::Zeros => {
                    let spec = spec(source.position);
                    let shape = Shape::new([source.ranges.bytes() / request.dtype().size()]);
                    I::float_zeros(shape, &spec.device, spec.dtype.into())
                }
                Input::Host(_) => return Err(Error::broken("an operation on a device", "its tensor is on the host")),
            };
            Ok((tensor, source.ranges))
        });
        let sources = sources.collect::<Result<_, Error>>()?;
        let targets = targets.into_iter().map(|target| {
            let spec = self.tensors.spec(target.position, target.dtype);
            // The place of a tensor, without elements.
            let like = I::float_empty(Shape::new([0]), &spec.device, spec.dtype.into());
            Target { like, shape: Shape::from(target.shape), ranges: target.ranges }
        });
        let call = DeviceCall::collective(request, bytes, sources, targets.collect());
        Ok(Box::new(OnDevice::<I>(start::<I, _>(&self.group, TensorKind::Float, call)?)))
    }
}

/// An operation in flight on a device.
struct OnDevice<I: Backend>(PendingTensors<FloatTensor<I>>);

impl<I: Backend> Pending for OnDevice<I> {
    fn is_finished(&self) -> Option<bool> {
        None
    }

    fn wait(self: Box<Self>) -> Result<Vec<Handle>, Error> {
        Ok(self.0.wait()?.into_iter().map(handle::<I>).collect())
    }

    fn follow(self: Box<Self>) -> Result<(Vec<Handle>, Completion), Error> {
        let (tensors, completion) = self.0.follow()?;
        Ok((tensors.into_iter().map(handle::<I>).collect(), completion))
    }
}
