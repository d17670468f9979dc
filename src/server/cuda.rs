//! CUDA: kernels that reduce in the devices' memory, on streams separate from cubecl's.
//!
//! cubecl does not expose its streams, so two small kernels that it launches order them against ours:
//! `kernels/order.cu`. One signals, after the work on a tensor's stream, that the tensor is ready, which our stream
//! waits for. The other waits, before later work on a stream, until our stream has written that a call is done.
//!
//! # Why streams of our own
//! The alternative is to launch collectives through cubecl, on a stream id that cubecl orders against the others. With
//! several ranks on a GPU it takes a rendezvous of their threads before each launch and another one after it: a kernel
//! that spins for a peer must not be on the GPU while the peer's thread loads a module, and no two launches of one call
//! may be in one hardware queue. NCCL needs a raw stream anyway.
//!
//! # What has been tested
//! The tests have run on one H100, never on several GPUs (`docs/measurements/gpu.md`). They also run on the software
//! driver (`kernels/check --driver`): with one hardware queue per GPU, with a driver that waits for the whole context,
//! on several GPUs, and groups on the stand-in for NCCL. That driver compiles kernels of cubecl and burn for the CPU,
//! so `tests/cuda_compute.rs` and the trainings of `tests/cuda_training.rs` run there, too.

mod backoff;
#[doc(hidden)]
pub mod bench;
mod choice;
mod control;
mod copy_stream;
mod device;
mod driver;
mod kernel;
mod launches;
mod memory;
#[cfg(feature = "nccl")]
pub mod nccl;
mod order;
mod place;
mod reach;
mod remote;
mod rounds;
mod route;
mod shared;
mod side;
mod team;
mod window;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use self::choice::{choose, setting};
use self::control::Order;
use self::copy_stream::CopyStream;
use self::order::Server;
use self::side::TeamHandle;
use self::team::Team;
use super::DeviceTransport;
use super::download::catch_panic;
use super::engine::{DeviceOperation, End, Engine, Route};
use super::memory::{PeerBuffer, Span};
use super::pending::UNFINISHED;
use super::status::Status;
use bonfire_core::error::Site;
use bonfire_core::internal::Rows;
use bonfire_core::{Deadline, Error, Group};

impl DeviceTransport for CudaRuntime {
    fn engine(device: DeviceId) -> Option<Box<dyn Engine<Self>>> {
        Some(Box::new(CudaEngine {
            device,
            status: Status::of::<CudaRuntime>(device),
            teams: HashMap::new(),
            pending: Vec::new(),
            copy_stream: None,
            barriers: Vec::new(),
            barrier_count: 0,
            entered: HashMap::new(),
        }))
    }

    fn route(group: &Group, device: DeviceId) -> Result<Option<Arc<dyn Route<Self>>>, Error> {
        route::of(group, device)
    }

    fn agreed_route(group: &Group) -> Option<Arc<dyn Route<Self>>> {
        route::agreed(group)
    }
}

struct CudaEngine {
    device: DeviceId,
    status: Arc<Status>,
    /// The teams of this device, by their devices.
    teams: HashMap<Vec<DeviceId>, Arc<TeamHandle>>,
    /// Calls after which no `sync` has ordered the streams yet.
    pending: Vec<SubmittedCall>,
    /// Created on first use.
    copy_stream: Option<CopyStream>,
    /// What streams wait for before new work, one barrier per word. cubecl's order between streams is not enough: it
    /// goes by when a tensor's memory was bound, not by when it was written.
    barriers: Vec<Barrier>,
    barrier_count: u64,
    /// The number of the last barrier that each stream is ordered after.
    entered: HashMap<StreamId, u64>,
}

/// The latest value of a word that streams wait for.
struct Barrier {
    order: Order,
    number: u64,
    /// Whether the host knows that the word has this value, if it can.
    passed: Option<Box<dyn Fn() -> bool + Send>>,
}

impl Barrier {
    fn has_passed(&self) -> bool {
        self.passed.as_ref().is_some_and(|passed| passed())
    }
}

