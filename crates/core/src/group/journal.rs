//! What a rank is in, over all of its groups: what other ranks learn if they wait for it.
//!
//! A group, its subgroups and the groups that they shrink to have one journal. Operations are in the recorders of these
//! groups. Functions of layers above consist of several operations, also of other groups, and of computations between
//! them; they enter the journal. While a thread is in such a function, operations are recorded with the line where
//! the program calls that function. So errors and traces name lines of the program, also for what runs in closures,
//! hooks and layers of a model, whose callers are not the program.
//!
//! A rank that waits asks the others after a tenth of its deadline, and again before it passes (`control/watch.rs`).
//! Their control threads answer at once. If all missing ranks wait in functions that the asking rank is not in, more
//! time does not help, and the error does not propose it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::record::{CallSite, State};
use super::recorder::Recorder;
use crate::sync::{Mutex, lock};
use crate::types::{Locate, ProgramCall, Whereabouts};

thread_local! {
    /// Where the program calls the function that this thread is in.
    static INSIDE: Cell<Option<CallSite>> = const { Cell::new(None) };
}

/// Returns where the program calls what this thread is in: the function that has entered the journal, or the
/// caller of the function that calls this.
#[track_caller]
#[inline]
pub fn call_site() -> CallSite {
    INSIDE.get().unwrap_or(Location::caller())
}

/// Goes on with a call of the program's, in a hook that a library calls: operations have the line of that call, until
/// the result is dropped.
pub fn go_on(at: CallSite) -> Entered {
    let outermost = INSIDE.get().is_none();
    if outermost {
        INSIDE.set(Some(at));
    }
    Entered { outermost, entry: None, on_its_thread: PhantomData }
}

/// The operations of one group on one rank.
pub(crate) struct Operations {
    pub recorder: Recorder,
    /// Whether a thread of Bonfire's own runs the operation whose turn it is. Relaxed, like `waiters`: a reader gets a
    /// snapshot of what changes meanwhile.
    pub started: AtomicBool,
    /// Threads of the program that wait for other ranks in no operation of their own.
    waiters: AtomicUsize,
}

impl Operations {
    pub fn new() -> Operations {
        Operations { recorder: Recorder::new(), started: AtomicBool::new(false), waiters: AtomicUsize::new(0) }
    }

    /// Whether a thread of the program is in an operation.
    fn are_blocking(&self) -> bool {
        let is_begun = self.recorder.last().is_some_and(|record| record.state == State::Begun);
        is_begun && !self.started.load(Ordering::Relaxed)
    }

    /// Whether a thread of the program waits for another one that is in an operation.
    fn are_awaited(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }
}

/// A thread of the program that waits for other ranks, for a started operation for instance.
pub struct Waiting(Arc<Operations>);

