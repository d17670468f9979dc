//! The server around a server: everything but communication is the inner one's.

use std::fmt;
use std::sync::Arc;

use cubecl::bytes::Bytes;
use cubecl::device::{DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::DynFut;
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
use super::engine::Engine;
use super::memory::Span;
use super::pending::Pending;
use super::reading::Reader;
use super::status::Status;
use bonfire_core::Error;

/// The compute server of one logical device: the inner runtime's server, and what is under way with other devices.
pub struct CollectiveServer<R: DeviceTransport> {
    pub(super) inner: R::Server,
    pub(super) device: DeviceId,
    pub(super) status: Arc<Status>,
    /// All-reduces whose results have not been written yet, in the order of the calls.
    pub(super) pending: Vec<Pending>,
    /// How many failures had been cleared when `pending` was last looked through for what they left.
    pub(super) cleared: u64,
    /// The runtime's own way to other devices, if it has one.
    pub(super) engine: Option<Box<dyn Engine<R>>>,
    /// What the engine will read or write until the next `sync_collective`.
    pub(super) promised: Vec<Span>,
    pub(super) reader: Reader,
    utilities: Arc<ServerUtilities<Self>>,
}

impl<R: DeviceTransport> CollectiveServer<R> {
    /// The inner server, before it puts something on this stream.
    pub(super) fn at(&mut self, stream: StreamId) -> &mut R::Server {
        self.forget_failed();
        if let Some(engine) = &mut self.engine {
            engine.enter(&mut self.inner, stream);
        }
        &mut self.inner
    }

    /// Once a failure was cleared, what failed with it is no longer waited for.
    pub(super) fn forget_failed(&mut self) {
        let cleared = self.status.cleared();
        if cleared != self.cleared && self.status.failure().is_none() {
            self.cleared = cleared;
            self.pending.retain(|pending| !pending.round.failed());
            if let Some(engine) = &mut self.engine {
                engine.forget();
                self.promised.clear();
            }
        }
    }

    /// Refuses where the device is poisoned: its memory may hold stale bytes.
    fn sound(&self) -> Result<(), ServerError> {
        sound(&self.status)
    }

    /// Refuses what comes of it where a collective has failed meanwhile, on the device.
    fn still_sound<T: Send + 'static>(
        &self,
        outcome: DynFut<Result<T, ServerError>>,
    ) -> DynFut<Result<T, ServerError>> {
        let status = self.status.clone();
        Box::pin(async move {
            let outcome = outcome.await;
            sound(&status)?;
            outcome
        })
    }
}

fn sound(status: &Status) -> Result<(), ServerError> {
    status.failure().map_or(Ok(()), |error| Err(server_error(&error)))
}

/// What cubecl and burn pass on of an error: its text.
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
            promised: Vec::new(),
            reader: Reader::default(),
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
        // cubecl's CUDA server panics where it is to make room for nothing.
        self.at(stream).initialize_memory(memory, size.max(1), stream);
    }

    fn staging(&mut self, sizes: &[usize], stream: StreamId) -> Result<Vec<Bytes>, ServerError> {
        self.at(stream).staging(sizes, stream)
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.inner.logger()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, stream: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        match self.sound() {
            Ok(()) => {
                let reading = self.at(stream).read(descriptors, stream);
                self.still_sound(reading)
            }
            Err(error) => Box::pin(async { Err(error) }),
        }
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, stream: StreamId) {
        self.at(stream).write(descriptors, stream);
    }

    fn sync(&mut self, stream: StreamId) -> DynFut<Result<(), ServerError>> {
        let sync = self.at(stream).sync(stream);
        match self.sound() {
            Ok(()) => self.still_sound(sync),
            Err(error) => Box::pin(async { Err(error) }),
        }
    }

    fn get_resource(
        &mut self,
        binding: Binding,
        stream: StreamId,
    ) -> Result<ManagedResource<<Self::Storage as ComputeStorage>::Resource>, ServerError> {
        self.sound()?;
        self.at(stream).get_resource(binding, stream)
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        bindings: KernelArguments,
        mode: ExecutionMode,
        stream: StreamId,
    ) {
        // SAFETY: the caller vouches for the kernel as the inner server requires.
        unsafe { self.at(stream).launch(kernel, count, bindings, mode, stream) }
    }

    fn flush(&mut self, stream: StreamId) -> Result<(), ServerError> {
        let flushed = self.at(stream).flush(stream);
        self.sound()?;
        flushed
    }

    fn memory_usage(&mut self, stream: StreamId) -> Result<MemoryUsage, ServerError> {
        self.inner.memory_usage(stream)
    }

    fn memory_cleanup(&mut self, stream: StreamId) {
        self.at(stream).memory_cleanup(stream);
    }

    fn start_profile(&mut self, stream: StreamId) -> Result<ProfilingToken, ServerError> {
        self.at(stream).start_profile(stream)
    }

    fn end_profile(&mut self, stream: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        self.at(stream).end_profile(stream, token)
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

/// What a client knows of its server: the inner server's own, and which device this is.
pub struct Info<R: DeviceTransport> {
    inner: Arc<ServerUtilities<R::Server>>,
    pub(super) device: DeviceId,
}

impl<R: DeviceTransport> Info<R> {
    /// What the inner runtime says of its server.
    pub fn inner(&self) -> &<R::Server as ComputeServer>::Info {
        &self.inner.info
    }
}

impl<R: DeviceTransport> fmt::Debug for Info<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Info").field("inner", &self.inner.info).field("device", &self.device).finish()
    }
}

/// The inner server's way of laying out memory.
pub struct LayoutPolicy<R: DeviceTransport> {
    inner: Arc<ServerUtilities<R::Server>>,
}

impl<R: DeviceTransport> MemoryLayoutPolicy for LayoutPolicy<R> {
    fn apply(&self, stream: StreamId, descriptors: &[MemoryLayoutDescriptor]) -> (Handle, Vec<MemoryLayout>) {
        self.inner.layout_policy.apply(stream, descriptors)
    }
}
