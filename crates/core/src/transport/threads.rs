//! Ranks as threads of one process.
//!
//! In an operation, every rank publishes its call and the addresses of its buffers in an exchange slot, and counts
//! itself in. Once all ranks have, each compares all calls (so all report the same mismatch), reduces its own part
//! straight from all inputs, stores it to all outputs, and counts itself out. There is no staging, no allocation and no
//! lock. Small inputs are copied into the slot; such an operation does not wait until all ranks are done.
//!
//! The models in `tests/loom/threads.rs` run these files on loom's primitives and report every access to the ranks'
//! buffers. `scripts/models --mutants` breaks their orderings and conditions one by one: a model must fail for each.

mod mailbox;
mod regrouping;

use std::sync::Arc;
use std::time::Instant;

use self::mailbox::Mailbox;
use self::regrouping::Regrouping;
use super::direct::{self, RankBuffers};
use super::reduce::{self, Output};
use super::{Buffers, Collectives, Neighbours};
use crate::sync::{
    AtomicU8, AtomicU64, Bell, Cell, Deadline, Mutex, OnceLock, Ordering, SlowWaitWarning, lock, oversubscribed, spin,
};
use crate::types::{Call, DType, Error, Fault, Locate, Operation, Parts, Places, RankList, Site, Whereabouts, asked};

/// One rank's endpoint of a group of threads.
pub(crate) struct ThreadEndpoint {
    shared: Arc<Shared>,
    rank: usize,
}

struct Shared {
    ranks: Box<[RankState]>,
    /// Ranks counted in, over all operations. All ranks are in operation `s` from `(s + 1) * world_size` on. The top
    /// bit is set when the group fails.
    arrived: CachePadded<AtomicU64>,
    /// Ranks counted out, over all operations that lend memory.
    left: CachePadded<AtomicU64>,
    /// Rung when `arrived` or `left` completes an operation, when the group fails and when a rank leaves.
    bell: Bell,
    /// Why the group failed, and the value of `arrived` at that moment.
    failure: Mutex<Option<(Fault, u64)>>,
    /// By sender, once one of its mailboxes is used: those to all ranks. Most groups use none.
    mailboxes: Box<[OnceLock<Box<[Mailbox]>>]>,
    regrouping: Regrouping,
    /// By rank, what tells where it is in its program. Written once, before the rank's first operation.
    located: Box<[std::sync::OnceLock<Arc<dyn Locate>>]>,
    /// There are more ranks than processors.
    oversubscribed: bool,
}

const FAILED: u64 = 1 << 63;

/// Aligns its value to cache lines of its own (two, because processors fetch lines in pairs).
#[repr(align(128))]
struct CachePadded<T>(T);

/// What a rank shares with its peers.
///
/// Its two slots are used alternately: a fast rank may begin the next operation while a straggler still reads the
/// inline data of this one. It cannot get two operations ahead, because the one between needs the straggler.
struct RankState {
    slots: [CachePadded<Cell<Slot>>; 2],
    /// Operations into which this rank has counted itself.
    entered: AtomicU64,
    /// Operations that lent memory and that this rank has completed. Only the rank itself uses it.
    lent: AtomicU64,
    presence: AtomicU8,
}

const PRESENT: u8 = 0;
const LEFT: u8 = 1;
const PANICKED: u8 = 2;

/// Inputs of up to this many bytes are copied into the slot.
const INLINE: usize = 256;

/// An exchange slot: a rank's call, and its buffers or its data.
#[derive(Clone, Copy)]
struct Slot {
    call: Call,
    input: *const u8,
    output: *mut u8,
    /// The sizes of all ranks' parts, if the caller gave them; else null.
    sizes: *const usize,
    inline: [u64; INLINE / 8],
}

// SAFETY: only the slot's own rank writes it, before it counts itself in (release), and peers read it only after all
// ranks are in (acquire). The rank writes the same slot again two operations later. It can begin that operation only
// after all ranks have entered the one between, and so have finished reading. The memory behind the pointers stays
// borrowed by `run` until all ranks have counted themselves out.
unsafe impl Sync for RankState {}
// SAFETY: any thread may use the pointers, under the rules of `Sync` above.
unsafe impl Send for RankState {}

