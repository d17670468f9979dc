//! One rank's share of an operation where ranks reach each other's buffers.
//!
//! Each rank reduces its own part straight from all inputs and stores it to all outputs. It is the least that can be
//! moved: nothing is copied on the way.

use std::mem::MaybeUninit;

use super::reduce::{self, Output};
use crate::types::{Call, Operation, Parts, partition};

/// Where one rank's buffers are.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub input: *const u8,
    /// The input's place where the rank works in place.
    pub output: *mut u8,
}

impl Place {
    fn in_place(self) -> bool {
        self.input == self.output.cast_const()
    }
}

/// Which of the rank's buffers, input and output, its peers access in the operation.
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(super) fn lends(call: &Call, rank: usize) -> [bool; 2] {
    let root = call.root == Some(rank);
    match call.operation {
        Operation::AllReduce | Operation::AllToAll => [true, true],
        Operation::Reduce => [true, root],
        Operation::ReduceScatter => [true, false],
        Operation::Broadcast | Operation::Scatter => [root, false],
        Operation::AllGather => [false, true],
        Operation::Gather => [false, root],
        _ => [false, false],
    }
}

/// Whether the rank has something in the operation that its peers want.
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(super) fn brings(call: &Call, rank: usize) -> bool {
    match call.operation {
        Operation::Broadcast | Operation::Scatter => call.root == Some(rank),
        Operation::Gather => call.root != Some(rank),
        operation => operation != Operation::Barrier,
    }
}

/// Carries out `rank`'s share of the call. Its result is whole when all ranks have done theirs and this thread has seen
/// that they have.
///
/// # Safety
/// All ranks have made this call, with the same parts. Of `rank` itself, `place` gives buffers of the lengths that `Buffers` lists, and of the
/// others those among them that [`lends`] names; they stay valid until all ranks are done, and meanwhile nobody but these
/// ranks' shares accesses the outputs or writes the inputs.
pub(super) unsafe fn share(
    call: &Call,
    parts: Parts<'_>,
    rank: usize,
    world_size: usize,
    place: impl Fn(usize) -> Place + Copy,
) {
    let size = call.dtype.size();
    let own = parts.part(call.count, world_size, rank);
    let (at, bytes) = (own.start * size, own.len() * size);
    let mine = place(rank);
    let places = (0..world_size).map(place);
    // SAFETY: as the caller vouches for, everything is within the buffers. Each rank writes only its own part of the
    // outputs, or its own output, and what others read in this operation is not written (`swap_parts` says why for
    // itself). An output is borrowed exclusively, so it overlaps no buffer but the input in its place.
    unsafe {
        match (call.operation, call.reduction, call.root) {
            (Operation::AllReduce, Some(op), _) => {
                let inputs = places.clone().map(|place| place.input.add(at));
                let outputs = places.map(|place| Output::of(place.output.add(at), bytes, !place.in_place()));
                reduce::reduce_to_all(call.dtype, op, own.len(), inputs, outputs);
            }
            (Operation::Reduce, Some(op), Some(root)) => {
                let target = place(root);
                let target = Output::of(target.output.add(at), bytes, !target.in_place());
                let inputs = places.map(|place| place.input.add(at));
                reduce::reduce_to_all(call.dtype, op, own.len(), inputs, std::iter::once(target));
            }
            (Operation::ReduceScatter, Some(op), _) => {
                let target = if mine.in_place() { mine.output.add(at) } else { mine.output };
                let target = Output::of(target, bytes, !mine.in_place());
                let inputs = places.map(|place| place.input.add(at));
                reduce::reduce_to_all(call.dtype, op, own.len(), inputs, std::iter::once(target));
            }
            (Operation::Broadcast, _, Some(root)) => copy(place(root).input, mine.output, call.bytes()),
            (Operation::AllGather, ..) => {
                let source = if mine.in_place() { mine.input.add(at) } else { mine.input };
                places.for_each(|place| copy(source, place.output.add(at), bytes));
            }
            // Empty buffers of two ranks, or of one, may all begin at one place.
            (Operation::Gather | Operation::Scatter, ..) if bytes == 0 => {}
            (Operation::Gather, _, Some(root)) => {
                let source = if mine.in_place() { mine.input.add(at) } else { mine.input };
                copy(source, place(root).output.add(at), bytes);
            }
            (Operation::Scatter, _, Some(root)) => {
                let target = if mine.in_place() { mine.output.add(at) } else { mine.output };
                copy(place(root).input.add(at), target, bytes);
            }
            (Operation::AllToAll, ..) => swap_parts(call, rank, world_size, place),
            _ => {}
        }
    }
    reduce::fence_streams();
}

/// Copies to memory that has not been read just before, unless it is there already.
///
/// # Safety
/// As for [`Output::copy`], but that the two may be the same place.
unsafe fn copy(source: *const u8, target: *mut u8, bytes: usize) {
    if source != target.cast_const() {
        // SAFETY: as the caller vouches for.
        unsafe { Output::of(target, bytes, true).copy(source, bytes) };
    }
}

/// Carries out a rank's share of an all_to_all. What two ranks have for each other is in four places, of which two are
/// one where a rank works in place, and no third rank touches them. So in place needs no copy of the input and no second
/// meeting: one of the two ranks swaps. To share the work, each does a half of every pair.
///
/// # Safety
/// As for [`share`].
unsafe fn swap_parts(call: &Call, rank: usize, world_size: usize, place: impl Fn(usize) -> Place) {
    // Rounded down: a started buffer may have another length by now than the one that was checked.
    let part = call.count / world_size * call.dtype.size();
    let mine = place(rank);
    let own = rank * part;
    // SAFETY: the part is within the whole. The peers leave a rank's own part alone.
    unsafe { copy(mine.input.add(own), mine.output.add(own), part) };
    for peer in (1..world_size).map(|distance| (rank + distance) % world_size) {
        let theirs = place(peer);
        let half = partition(part, 2, usize::from(rank > peer));
        let (here, there) = (peer * part + half.start, own + half.start);
        // SAFETY: both places are within the whole. Of the two ranks' parts for each other this half is this rank's to
        // access: the peer has the other half, third ranks have other parts. An output is borrowed exclusively, so it
        // overlaps no buffer, unless its rank works in place and has its input at the same address.
        unsafe {
            swap(
                (mine.input.add(here), mine.output.add(here)),
                (theirs.input.add(there), theirs.output.add(there)),
                half.len(),
            );
        }
    }
}

/// Copies `bytes` bytes from each side's input to the other side's output.
///
/// # Safety
/// Inputs are valid for reading and outputs for writing that many bytes; meanwhile nobody else writes the inputs or
/// accesses the outputs. Outputs overlap nothing but the input of the same side, which is then at the same address.
unsafe fn swap((input, output): (*const u8, *mut u8), (other_input, other_output): (*const u8, *mut u8), bytes: usize) {
    const BLOCK: usize = 4 << 10;
    let mut block = MaybeUninit::<[u8; BLOCK]>::uninit();
    let block = block.as_mut_ptr().cast::<u8>();
    for at in (0..bytes).step_by(BLOCK) {
        let len = BLOCK.min(bytes - at);
        // SAFETY: `at + len` is within the bytes that the caller vouches for, and `len` within the block. Either input
        // is read before the output in its place is written.
        unsafe {
            std::ptr::copy_nonoverlapping(other_input.add(at), block, len);
            std::ptr::copy_nonoverlapping(input.add(at), other_output.add(at), len);
            std::ptr::copy_nonoverlapping(block, output.add(at), len);
        }
    }
}
