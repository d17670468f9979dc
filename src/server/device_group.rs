//! All-reduces between the devices of one process, through host memory.
//!
//! Each device queues its calls here, in call order, and continues. A call is *matched* once every device has made it.
//! A thread takes all matched calls at once, a *round*, sums the snapshots in the devices' order, and keeps the results
//! until each device has taken them. A round begins when a device waits for calls that are all matched, or when the
//! matched calls have enough bytes.
//!
//! There is no deadlock: among the waiting devices, the one with the fewest calls waits for matched calls only. Timing
//! decides where a round ends, but no element's sum depends on it: the order of addition is always the devices' order.
//!
//! # Why one place for all devices
//! The alternative is a group per device, whose ranks exchange buckets. They would have to agree where a bucket ends,
//! by a function of the sizes. Here the devices meet in shared memory, and no device has to guess what the others have
//! called: 100 gradients take one or two rounds.
//!
//! # Memory
//! A round reads the snapshots in the memory that the runtime mapped, and all devices write from one copy of the
//! result. That memory comes from a pool: page faults on fresh memory cost as much as the sum.

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes as Shared;
use cubecl::bytes::Bytes;
use cubecl::device::DeviceId;

use super::download::PendingRead;
use super::memory::shared;
use super::status::Status;
use crate::pool;
use bonfire_core::error::Site;
use bonfire_core::internal::{DeviceCalls, DeviceWait, Output, lock, reduce_to_all};
use bonfire_core::{Call, Deadline, Error};

/// The input of one device to a call.
pub(super) enum Source {
    /// A snapshot of the device's memory.
    Snapshot(PendingRead),
    /// The result of this device's earlier call with this number, which has not been written to its memory yet.
    Result(u64),
}

/// The devices of one list: their queued calls and the results.
pub(super) struct DeviceGroup {
    key: Key,
    /// The devices, by rank.
    members: Vec<Arc<Status>>,
    state: Mutex<Queues>,
    changed: Condvar,
}

/// A runtime, and sorted devices.
type Key = (TypeId, Vec<DeviceId>);

struct Queues {
    /// The calls after number `done`.
    calls: DeviceCalls,
    ranks: Vec<Queue>,
    /// The number of calls whose results are known.
    done: u64,
    /// The latest results, up to number `done`, from the first that some device has not taken.
    results: VecDeque<Shared>,
}

#[derive(Default)]
struct Queue {
    /// The inputs of the calls that no round has taken.
    sources: VecDeque<Source>,
    /// The number of calls whose results this device waits for.
    awaited: Option<u64>,
    taken: u64,
}

/// Matched calls of this many bytes start a round even if no device waits, so that it overlaps with computation.
const ROUND_BYTES: usize = 25 << 20;

static GROUPS: LazyLock<Mutex<HashMap<Key, Arc<DeviceGroup>>>> = LazyLock::new(Mutex::default);

