//! Ranks as processes of one host: whole operations in memory that they share.
//!
//! Every rank publishes its call in an *offer*, and each compares all offers, so all see the same mismatch. Small data
//! travel inside the offers and need nothing more (`small`). Large data go through each rank's *window* in chunks that
//! stay in the cache (`chunks`), or not at all where all buffers are in memory that the ranks share (`lent`, `arena`).
//! Every word has one writer, and nobody ever holds a pointer into memory that is only a peer's, so a rank may end at any
//! time and by any means. That it did, the others know from its control connection.

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
use self::control::{Control, Offer};
pub(crate) use self::segment::Segment;
use self::segment::TINY;
use super::tcp::Tcp;
use super::{Buffers, Collectives, Storage, Transport};
use crate::sync::{AtomicU64, Deadline, Mutex, Ordering, crowded, fence, spin};
use crate::types::{Call, Error, Fault, Site};

/// One rank's end of the memory that the ranks of a host share: all ranks of a group, or some. Ranks are numbered here
/// as in the segment, from 0 on.
pub(crate) struct Shm {
    segment: Arc<Segment>,
    rank: usize,
    /// Who the ranks are in the group.
    members: Vec<usize>,
    /// Where news of the group come from, and where its ranks are asked what they called.
    tcp: Arc<Tcp>,
    /// More ranks than processors.
    crowded: bool,
    /// Operations so far.
    number: AtomicU64,
    flow: Mutex<Flow>,
    /// For this rank's own buffers.
    arena: Arc<Arena>,
}

/// One operation in this memory: the group's, or a part of it.
struct Phase {
    call: Call,
    /// Its number among the operations in this memory.
    sequence: u64,
    /// The group's operation: what ranks must agree on.
    whole: Site,
}

impl Phase {
    fn tag(&self) -> Site {
        Site { sequence: self.whole.sequence, call: self.whole.call }
    }
}

impl Shm {
    /// The end of the rank that is `members[rank]` in the group. The segment has a share for each member.
    pub fn new(segment: Segment, rank: usize, members: Vec<usize>, tcp: Arc<Tcp>) -> Shm {
        assert!(rank < members.len() && members.len() == segment.world_size(), "a share for each member");
        let segment = Arc::new(segment);
        let shared = segment.clone();
        tcp.board().alarm(move || shared.control(rank).sleeper.0.ring());
        let crowded = crowded(segment.world_size());
        let arena = Arena::new(segment.clone(), rank);
        Shm { segment, rank, members, tcp, crowded, number: AtomicU64::new(0), flow: Mutex::default(), arena }
    }

