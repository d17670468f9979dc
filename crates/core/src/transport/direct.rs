//! One rank's share of an operation in which ranks access each other's buffers.
//!
//! Each rank reduces its own part straight from all inputs and stores it to all outputs. No other algorithm moves fewer
//! bytes: there are no intermediate copies.

use std::mem::MaybeUninit;

use super::reduce::{self, Output};
use crate::types::{Call, Operation, Parts, partition};

/// The addresses of one rank's buffers.
#[derive(Clone, Copy)]
pub(super) struct RankBuffers {
    pub input: *const u8,
    /// Equal to `input` where the rank works in place.
    pub output: *mut u8,
}

impl RankBuffers {
    fn in_place(self) -> bool {
        self.input == self.output.cast_const()
    }
}

/// Which of the rank's buffers, input and output, its peers access in the operation: those that it lends.
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

/// Whether the operation moves data of this rank to its peers.
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(super) fn contributes(call: &Call, rank: usize) -> bool {
    match call.operation {
        Operation::Broadcast | Operation::Scatter => call.root == Some(rank),
        Operation::Gather => call.root != Some(rank),
        operation => operation != Operation::Barrier,
    }
}

/// Carries out `rank`'s share of the call. The rank's result is complete once all ranks have done their shares and this
/// thread has synchronized with them.
///
/// # Safety
/// All ranks have made this call, with the same parts. For `rank` itself, `buffers_of` returns buffers of the lengths
/// that `Buffers` lists; for its peers it returns those of them that [`lends`] names. They stay valid until all ranks
/// are done. Until then only these ranks' shares access the outputs or write the inputs.
pub(super) unsafe fn share(
    call: &Call,
    parts: Parts<'_>,
    rank: usize,
    world_size: usize,
    buffers_of: impl Fn(usize) -> RankBuffers + Copy,
) {
    let size = call.dtype.size();
    let own = parts.part(call.count, world_size, rank);
    let (at, bytes) = (own.start * size, own.len() * size);
    let mine = buffers_of(rank);
    let all_buffers = (0..world_size).map(buffers_of);
    // SAFETY: the caller ensures that all accesses are within the buffers. Each rank writes only its own part of the
    // outputs, or its own output. No rank writes what a peer reads in this operation (`swap_parts` has its own proof).
    // An output is borrowed exclusively, so it overlaps no buffer but the input, where the rank works in place.
    unsafe {
        match (call.operation, call.reduction, call.root) {
            (Operation::AllReduce, Some(op), _) => {
                let inputs = all_buffers.clone().map(|buffers| buffers.input.add(at));
                let outputs = all_buffers.map(|buffers| Output::of(buffers.output.add(at), bytes, !buffers.in_place()));
                reduce::reduce_to_all(call.dtype, op, own.len(), inputs, outputs);
            }
            (Operation::Reduce, Some(op), Some(root)) => {
                let target = buffers_of(root);
                let target = Output::of(target.output.add(at), bytes, !target.in_place());
                let inputs = all_buffers.map(|buffers| buffers.input.add(at));
                reduce::reduce_to_all(call.dtype, op, own.len(), inputs, std::iter::once(target));
            }
            (Operation::ReduceScatter, Some(op), _) => {
                let target = if mine.in_place() { mine.output.add(at) } else { mine.output };
                let target = Output::of(target, bytes, !mine.in_place());
                let inputs = all_buffers.map(|buffers| buffers.input.add(at));
                reduce::reduce_to_all(call.dtype, op, own.len(), inputs, std::iter::once(target));
            }
            (Operation::Broadcast, _, Some(root)) => copy(buffers_of(root).input, mine.output, call.bytes()),
            (Operation::AllGather, ..) => {
                let source = if mine.in_place() { mine.input.add(at) } else { mine.input };
                all_buffers.for_each(|buffers| copy(source, buffers.output.add(at), bytes));
            }
            // Empty buffers, of one rank or of two, may have the same address.
            (Operation::Gather | Operation::Scatter, ..) if bytes == 0 => {}
            (Operation::Gather, _, Some(root)) => {
                let source = if mine.in_place() { mine.input.add(at) } else { mine.input };
                copy(source, buffers_of(root).output.add(at), bytes);
            }
            (Operation::Scatter, _, Some(root)) => {
                let target = if mine.in_place() { mine.output.add(at) } else { mine.output };
                copy(buffers_of(root).input.add(at), target, bytes);
            }
            (Operation::AllToAll, ..) => swap_parts(call, rank, world_size, buffers_of),
            _ => {}
        }
    }
    reduce::fence_streams();
}

/// Copies to memory that was not read just before, so a large copy bypasses the cache. No-op if both are equal.
///
/// # Safety
/// See [`Output::copy`], except that source and target may be equal.
unsafe fn copy(source: *const u8, target: *mut u8, bytes: usize) {
    if source != target.cast_const() {
        // SAFETY: ensured by the caller; the two are not equal, as just checked.
        unsafe { Output::of(target, bytes, true).copy(source, bytes) };
    }
}

/// Carries out a rank's share of an all_to_all. The data of two ranks for each other are in four parts of buffers, two
/// in inputs and two in outputs; an input and its output are the same memory where a rank works in place. No third rank
/// accesses them. So in-place operations need no copy of the input and no second barrier: one of the two ranks swaps
/// the parts. Each of the two does one half of every pair, to divide the work.
///
/// # Safety
/// See [`share`].
unsafe fn swap_parts(call: &Call, rank: usize, world_size: usize, buffers_of: impl Fn(usize) -> RankBuffers) {
    // Rounded down: the buffer of a started operation may have changed its length since it was checked.
    let part = call.count / world_size * call.dtype.size();
    let mine = buffers_of(rank);
    let own = rank * part;
    // SAFETY: the part is within the whole. Peers do not access a rank's own part.
    unsafe { copy(mine.input.add(own), mine.output.add(own), part) };
    for peer in (1..world_size).map(|distance| (rank + distance) % world_size) {
        let theirs = buffers_of(peer);
        let half = partition(part, 2, usize::from(rank > peer));
        let (here, there) = (peer * part + half.start, own + half.start);
        // SAFETY: both ranges are within the whole. Only this rank accesses this half of the two ranks' parts for each
        // other: the peer has the other half, third ranks have other parts. An output is borrowed exclusively, so it
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
/// Inputs are valid for reads and outputs for writes of `bytes` bytes. During the call nothing else writes the inputs
/// or accesses the outputs. An output overlaps only the input of its own side, and then at the same address.
unsafe fn swap((input, output): (*const u8, *mut u8), (other_input, other_output): (*const u8, *mut u8), bytes: usize) {
    const BLOCK: usize = 4 << 10;
    let mut block = MaybeUninit::<[u8; BLOCK]>::uninit();
    let block = block.as_mut_ptr().cast::<u8>();
    for at in (0..bytes).step_by(BLOCK) {
        let len = BLOCK.min(bytes - at);
        // SAFETY: `at + len` is at most `bytes`, for which the caller ensures validity, and `len` is at most the size
        // of the block. Each input is read before the output at the same address is written.
        unsafe {
            std::ptr::copy_nonoverlapping(other_input.add(at), block, len);
            std::ptr::copy_nonoverlapping(input.add(at), other_output.add(at), len);
            std::ptr::copy_nonoverlapping(block, output.add(at), len);
        }
    }
}