impl DeviceGroup {
    /// Returns the group of these devices of the runtime `R`. They are sorted and distinct.
    pub fn of<R: 'static>(devices: Vec<DeviceId>) -> Result<Arc<DeviceGroup>, Error> {
        let key = (TypeId::of::<R>(), devices);
        let mut groups = lock(&GROUPS);
        if let Some(group) = groups.get(&key) {
            return Ok(group.clone());
        }
        let members: Vec<_> = key.1.iter().map(|id| Status::of::<R>(*id)).collect();
        let ranks = members.iter().map(|_| Queue::default()).collect();
        let state = Queues { calls: DeviceCalls::of(members.len()), ranks, done: 0, results: VecDeque::new() };
        let group =
            Arc::new(DeviceGroup { key: key.clone(), members, state: Mutex::new(state), changed: Condvar::new() });
        let thread = group.clone();
        std::thread::Builder::new()
            .name("bonfire-devices".into())
            .spawn(move || thread.serve())
            .map_err(|e| Error::io("starting the thread of a group of devices", e))?;
        groups.insert(key, group.clone());
        Ok(group)
    }

    /// Queues a call and returns its number.
    pub fn call(&self, rank: usize, call: Call, source: Source) -> Result<u64, Error> {
        let mut state = lock(&self.state);
        match state.calls.add(rank, call) {
            Ok(number) => {
                state.ranks[rank].sources.push_back(source);
                if state.due() {
                    self.changed.notify_all();
                }
                Ok(number)
            }
            Err(error) => {
                self.fail_locked(state, error.clone());
                Err(error)
            }
        }
    }

    /// Declares that this device now waits for the results of all its calls.
    pub fn declare_wait(&self, rank: usize) {
        let mut state = lock(&self.state);
        state.ranks[rank].awaited = Some(state.calls.made(rank));
        if state.due() {
            self.changed.notify_all();
        }
    }

    /// Waits for the declared results. Returns those that this device has not taken yet, in call order.
    pub fn take(&self, rank: usize, deadline: &Deadline) -> Result<Vec<Shared>, Error> {
        let mut state = lock(&self.state);
        let mut wait = DeviceWait::of(rank, deadline);
        loop {
            if let Some(error) = &state.calls.failure {
                return Err(error.clone());
            }
            let awaited = state.ranks[rank].awaited.unwrap_or(state.done);
            let Some(call) = state.calls.get(state.done + 1).filter(|_| awaited > state.done) else {
                state.ranks[rank].awaited = None;
                return Ok(state.take(rank, awaited));
            };
            let site = Site::new(call, state.done);
            match wait.pause(site, state.calls.missing(awaited), "no device's data arrived") {
                Ok(pause) => state = self.wait(state, Some(pause)),
                Err(error) => {
                    self.fail_locked(state, error.clone());
                    return Err(error);
                }
            }
        }
    }

    /// Ends the group: poisons every device in it, and fails every later call with this error.
    pub fn fail(&self, error: Error) {
        self.fail_locked(lock(&self.state), error);
    }

    fn fail_locked(&self, mut state: MutexGuard<'_, Queues>, error: Error) {
        let error = state.calls.failure.get_or_insert(error).clone();
        state.ranks.iter_mut().for_each(|rank| rank.sources.clear());
        state.results.clear();
        // Devices that were cleared form a new group. A device that sees this group failed, or a new one in its place,
        // is poisoned unless it was cleared since. So all three change under both locks.
        let mut groups = lock(&GROUPS);
        if groups.get(&self.key).is_some_and(|group| std::ptr::eq(&**group, self)) {
            groups.remove(&self.key);
        }
        for member in &self.members {
            member.fail(error.clone());
        }
        drop(groups);
        drop(state);
        self.changed.notify_all();
    }

    /// Whether the group has failed.
    pub fn failed(&self) -> bool {
        lock(&self.state).calls.failure.is_some()
    }

    fn wait<'a>(&self, state: MutexGuard<'a, Queues>, limit: Option<std::time::Duration>) -> MutexGuard<'a, Queues> {
        match limit {
            Some(limit) => self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }

    fn serve(&self) {
        let served = catch_unwind(AssertUnwindSafe(|| {
            let mut state = lock(&self.state);
            while state.calls.failure.is_none() {
                if !state.due() {
                    state = self.wait(state, None);
                    continue;
                }
                let (calls, sources) = state.take_matched();
                let (done, earlier) = (state.done, state.results.clone());
                drop(state);
                let results = self.run(&calls, sources, done, earlier);
                state = lock(&self.state);
                match results {
                    Ok(results) => {
                        state.done += results.len() as u64;
                        let done = state.done;
                        state.calls.forget(done);
                        state.results.extend(results);
                        self.changed.notify_all();
                    }
                    Err(error) => {
                        self.fail_locked(state, error);
                        return;
                    }
                }
            }
        }));
        if served.is_err() {
            self.fail(Error::broken(
                "all_reduce",
                "the thread of this group of devices panicked; see its message above",
            ));
        }
    }

    /// Reduces matched calls, each from one source per rank. `earlier` holds the results up to call number `done`.
    fn run(
        &self,
        calls: &[Call],
        sources: Vec<Vec<Source>>,
        done: u64,
        earlier: VecDeque<Shared>,
    ) -> Result<Vec<Shared>, Error> {
        let begin = Instant::now();
        self.members.iter().for_each(|member| member.count(|counters| counters.rounds += 1));
        let padded = |call: &Call| call.bytes().next_multiple_of(size_of::<u128>());
        let mut memory = pool::bytes("all_reduce", calls.iter().map(padded).sum())?;

        let mut ranks: Vec<_> = sources.into_iter().map(Vec::into_iter).collect();
        let mut rest = &mut memory[..];
        let mut before: Vec<&[u8]> = earlier.iter().map(|result| &result[..]).collect();
        for call in calls {
            let (output, after) = std::mem::take(&mut rest).split_at_mut(padded(call));
            let inputs = ranks.iter_mut().filter_map(Iterator::next).map(|source| match source {
                Source::Snapshot(reading) => arrived(reading, call).map(Input::Own),
                // `before` also gets this round's results, so a call's index is its distance from the oldest.
                Source::Result(number) => {
                    let oldest = done - earlier.len() as u64;
                    let index = number.checked_sub(oldest + 1).and_then(|index| before.get(index as usize).copied());
                    index.map(Input::Result).ok_or_else(|| Error::broken("all_reduce", "an earlier result is gone"))
                }
            });
            let inputs = inputs.collect::<Result<Vec<_>, Error>>()?;
            let (output, _) = output.split_at_mut(call.bytes());
            reduce(call, &inputs, output);
            drop(inputs);
            before.push(output);
            rest = after;
        }
        drop(before);

        let memory = shared(memory);
        let mut at = 0;
        let results = calls.iter().map(|call| {
            let result = memory.slice(at..at + call.bytes());
            at += padded(call);
            result
        });
        let results = results.collect();
        log::trace!("{} all-reduces of {} devices in {:.1?}", calls.len(), self.members.len(), begin.elapsed());
        Ok(results)
    }
}

