//! The devices of one list, as kernels work for them.
//!
//! A team has a stream of its own on each GPU. What its ranks call is put there in the order of their calls, for all ranks
//! on that GPU at once: the stream waits until the tensors of each are ready, one kernel works for all of them, and then
//! a word says that the call is done. So no kernel waits for one that has yet to be launched on its GPU, and what is on
//! a GPU waits only for what was put there before. Kernels on different GPUs do wait for each other, which is bounded.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;

use super::choice::{Launch, ROUTE, Route, Topology, launch};
use super::control::{
    ABORT, CONTROL_BYTES, FAILURE, HOST_WORDS, MAX_RANKS, Member, Parameters, READY, RELEASED, Report, nanoseconds,
};
use super::driver::{Gpu, Stream, settle};
use super::kernel::Module;
use super::memory::{HostWords, Memory, word};
use crate::call::{Call, Operation};
use crate::error::{Error, Ranks, Site};
use crate::server::device::physical;
use crate::server::status::Status;
use crate::wait::{Deadline, lock};

pub(super) struct Team {
    key: Vec<DeviceId>,
    /// By rank.
    members: Vec<Seat>,
    places: Vec<Place>,
    topology: Topology,
    host: HostWords,
    progress: Mutex<Progress>,
    /// Kept until no kernel uses it.
    _controls: Vec<Memory>,
}

/// One rank's part of a team.
struct Seat {
    status: Arc<Status>,
    control: u64,
    /// Index of its GPU in `places`.
    place: usize,
}

/// One GPU's part of a team.
struct Place {
    gpu: Arc<Gpu>,
    stream: Arc<Stream>,
    /// The ranks on this GPU.
    ranks: Vec<usize>,
    /// The number of the last call that is done, in GPU memory.
    done: u64,
    queue: Mutex<Queue>,
    launched: Condvar,
}

/// The calls that wait for other ranks on the same GPU.
struct Queue {
    /// By position in `Place::ranks`.
    calls: Vec<VecDeque<Ready>>,
    launched: u64,
}

/// A call of one rank whose tensors' streams have been told.
pub(super) struct Ready {
    pub call: Call,
    pub launch: Launch,
    pub module: Arc<Module>,
    pub source: u64,
    pub target: u64,
}

#[derive(Default)]
struct Progress {
    /// By rank.
    called: Vec<u64>,
    /// The calls that not all ranks have made, the first of which is number `min(called) + 1`.
    calls: VecDeque<Call>,
    failure: Option<Error>,
}

/// Where a list's team is, once it is made. Making one takes the driver's time, and must not keep other lists waiting.
type Slot = Arc<Mutex<Option<Arc<Team>>>>;

static TEAMS: LazyLock<Mutex<HashMap<Vec<DeviceId>, Slot>>> = LazyLock::new(Mutex::default);
/// Whether kernels can work for a list of devices.
static FIT: LazyLock<Mutex<HashMap<Vec<DeviceId>, bool>>> = LazyLock::new(Mutex::default);

/// Whether kernels can work for these devices: whether each reaches the memory of all others.
pub(super) fn fit(devices: &[DeviceId]) -> bool {
    if *ROUTE == Route::Host || devices.len() > MAX_RANKS {
        return false;
    }
    if let Some(fit) = lock(&FIT).get(devices) {
        return *fit;
    }
    let reach = || -> Result<bool, Error> {
        let gpus = devices.iter().map(|id| Gpu::of(ordinal(*id))).collect::<Result<Vec<_>, _>>()?;
        for (one, other) in gpus.iter().flat_map(|one| gpus.iter().map(move |other| (one, other))) {
            if !one.reaches(other)? {
                log::warn!(
                    "GPU {} does not reach the memory of GPU {}; collectives between them go through host memory",
                    one.ordinal,
                    other.ordinal
                );
                return Ok(false);
            }
        }
        for gpu in &gpus {
            // Older ones lack the orders and scopes of `kernels/ptx.cuh`.
            if gpu.architecture < 70 || !gpu.orders_streams() {
                log::warn!(
                    "GPU {} cannot do what our kernels need; its collectives go through host memory",
                    gpu.ordinal
                );
                return Ok(false);
            }
        }
        Ok(true)
    };
    let fit = reach().unwrap_or_else(|error| {
        log::warn!("{error}; collectives between the devices go through host memory");
        false
    });
    // Another device may have found out meanwhile: all must act on one answer.
    *lock(&FIT).entry(devices.to_vec()).or_insert(fit)
}

