use bytemuck::{bytes_of, cast_slice, cast_slice_mut};
use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::types::Element;

fn reduced<T: Element>(op: ReduceOp, inputs: &[&[T]]) -> Vec<T> {
    let len = inputs[0].len();
    let result = |skip: usize, streamed: &[bool]| {
        let mut outputs = vec![vec![T::zeroed(); skip + len + 1]; streamed.len()];
        let to = outputs.iter_mut().zip(streamed).map(|(output, streamed)| {
            let bytes = if *streamed { 1 << 30 } else { 0 };
            Output::of(output[skip..].as_mut_ptr().cast(), bytes, true)
        });
        let (to, from) = (to.collect::<Vec<_>>().into_iter(), inputs.iter().map(|input| input.as_ptr().cast()));
        // SAFETY: the tests below pass slices of equal length, and nothing else accesses them.
        unsafe { reduce_to_all(T::DTYPE, op, len, from, to) };
        for output in &outputs {
            assert_eq!(cast_slice::<T, u8>(&output[skip..][..len]), cast_slice::<T, u8>(&outputs[0][skip..][..len]));
            assert_eq!(bytes_of(&output[skip + len]), bytes_of(&T::zeroed()));
        }
        outputs.swap_remove(0)[skip..][..len].to_vec()
    };
    let expected = result(0, &[false]);
    for streamed in [&[true][..], &[true, false], &[true, true], &[true, false, true]] {
        for skip in [0, 1, 5] {
            assert_eq!(cast_slice::<T, u8>(&result(skip, streamed)), cast_slice::<T, u8>(&expected));
        }
    }
    expected
}

#[test]
fn sixteen_bit_sums_are_rounded_once() {
    // 2048 + 1 + 1 is 2048 if rounded to f16 after each addition, and 2050 if rounded once.
    let (big, one) = ([f16::from_f32(2048.0)], [f16::ONE]);
    assert_eq!(reduced(ReduceOp::Sum, &[&big, &one, &one]), [f16::from_f32(2050.0)]);
    let (big, one) = ([bf16::from_f32(256.0)], [bf16::ONE]);
    assert_eq!(reduced(ReduceOp::Sum, &[&big, &one, &one]), [bf16::from_f32(258.0)]);
}

#[test]
fn a_sixteen_bit_mean_does_not_overflow() {
    let max = [f16::MAX; 3];
    assert_eq!(reduced(ReduceOp::Mean, &[&max, &max, &max]), max);
}

#[test]
fn integer_means_come_from_the_exact_sum_and_round_toward_zero() {
    assert_eq!(reduced(ReduceOp::Mean, &[&[i8::MAX, -3, 3], &[i8::MAX, -2, 2]]), [i8::MAX, -2, 2]);
    assert_eq!(reduced(ReduceOp::Mean, &[&[i64::MAX, i64::MIN], &[i64::MAX, i64::MIN]]), [i64::MAX, i64::MIN]);
    assert_eq!(reduced(ReduceOp::Mean, &[&[u64::MAX], &[u64::MAX], &[u64::MAX]]), [u64::MAX]);
}

#[test]
fn integer_sums_and_products_wrap() {
    assert_eq!(reduced(ReduceOp::Sum, &[&[200u8], &[100]]), [44]);
    assert_eq!(reduced(ReduceOp::Product, &[&[i32::MAX], &[2]]), [-2]);
}

#[test]
fn extremes_propagate_nan_from_every_side() {
    for op in [ReduceOp::Max, ReduceOp::Min] {
        let result = reduced(op, &[&[f32::NAN, 1.0, 3.0], &[1.0, f32::NAN, 2.0]]);
        assert!(result[0].is_nan() && result[1].is_nan() && !result[2].is_nan());
        assert!(reduced(op, &[&[f16::ONE], &[f16::NAN]])[0].is_nan());
    }
}