impl ThreadEndpoint {
    /// Returns the endpoints of a group of `world_size` threads, by rank.
    pub fn group(world_size: usize) -> Vec<ThreadEndpoint> {
        let empty = Call::new(Operation::Barrier, DType::U8, 0);
        let slot = Slot {
            call: empty,
            input: std::ptr::null(),
            output: std::ptr::null_mut(),
            sizes: std::ptr::null(),
            inline: [0; INLINE / 8],
        };
        let state = || RankState {
            slots: [CachePadded(Cell::new(slot)), CachePadded(Cell::new(slot))],
            entered: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            presence: AtomicU8::new(PRESENT),
        };
        let shared = Arc::new(Shared {
            ranks: (0..world_size).map(|_| state()).collect(),
            arrived: CachePadded(AtomicU64::new(0)),
            left: CachePadded(AtomicU64::new(0)),
            bell: Bell::default(),
            failure: Mutex::new(None),
            mailboxes: (0..world_size).map(|_| OnceLock::new()).collect(),
            regrouping: Regrouping::new(world_size),
            located: (0..world_size).map(|_| std::sync::OnceLock::new()).collect(),
            oversubscribed: oversubscribed(world_size),
        });
        (0..world_size).map(|rank| ThreadEndpoint { shared: shared.clone(), rank }).collect()
    }

    /// Fills this rank's slot, counts the rank in and waits until all ranks are in. Returns the operation's number.
    fn enter(&self, site: &Site, fill: impl FnOnce(&mut Slot), deadline: &Deadline) -> Result<u64, Fault> {
        let shared = &*self.shared;
        let state = &shared.ranks[self.rank];
        let sequence = state.entered.load(Ordering::Relaxed);
        // SAFETY: only this rank writes its slots, one operation at a time, and no rank reads this one: see
        // `Sync for RankState`.
        fill(unsafe { &mut *state.slots[sequence as usize % 2].0.writing() });
        state.entered.store(sequence + 1, Ordering::Release);
        let complete = (sequence + 1) * shared.ranks.len() as u64;
        // Release publishes the slot; acquire on the last arrival sees all slots.
        let before = shared.arrived.0.fetch_add(1, Ordering::AcqRel);
        if before + 1 == complete {
            shared.bell.ring();
            return Ok(sequence);
        }
        let ready = || {
            let arrived = shared.arrived.0.load(Ordering::Acquire);
            arrived >= complete || arrived & FAILED != 0
        };
        if !spin(shared.oversubscribed, ready) {
            self.wait_for_all(site, sequence, complete, ready, deadline)?;
        }
        // The failure bit is checked first, because it makes the count large. A failure after all ranks were in belongs
        // to a later operation, which a fast rank may have begun already.
        let failed = shared.arrived.0.load(Ordering::Acquire) & FAILED != 0;
        if failed && shared.arrived_before_failure() < complete { Err(shared.cause()) } else { Ok(sequence) }
    }

    /// Sleeps until `ready`. Fails the group if a missing rank is gone or the deadline passes. Returns an error only if
    /// this rank's deadline failed the group.
    #[cold]
    fn wait_for_all(
        &self,
        site: &Site,
        sequence: u64,
        complete: u64,
        ready: impl Fn() -> bool,
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        let shared = &*self.shared;
        let mut slow_wait = SlowWaitWarning::until(deadline);
        while !ready() {
            // An iterator, collected only for reports: waiting does not allocate.
            let missing =
                || (0..shared.ranks.len()).filter(|r| shared.ranks[*r].entered.load(Ordering::Acquire) <= sequence);
            if let Some(fault) = missing().find_map(|rank| shared.absence(rank)) {
                shared.abort(complete, fault);
            } else if deadline.passed() {
                let missing: Vec<_> = missing().collect();
                let (rank, elapsed) = (self.rank, deadline.elapsed());
                // The other ranks, the late ones too, are told who waited and for how long.
                let whereabouts = self.whereabouts(&asked(&missing, shared.ranks.len())).into();
                let error = Error::Timeout { site: *site, rank, missing: missing.clone(), elapsed, whereabouts };
                if shared.abort(complete, Fault::Failed(error)) {
                    return Err(Fault::Timeout { missing });
                }
            } else {
                let peer_left = || missing().any(|rank| shared.absence(rank).is_some());
                let woken = shared.bell.sleep(Instant::now() + slow_wait.pause(), || ready() || peer_left());
                if !woken {
                    slow_wait.warn(self.rank, || {
                        let missing: Vec<_> = missing().collect();
                        (format!("in {site} for {}", RankList(&missing)), self.places(&missing))
                    });
                }
            }
        }
        Ok(())
    }

