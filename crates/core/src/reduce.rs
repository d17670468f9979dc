//! Element-wise combination on the host.
//!
//! A [`Kernel`] is a reduction of one element type, as functions over bytes. It works on an *accumulator*: the element
//! type itself where that is exact enough, and a wider type where promises need it: f32 for f16 and bf16, so that a sum
//! is rounded once, and i64 or i128 for the mean of integers, so that it is the mean of the exact sum.
//!
//! Each is compiled for several sets of instructions (`level`), of which the best that the processor has is taken. All
//! give the same bits: they differ in how many elements they combine at once, not in what they do with one.

mod arithmetic;
mod kernels;
mod level;
mod output;
mod scratch;
#[cfg(test)]
mod tests;
mod widen;

use std::mem::MaybeUninit;

use self::level::Portable;
#[cfg(target_arch = "x86_64")]
use self::level::{Avx2, Avx512};
pub use self::output::Output;
pub(crate) use self::output::fence_streams;
pub(crate) use self::scratch::Scratch;
use crate::types::{DType, ReduceOp};

/// One reduction of one element type. All byte slices are aligned for their element type and hold whole elements;
/// those of one call hold the same number of elements.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    /// Size of one accumulator in bytes. Equal to the element's size where the accumulator is the element itself.
    pub accumulator: usize,
    /// Whether the accumulator is wider than the element.
    pub wide: bool,
    /// `accumulator = element`
    pub load: fn(&mut [u8], &[u8]),
    /// `accumulator = element + element`, where `+` stands for the reduction: two inputs in one pass.
    pub join: fn(&mut [u8], &[u8], &[u8]),
    /// `accumulator = accumulator + element`
    pub fold: fn(&mut [u8], &[u8]),
    /// `accumulator = element + accumulator`. The order shows in which NaN and which zero survives.
    pub fold_under: fn(&mut [u8], &[u8]),
    /// `outputs = element + element`, rounded, and divided by the number of ranks for the mean.
    pub join_to: FinalStep,
    /// `outputs = accumulator + element`, likewise.
    pub fold_to: FinalStep,
    /// `element = accumulator`, divided by the number of ranks for the mean.
    pub store: fn(&mut [u8], &[u8], usize),
    /// Divides elements by the number of ranks in place; only for the mean and only where the accumulator is not wide.
    pub divide: Option<fn(&mut [u8], usize)>,
    /// Gives every NaN the same bits; only for floats and only where the accumulator is not wide.
    pub unify_nan: Option<fn(&mut [u8])>,
}

/// Combines two sides of so many elements, one after the other, and stores the result to all outputs; the last argument is
/// the number of ranks.
///
/// # Safety
/// Both sides are valid for that many elements and outputs for as many results, all of them aligned, and an output that is
/// written past the cache begins with a line of it. Outputs are apart from each other; each is apart from the sides or
/// begins where one of them does, with elements of one size. Nobody else accesses the outputs meanwhile.
type FinalStep = unsafe fn(&[Output], [*const u8; 2], usize, usize);

/// The kernel for `dtype` and `op`.
pub(crate) fn kernel(dtype: DType, op: ReduceOp) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    {
        if Avx512::is_here() {
            // SAFETY: the processor has just said so.
            return unsafe { kernels::of::<Avx512>(dtype, op) };
        }
        if Avx2::is_here() {
            // SAFETY: as above.
            return unsafe { kernels::of::<Avx2>(dtype, op) };
        }
    }
    // SAFETY: every processor has what the whole program is compiled for: SSE2 or NEON at least on those of today.
    unsafe { kernels::of::<Portable>(dtype, op) }
}

/// Bytes of accumulators that [`reduce_to_all`] keeps at a time: small enough for the first-level cache beside the
/// inputs' lines.
const BLOCK: usize = 8 << 10;

#[repr(align(64))]
struct Block([u8; BLOCK]);

impl Block {
    /// The first bytes of a block, cleared: clearing all of it costs more than a small reduction.
    fn cleared(block: &mut MaybeUninit<Block>, bytes: usize) -> &mut [u8] {
        assert!(bytes <= BLOCK);
        // SAFETY: so many bytes are within the block, which is borrowed for as long as the slice, and they are
        // initialised before the slice is made.
        unsafe {
            let start = (&raw mut (*block.as_mut_ptr()).0).cast::<u8>();
            start.write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(start, bytes)
        }
    }
}

/// Reduces `inputs`, in their order, and stores the result to each of the `outputs`. An output may be the same memory
/// as an input: every element is read from all inputs before it is written to any output.
///
/// # Safety
/// Every pointer is valid for `elements` elements of `dtype` and aligned for it; inputs are not written and outputs not
/// accessed by anybody else during the call.
pub unsafe fn reduce_to_all(
    dtype: DType,
    op: ReduceOp,
    elements: usize,
    inputs: impl Iterator<Item = *const u8> + Clone,
    outputs: impl Iterator<Item = Output> + Clone,
) {
    let (kernel, size, ranks) = (kernel(dtype, op), dtype.size(), inputs.clone().count());
    // Where the result goes past the cache, it goes there straight from registers. Else it is copied from a block: the
    // copy of whole lines into the cache need not read them first.
    let straight = outputs.clone().any(Output::streams) && outputs.clone().count() <= 2;
    let head = outputs.clone().map(Output::head).max().unwrap_or(0) / size;
    let step = BLOCK / kernel.accumulator;
    let most = step.min(elements);
    let (mut block, mut result) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let sums = ranks > 2 || !straight && !kernel.wide;
    let block = Block::cleared(&mut block, if sums { most * kernel.accumulator } else { 0 }).as_mut_ptr();
    let result = Block::cleared(&mut result, if straight || !kernel.wide { 0 } else { most * size }).as_mut_ptr();
    let result = if kernel.wide { result } else { block };
    let mut done = 0;
    while done < elements {
        let count = if done < head { head } else { step }.min(elements - done);
        let (at, bytes) = (done * size, count * size);
        done += count;
        let mut outputs = outputs.clone().map(|output| output.after(at));
        // SAFETY: `at + bytes` is within the `elements` that the caller vouches for, and blocks are as long as they are
        // used for. Slices are gone before anything is written to an output, or to the block in another way.
        unsafe {
            let slice = |input| std::slice::from_raw_parts(input, bytes);
            let accumulators = || std::slice::from_raw_parts_mut(block, count * kernel.accumulator);
            let mut inputs = inputs.clone().map(|input| input.add(at));
            let Some(mut left) = inputs.next() else { return };
            let Some(mut right) = inputs.next() else {
                // One rank's result is what it brings, and may be there already.
                outputs
                    .filter(|output| output.place(0).cast_const() != left)
                    .for_each(|output| output.copy(left, bytes));
                continue;
            };
            let mut last = kernel.join_to;
            for (i, next) in inputs.enumerate() {
                if i == 0 {
                    (kernel.join)(accumulators(), slice(left), slice(right));
                    (left, last) = (block.cast_const(), kernel.fold_to);
                } else {
                    (kernel.fold)(accumulators(), slice(right));
                }
                right = next;
            }
            if straight {
                match (outputs.next(), outputs.next()) {
                    (Some(one), Some(two)) => last(&[one, two], [left, right], count, ranks),
                    (Some(one), None) => last(&[one], [left, right], count, ranks),
                    (None, _) => return,
                }
            } else {
                last(&[Output::cached(result)], [left, right], count, ranks);
                outputs.for_each(|output| output.copy(result, bytes));
            }
        }
    }
    if outputs.clone().any(Output::streams) {
        fence_streams();
    }
}
