//! Measures a group's operations on slices.
//!
//! The group allocates the buffers unless `--register 0` is given, because a program that needs the speed does so too.
//! `docs/measurements/shared-memory.md` has figures of both.

use std::ops::DerefMut;

use bonfire::{Group, ReduceOp};
use bonfire_core::internal::oracle::Sample;

use super::operation::{Benchmark, Calls};
use super::oracle::{Case, Extent, POISON, wrong};
use super::timing::{RankError, Workload};

pub struct Slices<'a, T: Sample> {
    group: &'a Group,
    calls: Calls<T>,
    case: Case<T>,
    in_place: bool,
    /// Empty in place.
    input: Buffer<T>,
    output: Buffer<T>,
}

/// A vector, or a buffer that the group allocated.
type Buffer<T> = Box<dyn DerefMut<Target = [T]>>;

impl<'a, T: Sample> Slices<'a, T> {
    /// Prepares an operation on whole buffers of `count` elements, allocated by the group if `register`. None if
    /// `in_place` and the operation has no such form.
    pub fn new(
        group: &'a Group,
        benchmark: Benchmark,
        op: ReduceOp,
        root: usize,
        count: usize,
        [register, in_place]: [bool; 2],
    ) -> Result<Option<Self>, RankError> {
        let calls = Calls::of(benchmark).filter(|calls| !in_place || calls.in_place.is_some());
        let Some(calls) = calls else { return Ok(None) };
        let case = Case::new(benchmark.facts().reduces, op, [group.world_size(), group.rank(), root], count);
        let zeros = |extent| -> Result<Buffer<T>, RankError> {
            let length = case.range(extent).len();
            Ok(if register { Box::new(group.allocate(length)?) } else { Box::new(vec![T::zeroed(); length]) })
        };
        let (input, output): (Buffer<T>, _) = match in_place {
            true => (Box::new(Vec::new()), zeros(Extent::Whole)?),
            false => (zeros(calls.input)?, zeros(calls.output)?),
        };
        Ok(Some(Slices { group, calls, case, in_place, input, output }))
    }
}

impl<T: Sample> Workload for Slices<'_, T> {
    fn reset(&mut self) {
        let Slices { calls, case, .. } = self;
        self.output.fill(T::of(POISON));
        let input = match self.in_place {
            true => &mut self.output[case.range(calls.input)],
            false => &mut self.input[..],
        };
        for (i, element) in input.iter_mut().enumerate() {
            *element = case.input(case.rank, i);
        }
    }

    fn call(&mut self) -> Result<(), RankError> {
        let call = self.calls.in_place.filter(|_| self.in_place).unwrap_or(self.calls.into);
        Ok(call(self.group, &self.case, &self.input, &mut self.output)?)
    }

    fn wrong(&mut self) -> Result<u64, RankError> {
        let Slices { calls, case, .. } = self;
        let output = match self.in_place {
            true => &self.output[case.range(calls.output)],
            false => &self.output[..],
        };
        Ok(wrong(output, |i| (calls.want)(case, i)))
    }
}

#[cfg(test)]
mod tests {
    use bonfire_testing::ranks;
    use clap::ValueEnum;
    use half::{bf16, f16};

    use super::*;

    /// Counts each rank's wrong elements after `corrupt` changed its output: out of place, then in place if supported.
    fn check<T: Sample>(benchmark: Benchmark, op: ReduceOp, n: usize, corrupt: fn(&mut [T])) -> Vec<u64> {
        let count = 30 * n;
        let counts = ranks(n, |group| {
            let mut counts = Vec::new();
            for in_place in [false, true] {
                let slices = Slices::<T>::new(&group, benchmark, op, n - 1, count, [in_place, in_place]).unwrap();
                let Some(mut slices) = slices else { continue };
                // Twice: a first call's result must not pass for that of a second.
                for _ in 0..2 {
                    slices.reset();
                    slices.call().unwrap();
                }
                let range = if in_place { slices.case.range(slices.calls.output) } else { 0..slices.output.len() };
                corrupt(&mut slices.output[range]);
                counts.push(slices.wrong().unwrap());
            }
            counts
        });
        counts.concat()
    }

    fn every_operation<T: Sample>(ranks: usize) {
        for benchmark in Benchmark::value_variants().iter().filter(|benchmark| **benchmark != Benchmark::Gradients) {
            for op in ReduceOp::ALL.iter().copied() {
                let wrong = check::<T>(*benchmark, op, ranks, |_| ());
                assert!(wrong.iter().all(|wrong| *wrong == 0), "{benchmark:?} {op} {} {wrong:?}", T::DTYPE);
            }
        }
    }

    #[test]
    fn every_operation_is_correct_in_every_type() {
        every_operation::<f32>(2);
        every_operation::<f64>(3);
        every_operation::<f16>(3);
        every_operation::<bf16>(4);
        every_operation::<i8>(3);
        every_operation::<i16>(2);
        every_operation::<i32>(5);
        every_operation::<i64>(2);
        every_operation::<u8>(4);
        every_operation::<u16>(3);
        every_operation::<u32>(2);
        every_operation::<u64>(3);
    }

    #[test]
    fn a_wrong_element_is_found_in_every_operation() {
        for benchmark in Benchmark::value_variants()
            .iter()
            .filter(|benchmark| benchmark.facts().moves_data() && **benchmark != Benchmark::Gradients)
        {
            let wrong = check::<f32>(*benchmark, ReduceOp::Sum, 3, |output| *output.last_mut().unwrap() += 1.0);
            // Operations with a root leave the other ranks' outputs unspecified.
            let found: Vec<u64> =
                if matches!(benchmark, Benchmark::Reduce | Benchmark::Gather) { wrong[4..].to_vec() } else { wrong };
            assert!(!found.is_empty() && found.iter().all(|wrong| *wrong == 1), "{benchmark:?} {found:?}");
        }
    }

    #[test]
    fn a_call_that_does_nothing_is_wrong_everywhere() {
        let group = Group::threads(1).unwrap().remove(0);
        let mut slices =
            Slices::<u8>::new(&group, Benchmark::AllReduce, ReduceOp::Max, 0, 1000, [false; 2]).unwrap().unwrap();
        slices.reset();
        slices.call().unwrap();
        // The correct result of the previous call must not pass for that of this one.
        slices.reset();
        assert_eq!(slices.wrong().unwrap(), 1000);
    }
}
