//! Allocation of buffers in the segment. Each rank allocates from its own arena, independently of its peers.
//!
//! An arena consists of addresses only. The pages of a range are allocated with its first buffer, all at once, so that
//! a lack of memory is an error and never a signal. Pages of dropped buffers are cached for later buffers, up to a
//! limit: the system has to clear fresh pages, and every rank takes a fault for each, which takes longer than an
//! all-reduce of as many bytes.
#![expect(clippy::single_range_in_vec_init, reason = "ranges are the elements here")]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::segment::{ALIGNMENT, Segment};
use crate::sync::{Mutex, lock};
use crate::transport::Storage;

/// The limit for cached pages, in bytes per rank.
const CACHE_MAX: usize = 256 << 20;

/// One rank's arena.
pub(super) struct Arena {
    segment: Arc<Segment>,
    rank: usize,
    ranges: Mutex<Ranges>,
}

/// The ranges in use, as offsets in the arena. Every range begins and ends at multiples of `ALIGNMENT`.
#[derive(Default)]
struct Ranges {
    /// Buffers: their offsets, and their sizes in bytes before rounding.
    live: BTreeMap<usize, usize>,
    /// Ranges that have pages and no buffer: their offsets and sizes. No two of them are adjacent.
    cached: BTreeMap<usize, usize>,
    /// Set after a failure: nothing is allocated any more.
    closed: bool,
}

impl Ranges {
    /// Reserves a range for `bytes` bytes in an arena of `size` bytes. Returns its offset, and whether it has pages.
    fn reserve(&mut self, bytes: usize, size: usize) -> Option<(usize, bool)> {
        let len = bytes.checked_next_multiple_of(ALIGNMENT)?;
        if let Some((at, free)) = self.cached.iter().map(|(at, free)| (*at, *free)).find(|(_, free)| *free >= len) {
            self.cached.remove(&at);
            if free > len {
                self.cached.insert(at + len, free - len);
            }
            self.live.insert(at, bytes);
            return Some((at, true));
        }
        let live = self.live.iter().map(|(at, bytes)| (*at, bytes.next_multiple_of(ALIGNMENT)));
        let mut used: Vec<_> = live.chain(self.cached.iter().map(|(at, len)| (*at, *len))).collect();
        used.sort_unstable();
        let ends = [0].into_iter().chain(used.iter().map(|(at, len)| at + len));
        let begins = used.iter().map(|(at, _)| *at).chain([size]);
        let (at, _) = ends.zip(begins).find(|(end, begin)| begin.saturating_sub(*end) >= len)?;
        self.live.insert(at, bytes);
        Some((at, false))
    }

    /// Frees the buffer at `at`. Returns the ranges whose pages must be freed because they are not cached.
    fn free(&mut self, at: usize) -> Vec<Range<usize>> {
        let Some(bytes) = self.live.remove(&at) else { return Vec::new() };
        let len = bytes.next_multiple_of(ALIGNMENT);
        if self.closed || len > CACHE_MAX {
            return vec![at..at + len];
        }
        // The buffer dropped last is the best guess for the size of the next one, so older ranges are evicted.
        let cached: usize = self.cached.values().sum();
        let evicted = if cached + len > CACHE_MAX { self.drain_cached() } else { Vec::new() };
        let before = self.cached.range(..at).next_back().map(|(at, len)| (*at, *len));
        let (mut start, mut end) = (at, at + len);
        if let Some((before, len)) = before.filter(|(before, len)| before + len == at) {
            self.cached.remove(&before);
            (start, end) = (before, end.max(before + len));
        }
        if let Some(len) = self.cached.remove(&end) {
            end += len;
        }
        self.cached.insert(start, end - start);
        evicted
    }

    /// Empties the cache. Returns the ranges that were in it.
    fn drain_cached(&mut self) -> Vec<Range<usize>> {
        std::mem::take(&mut self.cached).into_iter().map(|(at, len)| at..at + len).collect()
    }

