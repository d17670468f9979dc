//! Operations of a group on slices.

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
    /// Empty where the operation works in place.
    input: Memory<T>,
    output: Memory<T>,
}

/// A vector, or a buffer of the group's.
type Memory<T> = Box<dyn DerefMut<Target = [T]>>;

impl<'a, T: Sample> Slices<'a, T> {
    /// `count` elements of a whole buffer, in memory of the group's where `register` says so. None where the operation
    /// does not come in place.
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
        let zeros = |extent| -> Result<Memory<T>, RankError> {
            let length = case.place(extent).len();
            Ok(if register { Box::new(group.allocate(length)?) } else { Box::new(vec![T::zeroed(); length]) })
        };
        let (input, output): (Memory<T>, _) = match in_place {
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
            true => &mut self.output[case.place(calls.input)],
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
            true => &self.output[case.place(calls.output)],
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

    /// How many wrong elements are found after `corrupt` was at the outputs, out of place and, if there, in place.
    fn check<T: Sample>(benchmark: Benchmark, op: ReduceOp, n: usize, corrupt: fn(&mut [T])) -> Vec<u64> {
        let count = 30 * n;
        let counts = ranks(n, |group| {
            let mut counts = Vec::new();
            for in_place in [false, true] {
                let slices = Slices::<T>::new(&group, benchmark, op, n - 1, count, [in_place, in_place]).unwrap();
                let Some(mut slices) = slices else { continue };
                // Twice: what a first call left must not pass for the result of a second.
                for _ in 0..2 {
                    slices.reset();
                    slices.call().unwrap();
                }
                let place = if in_place { slices.case.place(slices.calls.output) } else { 0..slices.output.len() };
                corrupt(&mut slices.output[place]);
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
    fn every_operation_is_right_in_every_type() {
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
            .filter(|benchmark| benchmark.facts().moves() && **benchmark != Benchmark::Gradients)
        {
            let wrong = check::<f32>(*benchmark, ReduceOp::Sum, 3, |output| *output.last_mut().unwrap() += 1.0);
            // A reduction to a root says nothing of the other ranks' outputs.
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
        // The right result of the call before must not pass for one of this.
        slices.reset();
        assert_eq!(slices.wrong().unwrap(), 1000);
    }
}
