//! One order of launches on each GPU, for the calls of all groups.
//!
//! The kernels of a call wait for each other on different GPUs. If call A is launched before call B on one GPU and
//! after it on another, and their streams share a hardware queue or their blocks do not fit side by side, then A waits
//! for B and B for A, until the deadline. A group orders its own calls, but each rank launches on a thread of its own,
//! so nothing orders those of two groups.
//!
//! So each call gets a time once its ranks have agreed on it, the same on all its GPUs, and each GPU launches calls in
//! the order of their times. Where two are equal, the number of the group decides.
//!
//! A process counts times with a clock. If all ranks of a group are in this process, the first that is about to launch
//! a call takes the next time and appends the call to the queues of all its GPUs, in one step. Ranks in several
//! processes each propose a time and exchange these; the latest is the call's. This is the total order multicast of
//! Skeen (in Birman and Joseph, "Reliable Communication in the Presence of Failures", ACM TOCS 5(1), 1987). From the
//! proposal on, the call is in the queue of its GPU, at the proposed time, and nothing later is launched before its
//! time is settled, which is never earlier than proposed.
//!
//! # Progress
//! A call's ranks have agreed on it before the first of them comes here, and neither the exchange nor a launch waits
//! for what a program does. So all times are settled, the call with the earliest one comes first in all its queues and
//! is launched on all its GPUs, and by induction every other call. If a rank fails instead, its group's calls leave the
//! queues when that is noticed. Until then the calls of other groups would wait for one that never comes, so they wait
//! for [`TIMEOUT`] at most.
//!
//! # Limits
//! Messages that NCCL carries have no place in the order: only two ranks know of one, and around a ring of exchanges a
//! common time would take as many exchanges as there are ranks. Nor do all-reduces of `Engine`, whose ranks agree on
//! nothing before they launch.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use super::shared::Shared;
use bonfire_core::internal::lock;
use bonfire_core::{Deadline, Error};

/// How long a call waits for those before it. Launching takes microseconds, unless NCCL connects ranks.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A call's place in the queue of a GPU. Places are ordered by time, and then by group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    time: u64,
    group: u64,
    /// Of a group within this process, the call's sequence number; of another one, the rank: two of its ranks may be on
    /// one GPU.
    call: u64,
    settled: bool,
}

#[derive(Default)]
struct Queues {
    /// The latest time that a call of this process has proposed or got.
    clock: u64,
    /// The calls that are yet to be launched, by GPU.
    gpus: HashMap<usize, BTreeSet<Place>>,
}

static QUEUES: LazyLock<Mutex<Queues>> = LazyLock::new(Mutex::default);
/// Signalled when a call leaves a queue, or is settled.
static CHANGED: Condvar = Condvar::new();
/// The groups of this process, by number.
static GROUPS: Shared<Launches> = Shared::new();

/// Waits until the first call in the queue of this GPU is the wanted one, but not beyond the call's deadline. An error
/// is what `failure` returns.
fn wait_until_first(
    gpu: usize,
    wanted: impl Fn(&Place) -> bool,
    deadline: &Deadline,
    failure: impl Fn() -> Option<Error>,
) -> Result<(), Error> {
    let limit = TIMEOUT.min(deadline.remaining());
    let patience = Deadline::after(limit);
    let mut queues = lock(&QUEUES);
    loop {
        if let Some(error) = failure() {
            return Err(error);
        }
        if queues.gpus.get(&gpu).and_then(BTreeSet::first).is_none_or(&wanted) {
            return Ok(());
        }
        if patience.passed() {
            log::warn!("GPU {gpu}: a call of another group has not been launched for {limit:.0?}; not waiting");
            return Ok(());
        }
        queues = CHANGED.wait_timeout(queues, patience.remaining()).unwrap_or_else(PoisonError::into_inner).0;
    }
}

impl Queues {
    fn remove(&mut self, gpu: usize, unwanted: impl Fn(&Place) -> bool) {
        if let Some(queue) = self.gpus.get_mut(&gpu) {
            queue.retain(|place| !unwanted(place));
        }
        CHANGED.notify_all();
    }
}

/// Makes the calls that wait for their turn look whether their teams have failed.
pub(crate) fn wake() {
    // Locked once, so that no thread between its look and its wait misses the notification.
    drop(lock(&QUEUES));
    CHANGED.notify_all();
}