/// A submitted call. It keeps its tensors' memory until new work on any stream is ordered after the call.
struct SubmittedCall {
    handle: Arc<TeamHandle>,
    number: u64,
    /// What the call reads and what it writes.
    spans: [Span; 2],
    kept: Vec<Binding>,
}

impl SubmittedCall {
    /// Whether this call and a call on these spans conflict: one writes memory that the other uses.
    fn conflicts_with(&self, [source, target]: &[Span; 2]) -> bool {
        let [read, written] = &self.spans;
        written.overlaps(source) || written.overlaps(target) || read.overlaps(target)
    }
}

impl CudaEngine {
    fn handle(&mut self, devices: Vec<DeviceId>, rank: usize) -> Result<Arc<TeamHandle>, Error> {
        if let Some(handle) = self.teams.get(&devices) {
            // A failed team stays until the failure is cleared: `forget` has to wait for it.
            return handle.team.failure().map_or_else(|| Ok(handle.clone()), Err);
        }
        let team = Team::of(devices.clone())?;
        team.register_check(rank);
        let handle = Arc::new(TeamHandle::of(team, rank));
        self.teams.insert(devices, handle.clone());
        // If the previous team has failed since the call was checked, the call belongs to that team.
        self.status.failure().map_or(Ok(handle), Err)
    }

    fn copy_stream(&mut self) -> Result<&mut CopyStream, Error> {
        match &mut self.copy_stream {
            Some(copy_stream) => Ok(copy_stream),
            copy_stream => Ok(copy_stream.insert(CopyStream::new(self.device)?)),
        }
    }

    /// Enqueues on the copies' stream, and makes later work wait for the order that `enqueue` returns.
    fn enqueue_copy<T>(
        &mut self,
        enqueue: impl FnOnce(&mut CopyStream) -> Result<(T, Order), Error>,
    ) -> Result<T, Error> {
        let copies = self.copy_stream()?;
        let (value, order) = enqueue(copies).map_err(|error| copies.fault().unwrap_or(error))?;
        self.add_barrier(order, None);
        Ok(value)
    }

    fn submit(&mut self, server: &mut Server, handle: &Arc<TeamHandle>, job: DeviceOperation) -> Result<(), Error> {
        let (call, team) = (job.call, &handle.team);
        let spans = [&job.sources, &job.targets].map(|memory| Span::of(&memory[0].0));
        let mut others = self.pending.iter().filter(|pending| !Arc::ptr_eq(&pending.handle, handle));
        if others.any(|pending| pending.conflicts_with(&spans)) {
            // Streams of different teams do not wait for each other.
            return Err(Error::argument("all_reduce", UNFINISHED));
        }
        let choice = choose(setting()?.at(call.bytes()), &call, team.topology(), false);
        let choice = choice.ok_or_else(|| Error::argument(call.operation, format!("no kernel supports {call}")))?;
        let timeout = team.timeout();
        for ready in handle.prepare(server, job, choice, timeout)? {
            let number = team.next_number(handle.local, call)?;
            let (site, kept) = (Site::new(call, number - 1), ready.layout.kept.clone());
            team.submit(handle.local, site, Deadline::after(timeout), ready)?;
            self.pending.push(SubmittedCall { handle: handle.clone(), number, spans, kept });
        }
        Ok(())
    }

    fn add_barrier(&mut self, order: Order, passed: Option<Box<dyn Fn() -> bool + Send>>) {
        self.barriers.retain(|other| other.order.word != order.word && !other.has_passed());
        self.barrier_count += 1;
        self.barriers.push(Barrier { order, number: self.barrier_count, passed });
    }
}

impl Engine<CudaRuntime> for CudaEngine {
    fn takes(&mut self, devices: &[DeviceId]) -> bool {
        // A call returns the error of a malformed setting.
        setting().is_err() || self.teams.contains_key(devices) || team::kernels_supported(devices)
    }

    fn enter(&mut self, server: &mut Server, stream: StreamId) {
        let before = self.entered.get(&stream).copied().unwrap_or(0);
        if before == self.barrier_count {
            return;
        }
        for barrier in self.barriers.iter().filter(|barrier| barrier.number > before && !barrier.has_passed()) {
            order::await_done(server, barrier.order, stream);
        }
        // Threads that have ended leave their streams here. Clearing is harmless: streams only wait once more.
        const STREAMS: usize = 4096;
        if self.entered.len() >= STREAMS {
            self.entered.clear();
        }
        self.entered.insert(stream, self.barrier_count);
    }