    /// Whether the pages of this range hold no byte of a buffer outside the range.
    fn is_exclusive(&self, range: &Range<usize>) -> bool {
        let Some((at, bytes)) = self.live.range(..=range.start).next_back() else { return false };
        range.start.is_multiple_of(ALIGNMENT) && (range.end.is_multiple_of(ALIGNMENT) || range.end == at + bytes)
    }
}

impl Arena {
    pub fn new(segment: Arc<Segment>, rank: usize) -> Arc<Arena> {
        Arc::new(Arena { segment, rank, ranges: Mutex::default() })
    }

    /// Allocates zeroed memory for a buffer; `None` after [`close`](Self::close).
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Option<io::Result<Box<dyn Storage>>> {
        let size = self.segment.arena_size();
        let mut ranges = lock(&self.ranges);
        if ranges.closed {
            return None;
        }
        let mut found = ranges.reserve(bytes, size);
        if found.is_none() {
            self.free_pages(&ranges.drain_cached());
            found = ranges.reserve(bytes, size);
        }
        let Some((at, has_pages)) = found else {
            let reason = format!("{bytes} bytes do not fit the {size} bytes of shared addresses that each rank has");
            return Some(Err(io::Error::new(io::ErrorKind::OutOfMemory, reason)));
        };
        drop(ranges);
        let range = at..at + bytes.next_multiple_of(ALIGNMENT);
        if !has_pages && let Err(e) = self.allocate_pages(&range) {
            let mut ranges = lock(&self.ranges);
            ranges.live.remove(&at);
            self.free_pages(&[range]);
            return Some(Err(e));
        }
        let buffer = ArenaBuffer { arena: self.clone(), at };
        if has_pages {
            // SAFETY: the range is within the arena, and belongs to this buffer only.
            unsafe { buffer.start().write_bytes(0, bytes) };
        }
        Some(Ok(Box::new(buffer)))
    }

    /// Allocates the pages of a range that is in `live`.
    fn allocate_pages(&self, range: &Range<usize>) -> io::Result<()> {
        self.segment.back(self.rank, range).or_else(|_| {
            // The cached pages may be the memory that is missing.
            let mut ranges = lock(&self.ranges);
            self.free_pages(&ranges.drain_cached());
            drop(ranges);
            self.segment.back(self.rank, range)
        })
    }

    /// The offset in the arena of `bytes` bytes at `start`; `None` if they are not in it.
    pub fn find(&self, start: *const u8, bytes: usize) -> Option<usize> {
        let at = start.addr().checked_sub(self.segment.arena(self.rank, 0).addr().get())?;
        (at.checked_add(bytes)? <= self.segment.arena_size()).then_some(at)
    }

    /// See [`find`](Self::find). `None` also for memory that shares a page with another buffer and cannot be revoked.
    pub fn find_unshared(&self, start: *const u8, bytes: usize) -> Option<usize> {
        self.find(start, bytes).filter(|at| lock(&self.ranges).is_exclusive(&(*at..at + bytes)))
    }

    /// Stops allocation for good, so that no range is used by a second buffer.
    pub fn close(&self) {
        lock(&self.ranges).closed = true;
    }

    /// Returns pages to the system. The caller holds the lock, so the ranges cannot be reserved meanwhile.
    fn free_pages(&self, ranges: &[Range<usize>]) {
        ranges.iter().for_each(|range| self.segment.clear(self.rank, range));
    }
}

/// A buffer's memory. It keeps the segment mapped, even if the group ends first.
struct ArenaBuffer {
    arena: Arc<Arena>,
    at: usize,
}

