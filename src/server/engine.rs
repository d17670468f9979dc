//! The interface to a runtime's own data path between devices, without host memory.

use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use super::DeviceTransport;
use bonfire_core::internal::{Peers, Ranges, Rows};
use bonfire_core::{Call, DType, Error, Operation, ReduceOp};
#[cfg(feature = "cuda")]
pub use bonfire_cuda::{End, PeerBuffer};

/// The end of an operation of a group. No runtime of this build has a data path of its own.
#[cfg(not(feature = "cuda"))]
pub enum End {}

/// Device memory that another device may read. No runtime of this build has a data path of its own.
#[cfg(not(feature = "cuda"))]
pub enum PeerBuffer {}

/// A device operation: a collective as one rank calls it, on memory of its device.
pub struct DeviceOperation {
    pub(super) call: Call,
    pub(super) rank: usize,
    /// The memory that is read and the memory that is written, each with its bytes of the whole.
    pub(super) sources: Vec<(Binding, Ranges)>,
    pub(super) targets: Vec<(Binding, Ranges)>,
    /// The stream on which the sources' content was queued.
    pub(super) stream: StreamId,
    pub(super) peers: Peers,
}

/// A device's own data path to other devices of its process. The device's server owns it and calls it on its thread,
/// with the inner server.
pub trait Engine<R: DeviceTransport>: Send {
    /// Whether the engine connects these sorted devices. The answer is the same on all of them and never changes.
    fn takes(&mut self, devices: &[DeviceId]) -> bool;

    /// Called before anything is enqueued on a stream of the inner server. Orders the stream as earlier calls of
    /// `sync`, `follow`, `lend` and `copy` require.
    fn enter(&mut self, server: &mut R::Server, stream: StreamId);

    /// Queues an all-reduce between these devices, which are sorted. Neither source nor target may be accessed before
    /// [`sync`](Engine::sync).
    fn all_reduce(&mut self, server: &mut R::Server, devices: Vec<DeviceId>, job: DeviceOperation)
    -> Result<(), Error>;

    /// Fails the collectives between these devices, which are sorted, on all of them.
    fn fail(&mut self, devices: &[DeviceId], error: &Error);

    /// From now on, [`enter`](Engine::enter) orders every stream after all calls so far.
    fn sync(&mut self) -> Result<(), Error>;

    /// From now on, `enter` orders every stream after this end of an operation of a group.
    fn follow(&mut self, end: End);

    /// Exposes the first bytes of some memory to another device, as the work queued so far on the stream leaves them.
    fn lend(
        &mut self,
        server: &mut R::Server,
        memory: Binding,
        bytes: usize,
        stream: StreamId,
    ) -> Result<PeerBuffer, Error>;

    /// Copies rows to this device and packs them. From now on, `enter` orders every stream after the copy.
    fn copy(&mut self, server: &mut R::Server, lent: PeerBuffer, rows: Rows, target: Binding) -> Result<(), Error>;

    /// Drops the calls that failed, after the failure was cleared.
    fn forget(&mut self);
}

/// Describes an operation on memory of this many bytes.
pub(super) fn call(
    operation: Operation,
    bytes: u64,
    dtype: DType,
    reduction: Option<ReduceOp>,
    root: Option<usize>,
) -> Result<Call, Error> {
    let bytes = bytes as usize;
    if !bytes.is_multiple_of(dtype.size()) {
        return Err(Error::argument(operation, format!("{bytes} bytes are no whole number of {dtype}")));
    }
    let mut call = Call::new(operation, dtype, bytes / dtype.size());
    (call.reduction, call.root) = (reduction, root);
    Ok(call)
}
