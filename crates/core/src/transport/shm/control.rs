//! The control part of a rank's share: its exchange slots, its progress and its wake-up words.

use super::sleeper::Sleeper;
use crate::sync::{AtomicU64, Cell};

/// Bytes of data in an exchange slot, for one rank's contribution to a small operation. Two elements in loom models.
pub(super) const INLINE: usize = if cfg!(bonfire_loom) { 16 } else { 8 << 10 };

/// Aligns its value to cache lines of its own (two, because processors fetch lines in pairs).
#[repr(C, align(128))]
pub(super) struct CachePadded<T>(pub T);

/// The control part of one rank's share. Only that rank writes it, except `sleeper`.
#[repr(C)]
pub(super) struct Control {
    /// Exchange slots, used alternately: a fast rank may begin the next operation while a straggler still reads the
    /// slot of this one. It cannot get two operations ahead, because the one between needs the straggler.
    pub slots: [ExchangeSlot; 2],
    /// The last step that the rank has made in its large operations, see `chunks`.
    pub progress: CachePadded<AtomicU64>,
    /// Not 0 once the rank has given up an operation for which it had lent buffers, see `lent`. On a cache line of its
    /// own, which stays in the caches of all ranks.
    pub gave_up: CachePadded<AtomicU64>,
    /// Puts the rank to sleep and wakes it.
    pub sleeper: CachePadded<Sleeper>,
}

/// An exchange slot: a call, and its data if they are small. The first 96 bytes of the data are on its first two cache
/// lines, with `sequence` and `call`, so a small operation moves one or two lines from each rank to each.
#[repr(C, align(128))]
pub(super) struct ExchangeSlot {
    /// The number of the operation, counted from 1. Written last, with release.
    pub sequence: AtomicU64,
    /// The call, as words of its [`Site`](crate::types::Site).
    pub call: [AtomicU64; 3],
    pub inline: Cell<[u8; INLINE]>,
    /// The offsets of the input and the output of a large operation in this rank's arena, plus one; 0 if not lent.
    pub lent: [AtomicU64; 2],
}

// SAFETY: only the slot's own rank writes the inline data, before it publishes the slot (release on `sequence`). Peers
// read the data after they have seen the number (acquire), by raw pointers, whose reads return some bytes whatever a
// broken peer does meanwhile. The rank writes the same slot again two operations later. It can begin that operation
// only after all ranks have entered the one between, and so have finished reading.
unsafe impl Sync for ExchangeSlot {}

/// The offsets of a rank's input and output in its arena; `None` for one that is elsewhere or not accessed by peers.
pub(super) type LentOffsets = [Option<usize>; 2];
