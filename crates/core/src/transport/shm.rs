//! Ranks as processes of one host: whole operations in memory that they share.
//!
//! Every rank publishes its call in an exchange slot, and each compares all calls, so all report the same mismatch.
//! Small data are copied into the slots, which is all that they need (`small`). Large data go through each rank's
//! *window* in chunks that stay in the cache (`chunks`), or straight between buffers in shared memory (`lent`,
//! `arena`).
//!
//! Every control word has one writer, except those that wake a rank, and no rank holds a pointer into a peer's private
//! memory. So a rank may end at any time and in any way. Its peers learn of it from its control connection.
//!
//! # Memory ordering
//!
//! Each release store or fence has an acquire as its partner, and the handshake with sleepers has a SeqCst fence on
//! both sides. Nothing relies on guarantees that only x86 gives, but the code has run only on x86, and as loom models.
//!
//! # Limits
//!
//! * There is no choice by socket or NUMA node.
//! * In a group that spans hosts, `Group::allocate` returns ordinary memory, so no operation there uses `lent`.
//!
//! # Tried and left
//!
//! Touching the cache lines of the next slot while waiting, and polling for an answer without pauses first, made no
//! difference beyond the noise of a busy machine.

mod arena;
mod chunks;
mod control;
#[cfg_attr(bonfire_loom, path = "../../tests/loom/futex.rs")]
mod futex;
mod lent;
#[cfg_attr(bonfire_loom, path = "../../tests/loom/segment.rs")]
mod segment;
mod sleeper;
mod small;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use self::arena::Arena;
use self::chunks::Flow;
use self::control::{Control, ExchangeSlot};
use self::segment::SLOT_BYTES;
pub(crate) use self::segment::Segment;
use super::tcp::Tcp;
use super::{Buffers, Collectives, Storage, Transport};
use crate::sync::{AtomicU64, Deadline, Mutex, Ordering, fence, oversubscribed, spin};
use crate::types::{Call, Error, Fault, Site};

/// One rank's endpoint of the memory that the ranks of a host share. They are all ranks of a group, or some of them.
/// Here they are numbered as in the segment, from 0 on.
pub(crate) struct Shm {
    segment: Arc<Segment>,
    rank: usize,
    /// By rank here, the rank in the group.
    members: Vec<usize>,
    /// Reports failures and lost ranks of the group, and asks its ranks what they called.
    tcp: Arc<Tcp>,
    /// There are more ranks than processors.
    oversubscribed: bool,
    /// Operations in this memory so far.
    number: AtomicU64,
    flow: Mutex<Flow>,
    /// Allocates this rank's own buffers.
    arena: Arc<Arena>,
}

/// One operation in this memory: the group's operation, or a phase of it.
struct Phase {
    call: Call,
    /// Its number among the operations in this memory.
    sequence: u64,
    /// The group's operation, on which the ranks must agree.
    site: Site,
}

impl Phase {
    fn tag(&self) -> Site {
        Site { sequence: self.site.sequence, call: self.site.call }
    }
}

impl Shm {
    /// The endpoint of the group's rank `members[rank]`. The segment has a share for each member.
    pub fn new(segment: Segment, rank: usize, members: Vec<usize>, tcp: Arc<Tcp>) -> Shm {
        assert!(rank < members.len() && members.len() == segment.world_size(), "a share for each member");
        segment.populate(rank);
        let segment = Arc::new(segment);
        let shared = segment.clone();
        tcp.status().set_alarm(move || shared.control(rank).sleeper.0.ring());
        let oversubscribed = oversubscribed(segment.world_size());
        let arena = Arena::new(segment.clone(), rank);
        Shm { segment, rank, members, tcp, oversubscribed, number: AtomicU64::new(0), flow: Mutex::default(), arena }
    }

    /// Runs `call` as a phase of the group's operation `site`. Every rank of the host compares its call with those of
    /// all others, so on success all called the same operation. They must run the same phases in the same order.
    pub fn phase(&self, site: &Site, call: Call, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        // One operation of a rank runs at a time.
        let phase = Phase { call, sequence: self.number.fetch_add(1, Ordering::Relaxed), site: *site };
        if small::fits(&call, buffers.parts, self.world_size()) && call.bytes() <= SLOT_BYTES {
            self.small(&phase, buffers, deadline)
        } else {
            self.large(&phase, buffers, deadline)
        }
    }

    fn world_size(&self) -> usize {
        self.segment.world_size()
    }

    fn control(&self, rank: usize) -> &Control {
        self.segment.control(rank)
    }

    fn slot(&self, rank: usize, phase: &Phase) -> &ExchangeSlot {
        &self.control(rank).slots[phase.sequence as usize % 2]
    }

    /// Publishes this rank's call, and all that it wrote before to its slot and its window.
    fn publish(&self, phase: &Phase) {
        let slot = self.slot(self.rank, phase);
        for (word, value) in slot.call.iter().zip(words(&phase.site.call)) {
            word.store(value, Ordering::Relaxed);
        }
        // Release: a peer that sees the number sees the call and the data. Pairs with the acquire in `agree`.
        slot.sequence.store(phase.sequence + 1, Ordering::Release);
        self.ring();
    }

    /// Wakes the peers that sleep until this rank makes the step that it has just stored.
    fn ring(&self) {
        // Between storing the step and checking for sleepers: see `Sleeper::sleep_for`.
        fence(Ordering::SeqCst);
        for peer in (0..self.world_size()).filter(|peer| *peer != self.rank) {
            self.control(peer).sleeper.0.ring_for(self.rank);
        }
    }

