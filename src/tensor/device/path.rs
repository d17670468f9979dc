//! From a backend's tensors to the memory of their device, and back.

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

use super::Waiting;
use crate::server::{CollectiveRuntime, DeviceTransport, exchange};
use bonfire_core::internal::Request;
use bonfire_core::{Error, Group};

/// The way from a backend's tensors to the memory of the runtime `R`. Backends are compared by the type of their tensors,
/// because nothing in burn's traits says what they run on.
pub(super) struct Path<R>(std::marker::PhantomData<R>);

/// Any backend on the runtime will do to talk to its fusion server: element types play no part in it.
type On<R> = CubeBackend<CollectiveRuntime<R>, f32, i32, u32>;
type Plain<R> = CubeTensor<CollectiveRuntime<R>>;
type Fused<R> = FusionTensor<FusionCubeRuntime<CollectiveRuntime<R>>>;

impl<R: DeviceTransport> Path<R> {
    pub fn leads_to<B: Backend>() -> bool {
        let tensor = TypeId::of::<FloatTensor<B>>();
        tensor == TypeId::of::<Plain<R>>() || tensor == TypeId::of::<Fused<R>>()
    }

    pub fn start<B: Backend>(
        group: &Group,
        tensors: Vec<FloatTensor<B>>,
        request: Request<'static>,
    ) -> Result<Waiting<B>, Error> {
        let (mut sources, mut targets, mut results) = (Vec::new(), Vec::new(), Vec::new());
        let (mut bytes, size) = (0, request.dtype().size());
        for tensor in tensors {
            let origin = Origin::<R>::of(tensor)?;
            let tensor = into_contiguous(origin.resolve());
            let place = bytes..bytes + tensor.shape().num_elements() * size;
            let target = tensor.client.empty(place.len());
            bytes = place.end;
            targets.push((target.clone(), place.clone()));
            sources.push((tensor.handle.clone(), place));
            results.push((origin, Plain::new(tensor.client, target, *tensor.meta, tensor.device, tensor.dtype)));
        }
        let Some((_, first)) = results.first() else { return Ok(Box::new(|| Ok(Vec::new()))) };
        let call = request.call(bytes / size);
        let transfer = exchange::start(&first.client, group, call, sources, targets)?;
        Ok(Box::new(move || {
            transfer.wait()?;
            results.into_iter().map(|(origin, tensor)| origin.give_back::<B>(tensor)).collect()
        }))
    }
}

/// Where a tensor came from, to which its result goes back.
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
        tensor.map(|tensor| Origin::Fused(*tensor)).map_err(|_| foreign())
    }

    fn resolve(&self) -> Plain<R> {
        match self {
            Origin::Plain(tensor) => tensor.clone(),
            Origin::Fused(tensor) => tensor.client.resolve_tensor_float::<On<R>>(tensor.clone()),
        }
    }

    /// The tensor as the backend's own.
    fn give_back<B: Backend>(self, tensor: Plain<R>) -> Result<FloatTensor<B>, Error> {
        let tensor: Box<dyn Any> = match self {
            Origin::Plain(_) => Box::new(tensor),
            Origin::Fused(origin) => {
                let (shape, dtype, client) = (tensor.shape(), tensor.dtype, &origin.client);
                let out = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(tensor.into()));
                let streams = OperationStreams::default();
                let fused: Fused<R> = client.register(streams, OperationIr::Init(out), NoOp::<On<R>>::new()).output();
                Box::new(fused)
            }
        };
        tensor.downcast::<FloatTensor<B>>().map(|tensor| *tensor).map_err(|_| foreign())
    }
}

fn foreign() -> Error {
    Error::broken("all_reduce", "a tensor is not of the backend it was said to be of")
}
