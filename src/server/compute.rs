//! The collective server around an inner server, to which it forwards all calls except communication.
//!
//! Forwarding adds little to a call: a launch compares the number of cleared failures, a read or sync also looks for a
//! failure, and on CUDA all of them check whether the stream has something to wait for.

use std::fmt;
use std::sync::Arc;

use cubecl::bytes::Bytes;
use cubecl::device::{DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::{DynFut, block_on};
use cubecl::prelude::{CubeCount, ExecutionMode};
use cubecl::profile::ProfileDuration;
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, Handle, KernelArguments, MemoryLayout, MemoryLayoutDescriptor,
    MemoryLayoutPolicy, ProfileError, ProfilingToken, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::{MemoryAllocationMode, MemoryUsage};
use cubecl_common::backtrace::BackTrace;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};

use super::DeviceTransport;
use super::device::physical;
use super::download::{Reader, catch_panic};
use super::engine::Engine;
use super::memory::Span;
use super::pending::PendingResult;
use super::status::Status;
use bonfire_core::Error;

/// The compute server of one logical device: the inner runtime's server, and the collectives that are in flight.
pub struct CollectiveServer<R: DeviceTransport> {
    pub(super) inner: R::Server,
    pub(super) device: DeviceId,
    pub(super) status: Arc<Status>,
    /// All-reduces through host memory whose results have not been written yet, in call order.
    pub(super) pending: Vec<PendingResult>,
    /// `Status::cleared` at the time when `pending` was last purged of failed calls.
    pub(super) cleared: u64,
    /// The runtime's own data path to other devices, if it has one.
    pub(super) engine: Option<Box<dyn Engine<R>>>,
    /// Memory that the engine reads or writes until the next `sync_collective`.
    pub(super) engine_spans: Vec<Span>,
    pub(super) reader: Reader,
    /// Streams whose work must be done before other streams continue.
    awaited: Vec<StreamId>,
    utilities: Arc<ServerUtilities<Self>>,
}

impl<R: DeviceTransport> CollectiveServer<R> {
    /// Returns the inner server, ready to enqueue work on this stream.
    pub(super) fn inner_on(&mut self, stream: StreamId) -> &mut R::Server {
        self.drop_failed_calls();
        if let Some(engine) = &mut self.engine {
            engine.enter(&mut self.inner, stream);
        }
        while let Some(place) = self.awaited.iter().position(|other| *other != stream) {
            let other = self.awaited.swap_remove(place);
            let finished = catch_panic("sync", || {
                block_on(self.inner.sync(other)).map_err(|e| Error::io("waiting for a stream", e))
            });
            self.status.record(finished);
        }
        &mut self.inner
    }

    /// Makes the next work on any other stream wait, on the host, for the work of these streams. cubecl 0.10 orders
    /// streams after the allocation of memory that they share, not after a later write (`MultiStream::resolve`).
    pub(super) fn order_after(&mut self, streams: impl IntoIterator<Item = StreamId>) {
        for stream in streams {
            if !R::ONE_QUEUE && !self.awaited.contains(&stream) {
                self.awaited.push(stream);
            }
        }
    }

    /// Calls the inner server, ready to enqueue work on this stream. After a fault of the device that panics. The
    /// device's failure, which says more, is returned instead, and looking for it also tells the peers.
    fn call_inner<T>(
        &mut self,
        operation: &str,
        stream: StreamId,
        call: impl FnOnce(&mut R::Server) -> T,
    ) -> Result<T, ServerError> {
        catch_panic(operation, || Ok(call(self.inner_on(stream)))).or_else(|error| {
            self.check_not_poisoned()?;
            Err(ServerError::Generic { reason: error.to_string(), backtrace: BackTrace::capture() })
        })
    }

    /// After a failure was cleared, drops the calls that failed with it.
    pub(super) fn drop_failed_calls(&mut self) {
        let cleared = self.status.cleared();
        if cleared != self.cleared && self.status.failure().is_none() {
            self.cleared = cleared;
            self.pending.retain(|pending| !pending.group.failed());
            if let Some(engine) = &mut self.engine {
                engine.forget();
                self.engine_spans.clear();
            }
        }
    }

    /// Fails if the device is poisoned: its memory may hold stale bytes.
    fn check_not_poisoned(&self) -> Result<(), ServerError> {
        check_not_poisoned(&self.status)
    }

    /// Fails after `outcome` if a collective has poisoned the device in the meantime.
    fn check_after<T: Send + 'static>(
        &self,
        outcome: DynFut<Result<T, ServerError>>,
    ) -> DynFut<Result<T, ServerError>> {
        let status = self.status.clone();
        Box::pin(async move {
            let outcome = outcome.await;
            check_not_poisoned(&status)?;
            outcome
        })
    }
}

fn check_not_poisoned(status: &Status) -> Result<(), ServerError> {
    status.failure().map_or(Ok(()), |error| Err(server_error(&error)))
}