    fn all_reduce(&mut self, server: &mut Server, devices: Vec<DeviceId>, job: DeviceOperation) -> Result<(), Error> {
        setting()?;
        self.enter(server, job.stream);
        let handle = self.handle(devices, job.rank)?;
        // On an error the other ranks would wait for this call.
        catch_panic("all_reduce", || self.submit(server, &handle, job))
            .map_err(|error| handle.team.gpu_fault("all_reduce", Duration::ZERO).unwrap_or(error))
            .inspect_err(|error| handle.team.fail(error.clone()))
    }

    fn fail(&mut self, devices: &[DeviceId], error: &Error) {
        team::fail(devices, error);
    }

    fn sync(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(self.status.deadline());
        let mut orders: Vec<(&Arc<TeamHandle>, Order)> = Vec::new();
        let mut outcome = Ok(());
        for SubmittedCall { handle, number, .. } in self.pending.iter().rev() {
            if orders.iter().any(|(other, _)| Arc::ptr_eq(other, handle)) {
                continue;
            }
            let (team, local) = (&handle.team, handle.local);
            // What waits on the GPU for a call must be enqueued after it. If one team fails, others may be sound.
            if let Err(error) = team.wait_launched(local, *number, &deadline) {
                outcome = outcome.and(Err(error));
                continue;
            }
            let order = Order::after_call(team.done_word(local), *number, team.timeout(), team.host_words(local));
            orders.push((handle, order));
        }
        let orders: Vec<Order> = orders.into_iter().map(|(_, order)| order).collect();
        orders.into_iter().for_each(|order| self.add_barrier(order, None));
        // Calls of a failed team are kept until `forget` has waited for the team.
        self.pending.retain(|pending| pending.handle.team.failure().is_some());
        outcome
    }

    fn follow(&mut self, End { word, host, value, limit, passed }: End) {
        // Operations may be followed in any order.
        let later = |other: &Barrier| other.order.word == word && other.order.value >= value;
        if !self.barriers.iter().any(later) {
            self.add_barrier(Order::after_call(word, value, limit, host), Some(passed));
        }
    }

    fn lend(
        &mut self,
        server: &mut Server,
        memory: Binding,
        bytes: usize,
        stream: StreamId,
    ) -> Result<PeerBuffer, Error> {
        self.enter(server, stream);
        let timeout = self.status.deadline();
        self.enqueue_copy(|copies| copies.lend(server, memory, bytes, stream, timeout))
    }

    fn copy(&mut self, server: &mut Server, loan: PeerBuffer, rows: Rows, target: Binding) -> Result<(), Error> {
        self.enter(server, target.stream);
        let timeout = self.status.deadline();
        self.enqueue_copy(|copies| copies.copy(server, loan, rows, target, timeout).map(|order| ((), order)))
    }

    fn forget(&mut self) {
        let failed = |handle: &Arc<TeamHandle>| handle.team.failure().is_some();
        let (ended, pending): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(|pending| failed(&pending.handle));
        self.pending = pending;
        // The work that writes these words has ended after this, so their barriers are obsolete.
        let mut words = Vec::new();
        for handle in self.teams.values().filter(|handle| failed(handle)) {
            words.push(handle.team.done_word(handle.local));
            if let Err(error) = handle.team.quiesce() {
                // Then the tensors' memory must not be reused.
                log::error!("after a failure: {error}");
                std::mem::forget(ended.iter().map(|pending| pending.kept.clone()).collect::<Vec<_>>());
            }
        }
        // Its end waits for the copies.
        if let Some(copy_stream) = self.copy_stream.take_if(|copy_stream| copy_stream.has_failed()) {
            words.push(copy_stream.done_word());
        }
        self.barriers.retain(|barrier| !words.contains(&barrier.order.word));
        self.teams.retain(|_, handle| !failed(handle));
    }
}
