//! The functions of burn-collective, which burn dropped after 0.21, for programs that still call them.
//!
//! Peers are threads of one process, usually one per device. They [`register`] and then call the same operations in the
//! same order. There is one session in a process. New programs use [`Group`](crate::Group), where a rank is a thread or
//! a process, and [`DataParallel`](crate::DataParallel), which exchanges gradients during the backward pass.
//!
//! Bonfire's package for burn 0.21 has burn-collective's sessions over several nodes, and its orchestrator. Here a
//! process that is a rank of a larger job gets its [`Group`](crate::Group) from
//! [`Group::from_env`](crate::Group::from_env).

mod config;
mod error;
mod session;

use burn::tensor::{Device, Float, Tensor};

pub use self::config::{Address, AllReduceStrategy, BroadcastStrategy, CollectiveConfig, PeerId, ReduceStrategy};
pub use self::error::CollectiveError;
use self::session::{Call, SESSION, other_error};
use crate::tensor::host::{Source, TensorSpec, float, memory};
use bonfire_core::ReduceOp;
pub use bonfire_core::ReduceOp as ReduceOperation;
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Error, Operation};

/// Registers a peer. Blocks until `num_devices` peers have registered.
///
/// The peer receives broadcast tensors on `device`. A peer's operations run one after the other. This call and every
/// operation wait for missing peers until the deadline: 300 s, or the value of `BONFIRE_DEADLINE` in seconds.
///
/// The device has no autodiff. Use [`Device::inner`], and [`inner`](Tensor::inner) tensors: gradients do not flow
/// through collectives.
///
/// ```
/// use bonfire::burn_collective::{
///     CollectiveConfig, CollectiveError, PeerId, ReduceOperation, all_reduce, finish_collective, register,
/// };
/// use burn::tensor::{Device, Tensor};
///
/// let peers: Vec<_> = (0..2u32)
///     .map(|rank| std::thread::spawn(move || {
///         let (peer, device) = (PeerId::from(rank), Device::flex());
///         register(peer, device.clone(), CollectiveConfig::default().with_num_devices(2))?;
///         let sum = all_reduce(peer, Tensor::<1>::from_floats([rank as f32, 1.0], &device), ReduceOperation::Sum)?;
///         finish_collective(peer)?;
///         Ok::<_, CollectiveError>(sum)
///     }))
///     .collect();
/// for peer in peers {
///     assert_eq!(peer.join().unwrap()?.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0, 2.0]);
/// }
/// # Ok::<(), CollectiveError>(())
/// ```
///
/// # Errors
/// * [`CollectiveError::InvalidConfig`] if the config has no devices.
/// * [`CollectiveError::SeveralNodes`] if it asks for several nodes.
/// * [`CollectiveError::MultipleRegister`] if the id is already registered.
/// * [`CollectiveError::RegisterParamsMismatch`] if the config differs from the first peer's, or `num_devices` peers
///   are already registered.
/// * [`CollectiveError::LocalServerMissing`] if the session is [reset](reset_collective) meanwhile.
/// * [`CollectiveError::Other`] for a device with autodiff, after the deadline, or if `BONFIRE_DEADLINE` is malformed.
///
/// The call has not registered the peer then, and may be repeated.
pub fn register(id: PeerId, device: Device, config: CollectiveConfig) -> Result<(), CollectiveError> {
    if device.is_autodiff() {
        return Err(CollectiveError::Other(
            "register: the device has autodiff, and no gradient flows through these operations; register \
             `device.inner()`, and pass `tensor.inner()`"
                .into(),
        ));
    }
    log::info!("{id} registers for a session of {} devices", config.num_devices);
    SESSION.register(id, device, config)
}

/// Reduces the tensors of all peers, which have the same shape and element type, and returns the result to each peer on
/// its tensor's device.
///
/// All peers call it; it blocks until they have. 16-bit floats are accumulated in f32 and rounded once. Results are
/// bit-identical on all peers and in every run. No gradients flow through it: for that, and for other kinds of tensors,
/// see [`tensor`](crate::tensor).
///
/// # Errors
/// * [`CollectiveError::AllReduceShapeMismatch`] or [`CollectiveError::AllReduceOperationMismatch`], the same on all
///   peers. The session remains usable.
/// * [`CollectiveError::RegisterNotFirstOperation`] if the peer is not registered.
/// * [`CollectiveError::LocalServerMissing`] if the session is [reset](reset_collective) meanwhile.
/// * [`CollectiveError::Other`] after the deadline, if a peer's tensor cannot be read or has autodiff (then on all
///   peers), or if the peer is already in another operation.
pub fn all_reduce<const D: usize>(id: PeerId, tensor: Tensor<D>, op: ReduceOp) -> Result<Tensor<D>, CollectiveError> {
    let source = Source::read("all_reduce", tensor);
    let meeting = SESSION.meet(id, Call::AllReduce(op), described(source.as_ref().map(Some)))?;
    let Source { mut bytes, shape, spec } = source.map_err(other_error)?;
    let request = Request::new(Operation::AllReduce, spec.carrier).reduction(op).shape(&shape);
    meeting.run(|group| group.operate(request, None, &mut bytes))?;
    Ok(spec.of_kind(bytes, shape))
}