// SAFETY: the range is in `live` for as long as the value exists, so no other buffer has it. The mapping lives as long
// as the arena. Peers access the range only as part of operations that borrow it, which end their access: see `lent`.
unsafe impl Storage for ArenaBuffer {
    fn start(&self) -> NonNull<u8> {
        self.arena.segment.arena(self.arena.rank, self.at)
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        let mut ranges = lock(&self.arena.ranges);
        let evicted = ranges.free(self.at);
        self.arena.free_pages(&evicted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 100 * ALIGNMENT;

    #[test]
    fn buffers_are_disjoint_and_the_first_fitting_range_is_reserved() {
        let mut ranges = Ranges::default();
        assert_eq!(ranges.reserve(1, SIZE), Some((0, false)));
        assert_eq!(ranges.reserve(2 * ALIGNMENT + 1, SIZE), Some((ALIGNMENT, false)));
        assert_eq!(ranges.reserve(ALIGNMENT, SIZE), Some((4 * ALIGNMENT, false)));
        assert!(ranges.free(ALIGNMENT).is_empty());
        // Of three cached grains one is reused, then the other two, then none is left.
        assert_eq!(ranges.reserve(ALIGNMENT, SIZE), Some((ALIGNMENT, true)));
        assert_eq!(ranges.reserve(3 * ALIGNMENT, SIZE), Some((5 * ALIGNMENT, false)));
        assert_eq!(ranges.reserve(2 * ALIGNMENT, SIZE), Some((2 * ALIGNMENT, true)));
        assert_eq!(ranges.reserve(SIZE, SIZE), None);
        assert_eq!(ranges.reserve(usize::MAX, SIZE), None);
        assert_eq!(ranges.reserve(92 * ALIGNMENT, SIZE), Some((8 * ALIGNMENT, false)));
        assert_eq!(ranges.reserve(1, SIZE), None);
    }

    #[test]
    fn adjacent_freed_ranges_are_merged() {
        let mut ranges = Ranges::default();
        let starts: Vec<_> = (0..5).map(|_| ranges.reserve(ALIGNMENT, SIZE).unwrap().0).collect();
        for i in [1, 3, 2, 0] {
            assert!(ranges.free(starts[i]).is_empty());
        }
        assert_eq!(ranges.cached, BTreeMap::from([(0, 4 * ALIGNMENT)]));
        assert_eq!(ranges.drain_cached(), [0..4 * ALIGNMENT]);
        assert_eq!(ranges.reserve(ALIGNMENT, SIZE), Some((0, false)));
    }

    #[test]
    fn no_more_than_the_limit_is_cached() {
        let mut ranges = Ranges::default();
        let [small, large, larger] = [CACHE_MAX / 2, CACHE_MAX - ALIGNMENT, CACHE_MAX + ALIGNMENT]
            .map(|n| ranges.reserve(n, 8 * CACHE_MAX).unwrap().0);
        assert!(ranges.free(small).is_empty());
        assert_eq!(ranges.free(large), [small..small + CACHE_MAX / 2]);
        assert_eq!(ranges.free(larger), [larger..larger + CACHE_MAX + ALIGNMENT]);
        assert_eq!(ranges.cached, BTreeMap::from([(large, CACHE_MAX - ALIGNMENT)]));
        ranges.closed = true;
        let last = ranges.reserve(ALIGNMENT, 8 * CACHE_MAX).unwrap().0;
        assert_eq!(ranges.free(last).len(), 1);
    }

    #[test]
    fn a_range_is_exclusive_if_no_other_part_of_a_buffer_is_on_its_pages() {
        let mut ranges = Ranges::default();
        ranges.reserve(3 * ALIGNMENT + 5, SIZE);
        for (range, exclusive) in [
            (0..3 * ALIGNMENT + 5, true),
            (ALIGNMENT..3 * ALIGNMENT + 5, true),
            (0..ALIGNMENT, true),
            (0..ALIGNMENT + 4, false),
            (4..ALIGNMENT, false),
            (0..3 * ALIGNMENT + 4, false),
        ] {
            assert_eq!(ranges.is_exclusive(&range), exclusive, "{range:?}");
        }
    }
}
