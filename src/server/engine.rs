//! The interface to a runtime's own data path between devices, without host memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use super::DeviceTransport;
use super::memory::PeerBuffer;
use super::sent_tensors::SentTensors;
use bonfire_core::error::Site;
use bonfire_core::internal::{Peers, Ranges, Rows};
use bonfire_core::{Call, DType, Deadline, Error, Operation, ReduceOp, partition};

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

/// How a route carries messages between two ranks.
pub enum Messages {
    /// The sender lends its memory to the receiver, whose device is of the same process.
    Lent(Arc<SentTensors>),
    /// As it does collectives.
    Carried,
}

/// A prepared operation, which is launched once all ranks have called it, on any thread.
pub struct Launch {
    /// Proposes a time, if ranks in several processes order their launches. The latest of all ranks' is the launch's.
    pub(super) propose: Option<Box<dyn FnOnce() -> u64 + Send>>,
    pub(super) run: LaunchFn,
}

/// Launches an operation at the time that the ranks have agreed on, if they have. Returns when it is in flight here.
pub type LaunchFn = Box<dyn FnOnce(Option<u64>, &Site, &Deadline) -> Result<InFlight, Error> + Send>;

/// An in-flight operation.
pub struct InFlight {
    /// Waits until the operation is on the device's stream, and returns its end there.
    pub(super) end: Box<dyn Fn() -> Result<End, Error> + Send>,
    pub(super) wait: WaitFn,
}

/// Waits until a device is done with an operation. The argument returns the group's failure, if there is one.
type WaitFn = Box<dyn FnOnce(&dyn Fn() -> Option<Error>) -> Result<(), Error> + Send>;

/// The end of an operation, for which streams of its device can wait: a word then has this value or a greater one.
pub struct End {
    /// The word's address, and that of the words where a stream reports that it has waited for too long.
    pub(super) word: u64,
    pub(super) host: u64,
    pub(super) value: u64,
    /// How long the operation may wait for other devices.
    pub(super) limit: Duration,
    /// Whether the operation has ended.
    pub(super) passed: Box<dyn Fn() -> bool + Send>,
}

/// How the ranks of a group exchange data without host memory. A rank has one for its device.
pub trait Route<R: DeviceTransport>: Send + Sync {
    /// Whether the route supports this call. The answer is the same on all ranks.
    fn supports(&self, call: &Call) -> bool;

    /// How messages between the ranks go, if not through host memory. The answer is the same on all ranks.
    fn messages(&self) -> Option<Messages>;

    /// Prepares an operation on the memory as the work queued so far leaves it. Neither sources nor targets may be
    /// accessed until it has ended, except by work that [follows](Engine::follow) it. `limit` bounds how long a device
    /// may wait for another one.
    fn prepare(&self, server: &mut R::Server, job: DeviceOperation, limit: Duration) -> Result<Launch, Error>;
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
    fn copy(&mut self, server: &mut R::Server, loan: PeerBuffer, rows: Rows, target: Binding) -> Result<(), Error>;

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

/// The byte range of a rank's part of the whole.
pub(super) fn part(call: &Call, ranks: usize, rank: usize) -> Range<usize> {
    let part = partition(call.count, ranks, rank);
    part.start * call.dtype.size()..part.end * call.dtype.size()
}
