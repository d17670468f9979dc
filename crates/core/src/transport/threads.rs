//! Ranks as threads of one process.
//!
//! Every rank publishes where its buffers are and counts itself in. Once all have, each compares all calls (so all see
//! the same mismatch), reduces its own part straight from all inputs and stores it to all outputs, and counts itself
//! out. No staging, no allocation, no lock. Small inputs travel inside the slot, and then nobody needs to wait for the
//! others to be done.

mod mailbox;
mod meeting;

use std::sync::Arc;
use std::time::Instant;

use self::mailbox::Mailbox;
use self::meeting::Meeting;
use super::direct::{self, Place};
use super::reduce::{self, Output};
use super::{Buffers, Collectives};
use crate::sync::{AtomicU8, AtomicU64, Bell, Cell, Deadline, Mutex, Ordering, Patience, crowded, lock, spin};
use crate::types::{Call, DType, Error, Fault, Operation, Parts, Ranks, Site};

/// One rank's end of a group of threads.
pub(crate) struct Local {
    shared: Arc<Shared>,
    rank: usize,
}

struct Shared {
    slots: Box<[Slot]>,
    /// Ranks counted in, over all operations: operation `s` has all its ranks from `(s + 1) * world_size` on. The top
    /// bit says that the group failed.
    arrived: Line<AtomicU64>,
    /// Ranks counted out of operations that lend memory, over all such operations.
    left: Line<AtomicU64>,
    /// Rung when `arrived` or `left` completes an operation, and on failure and farewell.
    bell: Bell,
    /// Why the group failed, and how many had arrived by then.
    failure: Mutex<Option<(Fault, u64)>>,
    /// From rank `i` to rank `j` at `i * world_size + j`.
    mailboxes: Box<[Mailbox]>,
    meeting: Meeting,
    /// More ranks than processors.
    crowded: bool,
}

const FAILED: u64 = 1 << 63;

/// Keeps what it holds on cache lines of its own (two, since processors fetch lines in pairs).
#[repr(align(128))]
struct Line<T>(T);

/// What a rank shows to the others. Two offers, used in turn: a fast rank may begin the next operation while a slow one
/// still reads the inline data of this one. It cannot get two ahead, because the operation between needs the slow one.
struct Slot {
    offers: [Line<Cell<Offer>>; 2],
    /// Operations that this rank has counted itself into.
    entered: AtomicU64,
    /// Operations that lent memory and that this rank has been through. Only the rank itself uses it.
    lent: AtomicU64,
    presence: AtomicU8,
}

const PRESENT: u8 = 0;
const LEFT: u8 = 1;
const PANICKED: u8 = 2;

/// Inputs of up to this many bytes travel inside the offer.
const INLINE: usize = 256;

#[derive(Clone, Copy)]
struct Offer {
    call: Call,
    input: *const u8,
    output: *mut u8,
    /// Of every rank's part, where the call has such.
    sizes: *const usize,
    inline: [u64; INLINE / 8],
}

// SAFETY: an offer is written only by its own rank, before it counts itself in (release), and read by others only after
// all ranks are in (acquire); the rank writes that offer again two operations later, which it can begin only after all
// have entered the one between and so have finished reading. The memory behind the pointers stays borrowed by `run`
// until all ranks have counted themselves out.
unsafe impl Sync for Slot {}
// SAFETY: the pointers are used as `Sync` above says, by any thread.
unsafe impl Send for Slot {}

impl Local {
    /// The ends of a group of `world_size` threads, by rank.
    pub fn group(world_size: usize) -> Vec<Local> {
        let empty = Call {
            operation: Operation::Barrier,
            dtype: DType::U8,
            count: 0,
            reduction: None,
            root: None,
            sizes: None,
        };
        let offer = Offer {
            call: empty,
            input: std::ptr::null(),
            output: std::ptr::null_mut(),
            sizes: std::ptr::null(),
            inline: [0; INLINE / 8],
        };
        let slot = || Slot {
            offers: [Line(Cell::new(offer)), Line(Cell::new(offer))],
            entered: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            presence: AtomicU8::new(PRESENT),
        };
        let shared = Arc::new(Shared {
            slots: (0..world_size).map(|_| slot()).collect(),
            arrived: Line(AtomicU64::new(0)),
            left: Line(AtomicU64::new(0)),
            bell: Bell::default(),
            failure: Mutex::new(None),
            mailboxes: (0..world_size * world_size).map(|_| Mailbox::default()).collect(),
            meeting: Meeting::new(world_size),
            crowded: crowded(world_size),
        });
        (0..world_size).map(|rank| Local { shared: shared.clone(), rank }).collect()
    }

