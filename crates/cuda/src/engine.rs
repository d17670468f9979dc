//! What one device does without a group: all-reduces between the devices of a process, copies from one to another, and
//! the order of its streams after both.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::address::Address;
use super::choice::{choose, settings};
use super::control::Order;
use super::copy_stream::{CopyStream, PeerBuffer};
use super::order::{self, End, OwnToken};
use super::runtime::{DeviceId, DeviceOperation, Kept, Runtime, Status};
use super::side::TeamHandle;
use super::team::{self, Team};
use bonfire_core::error::Site;
use bonfire_core::internal::Rows;
use bonfire_core::{Deadline, Error};

/// A device's own data path to other devices of its process. The device's server owns it and calls it on its thread,
/// with itself.
pub struct Engine<R: Runtime> {
    device: DeviceId,
    status: Arc<dyn Status>,
    /// The teams of this device, by their devices.
    teams: HashMap<Vec<DeviceId>, Arc<TeamHandle<R>>>,
    /// Calls after which no `sync` has ordered the streams yet.
    pending: Vec<SubmittedCall<R>>,
    /// Created on first use.
    copy_stream: Option<CopyStream<R>>,
    /// What streams wait for before new work, one barrier per word. A server's own order between streams may not be
    /// enough: cubecl's goes by when a tensor's memory was bound, not by when it was written.
    barriers: Vec<Barrier>,
    barrier_count: u64,
    /// The number of the last barrier that each stream is ordered after.
    entered: HashMap<R::Stream, u64>,
    token: OwnToken<R>,
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
struct SubmittedCall<R: Runtime> {
    handle: Arc<TeamHandle<R>>,
    number: u64,
    /// What the call reads and what it writes.
    spans: [Span; 2],
    kept: Vec<Kept>,
}

/// Bytes of memory that is kept, so that no other memory has their addresses.
#[derive(Clone, Copy)]
struct Span(Address, Address);

impl Span {
    fn overlaps(&self, other: &Span) -> bool {
        self.0 < other.1 && other.0 < self.1
    }
}

impl<R: Runtime> SubmittedCall<R> {
    /// Whether this call and a call on these spans conflict: one writes memory that the other uses.
    fn conflicts_with(&self, [source, target]: &[Span; 2]) -> bool {
        let [read, written] = &self.spans;
        written.overlaps(source) || written.overlaps(target) || read.overlaps(target)
    }
}

impl<R: Runtime> Engine<R> {
    /// Creates that of a device.
    pub fn new(device: DeviceId) -> Engine<R> {
        Engine {
            device,
            status: R::status(device),
            teams: HashMap::new(),
            pending: Vec::new(),
            copy_stream: None,
            barriers: Vec::new(),
            barrier_count: 0,
            entered: HashMap::new(),
            token: OwnToken::new(),
        }
    }

    fn handle(&mut self, devices: Vec<DeviceId>, rank: usize) -> Result<Arc<TeamHandle<R>>, Error> {
        if let Some(handle) = self.teams.get(&devices) {
            // A failed team stays until the failure is cleared: `forget` has to wait for it.
            return handle.team.failure().map_or_else(|| Ok(handle.clone()), Err);
        }
        let team = Team::of::<R>(devices.clone())?;
        team.register_check(rank);
        let handle = Arc::new(TeamHandle::of(team, rank));
        self.teams.insert(devices, handle.clone());
        // If the previous team has failed since the call was checked, the call belongs to that team.
        self.status.failure().map_or(Ok(handle), Err)
    }

    fn copy_stream(&mut self) -> Result<&mut CopyStream<R>, Error> {
        match &mut self.copy_stream {
            Some(copy_stream) => Ok(copy_stream),
            copy_stream => Ok(copy_stream.insert(CopyStream::new(self.device)?)),
        }
    }

    /// Enqueues on the copies' stream, and makes later work wait for the order that `enqueue` returns.
    fn enqueue_copy<T>(
        &mut self,
        enqueue: impl FnOnce(&mut CopyStream<R>) -> Result<(T, Order), Error>,
    ) -> Result<T, Error> {
        let copies = self.copy_stream()?;
        let (value, order) = enqueue(copies).map_err(|error| copies.fault().unwrap_or(error))?;
        self.add_barrier(order, None);
        Ok(value)
    }

