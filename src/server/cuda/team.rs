//! The devices of one list, as kernels work for them; or one of them, as NCCL works for it.
//!
//! A team has a stream of its own on each GPU. What its ranks call is put there in the order of their calls, for all ranks
//! on that GPU at once: the stream waits until the tensors of each are ready, one kernel works for all of them, and then
//! a word says that the call is done. So no kernel waits for one that has yet to be launched on its GPU, and what is on
//! a GPU waits only for what was put there before. Kernels on different GPUs do wait for each other, which is bounded.

mod flight;
mod place;
mod registry;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::Binding;

use self::place::{Called, Means, Place};
pub(super) use self::place::{Copy, Layout, Ready};
pub(super) use self::registry::{fail, fit, ordinal};
use super::choice::{Topology, Way};
use super::control::{
    ABORT, CONTROL_BYTES, DONE, FAILURE, HOST_WORDS, Member, Parameters, READY, RELEASED, Report, nanoseconds,
};
use super::driver::Gpu;
use super::memory::{HostWords, Memory};
use super::pause::settle;
use super::remote::Remote;
use crate::server::meeting::{Calls, Wait};
use crate::server::status::Status;
use bonfire_core::error::Site;
use bonfire_core::internal::lock;
use bonfire_core::{Call, DType, Deadline, Error, Operation};

pub(super) struct Team {
    key: Vec<DeviceId>,
    seats: Vec<Seat>,
    places: Vec<Place>,
    host: HostWords,
    calls: Mutex<Calls>,
    workers: Workers,
    group: Option<Ours>,
}

/// A rank that this process has a device for.
struct Seat {
    rank: usize,
    status: Arc<Status>,
    /// Index of its GPU in `places`.
    place: usize,
}

/// Who works for the ranks.
enum Workers {
    /// All ranks have a seat, whose number is their rank. The control blocks are kept until no kernel uses them.
    Kernels(Topology, Vec<Memory>),
    /// One rank has a seat.
    Nccl(Box<dyn Remote>),
}

/// What a team has that works for a group, which waits on the host for what is under way, and whose failures are not the
/// devices'.
struct Ours {
    /// How long what is under way may take when the team is dropped.
    limit: Duration,
    /// The ranks have parted.
    parted: AtomicBool,
    kept: Mutex<Vec<Kept>>,
    /// When the team failed: up to which number each place's calls had been done by then.
    completed: OnceLock<Vec<u64>>,
}

/// What lives until a call is done: the index of its place, the call's number, and the memory.
type Kept = (usize, u64, Vec<Binding>);

impl Ours {
    fn new(limit: Duration) -> Ours {
        Ours { limit, parted: AtomicBool::new(false), kept: Mutex::default(), completed: OnceLock::new() }
    }
}

impl Team {
    /// This rank's part of a group that NCCL works for.
    pub fn of_remote(device: DeviceId, rank: usize, remote: Box<dyn Remote>, limit: Duration) -> Result<Team, Error> {
        let place = Place::new(Gpu::of(ordinal(device))?, true)?;
        Team::at(vec![device], vec![rank], vec![place], vec![0], Workers::Nccl(remote), Some(limit))
    }

    /// The group has failed: what is under way may wait for ranks that do not come.
    pub fn part(&self) {
        if let Some(ours) = &self.group {
            ours.parted.store(true, Ordering::Relaxed);
        }
    }

    /// From now on, who asks whether this seat's device is sound asks its GPU, too.
    pub fn watch(self: &Arc<Self>, seat: usize) {
        let team = Arc::downgrade(self);
        let look = move || match team.upgrade() {
            Some(team) => team.look(seat),
            None => false,
        };
        self.seats[seat].status.watch(Arc::new(look));
    }

    fn new(key: Vec<DeviceId>, limit: Option<Duration>) -> Result<Team, Error> {
        let (mut places, mut sits): (Vec<Place>, _) = (Vec::new(), Vec::new());
        let mut controls = Vec::new();
        for id in &key {
            let gpu = Gpu::of(ordinal(*id))?;
            let place = match places.iter().position(|place| place.gpu.ordinal == gpu.ordinal) {
                Some(place) => place,
                None => {
                    places.push(Place::new(gpu, limit.is_some())?);
                    places.len() - 1
                }
            };
            controls.push(Memory::zeroed(&places[place].stream, CONTROL_BYTES)?);
            sits.push(place);
        }
        let on = |place| sits.iter().filter(|other| **other == place).count() as u32;
        let topology = Topology {
            ranks: key.len(),
            gpus: places.len(),
            sharing: (0..places.len()).map(on).max().unwrap_or(1),
            multiprocessors: places.iter().map(|place| place.gpu.multiprocessors).min().unwrap_or(1),
        };
        let ranks = (0..key.len()).collect();
        Team::at(key, ranks, places, sits, Workers::Kernels(topology, controls), limit)
    }