#[test]
fn every_type_and_reduction_matches_f64_arithmetic_over_several_blocks() {
    fn check<T: Element>(from: fn(f64) -> T, to: fn(T) -> f64) {
        // Small whole numbers: they and their products are exact in every type.
        for world_size in 1..=4 {
            let rank = |r| (0..9001).map(|i| from(((i + r) % 4 + 1) as f64)).collect();
            let ranks: Vec<Vec<T>> = (0..world_size).map(rank).collect();
            let inputs: Vec<&[T]> = ranks.iter().map(Vec::as_slice).collect();
            for op in ReduceOp::ALL.iter().copied() {
                for (i, got) in reduced(op, &inputs).into_iter().enumerate() {
                    let values = inputs.iter().map(|input| to(input[i]));
                    let want = match op {
                        ReduceOp::Sum => values.sum(),
                        ReduceOp::Mean => to(from(values.sum::<f64>() / world_size as f64)),
                        ReduceOp::Max => values.fold(f64::MIN, f64::max),
                        ReduceOp::Min => values.fold(f64::MAX, f64::min),
                        ReduceOp::Product => values.product(),
                    };
                    assert_eq!(to(got), want, "{op} of {} at {i} of {world_size} ranks", T::DTYPE);
                }
            }
        }
    }
    check::<f32>(|x| x as f32, |x| x.into());
    check::<f64>(|x| x, |x| x);
    check::<f16>(|x| f16::from_f32(x as f32), |x| x.into());
    check::<bf16>(|x| bf16::from_f32(x as f32), |x| x.into());
    check::<i8>(|x| x as i8, |x| x.into());
    check::<i16>(|x| x as i16, |x| x.into());
    check::<i32>(|x| x as i32, |x| x.into());
    check::<i64>(|x| x as i64, |x| x as f64);
    check::<u8>(|x| x as u8, |x| x.into());
    check::<u16>(|x| x as u16, |x| x.into());
    check::<u32>(|x| x as u32, |x| x.into());
    check::<u64>(|x| x as u64, |x| x as f64);
}

/// Scalar reference arithmetic of an element type.
trait Scalar: Element {
    type Wide: bytemuck::Pod;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    /// `self op other`, in the accumulator.
    fn combine(op: ReduceOp, left: Self::Wide, right: Self::Wide) -> Self::Wide;
    fn over(wide: Self::Wide, ranks: usize) -> Self::Wide;
    fn is_nan(self) -> bool;
}

macro_rules! scalar {
    (integers $($int:ty),*; floats $($float:ty as $wide:ty: $widen:expr, $narrow:expr),*) => {
        $(impl Scalar for $int {
            type Wide = $int;
            fn widen(self) -> $int { self }
            fn narrow(wide: $int) -> $int { wide }
            fn combine(op: ReduceOp, left: $int, right: $int) -> $int {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => left.wrapping_add(right),
                    ReduceOp::Product => left.wrapping_mul(right),
                    ReduceOp::Max => left.max(right),
                    ReduceOp::Min => left.min(right),
                }
            }
            fn over(wide: $int, ranks: usize) -> $int { wide / ranks as $int }
            fn is_nan(self) -> bool { false }
        })*
        $(impl Scalar for $float {
            type Wide = $wide;
            fn widen(self) -> $wide { $widen(self) }
            fn narrow(wide: $wide) -> $float { $narrow(wide) }
            fn combine(op: ReduceOp, left: $wide, right: $wide) -> $wide {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => left + right,
                    ReduceOp::Product => left * right,
                    _ if left.is_nan() => left,
                    _ if right.is_nan() => right,
                    ReduceOp::Max => if left >= right { left } else { right },
                    ReduceOp::Min => if left <= right { left } else { right },
                }
            }
            fn over(wide: $wide, ranks: usize) -> $wide { wide / ranks as $wide }
            fn is_nan(self) -> bool { Scalar::widen(self).is_nan() }
        })*
    };
}

scalar!(integers i8, i16, i32, i64, u8, u16, u32, u64;
        floats f32 as f32: |x| x, |x| x, f64 as f64: |x| x, |x| x,
               f16 as f32: f16::to_f32, f16::from_f32, bf16 as f32: bf16::to_f32, bf16::from_f32);