/// The launches of a group within this process, shared by its ranks.
pub(crate) struct Launches {
    group: u64,
    gpus: Vec<usize>,
    /// Locked after `QUEUES`.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The sequence number after that of the last call that was appended.
    next: u64,
    failure: Option<Error>,
}

impl Launches {
    /// Returns the launches of the group with this number, whose ranks use these GPUs.
    pub fn of_group(group: u64, mut gpus: Vec<usize>) -> Result<Arc<Launches>, Error> {
        gpus.sort_unstable();
        gpus.dedup();
        GROUPS.of(group, || Ok(Launches { group, gpus, state: Mutex::default() }))
    }

    /// Appends a call to the queues of its GPUs, unless another rank has. Ranks come in the order of their calls.
    ///
    /// # Errors
    /// The failure that ended the group's launches.
    pub fn append(&self, sequence: u64) -> Result<(), Error> {
        let mut queues = lock(&QUEUES);
        let mut state = lock(&self.state);
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        if sequence >= state.next {
            state.next = sequence + 1;
            queues.clock = queues.clock.saturating_add(1);
            let place = Place { time: queues.clock, group: self.group, call: sequence, settled: true };
            for gpu in &self.gpus {
                queues.gpus.entry(*gpu).or_default().insert(place);
            }
        }
        Ok(())
    }

    /// Waits until an appended call is the next on this GPU. It must then be launched while the result lives.
    ///
    /// # Errors
    /// As `append`.
    pub fn turn(&self, gpu: usize, sequence: u64, deadline: &Deadline) -> Result<Turn, Error> {
        let turn = Turn { gpu, group: self.group, sequence };
        wait_until_first(gpu, |place| turn.has(place), deadline, || lock(&self.state).failure.clone())?;
        Ok(turn)
    }

    /// Ends the group's launches, after a failure. The first one is kept.
    pub fn fail(&self, error: &Error) {
        let mut queues = lock(&QUEUES);
        lock(&self.state).failure.get_or_insert_with(|| error.clone());
        self.leave(&mut queues);
    }

    fn leave(&self, queues: &mut Queues) {
        self.gpus.iter().for_each(|gpu| queues.remove(*gpu, |place| place.group == self.group));
    }
}

impl Drop for Launches {
    fn drop(&mut self) {
        self.leave(&mut lock(&QUEUES));
    }
}

/// A call's turn on a GPU, which ends when this is dropped.
pub(crate) struct Turn {
    gpu: usize,
    group: u64,
    sequence: u64,
}

impl Turn {
    fn has(&self, place: &Place) -> bool {
        (place.group, place.call) == (self.group, self.sequence)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&QUEUES).remove(self.gpu, |place| self.has(place));
    }
}

/// A call on the GPU of one rank of a group in several processes. It leaves the queue when this is dropped.
pub(crate) struct Ticket {
    gpu: usize,
    group: u64,
    rank: u64,
    place: Mutex<Option<Place>>,
}

impl Ticket {
    pub fn new(gpu: usize, group: u64, rank: usize) -> Ticket {
        Ticket { gpu, group, rank: rank as u64, place: Mutex::default() }
    }

    /// Proposes a time, once all ranks have called it.
    pub fn propose(&self) -> u64 {
        self.put(|clock| clock.saturating_add(1), false)
    }

    /// Settles the call's time, the latest that any rank has proposed, and waits until the call is the next on the GPU.
    /// It must be launched while this lives.
    ///
    /// # Errors
    /// What `failure` returns: whether the call's team has failed. It looks again after [`wake`].
    pub fn turn(&self, time: u64, deadline: &Deadline, failure: impl Fn() -> Option<Error>) -> Result<(), Error> {
        self.put(|_| time, true);
        let place = *lock(&self.place);
        wait_until_first(self.gpu, |first| Some(*first) == place, deadline, failure)
    }

    fn put(&self, time: impl Fn(u64) -> u64, settled: bool) -> u64 {
        let mut queues = lock(&QUEUES);
        let time = time(queues.clock);
        queues.clock = queues.clock.max(time);
        let place = Place { time, group: self.group, call: self.rank, settled };
        let proposed = lock(&self.place).replace(place);
        queues.remove(self.gpu, |place| Some(*place) == proposed);
        queues.gpus.entry(self.gpu).or_default().insert(place);
        time
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let place = *lock(&self.place);
        lock(&QUEUES).remove(self.gpu, |other| Some(*other) == place);
    }
}

#[cfg(test)]
mod tests;
