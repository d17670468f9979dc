//! Conversion between a backend's tensors and the memory of their device.

use std::any::{Any, TypeId};

use burn::tensor::TensorMetadata;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::FusionCubeRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::stream::OperationStreams;
use burn_fusion::{FusionTensor, NoOp};
use burn_ir::{InitOperationIr, OperationIr, OperationOutput};

use super::PendingAllReduce;
use crate::server::{CollectiveRuntime, DeviceTransport, exchange};
use bonfire_core::internal::Request;
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

    pub fn start<B: Backend>(
        group: &Group,
        tensors: Vec<FloatTensor<B>>,
        request: Request<'static>,
    ) -> Result<PendingAllReduce<B>, Error> {
        let (mut sources, mut targets, mut results) = (Vec::new(), Vec::new(), Vec::new());
        let (mut bytes, size) = (0, request.dtype().size());
        for tensor in tensors {
            let origin = Origin::<R>::of(tensor)?;
            let tensor = into_contiguous(origin.resolve());
            let range = bytes..bytes + tensor.shape().num_elements() * size;
            let target = tensor.client.empty(range.len());
            bytes = range.end;
            targets.push((target.clone(), range.clone()));
            sources.push((tensor.handle.clone(), range));
            results.push((origin, Plain::new(tensor.client, target, *tensor.meta, tensor.device, tensor.dtype)));
        }
        let Some((_, first)) = results.first() else { return Ok(Box::new(|| Ok(Vec::new()))) };
        let call = request.call(bytes / size);
        let transfer = exchange::start(&first.client, group, call, sources, targets)?;
        Ok(Box::new(move || {
            transfer.wait()?;
            results.into_iter().map(|(origin, tensor)| origin.restore::<B>(tensor)).collect()
        }))
    }
}

/// The tensor that an operation read, which determines the type of the result.
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

    fn resolve(&self) -> Plain<R> {
        match self {
            Origin::Plain(tensor) => tensor.clone(),
            Origin::Fused(tensor) => tensor.client.resolve_tensor_float::<ServerBackend<R>>(tensor.clone()),
        }
    }

    /// Converts the result to the backend's tensor type.
    fn restore<B: Backend>(self, tensor: Plain<R>) -> Result<FloatTensor<B>, Error> {
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
        tensor.downcast::<FloatTensor<B>>().map(|tensor| *tensor).map_err(|_| wrong_backend())
    }
}

fn wrong_backend() -> Error {
    Error::broken("all_reduce", "a tensor is not of the expected backend")
}