/// Ends the team of these devices, if there is one: whatever there is, all of them are poisoned.
pub(super) fn fail(devices: &[DeviceId], error: &Error) {
    let slot = lock(&TEAMS).entry(devices.to_vec()).or_default().clone();
    let present = lock(&slot);
    match &*present {
        Some(team) => {
            let team = team.clone();
            // `Team::fail` takes the slot after its own lock.
            drop(present);
            team.fail(error.clone());
        }
        None => devices.iter().for_each(|id| Status::of::<CudaRuntime>(*id).fail(error.clone())),
    }
}

/// The number of a logical device's GPU.
pub(super) fn ordinal(id: DeviceId) -> usize {
    usize::from(physical(id).0.index_id)
}

impl Team {
    /// The team of these devices, which are sorted and fit.
    pub fn of(devices: Vec<DeviceId>) -> Result<Arc<Team>, Error> {
        let slot = lock(&TEAMS).entry(devices.clone()).or_default().clone();
        let mut team = lock(&slot);
        match &*team {
            Some(team) => Ok(team.clone()),
            None => Ok(team.insert(Arc::new(Team::new(devices)?)).clone()),
        }
    }

    /// From now on, who asks whether this rank's device is sound asks its GPU, too.
    pub fn watch(self: &Arc<Self>, rank: usize) {
        let team = Arc::downgrade(self);
        let look = move || match team.upgrade() {
            Some(team) => team.look(rank),
            None => false,
        };
        self.members[rank].status.watch(Arc::new(look));
    }

    fn new(key: Vec<DeviceId>) -> Result<Team, Error> {
        let mut places: Vec<Place> = Vec::new();
        let mut members = Vec::new();
        let mut controls = Vec::new();
        for (rank, id) in key.iter().enumerate() {
            let gpu = Gpu::of(ordinal(*id))?;
            let place = match places.iter().position(|place| place.gpu.ordinal == gpu.ordinal) {
                Some(place) => place,
                None => {
                    places.push(Place::new(gpu)?);
                    places.len() - 1
                }
            };
            places[place].ranks.push(rank);
            lock(&places[place].queue).calls.push(VecDeque::new());
            let control = Memory::zeroed(&places[place].stream, CONTROL_BYTES)?;
            let status = Status::of::<CudaRuntime>(*id);
            members.push(Seat { status, control: control.address, place });
            controls.push(control);
        }
        let topology = Topology {
            ranks: key.len(),
            gpus: places.len(),
            sharing: places.iter().map(|place| place.ranks.len()).max().unwrap_or(1) as u32,
            multiprocessors: places.iter().map(|place| place.gpu.multiprocessors).min().unwrap_or(1),
        };
        let host = HostWords::zeroed(&places[0].gpu, HOST_WORDS * key.len())?;
        let progress = Progress { called: vec![0; key.len()], ..Progress::default() };
        Ok(Team { key, members, places, topology, host, progress: Mutex::new(progress), _controls: controls })
    }

    /// How a call is done, and its kernel, which is then on this rank's GPU.
    pub fn prepare(&self, rank: usize, call: &Call) -> Result<(Launch, Arc<Module>), Error> {
        let launch = launch(*ROUTE, call, &self.topology)
            .ok_or_else(|| Error::argument(call.operation, format!("no kernel does {call}")))?;
        Ok((launch, self.place(rank).gpu.module(launch.kernel)?))
    }

