//! The devices of one list, served by kernels, or one rank's device, served by kernels through windows or by NCCL.
//!
//! A team has its own stream on each GPU. The calls of its ranks are put on it in call order, once for all ranks on
//! that GPU: the stream waits until each rank's tensors are ready, one kernel works for all of them, and then a word
//! signals that the call is done. So no kernel waits for one that is yet to be launched on its own GPU, and work on a
//! GPU waits only for work that was enqueued before it. Kernels on different GPUs do wait for each other, with a
//! timeout.
//!
//! # Progress on one GPU
//! By induction over all that is enqueued: our stream waits for a `READY` word, whose kernel is on a stream of tensors
//! already; an `await_done` kernel is launched only after its call was; an event of the tensors' library comes after
//! the work that it waits for. So neither a single hardware queue for everything nor a module load that waits for the
//! whole context can stop one GPU. Device threads wait for each other in one place: `Engine::sync` waits until the
//! other ranks *on its GPU* have called, and never waits if each rank has a GPU.
//!
//! # Limits
//! With several ranks on each of several GPUs, streams that share a hardware queue may hold each other up through what
//! another GPU waits for, until the deadline. On software GPUs this happened with four ranks on two GPUs, eight teams
//! and 32 queues, and not with 512 queues.
//!
//! Some functions of the driver wait for all GPUs: those that free host memory or NCCL's, and perhaps those that
//! allocate it (NVIDIA/nccl#48). If one is called when a call is launched on one of two GPUs only, it waits for a
//! kernel there, and the launch on the other GPU may wait for it, until the deadline. A group launches on all GPUs
//! within microseconds, and our own host memory is allocated for 512 ranks at a time (`memory`). An all-reduce of
//! `Engine` launches on a GPU when that GPU's rank calls, so no program may call such a function between the calls of
//! two ranks.
//!
//! # Other processes
//! If kernels serve ranks of several processes, each rank has a team of its own, which launches for that rank alone.
//! Its kernels find the peers' data in their windows, so nothing of their calls needs to be known here. A call may take
//! several rounds, each of which is a call to the team, with a number of its own.
//!
//! The argument above holds for each GPU and process. Kernels of several processes on one GPU do not block each other:
//! each process has its own hardware queues, and the GPU divides its time among processes whose kernels do not run side
//! by side. A group's own calls are in one order in all processes, by kernels or by NCCL, because its ranks have agreed
//! on each before they launch it. Those of several groups get one order in [`launches`](super::launches).
//!
//! # NCCL
//! A team that NCCL serves is one rank. The same words order its stream; the communicator takes the kernel's place
//! between them, and its abort that of the abort words. A call's memory is kept until the call is done on the rank's
//! GPU, after a failure until the team is dropped.

mod gpu;
mod group;
mod launch;
mod registry;
mod wait;

use std::any::TypeId;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) use self::gpu::Prepared;
use self::gpu::{LoadedChoice, QueuedCall, TeamGpu};
pub(crate) use self::group::GroupTeam;
use self::launch::Controls;
pub(crate) use self::registry::{fail, kernels_supported};
use super::address::Word;
use super::backoff::wait_idle;
use super::choice::{Choice, Topology, settings};
use super::control::{ABORT, CONTROL_BYTES, DONE, FAILURE, HOST_WORDS, READY, RELEASED, Report};
use super::driver::Gpu;
use super::launches::{self, Launches};
use super::memory::{HostWords, Memory};
use super::order::End;
use super::reach::link;
use super::remote::Remote;
use super::runtime::{DeviceId, Look, Runtime, Status};
use bonfire_core::error::Site;
use bonfire_core::internal::{DeviceCalls, DeviceWait, lock};
use bonfire_core::{Call, DType, Deadline, Error, Operation};

pub(crate) struct Team {
    key: registry::Key,
    local_ranks: Vec<LocalRank>,
    team_gpus: Vec<TeamGpu>,
    host: HostWords,
    calls: Mutex<DeviceCalls>,
    backend: Backend,
    group: Option<GroupTeam>,
}

/// A rank whose device belongs to this process.
struct LocalRank {
    rank: usize,
    status: Arc<dyn Status>,
    /// Index of its GPU in `team_gpus`.
    team_gpu: usize,
}

/// What executes the ranks' calls.
enum Backend {
    Kernels(Topology, Controls),
    /// One rank is local.
    Nccl(Box<dyn Remote>),
}

impl Team {
    /// Creates this rank's part of a group that NCCL serves.
    pub fn of_remote<R: Runtime>(
        device: DeviceId,
        rank: usize,
        remote: Box<dyn Remote>,
        group: GroupTeam,
    ) -> Result<Team, Error> {
        let team_gpu = TeamGpu::new(Gpu::of(device.ordinal())?, true)?;
        Team::assemble::<R>(vec![device], vec![rank], vec![team_gpu], vec![0], Backend::Nccl(remote), Some(group))
    }

