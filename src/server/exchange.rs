//! The operations of a group of ranks on the memory of a device.

use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};

use bytes::Bytes as Shared;
use cubecl::client::ComputeClient;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{Binding, Handle};

use super::DeviceTransport;
use super::communication::{call, shared};
use super::compute::CollectiveServer;
use super::copy::stream_of;
use super::memory::{Lease, Pool};
use super::reading::Reading;
use super::runtime::CollectiveRuntime;
use crate::call::{Call, Operation};
use crate::dtype::{DType, ReduceOp};
use crate::error::Error;
use crate::group::{Group, Work};
use crate::partition::partition;

/// The operations of a [`Group`] on a device's memory, for clients of collective runtimes: each rank brings a device, and
/// ranks may be threads or processes.
///
/// Each operation takes what was queued before on the source's stream and returns at once; [`Transfer::wait`] waits for
/// the other ranks on the caller's thread, so the device goes on meanwhile. Sources are not changed; source and target may
/// be the same memory, whose former content is then replaced. Every buffer is copied once from the device and once to it.
///
/// # Errors
/// [`Error::InvalidArgument`] where sizes do not fit each other; whatever comes later is returned by [`Transfer::wait`].
pub trait DeviceCollectives<R: DeviceTransport> {
    /// [`Group::all_reduce`] of `source`, to `target` of the same size.
    fn start_all_reduce(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Transfer<R>, Error>;

    /// [`Group::broadcast`] of the root's memory.
    fn start_broadcast(&self, group: &Group, memory: &Handle, dtype: DType, root: usize) -> Result<Transfer<R>, Error>;

    /// [`Group::all_gather_into`]: `source` is as large as this rank's [`partition`](crate::partition()) of `target`.
    fn start_all_gather(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
    ) -> Result<Transfer<R>, Error>;

    /// [`Group::reduce_scatter_into`]: `target` is as large as this rank's [`partition`](crate::partition()) of `source`.
    fn start_reduce_scatter(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Transfer<R>, Error>;

    /// [`Group::all_to_all_into`]: `source` and `target` have one size, which is a multiple of the number of ranks.
    fn start_all_to_all(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
    ) -> Result<Transfer<R>, Error>;
}

/// An operation on a device's memory that was started. It takes place whether or not anybody waits, but its result gets
/// to the device only by [`wait`](Transfer::wait).
#[must_use = "the result gets to the device by `wait`"]
pub struct Transfer<R: DeviceTransport> {
    work: Work<Staged>,
    targets: Vec<(Binding, Range<usize>)>,
    device: DeviceHandle<CollectiveServer<R>>,
}

impl<R: DeviceTransport> Transfer<R> {
    /// Waits for the other ranks. What is queued afterwards at the device, on any stream, sees the result.
    ///
    /// # Errors
    /// Those of the group's operation, and [`Error::Io`] where the device's memory cannot be read.
    pub fn wait(self) -> Result<(), Error> {
        let staged = self.work.wait().map_err(|(error, _)| error)?;
        let memory = Shared::from_owner(staged.memory);
        let part = |range| shared(memory.slice(range));
        let writes: Vec<_> = self.targets.into_iter().map(|(target, range)| (target, part(range))).collect();
        if !writes.is_empty() {
            self.device.submit(move |server| {
                let written = server.write_all(writes);
                server.status.record(written);
            });
            self.device.flush_queue();
        }
        Ok(())
    }
}

/// What an operation works on: parts of host memory, each filled from the device.
struct Staged {
    memory: Lease,
    starts: Vec<usize>,
    reading: Receiver<Result<Reading, Error>>,
}

impl Staged {
    fn fill(&mut self, operation: Operation) -> Result<&mut [u8], Error> {
        let started =
            self.reading.recv().map_err(|_| Error::io(operation.to_string(), "the device's server is gone"))?;
        let parts = started?.wait(&operation.to_string())?;
        for (start, part) in self.starts.iter().zip(parts) {
            self.memory.bytes()[*start..start + part.len()].copy_from_slice(&part);
        }
        Ok(self.memory.bytes())
    }
}

static POOL: LazyLock<Arc<Pool>> = LazyLock::new(Arc::default);

/// Starts `call` on host memory, where `sources` are read to and `targets` are written from, each with its place there.
/// `prepare` sees the memory before the other ranks do.
pub(crate) fn start<R: DeviceTransport>(
    client: &ComputeClient<CollectiveRuntime<R>>,
    group: &Group,
    call: Call,
    sources: Vec<(Handle, Range<usize>)>,
    targets: Vec<(Handle, Range<usize>)>,
    prepare: impl FnOnce(&mut [u8]) + Send + 'static,
) -> Result<Transfer<R>, Error> {
    let device = DeviceHandle::<CollectiveServer<R>>::new(client.info().device);
    let stream = stream_of(client);
    let starts = sources.iter().map(|(_, place)| place.start).collect();
    let sources = sources.into_iter().map(|(handle, place)| (handle.binding(), place.len())).collect();
    let (sender, reading) = channel();
    device.submit(move |server| {
        // The receiver is gone only if the group's thread is.
        let _ = sender.send(server.snapshot(sources, stream));
    });
    device.flush_queue();
    let staged = Staged { memory: POOL.lease(call.bytes()), starts, reading };
    let work = group.start_filled(call, staged, move |staged| {
        let bytes = staged.fill(call.operation)?;
        prepare(bytes);
        Ok(bytes)
    })?;
    let targets = targets.into_iter().map(|(handle, place)| (handle.binding(), place)).collect();
    Ok(Transfer { work, targets, device })
}

impl<R: DeviceTransport> DeviceCollectives<R> for ComputeClient<CollectiveRuntime<R>> {
    fn start_all_reduce(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::AllReduce, source.size_in_used(), dtype, Some(op), None)?;
        expect(call.operation, "target", target, call.bytes())?;
        start(self, group, call, whole(source), whole(target), |_| ())
    }

    fn start_broadcast(&self, group: &Group, memory: &Handle, dtype: DType, root: usize) -> Result<Transfer<R>, Error> {
        let call = call(Operation::Broadcast, memory.size_in_used(), dtype, None, Some(root))?;
        group.check_rank("broadcast", "root", root)?;
        let (read, written) = if group.rank() == root { (whole(memory), vec![]) } else { (vec![], whole(memory)) };
        start(self, group, call, read, written, |_| ())
    }

    fn start_all_gather(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::AllGather, target.size_in_used(), dtype, None, None)?;
        let own = own_part(group, &call);
        expect(call.operation, "source", source, own.len())?;
        start(self, group, call, vec![(source.clone(), own)], whole(target), |_| ())
    }

