//! All-reduces between the devices of one process.
//!
//! Each device leaves its calls here, in their order, and goes on. A call is *matched* once every device has left its
//! own; a thread takes all matched calls at a time, a *round*, adds up the snapshots in the devices' order, and keeps
//! the results until each device has taken them. A round begins where a device waits for calls that are all matched, or
//! where enough bytes are.
//!
//! Nobody can wait in vain: of the devices that wait, the one with the fewest calls waits for matched ones only. Where a
//! round ends depends on time, but no element's sum does: the order of addition is the devices' order everywhere.

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes as Shared;
use cubecl::bytes::Bytes;
use cubecl::device::DeviceId;

use super::meeting::{Calls, Wait};
use super::memory::shared;
use super::reading::Reading;
use super::status::Status;
use crate::pool;
use bonfire_core::error::Site;
use bonfire_core::internal::{Output, lock, reduce_to_all};
use bonfire_core::{Call, Deadline, Error};

/// Where the data of a call comes from.
pub(super) enum Source {
    /// A snapshot of the device's memory.
    Snapshot(Reading),
    /// The result of an earlier call of this device, which has not been written to its memory yet.
    Result(u64),
}

/// The place where the devices of one list meet.
pub(super) struct Round {
    key: Key,
    /// The devices, by rank.
    members: Vec<Arc<Status>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A runtime, and devices in order.
type Key = (TypeId, Vec<DeviceId>);

struct State {
    /// Those that are not done, and all that follow.
    calls: Calls,
    ranks: Vec<Rank>,
    /// Calls whose results are known.
    done: u64,
    /// The latest results: those that some device has not taken.
    results: VecDeque<Shared>,
}

#[derive(Default)]
struct Rank {
    /// Of the calls that no round has taken.
    sources: VecDeque<Source>,
    /// The number of calls whose results this device waits for.
    awaited: Option<u64>,
    taken: u64,
}

/// Matched calls of this size are a round even if nobody waits, so that it runs beside the devices' computation.
const ENOUGH: usize = 25 << 20;

static ROUNDS: LazyLock<Mutex<HashMap<Key, Arc<Round>>>> = LazyLock::new(Mutex::default);

impl Round {
    /// The meeting place of these devices of the runtime `R`, which are sorted and different.
    pub fn of<R: 'static>(devices: Vec<DeviceId>) -> Result<Arc<Round>, Error> {
        let key = (TypeId::of::<R>(), devices);
        let mut rounds = lock(&ROUNDS);
        if let Some(round) = rounds.get(&key) {
            return Ok(round.clone());
        }
        let members: Vec<_> = key.1.iter().map(|id| Status::of::<R>(*id)).collect();
        let ranks = members.iter().map(|_| Rank::default()).collect();
        let state = State { calls: Calls::of(members.len()), ranks, done: 0, results: VecDeque::new() };
        let round = Arc::new(Round { key: key.clone(), members, state: Mutex::new(state), changed: Condvar::new() });
        let thread = round.clone();
        std::thread::Builder::new()
            .name("bonfire-devices".into())
            .spawn(move || thread.serve())
            .map_err(|e| Error::io("starting the thread of a group of devices", e))?;
        rounds.insert(key, round.clone());
        Ok(round)
    }

    /// Leaves a call; gives its number.
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

    /// Says that this device now waits for the results of all its calls.
    pub fn announce(&self, rank: usize) {
        let mut state = lock(&self.state);
        state.ranks[rank].awaited = Some(state.calls.made(rank));
        if state.due() {
            self.changed.notify_all();
        }
    }