    /// `sits` says for each seat where it is.
    fn at(
        key: Vec<DeviceId>,
        ranks: Vec<usize>,
        mut places: Vec<Place>,
        sits: Vec<usize>,
        workers: Workers,
        limit: Option<Duration>,
    ) -> Result<Team, Error> {
        let host = HostWords::zeroed(&places[0].gpu, HOST_WORDS * key.len())?;
        let mut seats = Vec::new();
        for (seat, (rank, place)) in ranks.into_iter().zip(sits).enumerate() {
            places[place].seats.push(seat);
            lock(&places[place].queue).calls.push(VecDeque::new());
            seats.push(Seat { rank, status: Status::of::<CudaRuntime>(key[seat]), place });
        }
        let calls = Mutex::new(Calls::of(key.len()));
        Ok(Team { key, seats, places, host, calls, workers, group: limit.map(Ours::new) })
    }

    /// Where the ranks are, if kernels work for them.
    pub fn topology(&self) -> Option<&Topology> {
        match &self.workers {
            Workers::Kernels(topology, _) => Some(topology),
            Workers::Nccl(_) => None,
        }
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        match &self.workers {
            Workers::Kernels(topology, _) => topology.ranks,
            Workers::Nccl(remote) => remote.ranks(),
        }
    }

    /// How a call goes this way: its kernel is then on the seat's GPU.
    pub fn prepare(&self, seat: usize, way: Way) -> Result<Means, Error> {
        self.place(seat).means(way)
    }

    /// Gives the seat's next call its number, from 1 on. An error where another rank called something else there.
    pub fn number(&self, seat: usize, call: Call) -> Result<u64, Error> {
        let mut calls = lock(&self.calls);
        let number = calls.add(seat, call);
        match &number {
            Ok(_) => {
                let matched = calls.matched();
                calls.forget(matched);
            }
            Err(error) => self.fail_locked(calls, error.clone()),
        }
        number
    }

    /// Puts a call on the GPU's stream, once all ranks there have. Calls come in the order of their numbers.
    pub fn submit(&self, seat: usize, site: Site, deadline: Deadline, ready: Ready) -> Result<(), Error> {
        let place = self.place(seat);
        let mut queue = lock(&place.queue);
        let position = place.seats.iter().position(|other| *other == seat);
        if let Some(calls) = position.and_then(|position| queue.calls.get_mut(position)) {
            calls.push_back(Called { site, deadline, ready });
        }
        // The stream may be full, and this then waits for the GPU. Nothing there waits for a rank that would need the lock.
        while queue.calls.iter().all(|calls| !calls.is_empty()) {
            // Who was in it may have let go of the tensors since.
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let calls: Vec<Called> = queue.calls.iter_mut().filter_map(VecDeque::pop_front).collect();
            let launched = self.launch(place, queue.launched + 1, &calls);
            // Also where it failed half-way: what is on the stream may use it.
            let kept = calls.into_iter().map(|call| call.ready.layout.kept);
            self.keep(self.seats[seat].place, queue.launched + 1, kept);
            launched?;
            self.let_go();
            queue.launched += 1;
            place.launched.notify_all();
        }
        Ok(())
    }

    fn launch(&self, place: &Place, number: u64, calls: &[Called]) -> Result<(), Error> {
        for (seat, Called { ready, .. }) in place.seats.iter().zip(calls) {
            place.stream.wait_for(self.ready(*seat), ready.ready)?;
            place.copy(&ready.layout.before)?;
        }
        let Called { site, deadline, ready: Ready { means, layout, .. } } = &calls[0];
        match (means, &self.workers) {
            (Means::Kernel(launch, module), Workers::Kernels(_, controls)) => {
                let parameters = self.parameters(place, calls, controls);
                place.stream.launch(module, (calls.len() as u32, launch.blocks), launch.threads, parameters)?;
            }
            (Means::Nccl, Workers::Nccl(remote)) => {
                remote.submit(*site, (layout.source, layout.target), &place.stream, deadline)?;
                if let Some(error) = self.failure() {
                    // Who failed it may have found the communicator at work.
                    remote.abort();
                    return Err(error);
                }
            }
            _ => return Err(Error::broken(site.to_string(), "this team does not do it so")),
        }
        calls.iter().try_for_each(|call| place.copy(&call.ready.layout.after))?;
        place.stream.write(place.done.unwrap_or_else(|| self.told(place)), number)
    }

    /// Where the host is told which call of a group is done.
    fn told(&self, place: &Place) -> u64 {
        self.host.address(HOST_WORDS * place.seats[0] + DONE)
    }

    fn parameters(&self, place: &Place, calls: &[Called], controls: &[Memory]) -> Parameters {
        let call = &calls[0].site.call;
        let mut parameters = Parameters {
            patience: nanoseconds(calls.iter().map(|call| call.ready.patience).max().unwrap_or_default()),
            ranks: self.seats.len() as u64,
            root: call.root.unwrap_or(0) as u64,
            count: call.count as u64,
            width: if call.reduction.is_some() { 0 } else { call.dtype.size() as u64 },
            ..Parameters::default()
        };
        for (address, control) in parameters.control.iter_mut().zip(controls) {
            *address = control.address;
        }
        for ((seat, Called { ready, .. }), member) in place.seats.iter().zip(calls).zip(&mut parameters.members) {
            let host = self.host(*seat);
            *member = Member { source: ready.layout.source, target: ready.layout.target, rank: *seat as u64, host };
        }
        parameters
    }