/// Broadcasts the tensor of the only peer that passes one. Every other peer passes `None` and gets the tensor on the
/// device with which it registered; it need not know the shape, except for the number of dimensions.
///
/// # Errors
/// [`CollectiveError::BroadcastNoTensor`], [`CollectiveError::BroadcastMultipleTensors`], or
/// [`CollectiveError::ReduceOperationMismatch`] if some peers call [`reduce`], the same on all peers;
/// [`CollectiveError::Other`] also on a peer whose device lacks the element type, or that expects another number of
/// dimensions; otherwise as [`all_reduce`].
pub fn broadcast<const D: usize>(id: PeerId, tensor: Option<Tensor<D>>) -> Result<Tensor<D>, CollectiveError> {
    const OPERATION: &str = "broadcast";
    let source = tensor.map(|tensor| Source::read(OPERATION, tensor)).transpose();
    let meeting = SESSION.meet(id, Call::Broadcast, described(source.as_ref().map(Option::as_ref)))?;
    let source = source.map_err(other_error)?;
    let (Some(root), Some((shape, dtype))) = (meeting.agreed.holder, meeting.agreed.tensor.clone()) else {
        return Err(CollectiveError::BroadcastNoTensor);
    };
    let own = source.as_ref().map(|source| &source.bytes[..]);
    let spec = match &source {
        Some(source) => Ok(source.spec.clone()),
        None => TensorSpec::of::<Float>(OPERATION, (&meeting.device, dtype)),
    };
    let carrier = float(dtype).ok_or(CollectiveError::BroadcastNoTensor)?;
    let bytes = meeting.run(|group| memory(group).broadcast((carrier, &shape), own, root))?;
    if shape.len() != D {
        let reason = format!("{OPERATION}: the tensor has {} dimensions, and this peer expects {D}", shape.len());
        return Err(CollectiveError::Other(reason));
    }
    Ok(spec.map_err(other_error)?.of_kind(bytes, shape))
}

/// Reduces the tensors of all peers, which have the same shape and element type, to the peer `root`. Returns the result
/// on `root`, on its tensor's device, and `None` on the other peers.
///
/// # Errors
/// [`CollectiveError::ReduceShapeMismatch`], [`CollectiveError::ReduceOperationMismatch`] or
/// [`CollectiveError::ReduceRootMismatch`], the same on all peers; [`CollectiveError::RegisterNotFirstOperation`] if
/// the peer or the root is not registered; otherwise as [`all_reduce`].
pub fn reduce<const D: usize>(
    id: PeerId,
    tensor: Tensor<D>,
    op: ReduceOp,
    root: PeerId,
) -> Result<Option<Tensor<D>>, CollectiveError> {
    let source = Source::read("reduce", tensor);
    let meeting = SESSION.meet(id, Call::Reduce(op, root), described(source.as_ref().map(Some)))?;
    let Source { bytes, shape, spec } = source.map_err(other_error)?;
    let root = meeting.agreed.holder.ok_or(CollectiveError::RegisterNotFirstOperation)?;
    let reduced = meeting.run(|group| memory(group).reduce((spec.carrier, &shape), op, &bytes, root))?;
    Ok(reduced.map(|reduced| spec.of_kind(reduced, shape)))
}

/// Unregisters a peer. Does not wait for other peers: operations in which they wait, and later ones, run on the
/// remaining peers. The last peer to finish ends the session, so that another one may begin.
///
/// # Errors
/// [`CollectiveError::RegisterNotFirstOperation`] if no peer has registered yet or the peer's registration is not
/// complete, [`CollectiveError::MultipleUnregister`] if the peer is not registered.
pub fn finish_collective(id: PeerId) -> Result<(), CollectiveError> {
    SESSION.finish(id)
}

/// Discards the session: all registrations and its config. Calls that wait for other peers return
/// [`CollectiveError::LocalServerMissing`]. An operation that all peers have entered completes.
pub fn reset_collective() {
    SESSION.reset();
}

/// Returns what the other peers need to know of a peer's tensor.
fn described(source: Result<Option<&Source>, &Error>) -> Result<Option<session::Described>, CollectiveError> {
    let described = source.map(|source| source.map(|source| (source.shape.to_vec(), source.spec.dtype)));
    described.map_err(|error| other_error(error.clone()))
}