    /// Counts this rank out of an operation that lent memory and waits until all ranks are out: until then peers hold
    /// pointers into its buffers. There is no deadline: all ranks are in, and until they are out they only move data.
    fn exit(&self) {
        let shared = &*self.shared;
        let state = &shared.ranks[self.rank];
        let lent = state.lent.load(Ordering::Relaxed) + 1;
        state.lent.store(lent, Ordering::Relaxed);
        let complete = lent * shared.ranks.len() as u64;
        // Release publishes what this rank wrote to its peers' outputs; acquire sees what they wrote to this rank's.
        if shared.left.0.fetch_add(1, Ordering::AcqRel) + 1 == complete {
            shared.bell.ring();
            return;
        }
        let ready = || shared.left.0.load(Ordering::Acquire) >= complete;
        if !spin(shared.oversubscribed, ready) {
            while !shared.bell.sleep(Instant::now() + std::time::Duration::from_secs(3600), ready) {}
        }
    }

    /// Says where the missing ranks and this one are in their programs, and the others of a small group.
    fn places(&self, missing: &[usize]) -> String {
        let mut ranks = asked(missing, self.shared.ranks.len());
        ranks.extend(Some(self.rank).filter(|rank| !ranks.contains(rank)));
        ranks.sort_unstable();
        Places(&self.whereabouts(&ranks)).to_string()
    }

    fn slot(&self, rank: usize, sequence: u64) -> *const Slot {
        self.shared.ranks[rank].slots[sequence as usize % 2].0.reading()
    }
}

impl Shared {
    /// Why `rank` will not arrive, if it is gone.
    fn absence(&self, rank: usize) -> Option<Fault> {
        match self.ranks[rank].presence.load(Ordering::Acquire) {
            LEFT => Some(Fault::Left { peer: rank }),
            PANICKED => Some(Fault::Lost { peer: rank, reason: "its thread panicked".into() }),
            _ => None,
        }
    }

    /// Fails the group, unless `arrived` is at least `complete`: then all ranks hold pointers, and complete it. Returns
    /// whether this call failed it.
    fn abort(&self, complete: u64, fault: Fault) -> bool {
        // Locked while the bit is set, so a thread that sees the bit finds the cause.
        let mut failure = lock(&self.failure);
        let aborted = self.arrived.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |arrived| {
            (arrived < complete).then_some(arrived | FAILED)
        });
        if let Ok(arrived) = aborted {
            *failure = Some((fault, arrived));
        }
        drop(failure);
        self.bell.ring();
        if aborted.is_ok() {
            self.mailboxes.iter().filter_map(OnceLock::get).flatten().for_each(Mailbox::ring);
        }
        aborted.is_ok()
    }

    fn cause(&self) -> Fault {
        let failure = lock(&self.failure);
        failure.as_ref().map_or(Fault::Timeout { missing: Vec::new() }, |(fault, _)| fault.clone())
    }

    /// The value of `arrived` when the group failed.
    fn arrived_before_failure(&self) -> u64 {
        let failure = lock(&self.failure);
        failure.as_ref().map_or(0, |(_, arrived)| *arrived)
    }

    fn failed(&self) -> bool {
        self.arrived.0.load(Ordering::Acquire) & FAILED != 0
    }

    fn fail(&self, error: &Error) {
        self.abort(FAILED, Fault::Failed(error.for_peers()));
    }

    fn leave(&self, rank: usize) {
        let how = if std::thread::panicking() { PANICKED } else { LEFT };
        self.ranks[rank].presence.store(how, Ordering::Release);
        self.bell.ring();
        // Only they wait for this rank. A rank that makes its mailboxes after this look finds this rank gone: that ring
        // has a SeqCst fence before the look, and `Bell::sleep` one after the mailboxes are made.
        for (from, to_all) in self.mailboxes.iter().enumerate() {
            let Some(to_all) = to_all.get() else { continue };
            if from == rank {
                to_all.iter().for_each(Mailbox::ring);
            } else {
                to_all[rank].ring();
            }
        }
    }
}

impl Neighbours for ThreadEndpoint {
    fn locate_by(&self, own: Arc<dyn Locate>) {
        // It is never set twice.
        let _ = self.shared.located[self.rank].set(own);
    }