    /// Waits for what was announced, and gives the results that this device has not taken, in the order of its calls.
    pub fn take(&self, rank: usize, deadline: &Deadline) -> Result<Vec<Shared>, Error> {
        let mut state = lock(&self.state);
        let mut wait = Wait::of(rank, deadline);
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

    /// Ends the meeting: every device that takes part is poisoned, and gets this error from every later call.
    pub fn fail(&self, error: Error) {
        self.fail_locked(lock(&self.state), error);
    }

    fn fail_locked(&self, mut state: MutexGuard<'_, State>, error: Error) {
        let error = state.calls.failure.get_or_insert(error).clone();
        state.ranks.iter_mut().for_each(|rank| rank.sources.clear());
        state.results.clear();
        // Devices that were cleared meet anew. Whoever sees this meeting failed, or a new one in its place, sees its own
        // device poisoned unless it was cleared since: so all three change under both locks.
        let mut rounds = lock(&ROUNDS);
        if rounds.get(&self.key).is_some_and(|round| std::ptr::eq(&**round, self)) {
            rounds.remove(&self.key);
        }
        for member in &self.members {
            member.fail(error.clone());
        }
        drop(rounds);
        drop(state);
        self.changed.notify_all();
    }

    /// Whether the meeting has ended.
    pub fn failed(&self) -> bool {
        lock(&self.state).calls.failure.is_some()
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Option<std::time::Duration>) -> MutexGuard<'a, State> {
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
                let (calls, sources) = state.matched();
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

    /// Adds up matched calls, each from one source of every rank. `earlier` are results up to call number `done`.
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
                // The results of this round follow those before it, so a call's place is its distance from the end.
                Source::Result(number) => {
                    let oldest = done - earlier.len() as u64;
                    let place = number.checked_sub(oldest + 1).and_then(|place| before.get(place as usize).copied());
                    place.map(Input::Result).ok_or_else(|| Error::broken("all_reduce", "an earlier result is gone"))
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

/// Waits for a snapshot, which is as long as the call says.
fn arrived(reading: Reading, call: &Call) -> Result<Bytes, Error> {
    let bytes = reading.wait_one(&call.to_string())?;
    if bytes.len() != call.bytes() {
        return Err(Error::broken(call.to_string(), format!("a device gave {} bytes", bytes.len())));
    }
    let aligned = bytes.as_ptr().align_offset(call.dtype.size()) == 0;
    Ok(if aligned { bytes } else { Bytes::from_elems(bytemuck::pod_collect_to_vec::<u8, u64>(&bytes)) })
}

fn reduce(call: &Call, inputs: &[Input<'_>], output: &mut [u8]) {
    let Some(op) = call.reduction else { return };
    let inputs = inputs.iter().map(|input| input.bytes().as_ptr());
    // SAFETY: every input has at least `call.bytes()` bytes and is aligned for the type (`arrived` sees to both, results
    // start at multiples of 16 bytes in memory that is aligned so); the output has as many, is aligned alike and is
    // borrowed mutably.
    unsafe {
        let output = Output::of(output.as_mut_ptr(), call.bytes(), true);
        reduce_to_all(call.dtype, op, call.count, inputs, std::iter::once(output));
    }
}

impl State {
    /// The matched calls that no round has taken.
    fn waiting(&self) -> impl Iterator<Item = Call> {
        let sources = self.ranks.iter().map(|rank| rank.sources.len()).min().unwrap_or(0) as u64;
        let matched = self.calls.matched();
        (matched - sources + 1..=matched).filter_map(|number| self.calls.get(number))
    }

    /// Whether a round should begin.
    fn due(&self) -> bool {
        let matched = self.calls.matched();
        let awaited = |rank: &Rank| rank.awaited.is_some_and(|awaited| self.done < awaited && awaited <= matched);
        let bytes = || self.waiting().map(|call| call.bytes()).sum::<usize>();
        self.waiting().next().is_some() && (self.ranks.iter().any(awaited) || bytes() >= ENOUGH)
    }

    /// Takes the matched calls, and their sources by rank.
    fn matched(&mut self) -> (Vec<Call>, Vec<Vec<Source>>) {
        let calls: Vec<_> = self.waiting().collect();
        let sources = self.ranks.iter_mut().map(|rank| rank.sources.drain(..calls.len()).collect()).collect();
        (calls, sources)
    }

    /// The results up to number `until` that this device has not taken yet.
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
