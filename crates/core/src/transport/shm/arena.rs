//! Memory for buffers within the segment: each rank hands out its own arena, and knows nothing of the others'.
//!
//! An arena is addresses only, until a range of it is given away: then the system puts pages there, all at once, so that
//! memory that is not to be had is an error and never a signal. Pages of dropped buffers are kept for the next ones, up to
//! a limit: fresh ones must be cleared by the system and then found by every rank, which takes longer than an all-reduce
//! of as many bytes.
#![expect(clippy::single_range_in_vec_init, reason = "ranges are the elements here")]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::segment::{GRAIN, Segment};
use crate::sync::{Mutex, lock};
use crate::transport::Storage;

/// Bytes of dropped buffers that a rank keeps.
const KEPT: usize = 256 << 20;

/// One rank's arena.
pub(super) struct Arena {
    segment: Arc<Segment>,
    rank: usize,
    ranges: Mutex<Ranges>,
}

/// What is where, in bytes from the arena's beginning. Every range begins and ends at multiples of `GRAIN`.
#[derive(Default)]
struct Ranges {
    /// Buffers: where they begin, and their bytes, which are rounded up only for what follows.
    live: BTreeMap<usize, usize>,
    /// Ranges that have pages and no buffer; no two touch.
    kept: BTreeMap<usize, usize>,
    /// After a failure nothing is given away any more.
    closed: bool,
}

impl Ranges {
    /// Finds room for so many bytes below `size`; says whether it has pages already.
    fn take(&mut self, bytes: usize, size: usize) -> Option<(usize, bool)> {
        let len = bytes.checked_next_multiple_of(GRAIN)?;
        if let Some((at, kept)) = self.kept.iter().map(|(at, kept)| (*at, *kept)).find(|(_, kept)| *kept >= len) {
            self.kept.remove(&at);
            if kept > len {
                self.kept.insert(at + len, kept - len);
            }
            self.live.insert(at, bytes);
            return Some((at, true));
        }
        let live = self.live.iter().map(|(at, bytes)| (*at, bytes.next_multiple_of(GRAIN)));
        let mut used: Vec<_> = live.chain(self.kept.iter().map(|(at, len)| (*at, *len))).collect();
        used.sort_unstable();
        let ends = [0].into_iter().chain(used.iter().map(|(at, len)| at + len));
        let begins = used.iter().map(|(at, _)| *at).chain([size]);
        let (at, _) = ends.zip(begins).find(|(end, begin)| begin.saturating_sub(*end) >= len)?;
        self.live.insert(at, bytes);
        Some((at, false))
    }

    /// Takes the buffer at `at` back; gives the ranges whose pages are not to be kept.
    fn give(&mut self, at: usize) -> Vec<Range<usize>> {
        let Some(bytes) = self.live.remove(&at) else { return Vec::new() };
        let len = bytes.next_multiple_of(GRAIN);
        if self.closed || len > KEPT {
            return vec![at..at + len];
        }
        // What was dropped last is most like what is asked for next.
        let kept: usize = self.kept.values().sum();
        let old = if kept + len > KEPT { self.release() } else { Vec::new() };
        let before = self.kept.range(..at).next_back().map(|(at, len)| (*at, *len));
        let (mut start, mut end) = (at, at + len);
        if let Some((before, len)) = before.filter(|(before, len)| before + len == at) {
            self.kept.remove(&before);
            (start, end) = (before, end.max(before + len));
        }
        if let Some(len) = self.kept.remove(&end) {
            end += len;
        }
        self.kept.insert(start, end - start);
        old
    }

    /// Keeps nothing.
    fn release(&mut self) -> Vec<Range<usize>> {
        std::mem::take(&mut self.kept).into_iter().map(|(at, len)| at..at + len).collect()
    }

    /// Whether the pages of this range hold nothing else that anybody uses.
    fn alone(&self, range: &Range<usize>) -> bool {
        let Some((at, bytes)) = self.live.range(..=range.start).next_back() else { return false };
        range.start.is_multiple_of(GRAIN) && (range.end.is_multiple_of(GRAIN) || range.end == at + bytes)
    }
}

impl Arena {
    pub fn new(segment: Arc<Segment>, rank: usize) -> Arc<Arena> {
        Arc::new(Arena { segment, rank, ranges: Mutex::default() })
    }

    /// Memory for a buffer; `None` after [`close`](Self::close).
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Option<io::Result<Box<dyn Storage>>> {
        let size = self.segment.arena_size();
        let mut ranges = lock(&self.ranges);
        if ranges.closed {
            return None;
        }
        let mut found = ranges.take(bytes, size);
        if found.is_none() {
            self.clear(&ranges.release());
            found = ranges.take(bytes, size);
        }
        let Some((at, has_pages)) = found else {
            let reason = format!("{bytes} bytes do not fit the {size} bytes of shared addresses that each rank has");
            return Some(Err(io::Error::new(io::ErrorKind::OutOfMemory, reason)));
        };
        drop(ranges);
        let range = at..at + bytes.next_multiple_of(GRAIN);
        if !has_pages && let Err(e) = self.back(&range) {
            let mut ranges = lock(&self.ranges);
            ranges.live.remove(&at);
            self.clear(&[range]);
            return Some(Err(e));
        }
        let lease = Lease { arena: self.clone(), at };
        if has_pages {
            // SAFETY: the range is within the arena, and nobody else's for as long as the lease exists.
            unsafe { lease.start().write_bytes(0, bytes) };
        }
        Some(Ok(Box::new(lease)))
    }