    /// Runs `call` as a part of the group's operation at `site`. Every rank of the host hears from every other here, and
    /// all of them have then called the same operation of the group. All must run the same parts in the same order.
    pub fn phase(&self, site: &Site, call: Call, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        // One operation of a rank runs at a time.
        let phase = Phase { call, sequence: self.number.fetch_add(1, Ordering::Relaxed), whole: *site };
        if small::fits(&call, buffers.parts, self.world_size()) && call.bytes() <= TINY {
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

    fn offer(&self, rank: usize, phase: &Phase) -> &Offer {
        &self.control(rank).offers[phase.sequence as usize % 2]
    }

    /// Shows this rank's call to the others, and all that it wrote before to its offer and its window.
    fn publish(&self, phase: &Phase) {
        let offer = self.offer(self.rank, phase);
        for (word, value) in offer.call.iter().zip(words(&phase.whole.call)) {
            word.store(value, Ordering::Relaxed);
        }
        // Release: who sees the number sees the call and the data.
        offer.sequence.store(phase.sequence + 1, Ordering::Release);
        self.ring();
    }

    /// Wakes those who sleep until this rank makes the step that it has just stored.
    fn ring(&self) {
        // Between the step and the look for sleepers: see `Sleeper::sleep_for`.
        fence(Ordering::SeqCst);
        for peer in (0..self.world_size()).filter(|peer| *peer != self.rank) {
            self.control(peer).sleeper.0.ring_for(self.rank);
        }
    }

    /// Waits for all offers and compares the calls.
    fn agree(&self, phase: &Phase, deadline: &Deadline) -> Result<(), Fault> {
        // Acquire pairs with the release in `publish`.
        let come = |rank| self.offer(rank, phase).sequence.load(Ordering::Acquire) == phase.sequence + 1;
        self.wait(phase, deadline, come)?;
        let mine = words(&phase.whole.call);
        let call = |rank| self.offer(rank, phase).call.each_ref().map(|word| word.load(Ordering::Relaxed));
        if (0..self.world_size()).all(|rank| call(rank) == mine) {
            return Ok(());
        }
        let read = |rank| match from_words(call(rank)) {
            Some(call) => Ok((self.members[rank], call)),
            None => {
                let reason = "what it wrote to shared memory is no call".into();
                Err(Fault::Lost { peer: self.members[rank], reason })
            }
        };
        let calls = (0..self.world_size()).map(read).collect::<Result<Vec<_>, Fault>>()?;
        if calls.len() == self.tcp.world_size() {
            return Err(Fault::Failed(Error::Mismatch { sequence: phase.whole.sequence, calls }));
        }
        Err(self.tcp.watch(&phase.tag(), deadline).disagree(&calls))
    }

    /// Waits until every peer has come as far as `reached` says.
    fn wait(&self, phase: &Phase, deadline: &Deadline, reached: impl Fn(usize) -> bool) -> Result<(), Fault> {
        for peer in (0..self.world_size()).filter(|peer| *peer != self.rank) {
            if !spin(self.crowded, || reached(peer)) {
                self.sleep(phase, deadline, peer, &reached)?;
            }
        }
        Ok(())
    }

    /// Sleeps until `peer` has come, looking for ranks that will never come and for the deadline.
    #[cold]
    fn sleep(
        &self,
        phase: &Phase,
        deadline: &Deadline,
        peer: usize,
        reached: &impl Fn(usize) -> bool,
    ) -> Result<(), Fault> {
        let tag = phase.tag();
        let absence = |rank: usize| self.tcp.board().absence_in(self.members[rank], &tag);
        // An iterator: a wait allocates nothing.
        let missing = || (0..self.world_size()).filter(|rank| *rank != self.rank && !reached(*rank));
        let gone = || missing().find_map(|rank| Some((rank, absence(rank)?)));
        let mut watch = self.tcp.watch(&tag, deadline);
        let mut still = Instant::now();
        while !reached(peer) {
            if let Some((rank, fault)) = gone() {
                // Whatever a rank did before it left or failed is in the memory before the news of it is here: what is
                // missing now will never come.
                if reached(rank) {
                    continue;
                }
                return Err(fault);
            }
            // All that is waited for rings. The end of the pause is for a peer that is stopped between its step and its
            // ring, and for ranks that wait for each other because they disagree, here or on other hosts.
            let pause = watch.pause();
            let sleeper = &self.control(self.rank).sleeper.0;
            let nap = pause.saturating_sub(still.elapsed());
            sleeper.sleep_for(peer, nap, || reached(peer) || gone().is_some());
            if still.elapsed() >= pause {
                still = Instant::now();
                if let Err(fault) = watch.tick(self.members[peer]) {
                    // As above.
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
        // What is small travels in the offers, wherever it is.
        if bytes <= TINY { None } else { self.arena.allocate(bytes) }
    }
}

/// A call as the words of its tag.
fn words(call: &Call) -> [u64; 3] {
    let bytes = Site { sequence: 0, call: *call }.to_bytes();
    [8, 16, 24].map(|at| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i])))
}

/// The inverse of [`words`]; `None` for words that no call gives.
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
    fn calls_survive_their_words_and_nonsense_is_no_call() {
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
        for nonsense in [[0, 0, 255], [0, 0, 255 << 8], [0, 99 << 32, 0], [0, 0, 1 << 32]] {
            assert_eq!(from_words(nonsense), None, "{nonsense:?}");
        }
    }
}