    fn submit(
        &mut self,
        server: &mut R::Server,
        handle: &Arc<TeamHandle<R>>,
        job: DeviceOperation<R>,
    ) -> Result<(), Error> {
        let (call, team) = (job.call, &handle.team);
        let job = job.locate(server)?;
        let ([(source, _)], [(target, _)]) = (&job.sources[..], &job.targets[..]) else {
            return Err(Error::broken("all_reduce", "it has several sources or targets"));
        };
        let spans = [*source, *target].map(|at| Span(at, at + call.bytes()));
        let mut others = self.pending.iter().filter(|pending| !Arc::ptr_eq(&pending.handle, handle));
        if others.any(|pending| pending.conflicts_with(&spans)) {
            // Streams of different teams do not wait for each other.
            return Err(Error::argument("all_reduce", R::UNFINISHED));
        }
        let choice = choose(settings()?.by_size.at(call.bytes()), &call, team.topology(), false);
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

impl<R: Runtime> Engine<R> {
    /// Whether kernels connect these sorted devices. The answer is the same on all of them and never changes.
    pub fn takes(&mut self, devices: &[DeviceId]) -> bool {
        // A call returns the error of a malformed setting.
        settings().is_err() || self.teams.contains_key(devices) || team::kernels_supported(devices)
    }

    /// Called before anything is enqueued on a stream of the server. Orders the stream as earlier calls of `sync`,
    /// `follow`, `lend` and `copy` require.
    pub fn enter(&mut self, server: &mut R::Server, stream: R::Stream) {
        let before = self.entered.get(&stream).copied().unwrap_or(0);
        if before == self.barrier_count {
            return;
        }
        for barrier in self.barriers.iter().filter(|barrier| barrier.number > before && !barrier.has_passed()) {
            order::await_done(server, barrier.order, stream, &mut self.token);
        }
        // Threads that have ended leave their streams here. Clearing is harmless: streams only wait once more.
        const STREAMS: usize = 4096;
        if self.entered.len() >= STREAMS {
            self.entered.clear();
        }
        self.entered.insert(stream, self.barrier_count);
    }

    /// Queues an all-reduce between these devices, which are sorted. It has one source and one target, neither of which
    /// may be accessed before [`sync`](Self::sync).
    ///
    /// # Errors
    /// All that keeps the all-reduce from being launched. It fails the devices' later ones, too.
    pub fn all_reduce(
        &mut self,
        server: &mut R::Server,
        devices: Vec<DeviceId>,
        job: DeviceOperation<R>,
    ) -> Result<(), Error> {
        settings()?;
        self.enter(server, job.stream);
        let handle = self.handle(devices, job.rank)?;
        // On an error the other ranks would wait for this call.
        R::guard("all_reduce", || self.submit(server, &handle, job))
            .map_err(|error| handle.team.gpu_fault("all_reduce", Duration::ZERO).unwrap_or(error))
            .inspect_err(|error| handle.team.fail(error.clone()))
    }

    /// Fails the all-reduces between these devices, which are sorted, on all of them.
    pub fn fail(&mut self, devices: &[DeviceId], error: &Error) {
        team::fail::<R>(devices, error);
    }

    /// From now on, [`enter`](Self::enter) orders every stream after all calls so far.
    ///
    /// # Errors
    /// A failure of one of them, or that another rank on this GPU has not called in time.
    pub fn sync(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(self.status.deadline());
        let mut orders: Vec<(&Arc<TeamHandle<R>>, Order)> = Vec::new();
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

    /// From now on, `enter` orders every stream after this end of an operation of a group.
    pub fn follow(&mut self, End { word, host, value, limit, passed }: End) {
        // Operations may be followed in any order.
        let later = |other: &Barrier| other.order.word == word && other.order.value >= value;
        if !self.barriers.iter().any(later) {
            self.add_barrier(Order::after_call(word, value, limit, host), Some(passed));
        }
    }

    /// Exposes the first bytes of some memory to another device, as the work queued so far on the stream leaves them.
    ///
    /// # Errors
    /// If the memory has fewer bytes, or the GPU refuses the copy that is lent.
    pub fn lend(
        &mut self,
        server: &mut R::Server,
        memory: R::Memory,
        bytes: usize,
        stream: R::Stream,
    ) -> Result<PeerBuffer, Error> {
        self.enter(server, stream);
        let timeout = self.status.deadline();
        self.enqueue_copy(|copies| copies.lend(server, memory, bytes, stream, timeout))
    }

    /// Copies rows to this device and packs them. From now on, `enter` orders every stream after the copy.
    ///
    /// # Errors
    /// If either memory has fewer bytes, or the GPU refuses the copy.
    pub fn copy(
        &mut self,
        server: &mut R::Server,
        lent: PeerBuffer,
        rows: Rows,
        target: R::Memory,
    ) -> Result<(), Error> {
        self.enter(server, R::stream(&target));
        let timeout = self.status.deadline();
        self.enqueue_copy(|copies| copies.copy(server, lent, rows, target, timeout).map(|order| ((), order)))
    }

    /// Drops the calls that failed, after the failure was cleared.
    pub fn forget(&mut self) {
        let failed = |handle: &Arc<TeamHandle<R>>| handle.team.failure().is_some();
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
