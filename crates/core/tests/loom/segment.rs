//! Replaces `transport::shm::segment`, the memory that processes share: one heap for all ranks, with every access to
//! windows reported to loom.
//!
//! All sizes are as small as possible, so that few elements take many steps.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::control::{CachePadded, Control, ExchangeSlot, INLINE};
use crate::models::memory;
use crate::sync::{AtomicU64, Cell};

/// As in the crate.
pub(super) const SLOT_BYTES: usize = 8;

/// As in the crate.
pub(super) const BUFFERS: usize = 4;

/// The smallest piece, in bytes.
const BLOCK: usize = 64;

pub(super) const ALIGNMENT: usize = 64;

/// Bytes of each rank's arena.
const ARENA: usize = 4 * ALIGNMENT;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Block(#[expect(dead_code, reason = "accessed by pointers")] [u8; BLOCK]);

/// One rank's view of the segment. All are the same.
#[derive(Clone)]
pub(crate) struct Segment(Arc<Memory>);

struct Memory {
    controls: Box<[Control]>,
    /// The windows, by rank, buffer and part.
    windows: NonNull<[Block]>,
    /// The arenas, by rank.
    arenas: NonNull<[Block]>,
}

// SAFETY: as for the crate's own; loom runs all threads of a model in turns.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

fn control() -> Control {
    let slot = || ExchangeSlot {
        sequence: AtomicU64::new(0),
        call: Default::default(),
        inline: Cell::new([0; INLINE]),
        lent: Default::default(),
    };
    let line = || CachePadded(AtomicU64::new(0));
    Control { slots: [slot(), slot()], progress: line(), gave_up: line(), sleeper: CachePadded(Default::default()) }
}

impl Segment {
    pub fn new(world_size: usize) -> Segment {
        let controls = (0..world_size).map(|_| control()).collect();
        let blocks = |n| NonNull::from(Box::leak(vec![Block([0; BLOCK]); n].into_boxed_slice()));
        let windows = blocks(world_size * BUFFERS * world_size);
        memory::watch(windows.as_ptr(), BLOCK);
        Segment(Arc::new(Memory { controls, windows, arenas: blocks(world_size * ARENA / BLOCK) }))
    }

    /// Only the rendezvous of processes calls this, and no model runs it.
    pub fn create(_world_size: usize) -> io::Result<(Segment, OwnedFd)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn open(_file: &OwnedFd, _world_size: usize) -> io::Result<Segment> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn populate(&self, _rank: usize) {}

    pub fn world_size(&self) -> usize {
        self.0.controls.len()
    }

    pub(super) fn control(&self, rank: usize) -> &Control {
        &self.0.controls[rank]
    }

    pub fn block_size(&self) -> usize {
        BLOCK
    }

    pub fn block(&self, rank: usize, buffer: usize, part: usize) -> *mut u8 {
        let n = self.world_size();
        assert!(rank < n && buffer < BUFFERS && part < n, "block {part} of buffer {buffer} of rank {rank}");
        let at = (rank * BUFFERS + buffer) * n + part;
        // SAFETY: the indices were checked above, so the block exists.
        unsafe { self.0.windows.cast::<Block>().add(at).cast().as_ptr() }
    }

    pub fn arena_size(&self) -> usize {
        ARENA
    }

    pub fn arena(&self, rank: usize, at: usize) -> NonNull<u8> {
        assert!(rank < self.world_size() && at <= ARENA, "byte {at} of arena {rank}");
        // SAFETY: checked above; there is an arena for each rank.
        unsafe { self.0.arenas.cast().add(rank * ARENA + at) }
    }

    pub fn back(&self, _rank: usize, _range: &Range<usize>) -> io::Result<()> {
        Ok(())
    }

    pub fn clear(&self, _rank: usize, _range: &Range<usize>) {}

    /// Stops watching this memory: from now on peers may do anything with it.
    pub unsafe fn detach(&self, rank: usize, range: &Range<usize>) {
        memory::unwatch(self.arena(rank, range.start).as_ptr(), range.len());
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: both came from boxes, and no rank uses them any more.
        unsafe {
            drop(Box::from_raw(self.windows.as_ptr()));
            drop(Box::from_raw(self.arenas.as_ptr()));
        }
    }
}