    /// Waits until all ranks have published their slots, and compares the calls. If they differ and the group has other
    /// ranks too, asks those what they called, so that all ranks return the same error.
    fn agree(&self, phase: &Phase, deadline: &Deadline) -> Result<(), Fault> {
        // Acquire pairs with the release in `publish`.
        let published = |rank| self.slot(rank, phase).sequence.load(Ordering::Acquire) == phase.sequence + 1;
        self.wait(phase, deadline, published)?;
        let own = words(&phase.site.call);
        let call = |rank| self.slot(rank, phase).call.each_ref().map(|word| word.load(Ordering::Relaxed));
        if (0..self.world_size()).all(|rank| call(rank) == own) {
            return Ok(());
        }
        let decode = |rank| match from_words(call(rank)) {
            Some(call) => Ok((self.members[rank], call)),
            None => {
                let reason = "the call that it wrote to shared memory is invalid".into();
                Err(Fault::Lost { peer: self.members[rank], reason })
            }
        };
        let calls = (0..self.world_size()).map(decode).collect::<Result<Vec<_>, Fault>>()?;
        if calls.len() == self.tcp.world_size() {
            let error = Error::Mismatch { sequence: phase.site.sequence, calls, note: String::new() };
            return Err(self.tcp.watch(&phase.tag(), deadline).mismatch(error));
        }
        Err(self.tcp.watch(&phase.tag(), deadline).disagree(&calls))
    }

    /// Waits until `reached` holds for every peer.
    fn wait(&self, phase: &Phase, deadline: &Deadline, reached: impl Fn(usize) -> bool) -> Result<(), Fault> {
        for peer in (0..self.world_size()).filter(|peer| *peer != self.rank) {
            if !spin(self.oversubscribed, || reached(peer)) {
                self.sleep(phase, deadline, peer, &reached)?;
            }
        }
        Ok(())
    }

    /// Sleeps until `reached` holds for `peer`, a missing rank is gone, or the deadline passes.
    #[cold]
    fn sleep(
        &self,
        phase: &Phase,
        deadline: &Deadline,
        peer: usize,
        reached: &impl Fn(usize) -> bool,
    ) -> Result<(), Fault> {
        let tag = phase.tag();
        let absence = |rank: usize| self.tcp.status().absence_in(self.members[rank], &tag);
        // An iterator: waiting does not allocate.
        let missing = || (0..self.world_size()).filter(|rank| *rank != self.rank && !reached(*rank));
        let gone = || missing().find_map(|rank| Some((rank, absence(rank)?)));
        let mut watch = self.tcp.watch(&tag, deadline);
        let mut since = Instant::now();
        while !reached(peer) {
            if let Some((rank, fault)) = gone() {
                // All that a rank stored before it left or failed is visible before the news of it arrives. So a step
                // that is missing now will never come.
                if reached(rank) {
                    continue;
                }
                return Err(fault);
            }
            // Every awaited event rings. The pause is limited because a peer may be stopped between its step and its
            // ring, and because ranks that disagree may wait for each other, on this host or on others.
            let pause = watch.pause();
            let sleeper = &self.control(self.rank).sleeper.0;
            let nap = pause.saturating_sub(since.elapsed());
            sleeper.sleep_for(peer, nap, || reached(peer) || gone().is_some());
            if since.elapsed() >= pause {
                since = Instant::now();
                if let Err(fault) = watch.tick(self.members[peer]) {
                    // The step may have been stored before the news arrived, as above.
                    return if reached(peer) { Ok(()) } else { Err(fault) };
                }
            }
        }
        Ok(())
    }
}

impl Collectives for Shm {
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        self.phase(site, site.call, buffers, deadline)
    }

    fn allocate(&self, bytes: usize) -> Option<io::Result<Box<dyn Storage>>> {
        // Small data are copied into the slots, wherever they are.
        if bytes <= SLOT_BYTES { None } else { self.arena.allocate(bytes) }
    }
}

/// The call as words of its tag, without the sequence number.
fn words(call: &Call) -> [u64; 3] {
    let bytes = Site { sequence: 0, call: *call }.to_bytes();
    [8, 16, 24].map(|at| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i])))
}

/// The inverse of [`words`]; `None` for words that no call encodes.
fn from_words(words: [u64; 3]) -> Option<Call> {
    let mut bytes = [0; Site::BYTES];
    for (i, word) in words.into_iter().enumerate() {
        bytes[8 + 8 * i..16 + 8 * i].copy_from_slice(&word.to_le_bytes());
    }
    Site::from_bytes(&bytes).map(|tag| tag.call)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, Operation, ReduceOp};

    #[test]
    fn calls_round_trip_as_words_and_invalid_words_are_rejected() {
        for (reduction, root) in
            [(None, None), (Some(ReduceOp::Mean), None), (None, Some(7)), (Some(ReduceOp::Max), Some(0))]
        {
            let call = Call {
                operation: Operation::Reduce,
                dtype: DType::BF16,
                count: 1 << 40,
                reduction,
                root,
                sizes: crate::types::Fingerprint::from_word(9),
            };
            assert_eq!(from_words(words(&call)), Some(call));
        }
        for invalid in [[0, 0, 255], [0, 0, 255 << 8], [0, 99 << 32, 0], [0, 0, 1 << 16]] {
            assert_eq!(from_words(invalid), None, "{invalid:?}");
        }
    }
}
