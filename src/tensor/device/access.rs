//! Conversion between a backend's tensors and the memory of their device.

use std::any::{Any, TypeId};

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::stream::OperationStreams;
use burn_fusion::{FusionTensor, NoOp};
use burn_ir::{InitOperationIr, OperationIr, OperationOutput};
use cubecl::Runtime;
use cubecl::client::ComputeClient;

use super::{Completion, DeviceCall, PendingTensors, Target, TensorKind, Transfer};
use crate::server::{CollectiveRuntime, DeviceTransport, exchange};
use bonfire_core::{Error, Group};

/// Access to the device memory of a backend's tensors on the runtime `R`. Backends are recognised by the type of their
/// tensors, because burn's traits do not tell what a backend runs on.
pub(super) struct DeviceAccess<R>(std::marker::PhantomData<R>);

/// A backend for calls to the fusion server of the runtime. The server does not depend on the element types.
type ServerBackend<R> = CubeBackend<CollectiveRuntime<R>, f32, i32, u32>;
type Plain<R> = CubeTensor<CollectiveRuntime<R>>;
type Fused<R> = FusionTensor<FusionCubeRuntime<CollectiveRuntime<R>>>;

impl<R: DeviceTransport> DeviceAccess<R> {
    pub fn applies_to<B: Backend>() -> bool {
        let tensor = TypeId::of::<FloatTensor<B>>();
        tensor == TypeId::of::<Plain<R>>() || tensor == TypeId::of::<Fused<R>>()
    }

    pub fn start<T: Send + 'static>(
        group: &Group,
        kind: TensorKind,
        call: DeviceCall<T>,
    ) -> Result<PendingTensors<T>, Error> {
        let DeviceCall { request, sources, targets, bytes, peers } = call;
        let (mut read, mut written, mut results) = (Vec::new(), Vec::new(), Vec::new());
        let mut place = None;
        for (tensor, ranges) in sources {
            let mut tensor = Origin::<R>::of(tensor)?.resolve(kind);
            // burn would launch a kernel on no elements, which CUDA refuses.
            if ranges.bytes() > 0 {
                tensor = into_contiguous(tensor);
            }
            read.push((tensor.handle, ranges));
            place = Some(tensor.client);
        }
        for Target { like, shape, ranges } in targets {
            let origin = Origin::<R>::of(like)?;
            let (client, device, dtype) = origin.place();
            let memory = client.empty(ranges.bytes());
            written.push((memory.clone(), ranges));
            results.push((origin, Plain::new_contiguous(client.clone(), device, shape, memory, dtype)));
            place = place.or(Some(client));
        }
        let Some(client) = place else {
            return Ok(PendingTensors { transfer: None, made: Box::new(|| Ok(Vec::new())) });
        };
        let call = request.call(bytes / request.dtype().size());
        let transfer = exchange::start(&client, group, (call, peers), read, written)?;
        let made = || results.into_iter().map(|(origin, tensor)| origin.restore(tensor)).collect();
        Ok(PendingTensors { transfer: Some(Box::new(transfer)), made: Box::new(made) })
    }
}

impl<R: DeviceTransport> Transfer for exchange::Transfer<R> {
    fn wait(self: Box<Self>) -> Result<(), Error> {
        (*self).wait()
    }

    fn follow(self: Box<Self>) -> Result<Completion, Error> {
        let completion = (*self).follow()?;
        Ok(Box::new(|| completion.wait()))
    }
}

/// A tensor of a backend, which says how a result becomes one.
enum Origin<R: DeviceTransport> {
    Plain(Plain<R>),
    Fused(Fused<R>),
}

impl<R: DeviceTransport> Origin<R> {
    fn of<T: 'static>(tensor: T) -> Result<Self, Error> {
        let tensor: Box<dyn Any> = Box::new(tensor);
        let tensor = match tensor.downcast::<Plain<R>>() {
            Ok(tensor) => return Ok(Origin::Plain(*tensor)),
            Err(tensor) => tensor.downcast::<Fused<R>>(),
        };
        tensor.map(|tensor| Origin::Fused(*tensor)).map_err(|_| wrong_backend())
    }

    fn resolve(self, kind: TensorKind) -> Plain<R> {
        match (self, kind) {
            (Origin::Plain(tensor), _) => tensor,
            (Origin::Fused(tensor), TensorKind::Float) => {
                tensor.client.clone().resolve_tensor_float::<ServerBackend<R>>(tensor)
            }
            (Origin::Fused(tensor), TensorKind::Int) => {
                tensor.client.clone().resolve_tensor_int::<ServerBackend<R>>(tensor)
            }
        }
    }

    /// Returns the client of the device, the device, and the element type.
    fn place(&self) -> (ComputeClient<CollectiveRuntime<R>>, <CollectiveRuntime<R> as Runtime>::Device, DType) {
        match self {
            Origin::Plain(tensor) => (tensor.client.clone(), tensor.device.clone(), tensor.dtype),
            Origin::Fused(tensor) => {
                let device = tensor.client.device().clone();
                (CollectiveRuntime::<R>::client(&device), device, tensor.dtype)
            }
        }
    }

    /// Converts the result to the backend's tensor type.
    fn restore<T: 'static>(self, tensor: Plain<R>) -> Result<T, Error> {
        let tensor: Box<dyn Any> = match self {
            Origin::Plain(_) => Box::new(tensor),
            Origin::Fused(origin) => {
                let (shape, dtype, client) = (tensor.shape(), tensor.dtype, &origin.client);
                let out = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(tensor.into()));
                let streams = OperationStreams::default();
                let fused: Fused<R> =
                    client.register(streams, OperationIr::Init(out), NoOp::<ServerBackend<R>>::new()).output();
                Box::new(fused)
            }
        };
        tensor.downcast().map(|tensor| *tensor).map_err(|_| wrong_backend())
    }
}

fn wrong_backend() -> Error {
    Error::broken("an operation on a device", "a tensor is not of the expected backend")
}