impl Waiting {
    pub(super) fn begin(operations: &Arc<Operations>) -> Waiting {
        operations.waiters.fetch_add(1, Ordering::Relaxed);
        Waiting(operations.clone())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a rank is in.
pub(crate) struct Journal {
    /// The session of the group of which all others of this journal were made.
    pub job: Option<u64>,
    state: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    /// The operations of each group. Weak: what reads them must not be the last to drop a group.
    groups: Vec<Weak<Operations>>,
    open: Vec<Arc<Entry>>,
    /// The last entry that has ended, and when.
    last: Option<(Arc<Entry>, Instant)>,
    /// How far the program has come, as a layer above says it.
    progress: String,
}

/// A call of a function that consists of operations.
struct Entry {
    function: &'static str,
    at: CallSite,
    begun: Instant,
    /// For a call that runs on a thread of Bonfire's own, the operations of its group.
    background: Option<Weak<Operations>>,
}

impl Entry {
    fn call(&self) -> ProgramCall {
        ProgramCall::new(self.function, self.at)
    }
}

impl Journal {
    pub fn new(job: Option<u64>) -> Arc<Journal> {
        Arc::new(Journal { job, state: Mutex::default() })
    }

    /// Adds a group.
    pub fn add(&self, operations: &Arc<Operations>) {
        let groups = &mut lock(&self.state).groups;
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(operations));
    }

    /// Enters a call of the program's, on the thread that makes it. Within another one it is a part of that one.
    pub fn enter(self: &Arc<Self>, function: &'static str, at: CallSite) -> Entered {
        self.open(function, at, None)
    }

    /// Enters a call that goes on here, on a thread of Bonfire's own, in the group of these operations.
    pub fn enter_behind(
        self: &Arc<Self>,
        function: &'static str,
        at: CallSite,
        operations: &Arc<Operations>,
    ) -> Entered {
        self.open(function, at, Some(Arc::downgrade(operations)))
    }

    fn open(self: &Arc<Self>, function: &'static str, at: CallSite, background: Option<Weak<Operations>>) -> Entered {
        let mut entered = go_on(at);
        entered.entry = entered.outermost.then(|| {
            let entry = Arc::new(Entry { function, at, begun: Instant::now(), background });
            lock(&self.state).open.push(entry.clone());
            (self.clone(), entry)
        });
        entered
    }

    /// Says how far the program has come.
    pub fn set_progress(&self, progress: String) {
        lock(&self.state).progress = progress;
    }

    fn leave(&self, entry: &Arc<Entry>) {
        let mut state = lock(&self.state);
        state.open.retain(|open| !Arc::ptr_eq(open, entry));
        if entry.background.is_none() {
            state.last = Some((entry.clone(), Instant::now()));
        }
    }
}

impl Locate for Journal {
    fn whereabouts(&self) -> Whereabouts {
        let (groups, open, last, progress) = {
            let state = lock(&self.state);
            let groups: Vec<_> = state.groups.iter().filter_map(Weak::upgrade).collect();
            (groups, state.open.clone(), state.last.clone(), state.progress.clone())
        };
        let (background, open): (Vec<_>, Vec<_>) = open.into_iter().partition(|entry| entry.background.is_some());
        let is_behind = |operations: &Arc<Operations>| {
            let of = |entry: &Arc<Entry>| entry.background.as_ref().map(Weak::as_ptr) == Some(Arc::as_ptr(operations));
            background.iter().any(of)
        };
        let is_awaited = groups.iter().any(|operations| operations.are_awaited());
        let groups: Vec<_> = groups.into_iter().filter(|operations| !is_behind(operations)).collect();
        let background = background.iter().map(|entry| entry.call()).collect();
        let waiting: Vec<_> =
            groups.iter().filter(|operations| operations.are_blocking() || operations.are_awaited()).collect();
        let waits = !waiting.is_empty() || is_awaited;
        let whereabouts = if let Some(first) = open.first() {
            let calls = open.iter().map(|entry| entry.call()).collect();
            Whereabouts { calls, waits, background, since: first.begun.elapsed(), ..Default::default() }
        } else if !waiting.is_empty() {
            let operations = waiting.iter().filter_map(|operations| {
                let record = operations.recorder.last()?;
                let since = operations.recorder.clock.since(record.begun_ns);
                Some((ProgramCall { function: record.function(), at: record.at }, since))
            });
            let (calls, since): (Vec<_>, Vec<_>) = operations.unzip();
            let since = since.into_iter().max().unwrap_or_default();
            Whereabouts { calls, waits, background, since, ..Default::default() }
        } else {
            let ended = groups.iter().filter_map(|operations| {
                let record = operations.recorder.last()?;
                let since = operations.recorder.clock.since(record.ended_ns?);
                Some((ProgramCall { function: record.function(), at: record.at }, since))
            });
            let entered = last.map(|(entry, ended)| (entry.call(), ended.elapsed()));
            // The operations of an entry end before it does, and by a clock of less resolution.
            let last = ended.min_by_key(|(_, since)| *since);
            let last = match (entered, last) {
                (Some(entered), Some(last)) if last.1 + COARSE < entered.1 => Some(last),
                (entered, last) => entered.or(last),
            };
            let (last, since) = last.map_or((None, Duration::ZERO), |(call, since)| (Some(call), since));
            Whereabouts { background, last, since, ..Default::default() }
        };
        Whereabouts { progress, ..whereabouts }.bounded()
    }
}

/// More than the resolution of the clock that records the end of operations.
const COARSE: Duration = Duration::from_millis(20);

/// A call that lasts until this is dropped, on the thread that has entered it.
#[must_use = "the call ends when it is dropped"]
pub struct Entered {
    /// Not within another call.
    outermost: bool,
    entry: Option<(Arc<Journal>, Arc<Entry>)>,
    on_its_thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.outermost {
            INSIDE.set(None);
        }
        if let Some((journal, entry)) = &self.entry {
            journal.leave(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{AgreedOperations, Group};
    use crate::types::ReduceOp;

    fn whereabouts(group: &Group) -> Whereabouts {
        group.core.journal.whereabouts()
    }

    #[test]
    fn the_outermost_call_is_named_and_operations_in_it_have_its_line() {
        let group = Group::threads(1).unwrap().remove(0);
        assert_eq!(whereabouts(&group), Whereabouts::default());
        let inside = || {
            let _inner = group.enter("inner");
            group.barrier().unwrap();
            whereabouts(&group)
        };
        let outer = (line!(), group.enter("outer"));
        let found = inside();
        let call = ProgramCall { function: "outer".into(), at: format!("{}:{}", file!(), outer.0) };
        assert_eq!((&found.calls[..], found.waits), (&[call.clone()][..], false));
        drop(outer);
        assert_eq!(group.trace().operations[0].at, call.at);
        let after = whereabouts(&group);
        assert_eq!((after.calls.len(), after.last), (0, Some(call)));
        group.barrier().unwrap();
        assert_eq!(group.trace().operations[1].at, format!("{}:{}", file!(), line!() - 1));
    }

    #[test]
    fn operations_of_subgroups_count_and_those_in_the_background_are_apart() {
        let mut groups = Group::threads(2).unwrap();
        let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
        let peer = std::thread::spawn(move || one.subgroup(&[0, 1]).map(|lane| (one, lane)).unwrap());
        let lane = zero.subgroup(&[0, 1]).unwrap();
        let (_one, peer) = peer.join().unwrap();
        let (at, behind) = (call_site(), lane.clone());
        let saving = std::thread::spawn(move || {
            let _call = behind.enter_behind("save", at);
            behind.barrier()
        });
        let found = loop {
            let found = whereabouts(&zero);
            if !found.background.is_empty() {
                break found;
            }
            std::thread::yield_now();
        };
        assert_eq!((&found.background[..], found.calls.len()), (&[ProgramCall::new("save", at)][..], 0));
        peer.barrier().unwrap();
        saving.join().unwrap().unwrap();
        let line = line!() + 1;
        let waiting = std::thread::spawn(move || lane.all_reduce(&mut [1.0f32], ReduceOp::Sum));
        let found = loop {
            let found = whereabouts(&zero);
            if found.waits {
                break found;
            }
            std::thread::yield_now();
        };
        let call = ProgramCall { function: "all_reduce".into(), at: format!("{}:{line}", file!()) };
        assert_eq!((&found.calls[..], found.background.len()), (&[call][..], 0));
        peer.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
        waiting.join().unwrap().unwrap();
    }

    #[test]
    fn a_started_operation_holds_nothing_up_until_the_program_waits_for_it() {
        let mut groups = Group::threads(2).unwrap();
        let (one, zero) = (groups.pop().unwrap(), groups.pop().unwrap());
        let started = zero.start_all_reduce(vec![1.0f32], ReduceOp::Sum).unwrap();
        while zero.trace().operations.is_empty() {
            std::thread::yield_now();
        }
        assert!(!whereabouts(&zero).waits);
        let zero = Arc::new(zero);
        let waiting = std::thread::spawn(move || started.wait().map_err(|(error, _)| error));
        while !whereabouts(&zero).waits {
            std::thread::yield_now();
        }
        one.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
        waiting.join().unwrap().unwrap();
    }
}