    /// Gives the rank's next call its number, from 1 on. An error where another rank called something else there.
    pub fn number(&self, rank: usize, call: Call) -> Result<u64, Error> {
        let mut progress = lock(&self.progress);
        if let Some(error) = &progress.failure {
            return Err(error.clone());
        }
        let first = progress.called.iter().min().copied().unwrap_or(0);
        let at = (progress.called[rank] - first) as usize;
        match progress.calls.get(at) {
            Some(other) if *other != call => {
                let called = progress.called.iter().enumerate();
                let others = called.filter(|(_, called)| **called > progress.called[rank]);
                let mut calls: Vec<_> = others.map(|(other_rank, _)| (other_rank, *other)).collect();
                calls.push((rank, call));
                calls.sort_by_key(|(rank, _)| *rank);
                let error = Error::Mismatch { sequence: progress.called[rank], calls };
                self.fail_locked(progress, error.clone());
                return Err(error);
            }
            Some(_) => {}
            None => progress.calls.push_back(call),
        }
        progress.called[rank] += 1;
        let number = progress.called[rank];
        let made_by_all = progress.called.iter().min().copied().unwrap_or(0) - first;
        progress.calls.drain(..made_by_all as usize);
        Ok(number)
    }

    /// Puts a call on the GPU's stream, once all ranks there have. Calls come in the order of their numbers.
    pub fn submit(&self, rank: usize, ready: Ready) -> Result<(), Error> {
        let place = self.place(rank);
        let mut queue = lock(&place.queue);
        let position = place.ranks.iter().position(|other| *other == rank);
        if let Some(calls) = position.and_then(|position| queue.calls.get_mut(position)) {
            calls.push_back(ready);
        }
        // The stream may be full, and this then waits for the GPU. Nothing there waits for a rank that would need the lock.
        while queue.calls.iter().all(|calls| !calls.is_empty()) {
            // Who was in it may have let go of the tensors since.
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let calls: Vec<Ready> = queue.calls.iter_mut().filter_map(VecDeque::pop_front).collect();
            self.launch(place, queue.launched + 1, &calls)?;
            queue.launched += 1;
            place.launched.notify_all();
        }
        Ok(())
    }

    fn launch(&self, place: &Place, number: u64, calls: &[Ready]) -> Result<(), Error> {
        let Ready { call, launch, module, .. } = &calls[0];
        let mut parameters = Parameters {
            patience: nanoseconds(self.patience()),
            ranks: self.members.len() as u64,
            count: call.count as u64,
            ..Parameters::default()
        };
        for (control, seat) in parameters.control.iter_mut().zip(&self.members) {
            *control = seat.control;
        }
        for ((rank, ready), member) in place.ranks.iter().zip(calls).zip(&mut parameters.members) {
            let host = self.host(*rank);
            *member = Member { source: ready.source, target: ready.target, rank: *rank as u64, host };
            place.stream.wait_for(self.ready(*rank), number)?;
        }
        place.stream.launch(module, (calls.len() as u32, launch.blocks), launch.threads, parameters)?;
        place.stream.write(place.done, number)
    }