/// Memory that begins at a cache line.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Checks the last step of a reduction: to one output, and to two of which one is written with streaming stores.
fn check_last_step<T: Scalar>(level: &Level, op: ReduceOp, left: &[T], right: &[T], ranks: usize) {
    let kernel = level.1(T::DTYPE, op);
    let mut sum = vec![<T::Wide as bytemuck::Zeroable>::zeroed(); left.len()];
    (kernel.load)(cast_slice_mut(&mut sum), cast_slice(left));
    let lines = || vec![Line([0; 64]); size_of_val(left).div_ceil(64) + 1];
    for (step, left_side) in [(kernel.join_to, left.as_ptr().cast()), (kernel.fold_to, sum.as_ptr().cast())] {
        let (mut alone, mut cached, mut streamed, mut place) = (lines(), lines(), lines(), lines());
        cast_slice_mut::<Line, u8>(&mut place)[..size_of_val(right)].copy_from_slice(cast_slice(right));
        let streams = Output::of(streamed.as_mut_ptr().cast(), 1 << 30, true);
        assert!(streams.streams());
        // SAFETY: both sides and all outputs are large enough for the elements and do not overlap, and the output that
        // is written with streaming stores is aligned.
        unsafe {
            let sides = [left_side, right.as_ptr().cast()];
            step(&[Output::cached(alone.as_mut_ptr().cast())], sides, left.len(), ranks);
            step(&[streams, Output::cached(cached.as_mut_ptr().cast())], sides, left.len(), ranks);
            // In place of the right side.
            let sides = [left_side, place.as_ptr().cast()];
            step(&[Output::cached(place.as_mut_ptr().cast())], sides, left.len(), ranks);
        }
        fence_streams();
        for output in [&alone, &cached, &streamed, &place] {
            let (output, after) = cast_slice::<Line, u8>(output).split_at(size_of_val(left));
            assert!(after.iter().all(|byte| *byte == 0), "{} wrote too far", level.0);
            for (i, got) in cast_slice::<u8, T>(output).iter().enumerate() {
                let wide = T::combine(op, left[i].widen(), right[i].widen());
                let want = T::narrow(if op == ReduceOp::Mean { T::over(wide, ranks) } else { wide });
                let either = !matches!(op, ReduceOp::Max | ReduceOp::Min) && got.is_nan() && want.is_nan();
                assert!(
                    either || bytes_of(got) == bytes_of(&want),
                    "{} last step of {op} of {} x {} at {i}: {:02x?} is not {:02x?}",
                    level.0,
                    T::DTYPE,
                    left.len(),
                    bytes_of(got),
                    bytes_of(&want),
                );
            }
        }
    }
}

