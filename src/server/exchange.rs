//! The operations of a group of ranks on the memory of a device.

mod direct;
mod staged;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::mpsc::channel;

use cubecl::client::ComputeClient;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Handle;

use super::DeviceTransport;
use super::compute::CollectiveServer;
use super::copy::stream_of;
use super::engine::{Job, call};
use super::runtime::CollectiveRuntime;
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Call, DType, Error, Group, Operation, ReduceOp, partition};

/// The operations of a [`Group`] on a device's memory, for clients of collective runtimes: each rank brings a device, and
/// ranks may be threads or processes.
///
/// Each operation takes what was queued before on the source's stream and returns at once; [`Transfer::wait`] waits for
/// the other ranks on the caller's thread, so the device goes on meanwhile. Sources are not changed; source and target may
/// be the same memory, whose former content is then replaced. Until `wait` has returned, neither may be written to, and a
/// target not read.
///
/// Data goes through host memory, every buffer once from the device and once to it, except on CUDA. There a rank works with
/// one device in a group, and its first operation waits for the other ranks: see [the module's page](crate::server#cuda).
///
/// # Errors
/// [`Error::InvalidArgument`] where sizes do not fit each other; whatever comes later is returned by [`Transfer::wait`].
pub trait DeviceCollectives<R: DeviceTransport> {
    /// Starts `call` on this memory.
    #[doc(hidden)]
    fn start(&self, group: &Group, call: Call, sources: Vec<Piece>, targets: Vec<Piece>) -> Result<Transfer<R>, Error>;

    /// [`Group::all_reduce`] of `source`, to `target` of the same size.
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
        self.start(group, call, whole(source), whole(target))
    }

    /// [`Group::broadcast`] of the root's memory.
    fn start_broadcast(&self, group: &Group, memory: &Handle, dtype: DType, root: usize) -> Result<Transfer<R>, Error> {
        let call = call(Operation::Broadcast, memory.size_in_used(), dtype, None, Some(root))?;
        group.check_rank("broadcast", "root", root)?;
        let (read, written) = if group.rank() == root { (whole(memory), vec![]) } else { (vec![], whole(memory)) };
        self.start(group, call, read, written)
    }

    /// [`Group::all_gather_into`]: `source` is as large as this rank's [`partition`](crate::partition()) of `target`.
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
        self.start(group, call, vec![(source.clone(), own)], whole(target))
    }

    /// [`Group::reduce_scatter_into`]: `target` is as large as this rank's [`partition`](crate::partition()) of `source`.
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
        self.start(group, call, whole(source), vec![(target.clone(), own)])
    }

    /// [`Group::all_to_all_into`]: `source` and `target` have one size, which is a multiple of the number of ranks.
    fn start_all_to_all(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::AllToAll, source.size_in_used(), dtype, None, None)?;
        expect(call.operation, "target", target, call.bytes())?;
        Request::from(call).in_place(group.world_size(), call.count)?;
        self.start(group, call, whole(source), whole(target))
    }
}

/// An operation on a device's memory that was started. It takes place whether or not anybody waits, but its result is there
/// only after [`wait`](Transfer::wait).
#[must_use = "the result is there after `wait`"]
pub struct Transfer<R> {
    waiting: Waiting,
    runtime: PhantomData<fn() -> R>,
}

/// The end of an operation that was started: called, it waits for it.
type Waiting = Box<dyn FnOnce() -> Result<(), Error> + Send>;

impl<R: DeviceTransport> Transfer<R> {
    /// Waits for the other ranks, and on CUDA until the device is done. What is queued afterwards at the device, on any
    /// stream, sees the result.
    ///
    /// # Errors
    /// Those of the group's operation, [`Error::Io`] where the device's memory cannot be read, and on CUDA `Error::Nccl`; each
    /// ends the group. After one, a target on CUDA may still be written to until the group is dropped.
    pub fn wait(self) -> Result<(), Error> {
        (self.waiting)()
    }
}

/// Memory of a device, and which bytes of an operation's whole it is.
pub(crate) type Piece = (Handle, Range<usize>);

/// Starts `call` on this memory.
pub(crate) fn start<R: DeviceTransport>(
    client: &ComputeClient<CollectiveRuntime<R>>,
    group: &Group,
    call: Call,
    sources: Vec<Piece>,
    targets: Vec<Piece>,
) -> Result<Transfer<R>, Error> {
    let device = DeviceHandle::<CollectiveServer<R>>::new(client.info().device);
    let stream = stream_of(client);
    let bound = |pieces: Vec<Piece>| pieces.into_iter().map(|(handle, place)| (handle.binding(), place)).collect();
    let (sources, targets) = (bound(sources), bound(targets));
    let job = Job { call, rank: group.rank(), sources, targets, stream };
    let route = R::route(group, client.info().device)?.filter(|route| route.serves(&call));
    let waiting = match route {
        Some(route) => direct::start(&device, group, route, job)?,
        None => staged::start(device, group, job)?,
    };
    Ok(Transfer { waiting, runtime: PhantomData })
}

/// Asks a device's server something on its thread; called on another one, gives the answer.
fn ask<R: DeviceTransport, T: Send + 'static, Q>(
    device: &DeviceHandle<CollectiveServer<R>>,
    call: Call,
    question: Q,
) -> impl FnOnce() -> Result<T, Error> + Send + use<R, T, Q>
where
    Q: FnOnce(&mut CollectiveServer<R>) -> Result<T, Error> + Send + 'static,
{
    let (sender, answer) = channel();
    device.submit(move |server| {
        // The receiver is gone only if the group's thread is.
        let _ = sender.send(question(server));
    });
    device.flush_queue();
    let gone = move |_| Error::broken(call.operation.to_string(), "the device's server is gone");
    move || answer.recv().map_err(gone)?
}

impl<R: DeviceTransport> DeviceCollectives<R> for ComputeClient<CollectiveRuntime<R>> {
    fn start(&self, group: &Group, call: Call, sources: Vec<Piece>, targets: Vec<Piece>) -> Result<Transfer<R>, Error> {
        start(self, group, call, sources, targets)
    }
}

fn expect(operation: Operation, what: &str, memory: &Handle, right: usize) -> Result<(), Error> {
    match memory.size_in_used() as usize {
        bytes if bytes == right => Ok(()),
        bytes => Err(Error::argument(operation, format!("the {what} has {bytes} bytes and must have {right}"))),
    }
}

fn whole(memory: &Handle) -> Vec<Piece> {
    vec![(memory.clone(), 0..memory.size_in_used() as usize)]
}

/// The bytes of the whole that are this rank's part.
fn own_part(group: &Group, call: &Call) -> Range<usize> {
    let own = partition(call.count, group.world_size(), group.rank());
    own.start * call.dtype.size()..own.end * call.dtype.size()
}
