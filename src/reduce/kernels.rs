//! The kernels: every reduction of every element type.

use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};

use super::Kernel;
use super::arithmetic::Accumulator;
use super::level::Level;
use super::widen::{PIECE, Widen};
use crate::dtype::{DType, ReduceOp};

/// The kernel for `dtype` and `op` in `L`'s instructions.
///
/// # Safety
/// The processor has them.
pub(super) unsafe fn of<L: Level>(dtype: DType, op: ReduceOp) -> Kernel {
    // SAFETY: as the caller vouches for.
    unsafe {
        match dtype {
            DType::F32 => functions::<L, f32, f32>(op),
            DType::F64 => functions::<L, f64, f64>(op),
            DType::F16 => functions::<L, f16, f32>(op),
            DType::BF16 => functions::<L, bf16, f32>(op),
            DType::I8 => integer::<L, i8, i64>(op),
            DType::I16 => integer::<L, i16, i64>(op),
            DType::I32 => integer::<L, i32, i64>(op),
            DType::I64 => integer::<L, i64, i128>(op),
            DType::U8 => integer::<L, u8, i64>(op),
            DType::U16 => integer::<L, u16, i64>(op),
            DType::U32 => integer::<L, u32, i64>(op),
            DType::U64 => integer::<L, u64, i128>(op),
        }
    }
}

unsafe fn integer<L: Level, T: Widen<T> + Widen<W> + Accumulator, W: Accumulator>(op: ReduceOp) -> Kernel {
    // SAFETY: as the caller vouches for.
    unsafe { if op == ReduceOp::Mean { functions::<L, T, W>(op) } else { functions::<L, T, T>(op) } }
}

/// # Safety
/// The processor has `L`'s instructions: everything below runs in them.
unsafe fn functions<L: Level, T: Widen<A>, A: Accumulator>(op: ReduceOp) -> Kernel {
    let wide = size_of::<A>() != size_of::<T>();
    let mean = op == ReduceOp::Mean;
    Kernel {
        accumulator: size_of::<A>(),
        wide,
        load: load::<L, T, A>,
        join: match op {
            ReduceOp::Sum | ReduceOp::Mean => |a, l, r| join::<L, T, A>(a, l, r, A::sum),
            ReduceOp::Product => |a, l, r| join::<L, T, A>(a, l, r, A::product),
            ReduceOp::Max => |a, l, r| join::<L, T, A>(a, l, r, A::max),
            ReduceOp::Min => |a, l, r| join::<L, T, A>(a, l, r, A::min),
        },
        fold: match op {
            ReduceOp::Sum | ReduceOp::Mean => |a, s| fold::<L, T, A>(a, s, A::sum),
            ReduceOp::Product => |a, s| fold::<L, T, A>(a, s, A::product),
            ReduceOp::Max => |a, s| fold::<L, T, A>(a, s, A::max),
            ReduceOp::Min => |a, s| fold::<L, T, A>(a, s, A::min),
        },
        fold_under: match op {
            ReduceOp::Sum | ReduceOp::Mean => |a, s| fold::<L, T, A>(a, s, |x, y| y.sum(x)),
            ReduceOp::Product => |a, s| fold::<L, T, A>(a, s, |x, y| y.product(x)),
            ReduceOp::Max => |a, s| fold::<L, T, A>(a, s, |x, y| y.max(x)),
            ReduceOp::Min => |a, s| fold::<L, T, A>(a, s, |x, y| y.min(x)),
        },
        store: if mean { store_mean::<L, T, A> } else { store::<L, T, A> },
        divide: (mean && !wide).then_some(divide::<L, A>),
        unify_nan: (A::FLOAT && !wide).then_some(unify_nan::<L, A>),
    }
}

fn load<L: Level, T: Widen<A>, A: Accumulator>(accumulator: &mut [u8], source: &[u8]) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    let source = cast_slice(source);
    // SAFETY: `functions` gives this only where its caller vouched for `L`'s instructions.
    unsafe {
        L::run(|| {
            T::pieces::<L>(source, |piece| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len());
                now.copy_from_slice(piece);
                rest = later;
            });
        });
    }
}

#[inline(always)]
fn join<L: Level, T: Widen<A>, A: Accumulator>(
    accumulator: &mut [u8],
    left: &[u8],
    right: &[u8],
    combine: impl Fn(A, A) -> A,
) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    let (left, right) = (cast_slice(left), cast_slice(right));
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| {
            T::pairs::<L>(left, right, |left, right| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(left.len());
                for ((a, left), right) in now.iter_mut().zip(left).zip(right) {
                    *a = combine(*left, *right);
                }
                rest = later;
            });
        });
    }
}

#[inline(always)]
fn fold<L: Level, T: Widen<A>, A: Accumulator>(accumulator: &mut [u8], source: &[u8], combine: impl Fn(A, A) -> A) {
    let mut rest: &mut [A] = cast_slice_mut(accumulator);
    let source = cast_slice(source);
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| {
            T::pieces::<L>(source, |piece| {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len());
                for (a, b) in now.iter_mut().zip(piece) {
                    *a = combine(*a, *b);
                }
                rest = later;
            });
        });
    }
}

fn store<L: Level, T: Widen<A>, A: Accumulator>(target: &mut [u8], source: &[u8], _ranks: usize) {
    let (source, target) = (cast_slice(source), cast_slice_mut(target));
    // SAFETY: as in `load`.
    unsafe { L::run(|| T::narrow::<L>(source, target)) };
}

fn store_mean<L: Level, T: Widen<A>, A: Accumulator>(target: &mut [u8], source: &[u8], ranks: usize) {
    let target: &mut [T] = cast_slice_mut(target);
    let source: &[A] = cast_slice(source);
    let mut piece = [A::zeroed(); PIECE];
    // SAFETY: as in `load`.
    unsafe {
        L::run(|| {
            for (target, source) in target.chunks_mut(PIECE).zip(source.chunks(PIECE)) {
                for (quotient, sum) in piece.iter_mut().zip(source) {
                    *quotient = sum.over(ranks);
                }
                T::narrow::<L>(&piece[..target.len()], target);
            }
        });
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
    unsafe { L::run(|| elements.iter_mut().for_each(|element| *element = element.over(ranks))) };
}