    /// Publishes the offer and waits until all ranks have.
    fn enter(&self, offer: impl FnOnce(&mut Offer), deadline: &Deadline) -> Result<u64, Fault> {
        let shared = &*self.shared;
        let slot = &shared.slots[self.rank];
        let sequence = slot.entered.load(Ordering::Relaxed);
        // SAFETY: only this rank writes its offers, one operation at a time, and nobody reads this one any more: see
        // `Sync for Slot`.
        offer(unsafe { &mut *slot.offers[sequence as usize % 2].0.writing() });
        slot.entered.store(sequence + 1, Ordering::Release);
        let complete = (sequence + 1) * shared.slots.len() as u64;
        // Release publishes the offer; acquire on the last arrival sees all of them.
        let before = shared.arrived.0.fetch_add(1, Ordering::AcqRel);
        if before + 1 == complete {
            shared.bell.ring();
            return Ok(sequence);
        }
        let ready = || {
            let arrived = shared.arrived.0.load(Ordering::Acquire);
            arrived >= complete || arrived & FAILED != 0
        };
        if !spin(shared.crowded, ready) {
            self.wait_for_all(sequence, complete, ready, deadline);
        }
        // The failure bit makes the number large, so it is asked for first. A failure after all ranks were in belongs to
        // a later operation: a fast rank may be there already.
        let failed = shared.arrived.0.load(Ordering::Acquire) & FAILED != 0;
        if failed && shared.arrived_before_failure() < complete { Err(shared.cause()) } else { Ok(sequence) }
    }

    /// Sleeps until `ready`, looking for ranks that will never come and for the deadline; either fails the group.
    #[cold]
    fn wait_for_all(&self, sequence: u64, complete: u64, ready: impl Fn() -> bool, deadline: &Deadline) {
        let shared = &*self.shared;
        let mut patience = Patience::until(deadline);
        while !ready() {
            // An iterator, collected only for reports: a wait allocates nothing.
            let missing =
                || (0..shared.slots.len()).filter(|r| shared.slots[*r].entered.load(Ordering::Acquire) <= sequence);
            if let Some(fault) = missing().find_map(|rank| shared.absence(rank)) {
                shared.withdraw(complete, fault);
            } else if deadline.passed() {
                shared.withdraw(complete, Fault::Timeout { missing: missing().collect() });
            } else {
                let someone_left = || missing().any(|rank| shared.absence(rank).is_some());
                let woken = shared.bell.sleep(Instant::now() + patience.pause(), || ready() || someone_left());
                if !woken {
                    let waiting = || format!("at operation #{sequence} for {}", Ranks(&missing().collect::<Vec<_>>()));
                    patience.warn(self.rank, waiting);
                }
            }
        }
    }

    /// Counts this rank out of an operation that lent memory and waits until all are out: peers hold pointers into its
    /// buffers until then. There is no deadline here: all ranks are in, and between here and there they only copy.
    fn exit(&self) {
        let shared = &*self.shared;
        let slot = &shared.slots[self.rank];
        let lent = slot.lent.load(Ordering::Relaxed) + 1;
        slot.lent.store(lent, Ordering::Relaxed);
        let complete = lent * shared.slots.len() as u64;
        // Release: what this rank wrote to the others' outputs is seen by them; acquire: what they wrote to this one's.
        if shared.left.0.fetch_add(1, Ordering::AcqRel) + 1 == complete {
            shared.bell.ring();
            return;
        }
        let ready = || shared.left.0.load(Ordering::Acquire) >= complete;
        if !spin(shared.crowded, ready) {
            while !shared.bell.sleep(Instant::now() + std::time::Duration::from_secs(3600), ready) {}
        }
    }

    fn offer(&self, rank: usize, sequence: u64) -> *const Offer {
        self.shared.slots[rank].offers[sequence as usize % 2].0.reading()
    }
}

impl Shared {
    /// Why `rank` will not come, if it won't.
    fn absence(&self, rank: usize) -> Option<Fault> {
        match self.slots[rank].presence.load(Ordering::Acquire) {
            LEFT => Some(Fault::Left { peer: rank }),
            PANICKED => Some(Fault::Lost { peer: rank, reason: "its thread panicked".into() }),
            _ => None,
        }
    }

