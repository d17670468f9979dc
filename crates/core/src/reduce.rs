//! Element-wise reductions on the host.
//!
//! A [`Kernel`] is a reduction of one element type, as functions over bytes. It works on an *accumulator*: the element
//! type itself if that is exact enough, otherwise a wider type. That is f32 for f16 and bf16, so that a sum is rounded
//! once, and i64 or i128 for the mean of integers, so that it is the mean of the exact sum.
//!
//! Each kernel is compiled for several instruction sets (`level`), and the best one that the processor supports is
//! used. Results are bit-identical: the sets differ in how many elements they combine at once, not in what they compute
//! for one.

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
pub use self::scratch::Scratch;
use crate::types::{DType, ReduceOp};

/// One reduction of one element type. All byte slices are aligned for their element type and hold whole elements. The
/// slices of one call hold the same number of elements.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Size of one accumulator in bytes. Equal to the element's size if the accumulator is the element itself.
    pub accumulator: usize,
    /// Whether the accumulator is wider than the element.
    pub wide: bool,
    /// `accumulator = element`
    pub load: fn(&mut [u8], &[u8]),
    /// `accumulator = element + element`, where `+` stands for the reduction: combines two inputs in one pass.
    pub(crate) join: fn(&mut [u8], &[u8], &[u8]),
    /// `accumulator = accumulator + element`
    pub fold: fn(&mut [u8], &[u8]),
    /// `accumulator = element + accumulator`. The order decides which NaN and which zero survives.
    pub(crate) fold_under: fn(&mut [u8], &[u8]),
    /// `outputs = element + element`, rounded, and divided by the number of ranks for the mean.
    pub(crate) join_to: FinalStep,
    /// `outputs = accumulator + element`, likewise.
    pub(crate) fold_to: FinalStep,
    /// `element = accumulator`, divided by the number of ranks for the mean.
    pub store: fn(&mut [u8], &[u8], usize),
    /// Divides elements by the number of ranks in place; only for the mean and only where the accumulator is not wide.
    pub divide: Option<fn(&mut [u8], usize)>,
    /// Gives every NaN the same bits; only for floats and only where the accumulator is not wide.
    pub(crate) unify_nan: Option<fn(&mut [u8])>,
}

/// Combines two sides of this many contiguous elements and stores the result to all outputs. The last argument is the
/// world size.
///
/// # Safety
/// Both sides are valid for that many elements and every output for as many results, all of them aligned. An output
/// that is written with streaming stores begins at a cache line. Outputs do not overlap each other. Each output is
/// disjoint from the sides, or begins where one of them does and has elements of the same size. Nothing else accesses
/// the outputs meanwhile.
type FinalStep = unsafe fn(&[Output], [*const u8; 2], usize, usize);

/// Returns the kernel for `dtype` and `op`.
pub fn kernel(dtype: DType, op: ReduceOp) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    {
        if Avx512::is_supported() {
            // SAFETY: the processor has just been found to support these instructions.
            return unsafe { kernels::of::<Avx512>(dtype, op) };
        }
        if Avx2::is_supported() {
            // SAFETY: as above.
            return unsafe { kernels::of::<Avx2>(dtype, op) };
        }
    }
    // SAFETY: every processor supports what the whole program is compiled for: at least SSE2 or NEON today.
    unsafe { kernels::of::<Portable>(dtype, op) }
}

/// Bytes of accumulators that [`reduce_to_all`] works on at a time: small enough for the first-level cache beside the
/// inputs.
const BLOCK: usize = 8 << 10;

#[repr(align(64))]
struct Block([u8; BLOCK]);

impl Block {
    /// Returns the first bytes of a block, cleared: clearing all of it costs more than a small reduction.
    fn cleared(block: &mut MaybeUninit<Block>, bytes: usize) -> &mut [u8] {
        assert!(bytes <= BLOCK);
        // SAFETY: the bytes are within the block, which is borrowed for as long as the slice, and they are initialised
        // before the slice is made.
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
/// Every pointer is valid for `elements` elements of `dtype` and aligned for it. During the call nothing else writes to
/// the inputs or accesses the outputs.
pub unsafe fn reduce_to_all(
    dtype: DType,
    op: ReduceOp,
    elements: usize,
    inputs: impl Iterator<Item = *const u8> + Clone,
    outputs: impl Iterator<Item = Output> + Clone,
) {
    let (kernel, size, ranks) = (kernel(dtype, op), dtype.size(), inputs.clone().count());
    // A result that is written with streaming stores goes there straight from registers. Otherwise it is copied from a
    // block: copying whole lines need not first read the lines that it fills.
    let direct = outputs.clone().any(Output::streams) && outputs.clone().count() <= 2;
    let head = outputs.clone().map(Output::head).max().unwrap_or(0) / size;
    let step = BLOCK / kernel.accumulator;
    let most = step.min(elements);
    let (mut block, mut result) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let sums = ranks > 2 || !direct && !kernel.wide;
    let block = Block::cleared(&mut block, if sums { most * kernel.accumulator } else { 0 }).as_mut_ptr();
    let result = Block::cleared(&mut result, if direct || !kernel.wide { 0 } else { most * size }).as_mut_ptr();
    let result = if kernel.wide { result } else { block };
    let mut done = 0;
    while done < elements {
        let count = if done < head { head } else { step }.min(elements - done);
        let (at, bytes) = (done * size, count * size);
        done += count;
        let mut outputs = outputs.clone().map(|output| output.after(at));
        // SAFETY: `at + bytes` is within the `elements` that the caller guarantees, and blocks are as long as they are
        // used for. Slices are gone before anything is written to an output, or to the block by other means.
        unsafe {
            let slice = |input| std::slice::from_raw_parts(input, bytes);
            let accumulators = || std::slice::from_raw_parts_mut(block, count * kernel.accumulator);
            let mut inputs = inputs.clone().map(|input| input.add(at));
            let Some(mut left) = inputs.next() else { return };
            let Some(mut right) = inputs.next() else {
                // The result of a single rank is its input, which may be in place already.
                outputs
                    .filter(|output| output.address(0).cast_const() != left)
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
            if direct {
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