    /// Waits until this call is on the stream of the rank's GPU.
    pub fn wait_launched(&self, seat: usize, number: u64, deadline: &Deadline) -> Result<(), Error> {
        let (place, rank) = (self.place(seat), self.seats[seat].rank);
        let mut queue = lock(&place.queue);
        let mut wait = Wait::of(rank, deadline);
        while queue.launched < number {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let (site, mut missing) = called(&lock(&self.calls), queue.launched + 1);
            missing.retain(|seat| place.seats.contains(seat));
            let pause = match wait.pause(site, missing, "a device did not launch it") {
                Ok(pause) => pause,
                Err(error) => {
                    drop(queue);
                    self.fail(error.clone());
                    return Err(error);
                }
            };
            queue = place.launched.wait_timeout(queue, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Where the GPU of this rank says which call is done.
    pub fn done(&self, seat: usize) -> u64 {
        let place = self.place(seat);
        place.done.unwrap_or_else(|| self.told(place))
    }

    /// Where the rank's words in host memory are.
    pub fn host(&self, seat: usize) -> u64 {
        self.host.address(HOST_WORDS * seat)
    }

    pub fn ready(&self, seat: usize) -> u64 {
        self.host.address(HOST_WORDS * seat + READY)
    }

    /// How long a kernel waits for a peer: the longest deadline of the devices.
    pub fn patience(&self) -> Duration {
        self.seats.iter().map(|seat| seat.status.deadline()).max().unwrap_or_default()
    }

    fn place(&self, seat: usize) -> &Place {
        &self.places[self.seats[seat].place]
    }

    pub fn failure(&self) -> Option<Error> {
        lock(&self.calls).failure.clone()
    }

    /// Makes a failure that the GPU has reported for this rank the team's. Whether the team is still to be watched.
    fn look(&self, seat: usize) -> bool {
        let report = Report::of(self.host.load(HOST_WORDS * seat + FAILURE));
        let calls = lock(&self.calls);
        if let (Some(report), None) = (report, &calls.failure) {
            let (site, absent) = called(&calls, report.number);
            let rank = self.seats[seat].rank;
            self.fail_locked(calls, report.error(site, rank, absent, self.patience()));
            return false;
        }
        calls.failure.is_none()
    }

    /// Ends the team: its kernels end, and every device is poisoned, unless it works for a group.
    pub fn fail(&self, error: Error) {
        self.fail_locked(lock(&self.calls), error);
    }

    fn fail_locked(&self, mut calls: MutexGuard<'_, Calls>, error: Error) {
        if calls.failure.is_some() {
            // The devices may have been cleared since.
            return;
        }
        self.note_completed();
        calls.failure = Some(error.clone());
        (0..self.seats.len()).for_each(|seat| self.host.store(HOST_WORDS * seat + ABORT, 1));
        // A group's failures are its own.
        if self.group.is_none() {
            // Devices that were cleared meet anew. As in `Round::fail`, all three change under both locks.
            let slot = registry::slot(&self.key);
            let mut present = lock(&slot);
            if present.as_ref().is_some_and(|team| std::ptr::eq(&**team, self)) {
                *present = None;
            }
            self.seats.iter().for_each(|seat| seat.status.fail(error.clone()));
        }
        drop(calls);
        match &self.workers {
            Workers::Kernels(..) => {
                for place in &self.places {
                    // Taken and given back, so that nobody between its look at the failure and its wait misses this.
                    drop(lock(&place.queue));
                    place.launched.notify_all();
                }
            }
            // Not before the failure is known: the stream goes on after this.
            Workers::Nccl(remote) => remote.abort(),
        }
    }

    /// Waits until no kernel of a team that failed runs any more: before that, the tensors that it was told of must not be
    /// freed.
    pub fn quiesce(&self) -> Result<(), Error> {
        let release = || {
            let words = (0..self.seats.len()).map(|seat| HOST_WORDS * seat + READY);
            words.for_each(|word| self.host.store(word, RELEASED));
        };
        settle(|| self.is_idle(), release)
    }

    fn is_idle(&self) -> bool {
        // Who holds the queue may be about to launch.
        self.places.iter().all(|place| place.queue.try_lock().is_ok() && place.stream.is_idle())
    }
}

/// The call with this number, and the seats that have not made it.
fn called(calls: &Calls, number: u64) -> (Site, Vec<usize>) {
    /// Stands for a call that is not known any more.
    const NOTHING: Call = Call::new(Operation::AllReduce, DType::U8, 0);
    let call = calls.get(number).unwrap_or(NOTHING);
    (Site::new(call, number.saturating_sub(1)), calls.missing(number))
}

impl Drop for Team {
    fn drop(&mut self) {
        self.come_to_rest();
        // Then control blocks and tensors can go. Words stay: kernels on cubecl's streams may still look at them.
        if let Err(error) = self.quiesce() {
            log::warn!("the end of a team of devices: {error}");
            if let Some(ours) = &self.group {
                std::mem::forget(std::mem::take(&mut *lock(&ours.kept)));
            }
        }
    }
}
