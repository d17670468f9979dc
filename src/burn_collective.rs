//! Collectives on burn's tensors with the names and the behaviour of burn-collective, to run programs written for it.
//!
//! Peers, usually one thread per device, [`register`] and then call the same operations in the same order. There is one
//! session per backend type in a process. With a config for several nodes, that is, processes, a session spans them.
//! Known defects of burn-collective are not reproduced; each has a test.

mod address;
mod claim;
mod config;
mod data;
mod error;
mod gradients;
mod messages;
mod names;
mod nodes;
mod operation;
mod orchestrator;
mod payload;
mod session;
mod table;

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

use self::claim::CollectiveCall;
use self::payload::Payload;
/// The address of a node or of the orchestrator, in burn-collective's type: `host:port` or `[v6]:port`, with or without
/// a scheme such as `ws://`. The port of a node's address is optional.
pub use burn_communication::Address;

pub use self::config::{AllReduceStrategy, BroadcastStrategy, CollectiveConfig, ReduceStrategy};
pub use self::error::{CollectiveError, GlobalCollectiveError};
pub use self::gradients::{GradientsParamsExt, initialized};
pub use self::names::{NodeId, PeerId};
use self::operation::run;
pub use self::orchestrator::start_global_orchestrator;
use self::session::session;
use bonfire_core::ReduceOp;
pub use bonfire_core::ReduceOp as ReduceOperation;

/// Registers a peer. Blocks until `num_devices` peers have registered, and with several nodes until all nodes have
/// connected.
///
/// The peer receives broadcast tensors on `device`. A peer's operations run one after the other. This call and every
/// operation wait for missing peers until the deadline: 300 s, or the value of `BONFIRE_DEADLINE` in seconds. Nodes
/// have 120 s or the deadline, whichever is shorter, to register with the orchestrator, and the same again to connect
/// to each other.
///
/// `B` is any backend without autodiff. With autodiff use the inner backend and [`inner`](burn::tensor::Tensor::inner)
/// tensors: gradients do not flow through collectives.
///
/// ```
/// use bonfire::burn_collective::{
///     CollectiveConfig, PeerId, ReduceOperation, all_reduce, finish_collective, register,
/// };
/// use burn::backend::NdArray;
/// use burn::tensor::{Tensor, TensorPrimitive};
///
/// let peers: Vec<_> = (0..2u32)
///     .map(|rank| std::thread::spawn(move || {
///         let (peer, device) = (PeerId::from(rank), Default::default());
///         register::<NdArray>(peer, device, CollectiveConfig::default().with_num_devices(2))?;
///         let mine = Tensor::<NdArray, 1>::from_floats([rank as f32, 1.0], &device).into_primitive().tensor();
///         let sum = all_reduce::<NdArray>(peer, mine, ReduceOperation::Sum)?;
///         finish_collective::<NdArray>(peer)?;
///         Ok::<_, bonfire::CollectiveError>(Tensor::<NdArray, 1>::from_primitive(TensorPrimitive::Float(sum)))
///     }))
///     .collect();
/// for peer in peers {
///     assert_eq!(peer.join().unwrap()?.into_data().to_vec::<f32>().unwrap(), [1.0, 2.0]);
/// }
/// # Ok::<(), bonfire::CollectiveError>(())
/// ```
///
/// # Errors
/// * [`CollectiveError::InvalidConfig`] if the config cannot work.
/// * [`CollectiveError::MultipleRegister`] if the id is already registered.
/// * [`CollectiveError::RegisterParamsMismatch`] if the config differs from the first peer's, or `num_devices` peers
///   are already registered.
/// * [`CollectiveError::LocalServerMissing`] if the session is [reset](reset_collective) meanwhile.
/// * [`CollectiveError::Global`] if the nodes cannot connect or disagree.
/// * [`CollectiveError::Other`] for a backend with autodiff, after the deadline, or if `BONFIRE_DEADLINE` is malformed.
///
/// The call has not registered the peer then, and may be repeated.
pub fn register<B: Backend>(id: PeerId, device: B::Device, config: CollectiveConfig) -> Result<(), CollectiveError> {
    if B::ad_enabled(&device) {
        let backend = B::name(&device);
        return Err(CollectiveError::Other(format!(
            "register: {backend} has autodiff, and no gradient flows through these operations; register on its inner \
             backend (for `Autodiff<Flex>` that is `register::<Flex>`), and pass it `tensor.inner()`"
        )));
    }
    log::info!("{id} registers: {config}");
    session::<B>().register(id, Arc::new(device), config)
}

