//! One order of launches on the GPUs of this process, for the calls of all its groups.
//!
//! The kernels of a call wait for each other on different GPUs. If call A is launched before call B on one GPU and
//! after it on another, and their streams share a hardware queue or their blocks do not fit side by side, then A waits
//! for B and B for A, until the deadline. A group orders its own calls, but each rank launches on a thread of its own,
//! so nothing orders those of two groups.
//!
//! The first rank that is about to launch a call appends it to the queues of all its GPUs, in one step. So any two
//! calls are in the same order in all queues that they share. A GPU launches the call at the front of its queue.
//!
//! # Progress
//! A call's ranks have agreed on it before the first of them comes here, and each comes without waiting for another
//! group. So the call that was appended first, which is at the front of all its queues, is launched on all its GPUs,
//! and by induction every other call. If a rank fails instead, its group's calls leave the queues when that is noticed.
//! Until then the calls of other groups would wait for one that never comes, so they wait for [`PATIENCE`] at most.
//!
//! # Limits
//! Only groups whose ranks are all in this process take part: the queues of two processes could differ, and NCCL, which
//! waits for all ranks before its first call is on the stream, would then wait for a call that is behind another one.
//! Nor do cubecl's own all-reduces, whose ranks agree on nothing before they launch.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use super::shared::Shared;
use bonfire_core::internal::lock;
use bonfire_core::{Deadline, Error};

/// How long a call waits for those before it. Launching takes microseconds, unless NCCL connects ranks.
const PATIENCE: Duration = Duration::from_secs(10);

/// A call: the number of its group, and its sequence number there.
type Ticket = (u64, u64);

/// The calls that are yet to be launched, by GPU.
static QUEUES: LazyLock<Mutex<HashMap<usize, VecDeque<Ticket>>>> = LazyLock::new(Mutex::default);
/// Signalled when a call leaves a queue.
static LEFT: Condvar = Condvar::new();
/// The groups of this process, by number.
static GROUPS: Shared<Launches> = Shared::new();

/// The launches of one group, shared by its ranks.
pub(super) struct Launches {
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
            for gpu in &self.gpus {
                queues.entry(*gpu).or_default().push_back((self.group, sequence));
            }
        }
        Ok(())
    }

    /// Waits until an appended call is the next on this GPU. It must then be launched while the result lives.
    ///
    /// # Errors
    /// As `append`.
    pub fn turn(&self, gpu: usize, sequence: u64) -> Result<Turn, Error> {
        let turn = Turn { gpu, ticket: (self.group, sequence) };
        let patience = Deadline::after(PATIENCE);
        let mut queues = lock(&QUEUES);
        loop {
            if let Some(error) = &lock(&self.state).failure {
                return Err(error.clone());
            }
            if queues.get(&gpu).is_none_or(|queue| queue.front() == Some(&turn.ticket)) {
                return Ok(turn);
            }
            if patience.passed() {
                log::warn!("GPU {gpu}: a call of another group has not been launched for {PATIENCE:.0?}; not waiting");
                return Ok(turn);
            }
            queues = LEFT.wait_timeout(queues, patience.remaining()).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the group's launches, after a failure. The first one is kept.
    pub fn fail(&self, error: &Error) {
        let mut queues = lock(&QUEUES);
        lock(&self.state).failure.get_or_insert_with(|| error.clone());
        self.leave(&mut queues);
    }

    fn leave(&self, queues: &mut HashMap<usize, VecDeque<Ticket>>) {
        queues.values_mut().for_each(|queue| queue.retain(|(group, _)| *group != self.group));
        LEFT.notify_all();
    }
}

impl Drop for Launches {
    fn drop(&mut self) {
        self.leave(&mut lock(&QUEUES));
    }
}

/// A call's turn on a GPU, which ends when this is dropped.
pub(super) struct Turn {
    gpu: usize,
    ticket: Ticket,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(queue) = lock(&QUEUES).get_mut(&self.gpu) {
            queue.retain(|ticket| *ticket != self.ticket);
        }
        LEFT.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// GPUs that no other test and no device uses.
    const GPUS: [usize; 2] = [1000, 1001];

    #[test]
    fn two_groups_launch_in_one_order_on_all_gpus() {
        const CALLS: u64 = 2000;
        let launched = GPUS.map(|_| Mutex::new(Vec::new()));
        let groups = [1, 2].map(|group| Launches::of_group(group, GPUS.to_vec()).unwrap());
        thread::scope(|scope| {
            for (group, i) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let (launches, gpu, launched) = (&groups[group], GPUS[i], &launched[i]);
                scope.spawn(move || {
                    for sequence in 0..CALLS {
                        launches.append(sequence).unwrap();
                        let _turn = launches.turn(gpu, sequence).unwrap();
                        lock(launched).push((group, sequence));
                    }
                });
            }
        });
        let [first, second] = launched.map(|launched| lock(&launched).clone());
        assert_eq!(first.len(), 2 * CALLS as usize);
        assert_eq!(first, second);
    }

    #[test]
    fn a_call_that_never_comes_leaves_when_its_group_fails_or_ends() {
        for fails in [true, false] {
            let [absent, other] = [3, 4].map(|group| Launches::of_group(group, GPUS.to_vec()).unwrap());
            absent.append(0).unwrap();
            other.append(0).unwrap();
            thread::scope(|scope| {
                let launched = scope.spawn(|| other.turn(GPUS[0], 0).map(drop));
                let error = Error::broken("test", "on purpose");
                if fails {
                    absent.fail(&error);
                    assert_eq!(absent.append(1), Err(error));
                } else {
                    drop(absent);
                }
                assert_eq!(launched.join().unwrap(), Ok(()));
            });
        }
    }
}
