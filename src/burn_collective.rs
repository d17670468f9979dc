//! Collectives on burn's tensors, with the names and the behaviour of burn-collective.
//!
//! Peers, usually one thread for each device, [`register`] and then call the same operations in the same order. There is
//! one session for each backend type in a process; with a config for several nodes it spans processes.

mod address;
mod cargo;
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
mod session;
mod table;

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

use self::cargo::Cargo;
use self::claim::Call;
/// Where a node or the orchestrator is: `host:port` or `[v6]:port`, with or without a scheme such as `ws://`. A node's
/// address may lack the port. It is the type that burn-collective takes.
pub use burn_communication::Address;

pub use self::config::{AllReduceStrategy, BroadcastStrategy, CollectiveConfig, ReduceStrategy};
pub use self::error::{CollectiveError, GlobalCollectiveError};
pub use self::gradients::GradientsParamsExt;
pub use self::names::{NodeId, PeerId};
use self::operation::run;
pub use self::orchestrator::start_global_orchestrator;
use self::session::session;
use bonfire_core::ReduceOp;
pub use bonfire_core::ReduceOp as ReduceOperation;

/// Registers a peer and blocks until all `num_devices` of the config have registered; with several nodes, until all
/// nodes have found each other.
///
/// The peer receives broadcast tensors on `device`. A peer's operations run one after the other. Peers that never come
/// are waited for until the deadline, 300 s unless `BONFIRE_DEADLINE` says otherwise; nodes find each other within 120 s
/// or that deadline, whichever is less.
///
/// `B` is any backend. With autodiff use the inner backend: gradients do not flow through collectives.
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
/// [`CollectiveError::InvalidConfig`]; [`CollectiveError::MultipleRegister`] where the id is registered;
/// [`CollectiveError::RegisterParamsMismatch`] where the config is another than the first peer's or all its devices are
/// there; [`CollectiveError::LocalServerMissing`] after a reset; [`CollectiveError::Global`] where the nodes do not find
/// each other or disagree; [`CollectiveError::Other`] after the deadline.
pub fn register<B: Backend>(id: PeerId, device: B::Device, config: CollectiveConfig) -> Result<(), CollectiveError> {
    log::info!("{id} registers: {config}");
    session::<B>().register(id, Arc::new(device), config)
}

/// Reduces the tensors of all peers, which have the same shape and element type, and returns the result to each, on its
/// tensor's device. The mean is that over all devices of all nodes. 16-bit floats are accumulated in f32 and rounded
/// once. All peers get the same bits, in every run.
///
/// # Errors
/// [`CollectiveError::AllReduceShapeMismatch`] or [`CollectiveError::AllReduceOperationMismatch`], the same on all peers
/// and without harm to the session; [`CollectiveError::RegisterNotFirstOperation`] where the peer is not registered;
/// [`CollectiveError::LocalServerMissing`] after a reset; [`CollectiveError::Global`] where a node is lost;
/// [`CollectiveError::Other`] after the deadline, or on a second call of one peer at a time.
pub fn all_reduce<B: Backend>(
    id: PeerId,
    tensor: B::FloatTensorPrimitive,
    op: ReduceOp,
) -> Result<B::FloatTensorPrimitive, CollectiveError> {
    let device = B::float_device(&tensor);
    let (cargo, _) = run(id, Call::AllReduce(op), Cargo::<B>::load(tensor).map(Some))?;
    unload(cargo, &device)
}

/// Gives every peer, on its own device, the tensor that exactly one of them brings.
///
/// # Errors
/// [`CollectiveError::BroadcastNoTensor`] or [`CollectiveError::BroadcastMultipleTensors`], the same on all peers; else
/// as [`all_reduce`].
pub fn broadcast<B: Backend>(
    id: PeerId,
    tensor: Option<B::FloatTensorPrimitive>,
) -> Result<B::FloatTensorPrimitive, CollectiveError> {
    let own = tensor.as_ref().map(|tensor| B::float_device(tensor));
    let cargo = tensor.map(Cargo::<B>::read).transpose();
    let (cargo, registered) = run(id, Call::Broadcast, cargo)?;
    let device = own.or_else(|| registered.downcast_ref::<B::Device>().cloned()).unwrap_or_default();
    unload(cargo, &device)
}

/// Reduces the tensors of all peers to the peer `root`, which may be on any node. Returns the result there, on its
/// tensor's device, and `None` elsewhere.
///
/// # Errors
/// [`CollectiveError::ReduceShapeMismatch`], [`CollectiveError::ReduceOperationMismatch`] or
/// [`CollectiveError::ReduceRootMismatch`], the same on all peers; [`CollectiveError::RegisterNotFirstOperation`] where
/// the peer or the root is not registered; else as [`all_reduce`].
pub fn reduce<B: Backend>(
    id: PeerId,
    tensor: B::FloatTensorPrimitive,
    op: ReduceOp,
    root: PeerId,
) -> Result<Option<B::FloatTensorPrimitive>, CollectiveError> {
    let device = B::float_device(&tensor);
    let (cargo, _) = run(id, Call::Reduce(op, root), Cargo::<B>::read(tensor).map(Some))?;
    Ok(cargo.map(|cargo| cargo.unload(&device)))
}

/// Unregisters a peer. Later operations take place among the others; the last one to finish leaves the other nodes, and
/// another session may begin.
///
/// # Errors
/// [`CollectiveError::RegisterNotFirstOperation`] where nobody has registered yet or the peer's registration is not
/// complete, [`CollectiveError::MultipleUnregister`] where the peer is not registered.
pub fn finish_collective<B: Backend>(id: PeerId) -> Result<(), CollectiveError> {
    session::<B>().finish(id)
}

/// Forgets the session: all registrations, its config and its connections. Calls that wait for other peers return
/// [`CollectiveError::LocalServerMissing`]; an operation that all peers of this node are in completes.
pub fn reset_collective<B: Backend>() {
    session::<B>().reset();
}

/// A result as a tensor. Operations that give every peer a result have one here.
fn unload<B: Backend>(cargo: Option<Cargo<B>>, device: &B::Device) -> Result<FloatTensor<B>, CollectiveError> {
    Ok(cargo.ok_or(CollectiveError::LocalServerMissing)?.unload(device))
}