/// Reduces the tensors of all peers, which have the same shape and element type, and returns the result to each peer on
/// its tensor's device.
///
/// All peers call it; it blocks until they have. The mean is over all devices of all nodes. 16-bit floats are
/// accumulated in f32 and rounded once. Results are bit-identical on all peers and in every run. No gradients flow
/// through it: for that, and for other kinds of tensors, see [`tensor`](crate::tensor).
///
/// # Errors
/// * [`CollectiveError::AllReduceShapeMismatch`] or [`CollectiveError::AllReduceOperationMismatch`], the same on all
///   peers. The session remains usable.
/// * [`CollectiveError::RegisterNotFirstOperation`] if the peer is not registered.
/// * [`CollectiveError::LocalServerMissing`] if the session is [reset](reset_collective) meanwhile.
/// * [`CollectiveError::Global`] if a node is lost. Operations over the nodes fail from then on.
/// * [`CollectiveError::Other`] after the deadline, if a peer's tensor cannot be read (then on all peers), or if the
///   peer is already in another operation.
pub fn all_reduce<B: Backend>(
    id: PeerId,
    tensor: B::FloatTensorPrimitive,
    op: ReduceOp,
) -> Result<B::FloatTensorPrimitive, CollectiveError> {
    let device = B::float_device(&tensor);
    let (payload, _) = run(id, CollectiveCall::AllReduce(op), Payload::<B>::in_place_or_read(tensor).map(Some))?;
    into_tensor(payload, &device)
}

/// Broadcasts the tensor of the only peer that passes one. Every other peer passes `None` and gets the tensor on the
/// device with which it registered; it need not know the shape.
///
/// # Errors
/// [`CollectiveError::BroadcastNoTensor`], [`CollectiveError::BroadcastMultipleTensors`], or
/// [`CollectiveError::ReduceOperationMismatch`] if some peers call [`reduce`], the same on all peers; otherwise as
/// [`all_reduce`].
pub fn broadcast<B: Backend>(
    id: PeerId,
    tensor: Option<B::FloatTensorPrimitive>,
) -> Result<B::FloatTensorPrimitive, CollectiveError> {
    let own = tensor.as_ref().map(|tensor| B::float_device(tensor));
    let payload = tensor.map(Payload::<B>::read).transpose();
    let (payload, registered) = run(id, CollectiveCall::Broadcast, payload)?;
    let device = own.or_else(|| registered.downcast_ref::<B::Device>().cloned()).unwrap_or_default();
    into_tensor(payload, &device)
}

/// Reduces the tensors of all peers, which have the same shape and element type, to the peer `root`, which may be on
/// any node. Returns the result on `root`, on its tensor's device, and `None` on the other peers.
///
/// # Errors
/// [`CollectiveError::ReduceShapeMismatch`], [`CollectiveError::ReduceOperationMismatch`] or
/// [`CollectiveError::ReduceRootMismatch`], the same on all peers; [`CollectiveError::RegisterNotFirstOperation`] if
/// the peer or the root is not registered; otherwise as [`all_reduce`].
pub fn reduce<B: Backend>(
    id: PeerId,
    tensor: B::FloatTensorPrimitive,
    op: ReduceOp,
    root: PeerId,
) -> Result<Option<B::FloatTensorPrimitive>, CollectiveError> {
    let device = B::float_device(&tensor);
    let (payload, _) = run(id, CollectiveCall::Reduce(op, root), Payload::<B>::read(tensor).map(Some))?;
    Ok(payload.map(|payload| payload.into_tensor(&device)))
}

/// Unregisters a peer. Does not wait for other peers: operations in which they wait, and later ones, run on the
/// remaining peers. The last peer to finish disconnects the node from the other nodes and ends the session, so that
/// another one may begin.
///
/// # Errors
/// [`CollectiveError::RegisterNotFirstOperation`] if no peer has registered yet or the peer's registration is not
/// complete, [`CollectiveError::MultipleUnregister`] if the peer is not registered.
pub fn finish_collective<B: Backend>(id: PeerId) -> Result<(), CollectiveError> {
    session::<B>().finish(id)
}

/// Discards the session: all registrations, its config and its connections. Calls that wait for other peers return
/// [`CollectiveError::LocalServerMissing`]. An operation that all peers of this node have entered completes.
pub fn reset_collective<B: Backend>() {
    session::<B>().reset();
}

/// Returns the result of an operation that has one on every peer.
fn into_tensor<B: Backend>(payload: Option<Payload<B>>, device: &B::Device) -> Result<FloatTensor<B>, CollectiveError> {
    Ok(payload.ok_or(CollectiveError::LocalServerMissing)?.into_tensor(device))
}
