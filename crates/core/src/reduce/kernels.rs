//! The kernels: every reduction of every element type.
//!
//! # The last step is one loop
//!
//! [`combine_to`] converts, combines, divides and rounds in registers, and writes large results past the cache. Before,
//! these were passes over a block of 8 KiB. Between two threads the single loop takes two thirds of the time for
//! all-reduces of 64 MiB, half for means, and a half to a third for f16 and bf16 of 1 MiB, which now take as long per
//! byte as f32 and twice as long, respectively. A mean over a power of two of ranks multiplies by the reciprocal,
//! because the division took as long as everything else together.
//!
//! # Functions and plain loops
//!
//! Closures and `map` of arrays were not inlined, or not vectorised, and were three times as slow. Hence
//! [`combine_lines`] and [`each`], which are always inlined, and plain loops.

use std::slice::from_raw_parts;

use bytemuck::{bytes_of, cast_slice, cast_slice_mut};
use half::{bf16, f16};

use super::arithmetic::{Accumulator, Max, Mean, Min, Operation, Product, Sum, Under};
use super::level::{LANES, Level, Portable};
use super::widen::{Widen, each, line};
use super::{Kernel, Output};
use crate::types::{DType, ReduceOp};

/// Returns the kernel for `dtype` and `op` in the instructions of `L`.
///
/// Every operation is a type, so that each kernel is compiled only for the element types that it is used with. With
/// operations as values, the kernels were half of what the compiler had to do for this crate.
///
/// # Safety
/// The processor supports the instructions of `L`.
pub(super) unsafe fn of<L: Level>(dtype: DType, op: ReduceOp) -> Kernel {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match op {
            ReduceOp::Sum => reduction::<L, Sum>(dtype),
            ReduceOp::Mean => reduction::<L, Mean>(dtype),
            ReduceOp::Product => reduction::<L, Product>(dtype),
            ReduceOp::Max => reduction::<L, Max>(dtype),
            ReduceOp::Min => reduction::<L, Min>(dtype),
        }
    }
}

unsafe fn reduction<L: Level, O: Operation>(dtype: DType) -> Kernel {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match dtype {
            DType::F32 => functions::<L, f32, f32, O>(),
            DType::F64 => functions::<L, f64, f64, O>(),
            DType::F16 => functions::<L, f16, f32, O>(),
            DType::BF16 => functions::<L, bf16, f32, O>(),
            DType::I8 => integer::<L, i8, u8, i64, O>(),
            DType::I16 => integer::<L, i16, u16, i64, O>(),
            DType::I32 => integer::<L, i32, u32, i64, O>(),
            DType::I64 => integer::<L, i64, u64, i128, O>(),
            DType::U8 => integer::<L, u8, u8, i64, O>(),
            DType::U16 => integer::<L, u16, u16, i64, O>(),
            DType::U32 => integer::<L, u32, u32, i64, O>(),
            DType::U64 => integer::<L, u64, u64, i128, O>(),
        }
    }
}

/// The kernel for integers `T`, whose unsigned type is `U` and whose mean is accumulated in `W`.
unsafe fn integer<L: Level, T, U, W, O: Operation>() -> Kernel
where
    T: Widen<T> + Widen<W> + Accumulator,
    U: Widen<U> + Accumulator,
    W: Widen<W> + Accumulator,
{
    // SAFETY: guaranteed by the caller.
    unsafe {
        if O::MEAN {
            // No level divides integers in vectors.
            functions::<Portable, T, W, O>()
        } else if O::SIGN {
            functions::<L, T, T, O>()
        } else {
            functions::<L, U, U, O>()
        }
    }
}

/// # Safety
/// The processor supports the instructions of `L`, in which everything below runs.
unsafe fn functions<L: Level, T: Widen<A>, A: Accumulator + Widen<A>, O: Operation>() -> Kernel {
    let wide = size_of::<A>() != size_of::<T>();
    Kernel {
        accumulator: size_of::<A>(),
        wide,
        load: load::<L, T, A>,
        join: join::<L, T, A, O>,
        fold: fold::<L, T, A, O>,
        // Integers commute.
        fold_under: if A::FLOAT { fold::<L, T, A, Under<O>> } else { fold::<L, T, A, O> },
        join_to: finish::<L, T, T, A, O>,
        fold_to: finish::<L, A, T, A, O>,
        store: if O::MEAN {
            store_mean::<L, T, A>
        } else {
            |target, sums, _| store::<L, T, A>(target, sums, |sum| sum)
        },
        divide: (O::MEAN && !wide).then_some(divide::<L, A>),
        unify_nan: (A::FLOAT && !wide).then_some(unify_nan::<L, A>),
    }
}

fn load<L: Level, T: Widen<A>, A: Accumulator>(accumulator: &mut [u8], source: &[u8]) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    let source = cast_slice(source);
    // SAFETY: `functions` returns this only if its caller guarantees that the processor supports `L`.
    unsafe {
        L::run(|| {
            T::for_chunks::<L>(source, |chunk| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(chunk.len());
                now.copy_from_slice(chunk);
                rest = later;
            });
        });
    }
}

fn join<L: Level, T: Widen<A>, A: Accumulator, O: Operation>(accumulator: &mut [u8], left: &[u8], right: &[u8]) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    let (left, right) = (cast_slice(left), cast_slice(right));
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| {
            T::for_chunk_pairs::<L>(left, right, |left, right| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(left.len());
                for ((a, left), right) in now.iter_mut().zip(left).zip(right) {
                    *a = O::combine(*left, *right);
                }
                rest = later;
            });
        });
    }
}

