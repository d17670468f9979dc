//! Collectives of a group of ranks on the memory of devices.

mod message;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CUDA has a data path of its own"))]
mod route;
mod staged;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::mpsc::channel;

use cubecl::client::ComputeClient;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Handle;

pub use self::route::Route;
#[cfg(feature = "cuda")]
pub(super) use self::route::{Direction, Messages};
use super::DeviceTransport;
use super::compute::CollectiveServer;
use super::copy::stream_of;
use super::engine::{DeviceOperation, call};
use super::runtime::CollectiveRuntime;
use bonfire_core::internal::{ByteOperations, Peers, Ranges, Request};
use bonfire_core::{Call, DType, Error, Group, Operation, ReduceOp, partition};

/// The collectives of a [`Group`] on a device's memory, for clients of collective runtimes. Each rank contributes a
/// device; ranks may be threads or processes.
///
/// Each operation reads what was queued before it on the source's stream and returns at once. [`Transfer::wait`] waits
/// for the other ranks on the caller's thread, so the device continues meanwhile. Sources are not changed. Source and
/// target may be the same memory, whose content is then replaced. Until `wait` or [`follow`](Transfer::follow) has
/// returned, neither may be written to, and the target must not be read.
///
/// Data goes through host memory, one copy from the device and one to it, except on CUDA. There a rank uses one device
/// per group, and its first operation waits for the other ranks: see [the module's page](crate::server#cuda).
///
/// # Errors
/// [`Error::InvalidArgument`] if sizes do not match or are not whole elements, if `root` is not a rank, or on CUDA if
/// this rank used another device in this group before; the group remains usable. On CUDA, the first operation also
/// returns why the ranks cannot agree on a path, which poisons the group. [`Transfer::wait`], or `follow` and
/// [`Completion::wait`], return all later errors.
pub trait DeviceCollectives<R: DeviceTransport> {
    /// Starts `call` on this memory.
    #[doc(hidden)]
    fn start(&self, group: &Group, call: Call, sources: Vec<Chunk>, targets: Vec<Chunk>) -> Result<Transfer<R>, Error>;

    /// Starts [`Group::all_reduce`] from `source` to `target`, which have the same size, on all ranks.
    fn start_all_reduce(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::AllReduce, source.size_in_used(), dtype, Some(op), None)?;
        check_size(call.operation, "target", target, call.bytes())?;
        self.start(group, call, whole(source), whole(target))
    }

    /// Starts [`Group::broadcast`] of the root's `memory` to that of the other ranks, which has the same size.
    fn start_broadcast(&self, group: &Group, memory: &Handle, dtype: DType, root: usize) -> Result<Transfer<R>, Error> {
        let call = call(Operation::Broadcast, memory.size_in_used(), dtype, None, Some(root))?;
        group.check_rank("broadcast", "root", root)?;
        let (read, written) = if group.rank() == root { (whole(memory), vec![]) } else { (vec![], whole(memory)) };
        self.start(group, call, read, written)
    }

    /// Starts [`Group::all_gather_into`]: `source` is as large as this rank's [`partition`](crate::partition()) of
    /// `target`, which has the same size on all ranks.
    fn start_all_gather(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::AllGather, target.size_in_used(), dtype, None, None)?;
        let own = own_part(group, &call);
        check_size(call.operation, "source", source, own.len())?;
        self.start(group, call, vec![(source.clone(), own.into())], whole(target))
    }

    /// Starts [`Group::reduce_scatter_into`]: `target` is as large as this rank's [`partition`](crate::partition()) of
    /// `source`, which has the same size on all ranks.
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
        check_size(call.operation, "target", target, own.len())?;
        self.start(group, call, whole(source), vec![(target.clone(), own.into())])
    }

    /// Starts [`Group::reduce_into`] from `source`, which has the same size on all ranks, to the root's `target`, which
    /// has that size too. The other ranks give no target.
    fn start_reduce(
        &self,
        group: &Group,
        source: &Handle,
        target: Option<&Handle>,
        dtype: DType,
        op: ReduceOp,
        root: usize,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::Reduce, source.size_in_used(), dtype, Some(op), Some(root))?;
        let target = of_root(group, &call, "target", target)?;
        self.start(group, call, whole(source), target)
    }

    /// Starts [`Group::gather_into`]: `source` has the same size on all ranks, and the root's `target` is world size
    /// times as large. The other ranks give no target.
    fn start_gather(
        &self,
        group: &Group,
        source: &Handle,
        target: Option<&Handle>,
        dtype: DType,
        root: usize,
    ) -> Result<Transfer<R>, Error> {
        let bytes = source.size_in_used() * group.world_size() as u64;
        let call = call(Operation::Gather, bytes, dtype, None, Some(root))?;
        let target = of_root(group, &call, "target", target)?;
        self.start(group, call, vec![(source.clone(), own_part(group, &call).into())], target)
    }

    /// Starts [`Group::scatter_into`]: `target` has the same size on all ranks, and the root's `source` is world size
    /// times as large. The other ranks give no source.
    fn start_scatter(
        &self,
        group: &Group,
        source: Option<&Handle>,
        target: &Handle,
        dtype: DType,
        root: usize,
    ) -> Result<Transfer<R>, Error> {
        let bytes = target.size_in_used() * group.world_size() as u64;
        let call = call(Operation::Scatter, bytes, dtype, None, Some(root))?;
        let source = of_root(group, &call, "source", source)?;
        self.start(group, call, source, vec![(target.clone(), own_part(group, &call).into())])
    }

    /// Starts [`Group::all_to_all_into`]: `source` and `target` have the same size on all ranks. Their number of
    /// elements is a multiple of the world size.
    fn start_all_to_all(
        &self,
        group: &Group,
        source: &Handle,
        target: &Handle,
        dtype: DType,
    ) -> Result<Transfer<R>, Error> {
        let call = call(Operation::AllToAll, source.size_in_used(), dtype, None, None)?;
        check_size(call.operation, "target", target, call.bytes())?;
        Request::from(call).in_place(group.world_size(), call.count)?;
        self.start(group, call, whole(source), whole(target))
    }
}

