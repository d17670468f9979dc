//! burn's tensors for the engine of `bonfire-train`.

use std::any::Any;
use std::future::Future;
use std::mem::replace;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, ExecutionError, Scalar, TensorMetadata};
use burn::tensor::{Bytes, DType as BurnDType, FloatDType, Shape, TensorData, try_read_sync};

use crate::tensor::host::{TensorSpec, align, buffer, float};
use bonfire_core::{DType, Error};
use bonfire_train::lane::{Elements, Memory, Read, Tensor as Handle, Tensors};

/// The tensors of a model's parameters, without autodiff.
pub(super) struct BurnTensors {
    /// By position, the whole shape of the parameter, and how tensors are made for it.
    parameters: Vec<(Shape, TensorSpec)>,
}

impl BurnTensors {
    pub fn of(parameters: impl Iterator<Item = (Shape, TensorSpec)>) -> Arc<dyn Tensors> {
        let parameters = parameters.collect::<Vec<_>>();
        #[cfg(feature = "cubecl")]
        say_staged(&parameters);
        Arc::new(BurnTensors { parameters })
    }

    /// Returns how tensors of this element type are made on the device of the parameter at a position.
    fn spec(&self, position: usize, dtype: DType) -> TensorSpec {
        let own = &self.parameters[position].1;
        let wide = if dtype == DType::F64 { BurnDType::F64 } else { BurnDType::F32 };
        let burn = if dtype == own.carrier { own.dtype } else { wide };
        TensorSpec { device: own.device.clone(), dtype: burn, carrier: dtype }
    }
}

/// Says once per process that gradients on an accelerator go through host memory.
#[cfg(feature = "cubecl")]
fn say_staged(parameters: &[(Shape, TensorSpec)]) {
    use burn::backend::DispatchDevice;

    static SAID: std::sync::Once = std::sync::Once::new();
    let device = parameters.iter().find_map(|(_, spec)| match &spec.device {
        DispatchDevice::Cube(device) => Some(device),
        #[allow(unreachable_patterns, reason = "without another backend")]
        _ => None,
    });
    if let Some(device) = device {
        SAID.call_once(|| log::info!("gradients of models on {device:?} go through host memory"));
    }
}

/// Returns the handle of a tensor.
pub(super) fn handle(tensor: DispatchTensor) -> Handle {
    Arc::new(tensor)
}

/// Returns the tensor of a handle. The engine gets handles from this adapter only.
pub(super) fn opened(handle: Handle) -> DispatchTensor {
    let tensor = handle.downcast::<DispatchTensor>();
    Arc::unwrap_or_clone(tensor.unwrap_or_else(|_| unreachable!("a tensor of another adapter")))
}

/// Multiplies a tensor. 16-bit elements are multiplied in f32.
pub(super) fn scaled(tensor: DispatchTensor, factor: f64) -> DispatchTensor {
    let factor = Scalar::from(factor);
    let narrow = match tensor.dtype() {
        BurnDType::F16 => FloatDType::F16,
        BurnDType::BF16 => FloatDType::BF16,
        _ => return Dispatch::float_mul_scalar(tensor, factor),
    };
    Dispatch::float_cast(Dispatch::float_mul_scalar(Dispatch::float_cast(tensor, FloatDType::F32), factor), narrow)
}

impl Tensors for BurnTensors {
    fn fits(&self, position: usize, tensor: &Handle) -> bool {
        let (shape, spec) = &self.parameters[position];
        let tensor = tensor.downcast_ref::<DispatchTensor>();
        tensor.is_some_and(|tensor| tensor.shape() == *shape && tensor.dtype() == spec.dtype)
    }

    fn cast(&self, position: usize, tensor: Handle, dtype: DType) -> Handle {
        handle(Dispatch::float_cast(opened(tensor), self.spec(position, dtype).dtype.into()))
    }

    fn scale(&self, tensor: Handle, _: DType, factor: f64) -> Handle {
        handle(scaled(opened(tensor), factor))
    }

    fn add(&self, one: Handle, other: Handle) -> Handle {
        handle(Dispatch::float_add(opened(one), opened(other)))
    }

    fn sum(&self, tensor: Handle, dtype: DType) -> Handle {
        let tensor = opened(tensor);
        handle(Dispatch::float_sum(match dtype {
            DType::F16 | DType::BF16 => Dispatch::float_cast(tensor, FloatDType::F32),
            _ => tensor,
        }))
    }

    fn read(&self, tensor: Handle) -> Box<dyn Read> {
        Box::new(Reading::InFlight(Box::pin(Dispatch::float_into_data(opened(tensor)))))
    }

    fn memory(&self, dtype: DType, elements: usize) -> Result<Box<dyn Memory>, Error> {
        Ok(Box::new(Host(buffer("gathering tensors", dtype, elements)?)))
    }

    fn tensor(&self, position: usize, shape: &[usize], dtype: DType, memory: Box<dyn Memory>) -> Handle {
        let memory: Box<dyn Any> = memory;
        let memory = memory.downcast::<Host>().unwrap_or_else(|_| unreachable!("memory of another adapter"));
        handle(self.spec(position, dtype).tensor(memory.0, Shape::from(shape.to_vec())))
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

type DataFuture = Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>;

/// A tensor that is being read.
enum Reading {
    InFlight(DataFuture),
    Read(Result<Elements, Error>),
}

impl Reading {
    fn read(data: Result<TensorData, ExecutionError>) -> Reading {
        let owned = data.map(|data| {
            let element = float(data.dtype()).unwrap_or(DType::F32);
            Elements::Owned(Box::new(Host(align(data.into_bytes(), element))))
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
