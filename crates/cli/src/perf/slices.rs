//! Operations of a group on slices.

use std::ops::{Deref, DerefMut};

use bonfire::{Buffer, Group, ReduceOp};
use bonfire_core::internal::oracle::Sample;

use super::operation::{Benchmark, Calls};
use super::oracle::{Case, Extent, POISON, wrong};
use super::ranks::RankError;
use super::timing::Workload;

pub struct Slices<'a, T: Sample> {
    group: &'a Group,
    operation: Calls<T>,
    case: Case<T>,
    in_place: bool,
    /// Empty where the operation works in place.
    input: Memory<T>,
    output: Memory<T>,
}

/// Where the elements are.
enum Memory<T> {
    Own(Vec<T>),
    Registered(Buffer<T>),
}

impl<T: Sample> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Memory::Own(elements) => elements,
            Memory::Registered(elements) => elements,
        }
    }
}

impl<T: Sample> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Memory::Own(elements) => elements,
            Memory::Registered(elements) => elements,
        }
    }
}

impl<'a, T: Sample> Slices<'a, T> {
    /// `count` elements of a whole buffer, in memory of the group's where `register` says so. None where the operation
    /// does not come in place.
    pub fn new(
        group: &'a Group,
        name: Benchmark,
        op: ReduceOp,
        root: usize,
        count: usize,
        [register, in_place]: [bool; 2],
    ) -> Result<Option<Self>, RankError> {
        let operation = Calls::<T>::ALL[name as usize];
        if in_place && operation.in_place.is_none() {
            return Ok(None);
        }
        let case = Case::new(operation.facts.reduces, op, [group.world_size(), group.rank(), root], count);
        let zeros = |extent| {
            let length = case.place(extent).len();
            Ok::<_, RankError>(match register {
                true => Memory::Registered(group.allocate(length)?),
                false => Memory::Own(vec![T::zeroed(); length]),
            })
        };
        let (input, output) = match in_place {
            true => (Memory::Own(Vec::new()), zeros(Extent::Whole)?),
            false => (zeros(operation.input)?, zeros(operation.output)?),
        };
        Ok(Some(Slices { group, operation, case, in_place, input, output }))
    }
}

impl<T: Sample> Workload for Slices<'_, T> {
    fn reset(&mut self) {
        let Slices { operation, case, .. } = self;
        self.output.fill(T::of(POISON));
        let input = match self.in_place {
            true => &mut self.output[case.place(operation.input)],
            false => &mut self.input[..],
        };
        for (i, element) in input.iter_mut().enumerate() {
            *element = case.input(case.rank, i);
        }
    }

    fn call(&mut self) -> Result<(), RankError> {
        let call = self.operation.in_place.filter(|_| self.in_place).unwrap_or(self.operation.into);
        Ok(call(self.group, &self.case, &self.input, &mut self.output)?)
    }

    fn wrong(&mut self) -> Result<u64, RankError> {
        let Slices { operation, case, .. } = self;
        let output = match self.in_place {
            true => &self.output[case.place(operation.output)],
            false => &self.output[..],
        };
        Ok(wrong(output, |i| (operation.want)(case, i)))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use clap::ValueEnum;
    use half::{bf16, f16};

    use super::*;

    /// The wrong elements of every rank after `name`, whose results `corrupt` may change.
    fn check<T: Sample>(name: Benchmark, op: ReduceOp, ranks: usize, corrupt: fn(&mut [T])) -> Vec<u64> {
        let count = 30 * ranks;
        let rank = move |group: Group| {
            let mut counts = Vec::new();
            for in_place in [false, true] {
                let slices = Slices::<T>::new(&group, name, op, ranks - 1, count, [in_place, in_place]).unwrap();
                let Some(mut slices) = slices else { continue };
                // Twice: what a first call left must not pass for the result of a second.
                for _ in 0..2 {
                    slices.reset();
                    slices.call().unwrap();
                }
                let place = if in_place { slices.case.place(slices.operation.output) } else { 0..slices.output.len() };
                corrupt(&mut slices.output[place]);
                counts.push(slices.wrong().unwrap());
            }
            counts
        };
        let ranks: Vec<_> =
            Group::threads(ranks).unwrap().into_iter().map(|g| thread::spawn(move || rank(g))).collect();
        ranks.into_iter().flat_map(|rank| rank.join().unwrap()).collect()
    }

    fn every_operation<T: Sample>(ranks: usize) {
        for name in Benchmark::value_variants().iter().filter(|name| **name != Benchmark::Gradients) {
            for op in ReduceOp::ALL {
                let wrong = check::<T>(*name, op, ranks, |_| ());
                assert!(wrong.iter().all(|wrong| *wrong == 0), "{name:?} {op} {} {wrong:?}", T::DTYPE);
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
        for name in
            Benchmark::value_variants().iter().filter(|name| name.facts().moves() && **name != Benchmark::Gradients)
        {
            let wrong = check::<f32>(*name, ReduceOp::Sum, 3, |output| *output.last_mut().unwrap() += 1.0);
            // A reduction to a root says nothing of the other ranks' outputs.
            let found: Vec<u64> =
                if matches!(name, Benchmark::Reduce | Benchmark::Gather) { wrong[4..].to_vec() } else { wrong };
            assert!(!found.is_empty() && found.iter().all(|wrong| *wrong == 1), "{name:?} {found:?}");
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