/// A started operation on a device's memory. It runs whether or not [`wait`](Transfer::wait) is called, but its result
/// is available only after `wait` or [`follow`](Transfer::follow).
#[must_use = "the result is there after `wait` or `follow`"]
pub struct Transfer<R> {
    wait: WaitFn,
    runtime: PhantomData<fn() -> R>,
}

/// Waits for a started operation.
pub type WaitFn = Box<dyn FnOnce(Until) -> Result<Completion, Error> + Send>;

/// What a call waits for, where a device has a data path of its own.
#[derive(Clone, Copy, PartialEq)]
pub enum Until {
    /// The operation is launched. Later work on the device waits for its end.
    Launched,
    Ended,
}

/// The end of an operation whose result is in use already: see [`Transfer::follow`]. If it is dropped, nothing tells
/// whether the result was right.
#[must_use = "`wait` says whether the result is right"]
pub struct Completion {
    /// None: it has ended.
    wait: Option<Box<dyn FnOnce() -> Result<(), Error> + Send>>,
}

impl Completion {
    pub(super) fn ended() -> Completion {
        Completion { wait: None }
    }

    /// Waits until the device is done with the operation.
    ///
    /// # Errors
    /// Those of [`Transfer::wait`]. Results of work that has followed the operation are then unspecified, too.
    pub fn wait(self) -> Result<(), Error> {
        self.wait.map_or(Ok(()), |wait| wait())
    }
}

impl<R: DeviceTransport> Transfer<R> {
    /// Waits for the other ranks, and on CUDA until the device is done. Work queued on the device afterwards, on any
    /// stream, sees the result.
    ///
    /// # Errors
    /// Those of the group's operation, [`Error::Io`] if the device's memory cannot be read, and on CUDA
    /// [`Error::Nccl`] and [`Error::Gpu`]. Each poisons the group. After one, a target on CUDA may still be written to
    /// until the group is dropped. A result that cannot be written poisons the device instead: see [the module's
    /// page](crate::server#errors).
    pub fn wait(self) -> Result<(), Error> {
        (self.wait)(Until::Ended)?.wait()
    }