    /// Waits until this call is on the stream of the rank's GPU.
    pub fn wait_launched(&self, rank: usize, number: u64, deadline: &Deadline) -> Result<(), Error> {
        let place = self.place(rank);
        let mut queue = lock(&place.queue);
        let mut warned = false;
        while queue.launched < number {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let sequence = queue.launched;
            let (call, mut missing) = lock(&self.progress).made(sequence + 1);
            missing.retain(|rank| place.ranks.contains(rank));
            if deadline.passed() {
                drop(queue);
                let (site, elapsed) = (Site { call, sequence }, deadline.elapsed());
                let error = match missing[..] {
                    [] => Error::io(site.to_string(), format!("a device did not launch it within {elapsed:.1?}")),
                    _ => Error::Timeout { site, rank, missing, elapsed },
                };
                self.fail(error.clone());
                return Err(error);
            }
            if !warned && deadline.elapsed() >= deadline.tenth() && !missing.is_empty() {
                log::warn!("{call}: device {rank} still waits for {}", Ranks(&missing));
                warned = true;
            }
            let limit = if warned { deadline.remaining() } else { deadline.tenth().saturating_sub(deadline.elapsed()) };
            let limit = limit.max(Duration::from_millis(1));
            queue = place.launched.wait_timeout(queue, limit).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Where the GPU of this rank says which call is done.
    pub fn done(&self, rank: usize) -> u64 {
        self.place(rank).done
    }

    /// Where the rank's words in host memory are.
    pub fn host(&self, rank: usize) -> u64 {
        self.host.address(HOST_WORDS * rank)
    }

    pub fn ready(&self, rank: usize) -> u64 {
        self.host.address(HOST_WORDS * rank + READY)
    }

    /// How long a kernel waits for a peer: the longest deadline of the devices.
    pub fn patience(&self) -> Duration {
        self.members.iter().map(|seat| seat.status.deadline()).max().unwrap_or_default()
    }

    fn place(&self, rank: usize) -> &Place {
        &self.places[self.members[rank].place]
    }

    pub fn failure(&self) -> Option<Error> {
        lock(&self.progress).failure.clone()
    }

    /// Makes a failure that the GPU has reported for this rank the team's. Whether the team is still to be watched.
    fn look(&self, rank: usize) -> bool {
        let report = Report::of(self.host.load(HOST_WORDS * rank + FAILURE));
        let progress = lock(&self.progress);
        if let (Some(report), None) = (report, &progress.failure) {
            let (call, absent) = progress.made(report.number);
            let site = Site { call, sequence: report.number.saturating_sub(1) };
            self.fail_locked(progress, report.error(site, rank, absent, self.patience()));
            return false;
        }
        progress.failure.is_none()
    }

    /// Ends the team: every device of it is poisoned, and its kernels end.
    pub fn fail(&self, error: Error) {
        self.fail_locked(lock(&self.progress), error);
    }

    fn fail_locked(&self, mut progress: MutexGuard<'_, Progress>, error: Error) {
        if progress.failure.is_some() {
            // The devices may have been cleared since.
            return;
        }
        progress.failure = Some(error.clone());
        (0..self.members.len()).for_each(|rank| self.host.store(HOST_WORDS * rank + ABORT, 1));
        // Devices that were cleared meet anew. As in `Round::fail`, all three change under both locks.
        let slot = lock(&TEAMS).get(&self.key).cloned();
        let mut present = slot.as_ref().map(|slot| lock(slot));
        if let Some(present) = &mut present
            && present.as_ref().is_some_and(|team| std::ptr::eq(&**team, self))
        {
            **present = None;
        }
        for seat in &self.members {
            seat.status.fail(error.clone());
        }
        drop((present, progress));
        for place in &self.places {
            // Taken and given back, so that nobody between its look at the failure and its wait misses this.
            drop(lock(&place.queue));
            place.launched.notify_all();
        }
    }

    /// Waits until no kernel of a team that failed runs any more: before that, the tensors that it was told of must not be
    /// freed.
    pub fn quiesce(&self) -> Result<(), Error> {
        // Who holds the queue may be about to launch.
        let idle = |place: &Place| place.queue.try_lock().is_ok() && place.stream.is_idle();
        let release = || {
            let words = (0..self.members.len()).map(|rank| HOST_WORDS * rank + READY);
            words.for_each(|word| self.host.store(word, RELEASED));
        };
        settle(|| self.places.iter().all(idle), release)
    }
}

impl Progress {
    /// The call with this number, and the ranks that have not made it.
    fn made(&self, number: u64) -> (Call, Vec<usize>) {
        let absent = (0..self.called.len()).filter(|rank| self.called[*rank] < number).collect();
        let first = self.called.iter().min().copied().unwrap_or(0);
        let at = number.checked_sub(first + 1).and_then(|at| self.calls.get(at as usize));
        (at.copied().unwrap_or(NOTHING), absent)
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // Then the control blocks can go. Words stay: kernels on cubecl's streams may still look at them.
        if let Err(error) = self.quiesce() {
            log::warn!("the end of a team of devices: {error}");
        }
    }
}

impl Place {
    fn new(gpu: Arc<Gpu>) -> Result<Place, Error> {
        let stream = Arc::new(Stream::new(&gpu)?);
        let done = word(&stream)?;
        let queue = Mutex::new(Queue { calls: Vec::new(), launched: 0 });
        Ok(Place { gpu, stream, ranks: Vec::new(), done, queue, launched: Condvar::new() })
    }
}

/// Stands for a call that is not known any more.
const NOTHING: Call = Call {
    operation: Operation::AllReduce,
    dtype: crate::dtype::DType::U8,
    count: 0,
    reduction: None,
    root: None,
    sizes: None,
};
