//! What a runtime may bring of its own: a way to move its devices' data that needs no host memory.

use std::ops::Range;
use std::time::Duration;

use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use super::DeviceTransport;
use bonfire_core::error::Site;
use bonfire_core::{Call, DType, Deadline, Error, Operation, ReduceOp};

/// A collective as one rank calls it, on memory of its device.
pub struct Job {
    pub(super) call: Call,
    pub(super) rank: usize,
    /// What is read and what is written, each with which bytes of the whole it is. There is one of each at most, but
    /// for a group's all-reduce.
    pub(super) sources: Vec<(Binding, Range<usize>)>,
    pub(super) targets: Vec<(Binding, Range<usize>)>,
    /// Where what the sources hold was queued.
    pub(super) stream: StreamId,
}

/// Memory of a device that another one may read, as long as it has this.
pub struct Loan {
    pub(super) memory: Binding,
    pub(super) address: u64,
    /// The word that says when it may be read: where it is, and from which value on.
    pub(super) ready: (u64, u64),
}

/// Rows of `bytes` bytes each, which begin `pitch` bytes after each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    pub(super) count: usize,
    pub(super) bytes: usize,
    pub(super) pitch: usize,
}

/// What remains of a job once all ranks have called it, on any thread. It returns when it is under way on this rank.
pub type Launch = Box<dyn FnOnce(&Site, &Deadline) -> Result<Flight, Error> + Send>;

/// An operation under way. Called, it waits until the device is done with it; the function that it is given tells what
/// has happened in the group.
pub type Flight = Box<dyn FnOnce(&dyn Fn() -> Option<Error>) -> Result<(), Error> + Send>;

/// How the ranks of a group work together without host memory. A rank has one for its device.
pub trait Route<R: DeviceTransport>: Send + Sync {
    /// Whether this call is done so. The answer is the same on all ranks.
    fn serves(&self, call: &Call) -> bool;

    /// Takes down what a job uses, as what was queued so far leaves it. Neither sources nor targets may be touched
    /// before its flight is over. `limit` is how long a device may wait for another one.
    fn prepare(&self, server: &mut R::Server, job: Job, limit: Duration) -> Result<Launch, Error>;
}

/// A device's own way to work with other devices of its process. It belongs to the device's server, and is called with
/// the inner one, on its thread.
pub trait Engine<R: DeviceTransport>: Send {
    /// Whether these devices, which are sorted, work together by it. The answer is the same on all of them, and stays.
    fn takes(&mut self, devices: &[DeviceId]) -> bool;

    /// Before anything is put on a stream of the inner server: orders it after all that `sync` and `copy` have
    /// promised.
    fn enter(&mut self, server: &mut R::Server, stream: StreamId);

    /// Queues an all-reduce of these devices, which are sorted. Neither source nor target may be touched before
    /// [`sync`](Engine::sync).
    fn all_reduce(&mut self, server: &mut R::Server, devices: Vec<DeviceId>, job: Job) -> Result<(), Error>;

    /// Ends what these devices, which are sorted, do together, on all of them.
    fn fail(&mut self, devices: &[DeviceId], error: &Error);

    /// From now on, whatever enters comes after all calls so far.
    fn sync(&mut self) -> Result<(), Error>;

    /// Lets another device read the first bytes of some memory, as what was queued so far on the stream leaves them.
    fn lend(&mut self, server: &mut R::Server, memory: Binding, bytes: usize, stream: StreamId) -> Result<Loan, Error>;

    /// Copies rows to this device, without gaps. From now on, whatever enters comes after it.
    fn copy(&mut self, server: &mut R::Server, loan: Loan, rows: Rows, target: Binding) -> Result<(), Error>;

    /// The failure was cleared: what failed with it is no longer waited for.
    fn forget(&mut self);
}

/// An operation on memory of so many bytes.
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