fn fold<L: Level, T: Widen<A>, A: Accumulator, O: Operation>(accumulator: &mut [u8], source: &[u8]) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    let source = cast_slice(source);
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| {
            T::for_chunks::<L>(source, |chunk| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(chunk.len());
                for (a, b) in now.iter_mut().zip(chunk) {
                    *a = O::combine(*a, *b);
                }
                rest = later;
            });
        });
    }
}

/// # Safety
/// As for [`FinalStep`](super::FinalStep), with elements `U` on the left; and the processor supports `L`.
unsafe fn finish<L: Level, U: Widen<A>, T: Widen<A>, A: Accumulator, O: Operation>(
    outputs: &[Output],
    sides: [*const u8; 2],
    elements: usize,
    ranks: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if !O::MEAN {
            return combine_to::<L, U, T, A, O>(outputs, sides, elements, |result| result);
        }
        match A::reciprocal(ranks) {
            Some(part) => combine_to::<L, U, T, A, O>(outputs, sides, elements, |sum| sum.product(part)),
            None => combine_to::<L, U, T, A, O>(outputs, sides, elements, |sum| sum.over(ranks)),
        }
    }
}

/// The last step of a reduction: from both sides to the outputs, all of it in registers.
///
/// # Safety
/// As for [`finish`].
#[inline(always)]
unsafe fn combine_to<L: Level, U: Widen<A>, T: Widen<A>, A: Accumulator, O: Operation>(
    outputs: &[Output],
    [left, right]: [*const u8; 2],
    elements: usize,
    after: impl Fn(A) -> A,
) {
    let (left, right) = (left.cast::<[U; LANES]>(), right.cast::<[T; LANES]>());
    let (size, lines) = (size_of::<[T; LANES]>(), elements / LANES);
    let rest = elements % LANES;
    // SAFETY: as in `load`. All accesses are within the elements that the caller guarantees, every line is read before
    // it is written, and outputs are aligned for streaming stores where these are used.
    unsafe {
        L::run(|| {
            match outputs {
                // Separate because it is a third faster than the general loop.
                [output] if !output.streams() => {
                    let target = output.address(0).cast::<[T; LANES]>();
                    for i in 0..lines {
                        let sides = (left.add(i).read(), right.add(i).read());
                        target.add(i).write(combine_lines::<L, U, T, A, O>(sides, &after));
                    }
                }
                _ => {
                    for i in 0..lines {
                        let sides = (left.add(i).read(), right.add(i).read());
                        let result = combine_lines::<L, U, T, A, O>(sides, &after);
                        for output in outputs {
                            let target = output.address(i * size);
                            if output.streams() {
                                L::stream(bytes_of(&result), target);
                            } else {
                                target.cast::<[T; LANES]>().write(result);
                            }
                        }
                    }
                }
            }
            if rest > 0 {
                let sides = (
                    line(from_raw_parts(left.add(lines).cast::<U>(), rest)),
                    line(from_raw_parts(right.add(lines).cast::<T>(), rest)),
                );
                let result = combine_lines::<L, U, T, A, O>(sides, &after);
                for output in outputs {
                    output.address(lines * size).cast::<T>().copy_from_nonoverlapping(result.as_ptr(), rest);
                }
            }
        });
    }
}

// A function, not a closure: whether a closure is inlined, and so compiled for `L`, is up to the compiler.
#[inline(always)]
unsafe fn combine_lines<L: Level, U: Widen<A>, T: Widen<A>, A: Accumulator, O: Operation>(
    (left, right): ([U; LANES], [T; LANES]),
    after: impl Fn(A) -> A,
) -> [T; LANES] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (left, right) = (U::widen::<L>(left), T::widen::<L>(right));
        let mut result = [A::zeroed(); LANES];
        for ((result, left), right) in result.iter_mut().zip(left).zip(right) {
            *result = after(O::combine(left, right));
        }
        T::narrow::<L>(result)
    }
}

#[inline(always)]
fn store<L: Level, T: Widen<A>, A: Accumulator>(target: &mut [u8], source: &[u8], after: impl Fn(A) -> A) {
    let (source, target): (&[A], &mut [T]) = (cast_slice(source), cast_slice_mut(target));
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| {
            for (target, source) in target.chunks_mut(LANES).zip(source.chunks(LANES)) {
                let narrow = T::narrow::<L>(each(line(source), &after));
                target.copy_from_slice(&narrow[..target.len()]);
            }
        });
    }
}

fn store_mean<L: Level, T: Widen<A>, A: Accumulator>(target: &mut [u8], source: &[u8], ranks: usize) {
    match A::reciprocal(ranks) {
        Some(part) => store::<L, T, A>(target, source, |sum| sum.product(part)),
        None => store::<L, T, A>(target, source, |sum| sum.over(ranks)),
    }
}

fn unify_nan<L: Level, A: Accumulator>(elements: &mut [u8]) {
    let elements: &mut [A] = cast_slice_mut(elements);
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| {
            for element in elements {
                // Only a NaN differs from itself.
                #[allow(clippy::eq_op)]
                if *element != *element {
                    *element = A::NAN;
                }
            }
        });
    }
}

fn divide<L: Level, A: Accumulator>(elements: &mut [u8], ranks: usize) {
    let elements: &mut [A] = cast_slice_mut(elements);
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| match A::reciprocal(ranks) {
            Some(part) => elements.iter_mut().for_each(|element| *element = element.product(part)),
            None => elements.iter_mut().for_each(|element| *element = element.over(ranks)),
        });
    }
}
