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
#[cfg(test)]
mod tests;
mod widen;

use std::mem::MaybeUninit;

use self::level::Portable;
#[cfg(target_arch = "x86_64")]
use self::level::{Avx2, Avx512};
pub(crate) use self::output::{Output, fence_streams};
use crate::dtype::{DType, ReduceOp};

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
    /// `element = accumulator`, divided by the number of ranks for the mean.
    pub store: fn(&mut [u8], &[u8], usize),
    /// Divides elements by the number of ranks in place; only for the mean and only where the accumulator is not wide.
    pub divide: Option<fn(&mut [u8], usize)>,
    /// Gives every NaN the same bits; only for floats and only where the accumulator is not wide.
    pub unify_nan: Option<fn(&mut [u8])>,
}

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
pub(crate) unsafe fn reduce_to_all(
    dtype: DType,
    op: ReduceOp,
    elements: usize,
    inputs: impl Iterator<Item = *const u8> + Clone,
    outputs: impl Iterator<Item = Output> + Clone,
) {
    let kernel = kernel(dtype, op);
    let ranks = inputs.clone().count();
    let step = BLOCK / kernel.accumulator;
    let most = step.min(elements);
    let (mut block, mut result) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let block = Block::cleared(&mut block, most * kernel.accumulator);
    let rounds = kernel.wide || kernel.divide.is_some();
    let result = Block::cleared(&mut result, if rounds { most * dtype.size() } else { 0 });
    let mut done = 0;
    while done < elements {
        let count = step.min(elements - done);
        let (at, bytes) = (done * dtype.size(), count * dtype.size());
        let accumulator = &mut block[..count * kernel.accumulator];
        let mut inputs = inputs.clone().map(|input| {
            // SAFETY: `at + bytes` is within the `elements` that the caller vouches for, and the slice is gone before
            // anything is written to an output.
            unsafe { std::slice::from_raw_parts(input.add(at), bytes) }
        });
        match (inputs.next(), inputs.next()) {
            (Some(first), Some(second)) => (kernel.join)(accumulator, first, second),
            (Some(only), None) => (kernel.load)(accumulator, only),
            (None, _) => return,
        }
        inputs.for_each(|input| (kernel.fold)(accumulator, input));
        let rounded = if rounds {
            (kernel.store)(&mut result[..bytes], accumulator, ranks);
            &result[..bytes]
        } else {
            &*accumulator
        };
        for output in outputs.clone() {
            // SAFETY: as above; outputs are accessed by this call alone, one at a time.
            let target = unsafe { std::slice::from_raw_parts_mut(output.place(at), bytes) };
            output.write(target, rounded);
        }
        done += count;
    }
    if outputs.clone().any(Output::streams) {
        fence_streams();
    }
}