enum Input<'a> {
    Own(Bytes),
    Result(&'a [u8]),
}

impl Input<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Input::Own(bytes) => bytes,
            Input::Result(bytes) => bytes,
        }
    }
}

/// Waits for a snapshot and checks that it has the length of the call. Copies it if it is not aligned for its type.
fn arrived(reading: PendingRead, call: &Call) -> Result<Bytes, Error> {
    let bytes = reading.wait_one(&call.to_string())?;
    if bytes.len() != call.bytes() {
        return Err(Error::broken(call.to_string(), format!("a device returned {} bytes", bytes.len())));
    }
    let aligned = bytes.as_ptr().align_offset(call.dtype.size()) == 0;
    Ok(if aligned { bytes } else { Bytes::from_elems(bytemuck::pod_collect_to_vec::<u8, u64>(&bytes)) })
}

fn reduce(call: &Call, inputs: &[Input<'_>], output: &mut [u8]) {
    let Some(op) = call.reduction else { return };
    let inputs = inputs.iter().map(|input| input.bytes().as_ptr());
    // SAFETY: every input has at least `call.bytes()` bytes and is aligned for the type: `arrived` checks snapshots,
    // results start at multiples of 16 bytes in memory that is aligned to 16. The output has as many bytes, is aligned
    // alike and is borrowed mutably.
    unsafe {
        let output = Output::of(output.as_mut_ptr(), call.bytes(), true);
        reduce_to_all(call.dtype, op, call.count, inputs, std::iter::once(output));
    }
}

impl Queues {
    /// The matched calls that no round has taken.
    fn queued(&self) -> impl Iterator<Item = Call> {
        let sources = self.ranks.iter().map(|rank| rank.sources.len()).min().unwrap_or(0) as u64;
        let matched = self.calls.matched();
        (matched - sources + 1..=matched).filter_map(|number| self.calls.get(number))
    }

    /// Whether a round should begin.
    fn due(&self) -> bool {
        let matched = self.calls.matched();
        let awaited = |rank: &Queue| rank.awaited.is_some_and(|awaited| self.done < awaited && awaited <= matched);
        let bytes = || self.queued().map(|call| call.bytes()).sum::<usize>();
        self.queued().next().is_some() && (self.ranks.iter().any(awaited) || bytes() >= ROUND_BYTES)
    }

    /// Takes the matched calls, and their sources by rank.
    fn take_matched(&mut self) -> (Vec<Call>, Vec<Vec<Source>>) {
        let calls: Vec<_> = self.queued().collect();
        let sources = self.ranks.iter_mut().map(|rank| rank.sources.drain(..calls.len()).collect()).collect();
        (calls, sources)
    }

    /// Takes this device's results up to number `until`, and drops those that all devices have taken.
    fn take(&mut self, rank: usize, until: u64) -> Vec<Shared> {
        let oldest = self.done - self.results.len() as u64;
        let range = (self.ranks[rank].taken - oldest) as usize..(until - oldest) as usize;
        let results = self.results.range(range).cloned().collect();
        self.ranks[rank].taken = until;
        let taken = self.ranks.iter().map(|rank| rank.taken).min().unwrap_or(until);
        self.results.drain(..(taken - oldest) as usize);
        results
    }
}