    /// Returns once all ranks have called the operation and it is launched here. Work queued on this device afterwards,
    /// on any stream, runs after the operation and sees its result. So the device need not be idle while the host finds
    /// the next work for it. Where data goes through host memory, this is the same as [`wait`](Self::wait).
    ///
    /// If a rank or a device fails meanwhile, the target has unspecified contents, and so has what was made of it. Only
    /// [`Completion::wait`] tells: call it before anything lasts, such as a change of parameters. A program that waits
    /// for its device otherwise meanwhile, to read a tensor for example, learns of a lost rank at the deadline only.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait) that are known before the operation runs on the device.
    pub fn follow(self) -> Result<Completion, Error> {
        (self.wait)(Until::Launched)
    }
}

/// Memory of a device, and the bytes of the operation's whole that it holds.
pub(crate) type Chunk = (Handle, Ranges);

/// Starts `call` on this memory: directly if the ranks have a route that supports it, else through host memory. With
/// peers it is a message, which needs a route that carries messages.
pub(crate) fn start<R: DeviceTransport>(
    client: &ComputeClient<CollectiveRuntime<R>>,
    group: &Group,
    (call, peers): (Call, Peers),
    sources: Vec<Chunk>,
    targets: Vec<Chunk>,
) -> Result<Transfer<R>, Error> {
    let device = DeviceHandle::<CollectiveServer<R>>::new(client.info().device);
    let stream = stream_of(client);
    let bound = |chunks: Vec<Chunk>| chunks.into_iter().map(|(handle, ranges)| (handle.binding(), ranges)).collect();
    let (sources, targets) = (bound(sources), bound(targets));
    let job = DeviceOperation { call, rank: group.rank(), sources, targets, stream, peers };
    let is_message = peers.is_message();
    let route = R::route(group, client.info().device)?.filter(|route| is_message || route.supports(&call));
    let wait = match route {
        Some(route) if is_message => message::start(device, group, route, job)?,
        Some(route) => route.start(device, group, job)?,
        None => staged::start(device, group, job)?,
    };
    Ok(Transfer { wait, runtime: PhantomData })
}

/// Runs `task` on the thread of a device's server. Returns a function that waits for its result, for another thread.
pub(super) fn run_on_device<R: DeviceTransport, T: Send + 'static, Q>(
    device: &DeviceHandle<CollectiveServer<R>>,
    call: Call,
    task: Q,
) -> impl FnOnce() -> Result<T, Error> + Send + use<R, T, Q>
where
    Q: FnOnce(&mut CollectiveServer<R>) -> Result<T, Error> + Send + 'static,
{
    let (sender, receiver) = channel();
    device.submit(move |server| {
        // The receiver is gone only if the group's thread is.
        let _ = sender.send(task(server));
    });
    device.flush_queue();
    let gone = move |_| Error::broken(call.operation.to_string(), "the device's server is gone");
    move || receiver.recv().map_err(gone)?
}

impl<R: DeviceTransport> DeviceCollectives<R> for ComputeClient<CollectiveRuntime<R>> {
    fn start(&self, group: &Group, call: Call, sources: Vec<Chunk>, targets: Vec<Chunk>) -> Result<Transfer<R>, Error> {
        start(self, group, (call, Peers::default()), sources, targets)
    }
}

fn check_size(operation: Operation, what: &str, memory: &Handle, right: usize) -> Result<(), Error> {
    match memory.size_in_used() as usize {
        bytes if bytes == right => Ok(()),
        bytes => Err(Error::argument(operation, format!("the {what} has {bytes} bytes and must have {right}"))),
    }
}

/// The memory that the root, and only the root, gives: all of the whole.
fn of_root(group: &Group, call: &Call, what: &str, memory: Option<&Handle>) -> Result<Vec<Chunk>, Error> {
    let root = call.root.unwrap_or(0);
    group.check_rank(&call.operation.to_string(), "root", root)?;
    if memory.is_some() != (group.rank() == root) {
        return Err(Error::argument(call.operation, format!("rank {root}, the root, gives the only {what}")));
    }
    let Some(memory) = memory else { return Ok(Vec::new()) };
    check_size(call.operation, what, memory, call.bytes())?;
    Ok(whole(memory))
}

fn whole(memory: &Handle) -> Vec<Chunk> {
    vec![(memory.clone(), (0..memory.size_in_used() as usize).into())]
}

/// The byte range of this rank's part of the whole.
fn own_part(group: &Group, call: &Call) -> Range<usize> {
    let part = partition(call.count, group.world_size(), group.rank());
    part.start * call.dtype.size()..part.end * call.dtype.size()
}