type Level = (&'static str, fn(DType, ReduceOp) -> Kernel);

/// Returns the levels that this processor supports.
fn levels() -> Vec<Level> {
    // SAFETY: every processor supports this level, and the others are kept only if it supports them.
    let portable: Level = ("portable", |dtype, op| unsafe { kernels::of::<Portable>(dtype, op) });
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: as above.
        let avx2: Level = ("avx2", |dtype, op| unsafe { kernels::of::<Avx2>(dtype, op) });
        // SAFETY: as above.
        let avx512: Level = ("avx512", |dtype, op| unsafe { kernels::of::<Avx512>(dtype, op) });
        let supported = [(portable, true), (avx2, Avx2::is_supported()), (avx512, Avx512::is_supported())];
        supported.into_iter().filter(|(_, supported)| *supported).map(|(level, _)| level).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    vec![portable]
}

/// Returns bits of all kinds: ordinary numbers, NaN, infinities, denormal numbers and zeros of both signs.
fn bits(random: &mut u64) -> u64 {
    // A linear congruential generator from L'Ecuyer, "Tables of linear congruential generators", 1999.
    *random = random.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(3_037_000_493);
    let word = (*random >> 1) ^ (*random << 31);
    match *random >> 60 {
        0 => 0,
        1 => 0x8000_8000_8000_8000,
        2 => 0x7ff0_0000_7f80_7c00 ^ (word & 0x8000_0000_8000_8000),
        3 => 0x7ff8_0000_7fc0_7fc0 | (word & 0xf),
        4 => word & 0x0000_00ff_0000_00ff,
        _ => word,
    }
}

fn elements<T: Element>(random: &mut u64, len: usize) -> Vec<T> {
    (0..len).map(|_| bytemuck::pod_read_unaligned(&bits(random).to_le_bytes()[..size_of::<T>()])).collect()
}

/// Checks every function of every level on `len` elements that begin `skip` elements into a vector.
fn check_levels<T: Scalar>(len: usize, skip: usize, random: &mut u64) {
    let [left, right]: [Vec<T>; 2] = std::array::from_fn(|_| elements(random, skip + len));
    let (left, right) = (&left[skip..], &right[skip..]);
    for (level, op) in levels().into_iter().flat_map(|level| ReduceOp::ALL.iter().map(move |op| (level, *op))) {
        // The mean of integers has a different accumulator, and its own test above.
        if op == ReduceOp::Mean && size_of::<T>() == size_of::<T::Wide>() {
            continue;
        }
        let kernel = level.1(T::DTYPE, op);
        assert_eq!(kernel.accumulator, size_of::<T::Wide>());
        let mut accumulators = vec![<T::Wide as bytemuck::Zeroable>::zeroed(); skip + len];
        let same = |accumulators: &[T::Wide], what: &str, want: &dyn Fn(usize) -> T::Wide| {
            for (i, got) in accumulators[skip..].iter().enumerate() {
                let (got, want) = (*got, want(i));
                // Of two NaNs a sum or a product keeps either, depending on the compiler.
                let either =
                    !matches!(op, ReduceOp::Max | ReduceOp::Min) && T::narrow(got).is_nan() && T::narrow(want).is_nan();
                assert!(
                    either || bytes_of(&got) == bytes_of(&want),
                    "{} {what} {op} of {} x {len} at {i}, {skip} in: {got:02x?} is not {want:02x?}",
                    level.0,
                    T::DTYPE,
                    got = bytes_of(&got),
                    want = bytes_of(&want),
                );
            }
        };
        for ranks in [2, 3, 4] {
            check_last_step(&level, op, left, right, ranks);
        }
        (kernel.load)(cast_slice_mut(&mut accumulators[skip..]), cast_slice(left));
        same(&accumulators, "load", &|i| left[i].widen());
        (kernel.fold)(cast_slice_mut(&mut accumulators[skip..]), cast_slice(right));
        same(&accumulators, "fold", &|i| T::combine(op, left[i].widen(), right[i].widen()));
        (kernel.load)(cast_slice_mut(&mut accumulators[skip..]), cast_slice(left));
        (kernel.fold_under)(cast_slice_mut(&mut accumulators[skip..]), cast_slice(right));
        same(&accumulators, "fold_under", &|i| T::combine(op, right[i].widen(), left[i].widen()));
        (kernel.join)(cast_slice_mut(&mut accumulators[skip..]), cast_slice(left), cast_slice(right));
        same(&accumulators, "join", &|i| T::combine(op, left[i].widen(), right[i].widen()));
        if op == ReduceOp::Mean {
            continue;
        }
        let mut stored = vec![T::zeroed(); skip + len];
        (kernel.store)(cast_slice_mut(&mut stored[skip..]), cast_slice(&accumulators[skip..]), 2);
        for (got, wide) in stored[skip..].iter().zip(&accumulators[skip..]) {
            assert_eq!(bytes_of(got), bytes_of(&T::narrow(*wide)), "{} store of {} x {len}", level.0, T::DTYPE);
        }
    }
}

#[test]
fn every_level_is_bit_identical_to_scalar_code() {
    let mut random = 1;
    for len in (0..100).chain([255, 256, 257, 1000]) {
        for skip in [0, 1, 3, 7] {
            check_levels::<f32>(len, skip, &mut random);
            check_levels::<f64>(len, skip, &mut random);
            check_levels::<f16>(len, skip, &mut random);
            check_levels::<bf16>(len, skip, &mut random);
            check_levels::<i8>(len, skip, &mut random);
            check_levels::<i16>(len, skip, &mut random);
            check_levels::<i32>(len, skip, &mut random);
            check_levels::<i64>(len, skip, &mut random);
            check_levels::<u8>(len, skip, &mut random);
            check_levels::<u16>(len, skip, &mut random);
            check_levels::<u32>(len, skip, &mut random);
            check_levels::<u64>(len, skip, &mut random);
        }
    }
}

#[test]
fn every_sixteen_bit_float_is_converted_as_half_does() {
    for bits in 0..=u16::MAX {
        let narrow = bf16::from_bits(bits);
        assert_eq!(widen::from_bf16(narrow).to_bits(), narrow.to_f32().to_bits(), "{bits:04x}");
        // Values around every bf16 and around every tie between two.
        for wide in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits((u32::from(bits) << 16) | low)) {
            assert_eq!(widen::to_bf16(wide).to_bits(), bf16::from_f32(wide).to_bits(), "{:08x}", wide.to_bits());
        }
    }
}

proptest! {
    #[test]
    fn any_float_is_rounded_to_bf16_as_half_does(bits in any::<u32>()) {
        let wide = f32::from_bits(bits);
        prop_assert_eq!(widen::to_bf16(wide).to_bits(), bf16::from_f32(wide).to_bits());
    }
}