    /// Puts pages in a range that is in `live`.
    fn back(&self, range: &Range<usize>) -> io::Result<()> {
        self.segment.back(self.rank, range).or_else(|_| {
            // What is kept for later may be what is missing now.
            let mut ranges = lock(&self.ranges);
            self.clear(&ranges.release());
            drop(ranges);
            self.segment.back(self.rank, range)
        })
    }

    /// Where so many bytes at `start` are in the arena, if they are.
    pub fn find(&self, start: *const u8, bytes: usize) -> Option<usize> {
        let at = start.addr().checked_sub(self.segment.arena(self.rank, 0).addr().get())?;
        (at.checked_add(bytes)? <= self.segment.arena_size()).then_some(at)
    }

    /// As [`find`](Self::find), for memory that can be taken back from the peers because its pages hold nothing else.
    pub fn find_alone(&self, start: *const u8, bytes: usize) -> Option<usize> {
        self.find(start, bytes).filter(|at| lock(&self.ranges).alone(&(*at..at + bytes)))
    }

    /// Gives nothing away any more, and no range to a second buffer.
    pub fn close(&self) {
        lock(&self.ranges).closed = true;
    }

    /// Gives pages back to the system. The caller holds the lock, so that nobody has the ranges by then.
    fn clear(&self, ranges: &[Range<usize>]) {
        ranges.iter().for_each(|range| self.segment.clear(self.rank, range));
    }
}

/// A buffer's memory. It keeps the mapping, whatever becomes of the group.
struct Lease {
    arena: Arc<Arena>,
    at: usize,
}

// SAFETY: the range is in `live` for as long as the lease exists, so no other lease has it, and the mapping lives as long
// as the arena. What peers do with it is part of operations that borrow it, and ends with them: see `lent`.
unsafe impl Storage for Lease {
    fn start(&self) -> NonNull<u8> {
        self.arena.segment.arena(self.arena.rank, self.at)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut ranges = lock(&self.arena.ranges);
        let cleared = ranges.give(self.at);
        self.arena.clear(&cleared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 100 * GRAIN;

    #[test]
    fn buffers_are_apart_and_the_first_room_that_fits_is_taken() {
        let mut ranges = Ranges::default();
        assert_eq!(ranges.take(1, SIZE), Some((0, false)));
        assert_eq!(ranges.take(2 * GRAIN + 1, SIZE), Some((GRAIN, false)));
        assert_eq!(ranges.take(GRAIN, SIZE), Some((4 * GRAIN, false)));
        assert!(ranges.give(GRAIN).is_empty());
        // Of three kept grains one is used again, then the other two, then none is left.
        assert_eq!(ranges.take(GRAIN, SIZE), Some((GRAIN, true)));
        assert_eq!(ranges.take(3 * GRAIN, SIZE), Some((5 * GRAIN, false)));
        assert_eq!(ranges.take(2 * GRAIN, SIZE), Some((2 * GRAIN, true)));
        assert_eq!(ranges.take(SIZE, SIZE), None);
        assert_eq!(ranges.take(usize::MAX, SIZE), None);
        assert_eq!(ranges.take(92 * GRAIN, SIZE), Some((8 * GRAIN, false)));
        assert_eq!(ranges.take(1, SIZE), None);
    }

    #[test]
    fn neighbours_that_are_dropped_become_one_range() {
        let mut ranges = Ranges::default();
        let starts: Vec<_> = (0..5).map(|_| ranges.take(GRAIN, SIZE).unwrap().0).collect();
        for i in [1, 3, 2, 0] {
            assert!(ranges.give(starts[i]).is_empty());
        }
        assert_eq!(ranges.kept, BTreeMap::from([(0, 4 * GRAIN)]));
        assert_eq!(ranges.release(), [0..4 * GRAIN]);
        assert_eq!(ranges.take(GRAIN, SIZE), Some((0, false)));
    }

    #[test]
    fn no_more_than_the_limit_is_kept() {
        let mut ranges = Ranges::default();
        let [small, large, larger] =
            [KEPT / 2, KEPT - GRAIN, KEPT + GRAIN].map(|n| ranges.take(n, 8 * KEPT).unwrap().0);
        assert!(ranges.give(small).is_empty());
        assert_eq!(ranges.give(large), [small..small + KEPT / 2]);
        assert_eq!(ranges.give(larger), [larger..larger + KEPT + GRAIN]);
        assert_eq!(ranges.kept, BTreeMap::from([(large, KEPT - GRAIN)]));
        ranges.closed = true;
        let last = ranges.take(GRAIN, 8 * KEPT).unwrap().0;
        assert_eq!(ranges.give(last).len(), 1);
    }

    #[test]
    fn pages_are_alone_where_no_other_part_of_a_buffer_is_on_them() {
        let mut ranges = Ranges::default();
        ranges.take(3 * GRAIN + 5, SIZE);
        for (range, alone) in [
            (0..3 * GRAIN + 5, true),
            (GRAIN..3 * GRAIN + 5, true),
            (0..GRAIN, true),
            (0..GRAIN + 4, false),
            (4..GRAIN, false),
            (0..3 * GRAIN + 4, false),
        ] {
            assert_eq!(ranges.alone(&range), alone, "{range:?}");
        }
    }
}