    /// Fails the group unless operation `complete` has all its ranks by now: then they hold pointers, and it goes on.
    fn withdraw(&self, complete: u64, fault: Fault) {
        // The lock makes the cause visible to everybody who sees the bit.
        let mut failure = lock(&self.failure);
        let withdrawn = self.arrived.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |arrived| {
            (arrived < complete).then_some(arrived | FAILED)
        });
        if let Ok(arrived) = withdrawn {
            *failure = Some((fault, arrived));
        }
        drop(failure);
        self.bell.ring();
    }

    fn cause(&self) -> Fault {
        let failure = lock(&self.failure);
        failure.as_ref().map_or(Fault::Timeout { missing: Vec::new() }, |(fault, _)| fault.clone())
    }

    /// How many ranks had counted themselves in when the group failed.
    fn arrived_before_failure(&self) -> u64 {
        let failure = lock(&self.failure);
        failure.as_ref().map_or(0, |(_, arrived)| *arrived)
    }

    fn failed(&self) -> bool {
        self.arrived.0.load(Ordering::Acquire) & FAILED != 0
    }

    fn fail(&self, error: &Error) {
        self.withdraw(FAILED, Fault::Failed(error.clone()));
        self.mailboxes.iter().for_each(Mailbox::ring);
    }

    fn leave(&self, rank: usize) {
        let how = if std::thread::panicking() { PANICKED } else { LEFT };
        self.slots[rank].presence.store(how, Ordering::Release);
        self.bell.ring();
        self.mailboxes.iter().for_each(Mailbox::ring);
    }
}

impl Collectives for Local {
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        let call = &site.call;
        let world_size = self.shared.slots.len();
        let output = buffers.output.as_mut_ptr();
        let input = buffers.input.map_or(output.cast_const(), <[u8]>::as_ptr);
        let sizes = if let Parts::Sizes(sizes) = buffers.parts { sizes.as_ptr() } else { std::ptr::null() };
        let inline = call.operation == Operation::AllReduce && call.bytes() <= INLINE;
        let publish = |offer: &mut Offer| {
            offer.call = *call;
            (offer.input, offer.output, offer.sizes) = (input, output, sizes);
            if inline {
                let source = buffers.input.unwrap_or(buffers.output);
                bytemuck::bytes_of_mut(&mut offer.inline)[..source.len()].copy_from_slice(source);
            }
        };
        let sequence = self.agree(site, publish, deadline)?;
        let offers = self.offers(sequence);
        if inline {
            let inputs = offers.map(|offer| offer.inline.as_ptr().cast());
            if let Some(op) = call.reduction {
                // SAFETY: `count` elements fit the inline data, checked above; the output is this rank's own.
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
        // Different sizes may have one fingerprint. All ranks see it, and nobody uses them.
        let agreed = match buffers.parts {
            Parts::Even => true,
            // SAFETY: all ranks are in, and those with sizes have one for each, which stay borrowed until `exit`.
            Parts::Sizes(sizes) => self.offers(sequence).all(|offer| unsafe {
                !offer.sizes.is_null() && std::slice::from_raw_parts(offer.sizes, world_size) == sizes
            }),
        };
        let place = |rank| {
            // SAFETY: all ranks are in: see `offers`.
            let offer = unsafe { &*self.offer(rank, sequence) };
            Place { input: offer.input, output: offer.output }
        };
        if agreed {
            // SAFETY: buffers have the lengths that `Buffers` lists, which the group checked, and all calls and sizes are
            // equal; `exit` keeps every buffer borrowed until all ranks are done.
            unsafe { direct::share(call, buffers.parts, self.rank, world_size, place) };
        }
        self.exit();
        if agreed { Ok(()) } else { Err(self.mismatch(site, sequence)) }
    }

    /// Ranks whose counts differ may find themselves here and in `run`, so both begin alike.
    fn stand_aside(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        self.agree(site, |offer| offer.call = site.call, deadline).map(drop)
    }
}

impl Local {
    /// The offers of operation `sequence`, by rank, once all ranks are in.
    fn offers(&self, sequence: u64) -> impl Iterator<Item = &Offer> + Clone {
        // SAFETY: all ranks are in, so every offer of this sequence is complete and stays as it is until this rank
        // enters the next but one: see `Sync for Slot`.
        (0..self.shared.slots.len()).map(move |rank| unsafe { &*self.offer(rank, sequence) })
    }

    /// Publishes the offer, waits until all ranks have, and compares their calls.
    fn agree(&self, site: &Site, publish: impl FnOnce(&mut Offer), deadline: &Deadline) -> Result<u64, Fault> {
        let sequence = self.enter(publish, deadline)?;
        if self.offers(sequence).all(|offer| offer.call == site.call) {
            return Ok(sequence);
        }
        Err(self.mismatch(site, sequence))
    }

    /// What all ranks called in operation `sequence`, once all are in.
    fn mismatch(&self, site: &Site, sequence: u64) -> Fault {
        let calls = self.offers(sequence).enumerate().map(|(rank, offer)| (rank, offer.call)).collect();
        Fault::Failed(Error::Mismatch { sequence: site.sequence, calls })
    }
}