    fn whereabouts(&self, ranks: &[usize]) -> Vec<(usize, Whereabouts)> {
        // Once the group has failed at a deadline, the other ranks go on: what counts is where they were then.
        if let Some((Fault::Failed(Error::Timeout { whereabouts, .. }), _)) = &*lock(&self.shared.failure) {
            return whereabouts.iter().filter(|(rank, _)| ranks.contains(rank)).cloned().collect();
        }
        let located = |rank: &usize| Some((*rank, self.shared.located[*rank].get()?.whereabouts()));
        ranks.iter().filter_map(located).collect()
    }
}

impl Collectives for ThreadEndpoint {
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        let call = &site.call;
        let world_size = self.shared.ranks.len();
        let output = buffers.output.as_mut_ptr();
        let input = buffers.input.map_or(output.cast_const(), <[u8]>::as_ptr);
        let sizes = if let Parts::Sizes(sizes) = buffers.parts { sizes.as_ptr() } else { std::ptr::null() };
        let inline = call.operation == Operation::AllReduce && call.bytes() <= INLINE;
        let publish = |slot: &mut Slot| {
            slot.call = *call;
            (slot.input, slot.output, slot.sizes) = (input, output, sizes);
            if inline {
                let source = buffers.input.unwrap_or(buffers.output);
                bytemuck::bytes_of_mut(&mut slot.inline)[..source.len()].copy_from_slice(source);
            }
        };
        let sequence = self.agree(site, publish, deadline)?;
        let slots = self.slots(sequence);
        if inline {
            let inputs = slots.map(|slot| slot.inline.as_ptr().cast());
            if let Some(op) = call.reduction {
                // SAFETY: `count` elements fit the inline data, as checked above; the output is this rank's own.
                unsafe {
                    let result = std::iter::once(Output::cached(output));
                    reduce::reduce_to_all(call.dtype, op, call.count, inputs, result);
                }
            }
            return Ok(());
        }
        if call.operation == Operation::Barrier {
            return Ok(());
        }
        // Different sizes may have the same fingerprint. All ranks see the difference, and none uses the sizes.
        let agreed = match buffers.parts {
            Parts::Even => true,
            // SAFETY: all ranks are in; those with sizes have one per rank, and the sizes stay borrowed until `exit`.
            Parts::Sizes(sizes) => self.slots(sequence).all(|slot| unsafe {
                !slot.sizes.is_null() && std::slice::from_raw_parts(slot.sizes, world_size) == sizes
            }),
        };
        let buffers_of = |rank| {
            // SAFETY: all ranks are in: see `slots`.
            let slot = unsafe { &*self.slot(rank, sequence) };
            RankBuffers { input: slot.input, output: slot.output }
        };
        if agreed {
            // SAFETY: buffers have the lengths that `Buffers` lists, as the group checked, and all calls and sizes are
            // equal. `exit` keeps every buffer borrowed until all ranks are done.
            unsafe { direct::share(call, buffers.parts, self.rank, world_size, buffers_of) };
        }
        self.exit();
        if agreed { Ok(()) } else { Err(self.mismatch(site, sequence)) }
    }

    /// Of ranks that disagree, some may be here and some in `run`, so both begin with the same step.
    fn agree_before_plan(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        self.agree(site, |slot| slot.call = site.call, deadline).map(drop)
    }
}

impl ThreadEndpoint {
    /// The slots of operation `sequence`, by rank. Called once all ranks are in.
    fn slots(&self, sequence: u64) -> impl Iterator<Item = &Slot> + Clone {
        // SAFETY: all ranks are in, so every slot of this operation is complete. It is not written again until this
        // rank enters the next operation but one: see `Sync for RankState`.
        (0..self.shared.ranks.len()).map(move |rank| unsafe { &*self.slot(rank, sequence) })
    }

    /// Enters the operation and compares the calls of all ranks.
    fn agree(&self, site: &Site, publish: impl FnOnce(&mut Slot), deadline: &Deadline) -> Result<u64, Fault> {
        let sequence = self.enter(site, publish, deadline)?;
        if self.slots(sequence).all(|slot| slot.call == site.call) {
            return Ok(sequence);
        }
        Err(self.mismatch(site, sequence))
    }

    /// The mismatch between the ranks' calls in operation `sequence`. Called once all ranks are in.
    fn mismatch(&self, site: &Site, sequence: u64) -> Fault {
        let calls = self.slots(sequence).enumerate().map(|(rank, slot)| (rank, slot.call)).collect();
        Fault::Failed(Error::Mismatch { sequence: site.sequence, calls, note: String::new() })
    }
}