    /// Records that the group has failed: calls in flight may wait for ranks that never call.
    pub fn mark_group_failed(&self) {
        if let Some(group_team) = &self.group {
            group_team.group_failed.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the failure check of this rank's device include its GPU's reports.
    pub fn register_check(self: &Arc<Self>, local: usize) {
        let team = Arc::downgrade(self);
        let check_report = move |look| match team.upgrade() {
            Some(team) => team.check_report(local, look),
            None => false,
        };
        self.local_ranks[local].status.add_check(Arc::new(check_report));
    }

    fn new<R: Runtime>(devices: Vec<DeviceId>, group: Option<GroupTeam>) -> Result<Team, Error> {
        let (mut team_gpus, mut gpu_indices): (Vec<TeamGpu>, _) = (Vec::new(), Vec::new());
        let mut controls = Vec::new();
        for id in &devices {
            let gpu = Gpu::of(id.ordinal())?;
            let team_gpu = match team_gpus.iter().position(|team_gpu| team_gpu.gpu.ordinal == gpu.ordinal) {
                Some(team_gpu) => team_gpu,
                None => {
                    team_gpus.push(TeamGpu::new(gpu, group.is_some())?);
                    team_gpus.len() - 1
                }
            };
            controls.push(Memory::zeroed(&team_gpus[team_gpu].stream, CONTROL_BYTES)?);
            gpu_indices.push(team_gpu);
        }
        let on = |team_gpu| gpu_indices.iter().filter(|other| **other == team_gpu).count() as u32;
        let gpus: Vec<&Gpu> = team_gpus.iter().map(|team_gpu| &*team_gpu.gpu).collect();
        let topology = Topology {
            ranks: devices.len(),
            gpus: gpus.len(),
            link: link(&gpus),
            sharing: (0..team_gpus.len()).map(on).max().unwrap_or(1),
            multiprocessors: gpus.iter().map(|gpu| gpu.multiprocessors).min().unwrap_or(1),
            share: settings()?.share,
        };
        let ranks = (0..devices.len()).collect();
        let backend = Backend::Kernels(topology, Controls::Own(controls));
        Team::assemble::<R>(devices, ranks, team_gpus, gpu_indices, backend, group)
    }

    /// `gpu_indices` holds, for each local rank, the index of its GPU.
    fn assemble<R: Runtime>(
        devices: Vec<DeviceId>,
        ranks: Vec<usize>,
        mut team_gpus: Vec<TeamGpu>,
        gpu_indices: Vec<usize>,
        backend: Backend,
        group: Option<GroupTeam>,
    ) -> Result<Team, Error> {
        let host = HostWords::zeroed(&team_gpus[0].gpu, HOST_WORDS * devices.len())?;
        let mut local_ranks = Vec::new();
        for (local, (rank, team_gpu)) in ranks.into_iter().zip(gpu_indices).enumerate() {
            team_gpus[team_gpu].local_ranks.push(local);
            lock(&team_gpus[team_gpu].queue).calls.push(VecDeque::new());
            local_ranks.push(LocalRank { rank, status: R::status(devices[local]), team_gpu });
        }
        let calls = Mutex::new(DeviceCalls::of(devices.len()));
        let key = (TypeId::of::<R>(), devices);
        Ok(Team { key, local_ranks, team_gpus, host, calls, backend, group })
    }

    /// How the ranks are distributed over GPUs, if kernels serve them.
    pub fn topology(&self) -> Option<&Topology> {
        match &self.backend {
            Backend::Kernels(topology, _) => Some(topology),
            Backend::Nccl(_) => None,
        }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        match &self.backend {
            Backend::Kernels(topology, _) => topology.ranks,
            Backend::Nccl(remote) => remote.ranks(),
        }
    }

    /// Prepares a choice to run: its kernel is then loaded on the rank's GPU.
    pub fn prepare(&self, local: usize, choice: Choice) -> Result<LoadedChoice, Error> {
        self.team_gpu(local).load(choice)
    }

    /// Numbers the rank's next call, starting at 1. Fails if another rank made a different call under that number.
    pub fn next_number(&self, local: usize, call: Call) -> Result<u64, Error> {
        let mut calls = lock(&self.calls);
        let number = calls.add(local, call);
        match &number {
            Ok(_) => {
                let matched = calls.matched();
                calls.forget(matched);
            }
            Err(error) => self.fail_locked(calls, error.clone()),
        }
        number
    }

    /// Enqueues a call on the GPU's stream once all ranks there have submitted it. DeviceCalls arrive in number order.
    pub fn submit(&self, local: usize, site: Site, deadline: Deadline, ready: Prepared) -> Result<(), Error> {
        let launches = self.group.as_ref().and_then(|group_team| group_team.launches.as_ref());
        launches.map_or(Ok(()), |launches| launches.append(site.sequence))?;
        let team_gpu = self.team_gpu(local);
        let mut queue = lock(&team_gpu.queue);
        let position = team_gpu.local_ranks.iter().position(|other| *other == local);
        if let Some(calls) = position.and_then(|position| queue.calls.get_mut(position)) {
            calls.push_back(QueuedCall { site, deadline, ready });
        }
        // If the stream is full, this waits for the GPU. Nothing on the GPU waits for a rank that needs this lock.
        while queue.calls.iter().all(|calls| !calls.is_empty()) {
            // After a failure the callers may have released the tensors already.
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let calls: Vec<QueuedCall> = queue.calls.iter_mut().filter_map(VecDeque::pop_front).collect();
            let turn = |launches: &Arc<Launches>| {
                launches.turn(team_gpu.gpu.ordinal, calls[0].site.sequence, &calls[0].deadline)
            };
            let _turn = launches.map(turn).transpose()?;
            let launched = self.launch(team_gpu, queue.launched + 1, &calls).map_err(|error| {
                // After a fault every call on the GPU fails, whatever it asks for.
                self.gpu_fault(site, deadline.elapsed()).unwrap_or(error)
            });
            // Kept even if the launch failed half-way: work on the stream may use it.
            let kept = calls.into_iter().map(|call| call.ready.layout.kept);
            self.keep_until_done(self.local_ranks[local].team_gpu, queue.launched + 1, kept);
            launched?;
            self.release_done();
            queue.launched += 1;
            team_gpu.launched.notify_all();
        }
        Ok(())
    }

    /// The host word that holds the number of a group's last call that is done.
    fn host_done_word(&self, team_gpu: &TeamGpu) -> Word {
        self.host.word(HOST_WORDS * team_gpu.local_ranks[0] + DONE)
    }

    /// Waits until this call is on the stream of the rank's GPU.
    pub fn wait_launched(&self, local: usize, number: u64, deadline: &Deadline) -> Result<(), Error> {
        let (team_gpu, rank) = (self.team_gpu(local), self.local_ranks[local].rank);
        let mut queue = lock(&team_gpu.queue);
        let mut wait = DeviceWait::of(rank, deadline);
        while queue.launched < number {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let (site, mut missing) = call_and_missing(&lock(&self.calls), queue.launched + 1);
            missing.retain(|local| team_gpu.local_ranks.contains(local));
            let pause = match wait.pause(site, missing, "a device did not launch it") {
                Ok(pause) => pause,
                Err(error) => {
                    drop(queue);
                    self.fail(error.clone());
                    return Err(error);
                }
            };
            queue = team_gpu.launched.wait_timeout(queue, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Returns the end of a group's call that is on the stream of the rank's GPU. `limit` is how long its kernels wait.
    pub fn end(&self, local: usize, number: u64, limit: Duration) -> End {
        let (host, done) = (self.host.clone(), HOST_WORDS * self.team_gpu(local).local_ranks[0] + DONE);
        End {
            word: self.done_word(local),
            host: self.host_words(local),
            value: number,
            limit,
            passed: Box::new(move || host.load(done) >= number),
        }
    }

    /// The word that holds the number of the last call that is done on this rank's GPU.
    pub fn done_word(&self, local: usize) -> Word {
        let team_gpu = self.team_gpu(local);
        team_gpu.done.unwrap_or_else(|| self.host_done_word(team_gpu))
    }

    /// The first of the rank's words in host memory.
    pub fn host_words(&self, local: usize) -> Word {
        self.host.word(HOST_WORDS * local)
    }

    pub fn ready_word(&self, local: usize) -> Word {
        self.host.word(HOST_WORDS * local + READY)
    }

    /// How long a kernel waits for a peer: the longest deadline of the devices.
    pub fn timeout(&self) -> Duration {
        self.local_ranks.iter().map(|local| local.status.deadline()).max().unwrap_or_default()
    }

    fn team_gpu(&self, local: usize) -> &TeamGpu {
        &self.team_gpus[self.local_ranks[local].team_gpu]
    }

    pub fn failure(&self) -> Option<Error> {
        lock(&self.calls).failure.clone()
    }

    /// Turns a failure that the GPU reported for this rank, or a fault of a GPU that it waits for, into the team's
    /// failure. Returns whether to keep checking.
    fn check_report(&self, local: usize, look: Look) -> bool {
        let report = Report::of(self.host.load(HOST_WORDS * local + FAILURE));
        // Not under the lock: the driver may block while a stream is full, and the ranks that drain it need the lock.
        // A device with nothing in flight does not depend on the other GPUs.
        let is_idle = || matches!(self.team_gpu(local).stream.is_idle(), Ok(true));
        let fault = match self.failure() {
            None if look == Look::Faults && !is_idle() => self.gpu_fault(Operation::AllReduce, Duration::ZERO),
            _ => None,
        };
        let calls = lock(&self.calls);
        if let (Some(error), None) = (fault, &calls.failure) {
            self.fail_locked(calls, error);
            return false;
        }
        if let (Some(report), None) = (report, &calls.failure) {
            let (site, absent) = call_and_missing(&calls, report.number);
            let rank = self.local_ranks[local].rank;
            self.fail_locked(calls, report.error(site, rank, absent, self.timeout()));
            return false;
        }
        calls.failure.is_none()
    }

    /// Fails the team: its kernels end, and every device is poisoned, unless the team works for a group.
    pub fn fail(&self, error: Error) {
        self.fail_locked(lock(&self.calls), error);
    }

    fn fail_locked(&self, mut calls: MutexGuard<'_, DeviceCalls>, error: Error) {
        if calls.failure.is_some() {
            // The devices may have been cleared since.
            return;
        }
        self.record_completed();
        calls.failure = Some(error.clone());
        (0..self.local_ranks.len()).for_each(|local| self.host.store(HOST_WORDS * local + ABORT, 1));
        // A group's failure does not poison the devices.
        if self.group.is_none() {
            // Devices that were cleared form a new team. As in `DeviceGroup::fail`, all three change under both locks.
            let slot = registry::slot(&self.key);
            let mut present = lock(&slot);
            if present.as_ref().is_some_and(|team| std::ptr::eq(&**team, self)) {
                *present = None;
            }
            self.local_ranks.iter().for_each(|local| local.status.fail(error.clone()));
        }
        drop(calls);
        if let Some(launches) = self.group.as_ref().and_then(|group_team| group_team.launches.as_ref()) {
            // Before the queues are locked: a thread may be waiting for its turn there.
            launches.fail(&error);
        }
        launches::wake();
        match &self.backend {
            Backend::Kernels(..) => {
                for team_gpu in &self.team_gpus {
                    // Locked once, so that no thread between its failure check and its wait misses the notification.
                    drop(lock(&team_gpu.queue));
                    team_gpu.launched.notify_all();
                }
            }
            // Only once the failure is set: the stream continues after the abort.
            Backend::Nccl(remote) => {
                self.end_kernels(&error);
                remote.abort();
            }
        }
    }

    /// Waits until no kernel of a failed team runs any more. Before that, its tensors must not be freed.
    ///
    /// # Errors
    /// If one still runs, or after a fault: the driver frees nothing on that GPU any more, and does not say when the
    /// last write to another GPU's memory has arrived. The tensors must then never be freed.
    pub fn quiesce(&self) -> Result<(), Error> {
        let release = || {
            let words = (0..self.local_ranks.len()).map(|local| HOST_WORDS * local + READY);
            words.for_each(|word| self.host.store(word, RELEASED));
        };
        wait_idle(|| self.is_idle(), release)?;
        self.gpu_fault("waiting for failed work on the GPU", Duration::ZERO).map_or(Ok(()), Err)
    }

    /// Whether no work is in flight on any of the team's GPUs. A fault has ended the work on its GPU.
    fn is_idle(&self) -> bool {
        // A thread that holds the queue may be about to launch.
        let idle = |team_gpu: &TeamGpu| team_gpu.queue.try_lock().is_ok() && team_gpu.stream.is_idle().unwrap_or(true);
        self.team_gpus.iter().all(idle)
    }
}

/// The call with this number, and the local ranks that have not made it.
fn call_and_missing(calls: &DeviceCalls, number: u64) -> (Site, Vec<usize>) {
    /// Stands in for a call that is no longer known.
    const NOTHING: Call = Call::new(Operation::AllReduce, DType::U8, 0);
    let call = calls.get(number).unwrap_or(NOTHING);
    (Site::new(call, number.saturating_sub(1)), calls.missing(number))
}

impl Drop for Team {
    fn drop(&mut self) {
        self.drain();
        // Then control blocks and tensors can be freed, and windows left. The words stay: kernels on tensors' streams
        // may read them.
        if let Err(error) = self.quiesce() {
            log::warn!("dropping a team of devices: {error}");
            if let Backend::Kernels(_, controls) = &mut self.backend {
                std::mem::forget(std::mem::replace(controls, Controls::Own(Vec::new())));
            }
            if let Some(group_team) = &self.group {
                std::mem::forget(std::mem::take(&mut *lock(&group_team.kept)));
            }
        }
    }
}
