//! What ranks tell each other in the memory that they share.

use super::sleeper::Sleeper;
use crate::sync::{AtomicU64, Cell};

/// Bytes of one rank's contribution to a small operation that travel in its offer; two elements in models.
pub(super) const INLINE: usize = if cfg!(bonfire_loom) { 16 } else { 8 << 10 };

/// Keeps what it holds on cache lines of its own (two, since processors fetch lines in pairs).
#[repr(C, align(128))]
pub(super) struct Line<T>(pub T);

/// What a rank tells the others. It alone writes it, but for `sleeper`.
#[repr(C)]
pub(super) struct Control {
    /// Used in turn: a fast rank may begin the next operation while a slow one still reads this one's. It cannot get
    /// two ahead, because the operation between needs the slow one.
    pub offers: [Offer; 2],
    /// How far it is in its large operations, see `chunks`.
    pub progress: Line<AtomicU64>,
    /// Not 0 once it has given up an operation for which it had lent buffers, see `lent`. On a line of its own, which
    /// stays in everybody's cache.
    pub gave_up: Line<AtomicU64>,
    /// Where it sleeps and is woken.
    pub sleeper: Line<Sleeper>,
}

/// A call, and its data where they are small. The first bytes are on the line that says that the offer is complete, so
/// a small operation moves one line from each rank to each.
#[repr(C, align(128))]
pub(super) struct Offer {
    /// The number of the operation, counted from 1. Written last, with release.
    pub sequence: AtomicU64,
    /// What is called, as in a [`Site`](crate::types::Site).
    pub call: [AtomicU64; 3],
    pub inline: Cell<[u8; INLINE]>,
    /// Where the input and the output of a large operation are in this rank's arena, plus one; 0 if they are not.
    pub lent: [AtomicU64; 2],
}

// SAFETY: only the offer's own rank writes the inline data, before it publishes the offer (release on `sequence`), and
// others read them after they have seen that (acquire), by raw pointers, whose reads give some bytes whatever a broken
// peer does meanwhile. The rank writes the same offer two operations later, which it can begin only after all have
// entered the one between and so have finished reading.
unsafe impl Sync for Offer {}

/// Where a rank's input and output are in its arena, if they are and peers have to reach them.
pub(super) type Lent = [Option<usize>; 2];