/// cubecl and burn pass on only the text of an error.
fn server_error(error: &Error) -> ServerError {
    ServerError::Generic { reason: format!("a collective failed: {error}"), backtrace: BackTrace::capture() }
}

impl<R: DeviceTransport> DeviceService for CollectiveServer<R> {
    fn init(device: DeviceId) -> Self {
        let inner = R::Server::init(physical(device).0);
        let shared = ComputeServer::utilities(&inner);
        let utilities = ServerUtilities::new(
            shared.properties.clone(),
            shared.logger.clone(),
            Info { inner: shared.clone(), device },
            LayoutPolicy { inner: shared },
        );
        let status = Status::of::<R>(device);
        CollectiveServer {
            inner,
            device,
            cleared: status.cleared(),
            status,
            pending: Vec::new(),
            engine: R::engine(device),
            engine_spans: Vec::new(),
            reader: Reader::default(),
            awaited: Vec::new(),
            utilities: Arc::new(utilities),
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl<R: DeviceTransport> ComputeServer for CollectiveServer<R> {
    type Kernel = <R::Server as ComputeServer>::Kernel;
    type Info = Info<R>;
    type MemoryLayoutPolicy = LayoutPolicy<R>;
    type Storage = <R::Server as ComputeServer>::Storage;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, stream: StreamId) {
        // cubecl's CUDA server panics on an allocation of 0 bytes.
        self.inner_on(stream).initialize_memory(memory, size.max(1), stream);
    }

    fn staging(&mut self, sizes: &[usize], stream: StreamId) -> Result<Vec<Bytes>, ServerError> {
        self.inner_on(stream).staging(sizes, stream)
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.inner.logger()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, stream: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let poisoned = self.check_not_poisoned();
        match poisoned.and_then(|()| self.call_inner("read", stream, |inner| inner.read(descriptors, stream))) {
            Ok(reading) => self.check_after(reading),
            Err(error) => Box::pin(async { Err(error) }),
        }
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, stream: StreamId) {
        self.inner_on(stream).write(descriptors, stream);
    }

    fn sync(&mut self, stream: StreamId) -> DynFut<Result<(), ServerError>> {
        let sync = self.call_inner("sync", stream, |inner| inner.sync(stream));
        match self.check_not_poisoned().and(sync) {
            Ok(sync) => self.check_after(sync),
            Err(error) => Box::pin(async { Err(error) }),
        }
    }

    fn get_resource(
        &mut self,
        binding: Binding,
        stream: StreamId,
    ) -> Result<ManagedResource<<Self::Storage as ComputeStorage>::Resource>, ServerError> {
        self.check_not_poisoned()?;
        self.inner_on(stream).get_resource(binding, stream)
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        bindings: KernelArguments,
        mode: ExecutionMode,
        stream: StreamId,
    ) {
        // SAFETY: the caller upholds the inner server's contract for the kernel.
        unsafe { self.inner_on(stream).launch(kernel, count, bindings, mode, stream) }
    }

    fn flush(&mut self, stream: StreamId) -> Result<(), ServerError> {
        let flushed = self.call_inner("flush", stream, |inner| inner.flush(stream));
        self.check_not_poisoned()?;
        flushed?
    }

    fn memory_usage(&mut self, stream: StreamId) -> Result<MemoryUsage, ServerError> {
        self.inner.memory_usage(stream)
    }

    fn memory_cleanup(&mut self, stream: StreamId) {
        self.inner_on(stream).memory_cleanup(stream);
    }

    fn start_profile(&mut self, stream: StreamId) -> Result<ProfilingToken, ServerError> {
        self.inner_on(stream).start_profile(stream)
    }

    fn end_profile(&mut self, stream: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        self.inner_on(stream).end_profile(stream, token)
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, stream: StreamId) {
        self.inner.allocation_mode(mode, stream);
    }
}

impl<R: DeviceTransport> fmt::Debug for CollectiveServer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectiveServer").field("device", &self.device).field("inner", &self.inner).finish()
    }
}

/// What a client knows about its server: the inner server's properties, and the device id.
pub struct Info<R: DeviceTransport> {
    inner: Arc<ServerUtilities<R::Server>>,
    pub(super) device: DeviceId,
}

impl<R: DeviceTransport> Info<R> {
    /// Returns the inner runtime's information about its server.
    pub fn inner(&self) -> &<R::Server as ComputeServer>::Info {
        &self.inner.info
    }
}

impl<R: DeviceTransport> fmt::Debug for Info<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Info").field("inner", &self.inner.info).field("device", &self.device).finish()
    }
}

/// The inner server's memory layout policy.
pub struct LayoutPolicy<R: DeviceTransport> {
    inner: Arc<ServerUtilities<R::Server>>,
}

impl<R: DeviceTransport> MemoryLayoutPolicy for LayoutPolicy<R> {
    fn apply(&self, stream: StreamId, descriptors: &[MemoryLayoutDescriptor]) -> (Handle, Vec<MemoryLayout>) {
        self.inner.layout_policy.apply(stream, descriptors)
    }
}
