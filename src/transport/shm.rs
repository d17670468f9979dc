//! Ranks as processes of one host: whole operations in memory that they share.
//!
//! Every rank publishes its call in an *offer*, and each compares all offers, so all see the same mismatch. Small data
//! travel inside the offers and need nothing more (`small`). Large data go through each rank's *window* in chunks that
//! stay in the cache (`chunks`), or not at all where all buffers are in memory that the ranks share (`lent`, `arena`).
//! Every word has one writer, and nobody ever holds a pointer into memory that is only a peer's, so a rank may end at any
//! time and by any means. That it did, the others know from its control connection.

mod arena;
mod chunks;
mod lent;
mod segment;
mod sleeper;
mod small;

use std::io;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::arena::Arena;
use self::chunks::Flow;
pub(crate) use self::segment::Segment;
use self::segment::{Control, INLINE, Offer};
use super::tcp::Board;
use super::{Buffers, Collectives, Fault, Storage};
use crate::call::{Call, Tag};
use crate::error::{Error, Ranks, Site};
use crate::wait::{Deadline, Patience, crowded, spin};

/// The longest sleep. All that is waited for rings; this is for a peer that is stopped between its step and its ring.
const NAP: Duration = Duration::from_millis(100);

/// One rank's end of a group whose ranks share memory.
pub(crate) struct Shm {
    segment: Arc<Segment>,
    rank: usize,
    /// What is known of the peers.
    board: Arc<Board>,
    /// More ranks than processors.
    crowded: bool,
    flow: Mutex<Flow>,
    /// For this rank's own buffers.
    arena: Arc<Arena>,
}

impl Shm {
    pub fn new(segment: Segment, rank: usize, board: Arc<Board>) -> Shm {
        let segment = Arc::new(segment);
        let shared = segment.clone();
        board.alarm(move || shared.control(rank).sleeper.0.ring());
        let crowded = crowded(segment.world_size());
        let arena = Arena::new(segment.clone(), rank);
        Shm { segment, rank, board, crowded, flow: Mutex::default(), arena }
    }

    fn world_size(&self) -> usize {
        self.segment.world_size()
    }

    fn control(&self, rank: usize) -> &Control {
        self.segment.control(rank)
    }

    fn offer(&self, rank: usize, site: &Site) -> &Offer {
        &self.control(rank).offers[site.sequence as usize % 2]
    }

    /// Shows this rank's call to the others, and all that it wrote before to its offer and its window.
    fn publish(&self, site: &Site) {
        let offer = self.offer(self.rank, site);
        for (word, value) in offer.call.iter().zip(words(&site.call)) {
            word.store(value, Ordering::Relaxed);
        }
        // Release: who sees the number sees the call and the data.
        offer.sequence.store(site.sequence + 1, Ordering::Release);
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
    fn agree(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        // Acquire pairs with the release in `publish`.
        self.wait(site, deadline, |rank| self.offer(rank, site).sequence.load(Ordering::Acquire) == site.sequence + 1)?;
        let mine = words(&site.call);
        let call = |rank| self.offer(rank, site).call.each_ref().map(|word| word.load(Ordering::Relaxed));
        if (0..self.world_size()).all(|rank| call(rank) == mine) {
            return Ok(());
        }
        let read = |rank| match from_words(call(rank)) {
            Some(call) => Ok((rank, call)),
            None => Err(Fault::Lost { peer: rank, reason: "what it wrote to shared memory is no call".into() }),
        };
        let calls = (0..self.world_size()).map(read).collect::<Result<_, Fault>>()?;
        Err(Fault::Failed(Error::Mismatch { sequence: site.sequence, calls }))
    }

    /// Waits until every peer has come as far as `reached` says.
    fn wait(&self, site: &Site, deadline: &Deadline, reached: impl Fn(usize) -> bool) -> Result<(), Fault> {
        for peer in (0..self.world_size()).filter(|peer| *peer != self.rank) {
            if !spin(self.crowded, || reached(peer)) {
                self.sleep(site, deadline, peer, &reached)?;
            }
        }
        Ok(())
    }

    /// Sleeps until `peer` has come, looking for ranks that will never come and for the deadline.
    #[cold]
    fn sleep(
        &self,
        site: &Site,
        deadline: &Deadline,
        peer: usize,
        reached: &impl Fn(usize) -> bool,
    ) -> Result<(), Fault> {
        let tag = Tag { group: 0, sequence: site.sequence, call: site.call };
        // An iterator, collected only for reports: a wait allocates nothing.
        let missing = || (0..self.world_size()).filter(|rank| *rank != self.rank && !reached(*rank));
        let gone = || missing().find_map(|rank| Some((rank, self.board.absence_in(rank, &tag)?)));
        let mut patience = Patience::until(deadline);
        while !reached(peer) {
            if let Some((rank, fault)) = gone() {
                // Whatever a rank did before it left or failed is in the memory before the news of it is here: what is
                // missing now will never come.
                if reached(rank) {
                    continue;
                }
                return Err(fault);
            }
            if deadline.passed() {
                let missing: Vec<usize> = missing().collect();
                // The last may have come since the loop looked.
                if missing.is_empty() {
                    break;
                }
                return Err(Fault::Timeout { missing });
            }
            patience.warn(self.rank, || format!("in {site} for {}", Ranks(&missing().collect::<Vec<_>>())));
            let sleeper = &self.control(self.rank).sleeper.0;
            sleeper.sleep_for(peer, patience.pause().min(NAP), || reached(peer) || gone().is_some());
        }
        Ok(())
    }
}

impl Collectives for Shm {
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Option<Result<(), Fault>> {
        Some(if small::fits(&site.call, self.world_size()) {
            self.small(site, buffers, deadline)
        } else {
            self.large(site, buffers, deadline)
        })
    }

    fn allocate(&self, bytes: usize) -> Option<io::Result<Box<dyn Storage>>> {
        // What is small travels in the offers, wherever it is.
        if bytes <= INLINE { None } else { self.arena.allocate(bytes) }
    }
}

/// A call as the words of its tag.
fn words(call: &Call) -> [u64; 3] {
    let bytes = Tag { group: 0, sequence: 0, call: *call }.to_bytes();
    [16, 24, 32].map(|at| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i])))
}

/// The inverse of [`words`]; `None` for words that no call gives.
fn from_words(words: [u64; 3]) -> Option<Call> {
    let mut bytes = [0; Tag::BYTES];
    for (i, word) in words.into_iter().enumerate() {
        bytes[16 + 8 * i..24 + 8 * i].copy_from_slice(&word.to_le_bytes());
    }
    Tag::from_bytes(&bytes).map(|tag| tag.call)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Operation;
    use crate::dtype::{DType, ReduceOp};

    #[test]
    fn calls_survive_their_words_and_nonsense_is_no_call() {
        for (reduction, root) in
            [(None, None), (Some(ReduceOp::Mean), None), (None, Some(7)), (Some(ReduceOp::Max), Some(0))]
        {
            let call = Call { operation: Operation::Reduce, dtype: DType::BF16, count: 1 << 40, reduction, root };
            assert_eq!(from_words(words(&call)), Some(call));
        }
        for nonsense in [[0, 0, 255], [0, 0, 255 << 8], [0, 99 << 32, 0], [0, 0, 1 << 16]] {
            assert_eq!(from_words(nonsense), None, "{nonsense:?}");
        }
    }
}