    fn start_reduce_scatter(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::ReduceScatter, source.size_in_used(), dtype, Some(op), None)?;
        let own = own_part(group, &call);
        expect(call.operation, "target", target, own.len())?;
        start(self, group, call, whole(source), vec![(target.clone(), own)], |_| ())
    }

    fn start_all_to_all(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::AllToAll, source.size_in_used(), dtype, None, None)?;
        expect(call.operation, "target", target, call.bytes())?;
        group.check_parts(call.count)?;
        start(self, group, call, whole(source), whole(target), |_| ())
    }
}

fn expect(operation: Operation, what: &str, memory: &Handle, right: usize) -> Result<(), Error> {
    match memory.size_in_used() as usize {
        bytes if bytes == right => Ok(()),
        bytes => Err(Error::argument(operation, format!("the {what} has {bytes} bytes and must have {right}"))),
    }
}

fn whole(memory: &Handle) -> Vec<(Handle, Range<usize>)> {
    vec![(memory.clone(), 0..memory.size_in_used() as usize)]
}

/// The bytes of the whole that are this rank's part.
fn own_part(group: &Group, call: &Call) -> Range<usize> {
    let own = partition(call.count, group.world_size(), group.rank());
    own.start * call.dtype.size()..own.end * call.dtype.size()
}
