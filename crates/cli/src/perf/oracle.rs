//! Inputs of a measured call, and its expected results.
//!
//! All inputs are integers small enough that every order of summation gives the same exact result in every element
//! type, 8-bit integers and 16-bit floats included: no result is above 126.

use std::ops::Range;

use bonfire::ReduceOp;
use bonfire_core::internal::oracle::{Sample, reduce};

/// Inputs repeat after this many elements. It is prime, so that a part at a wrong offset does not match.
const PERIOD: usize = 509;
/// At most this many ranks contribute a non-zero value to an element of a sum, up to 4 each.
const SUMMANDS: usize = 31;
/// At most this many ranks contribute a 2 to an element of a product.
const FACTORS: usize = 6;

/// Every element of an output before a call. Every element type can represent it, and no result equals it.
pub const POISON: i128 = 127;

/// How much of the size a rank's buffer holds: all of it or one part.
#[derive(Clone, Copy, PartialEq)]
pub enum Extent {
    Whole,
    /// One rank's part.
    Part,
}

/// The parameters of a call that determine its result.
pub struct Case<T> {
    /// Whether the operation reduces. Otherwise it only moves elements.
    reduces: bool,
    pub op: ReduceOp,
    pub ranks: usize,
    pub rank: usize,
    pub root: usize,
    /// Elements of a whole buffer.
    pub count: usize,
    /// The size of each rank's part, all equal: an argument of the variable-size (`_v`) operations.
    pub sizes: Vec<usize>,
    /// The first period of the reduction of all inputs.
    reduced: Vec<T>,
}

impl<T: Sample> Case<T> {
    pub fn new(reduces: bool, op: ReduceOp, [ranks, rank, root]: [usize; 3], count: usize) -> Self {
        let sizes = vec![count / ranks; ranks];
        let mut case = Case { reduces, op, ranks, rank, root, count, sizes, reduced: Vec::new() };
        let reduced = |i| reduce(op, (0..ranks).map(|rank| case.value(rank, i)));
        case.reduced = (0..PERIOD.min(count)).map(reduced).collect();
        case
    }

    fn value(&self, rank: usize, i: usize) -> i128 {
        let i = i % PERIOD;
        // The high bits of a multiplicative hash: adjacent elements and adjacent ranks differ.
        let mixed = ((rank * PERIOD + i) as u32).wrapping_mul(0x9E37_79B1) >> 16;
        let contributes = |most: usize| (rank + i).is_multiple_of(self.ranks.div_ceil(most));
        let value = match self.op {
            _ if !self.reduces => mixed % 127,
            ReduceOp::Product if contributes(FACTORS) => 1 + mixed % 2,
            ReduceOp::Product => 1,
            _ if contributes(SUMMANDS) => 1 + mixed % 4,
            _ => 0,
        };
        value.into()
    }

    /// Element `i` of the input of `rank`.
    pub fn input(&self, rank: usize, i: usize) -> T {
        T::of(self.value(rank, i))
    }

    /// Element `i` of the reduction of all inputs.
    pub fn reduced(&self, i: usize) -> T {
        self.reduced[i % PERIOD]
    }

    /// Elements of one rank's part.
    pub fn part(&self) -> usize {
        self.count / self.ranks
    }

    /// The range of this rank's part in a whole buffer, or of the whole buffer.
    pub fn range(&self, extent: Extent) -> Range<usize> {
        match extent {
            Extent::Whole => 0..self.count,
            Extent::Part => self.rank * self.part()..(self.rank + 1) * self.part(),
        }
    }
}

/// Counts the `elements` that differ from what `want` returns. Where it returns None, any value is correct.
pub fn wrong<T: Sample>(elements: &[T], want: impl Fn(usize) -> Option<T>) -> u64 {
    let is_wrong = |(i, element): &(usize, &T)| want(*i).is_some_and(|want| **element != want);
    elements.iter().enumerate().filter(is_wrong).count() as u64
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn known_reductions() {
        let case = |op| Case::<f64>::new(true, op, [3, 0, 0], 64);
        let inputs: Vec<f64> = (0..3).map(|rank| case(ReduceOp::Sum).input(rank, 5)).collect();
        let [a, b, c] = inputs[..] else { unreachable!() };
        assert!(inputs.iter().all(|x| (1.0..=4.0).contains(x)));
        assert_eq!(case(ReduceOp::Sum).reduced(5), a + b + c);
        assert_eq!(case(ReduceOp::Mean).reduced(5), (a + b + c) / 3.0);
        assert_eq!(case(ReduceOp::Max).reduced(5), a.max(b).max(c));
        assert_eq!(case(ReduceOp::Min).reduced(5), a.min(b).min(c));
        let factors: Vec<f64> = (0..3).map(|rank| case(ReduceOp::Product).input(rank, 5)).collect();
        assert_eq!(case(ReduceOp::Product).reduced(5), factors[0] * factors[1] * factors[2]);
    }

    #[test]
    fn results_fit_every_type_exactly_with_any_number_of_ranks() {
        for ranks in [1, 2, 3, 5, 6, 7, 31, 32, 33, 100, 1024] {
            for op in ReduceOp::ALL.iter().copied() {
                let case = Case::<f64>::new(true, op, [ranks, 0, 0], PERIOD);
                for i in 0..PERIOD {
                    let sum: f64 = (0..ranks).map(|rank| case.input(rank, i)).sum();
                    let want = case.reduced(i);
                    assert!((0.0..POISON as f64).contains(&want), "{op} of {ranks} ranks is {want}");
                    assert!(op == ReduceOp::Product || sum < POISON as f64, "{op} of {ranks} ranks sums up to {sum}");
                    if op != ReduceOp::Mean {
                        let whole = want as i128;
                        let held = [f16::of(whole).to_f64(), bf16::of(whole).to_f64(), i8::of(whole).into()];
                        assert_eq!(held, [want; 3], "{op} of {ranks} ranks");
                    }
                }
            }
        }
    }

    #[test]
    fn every_rank_and_offset_matters() {
        for (reduces, op) in [(false, ReduceOp::Sum), (true, ReduceOp::Sum), (true, ReduceOp::Product)] {
            let case = Case::<u8>::new(reduces, op, [4, 0, 0], 4096);
            for rank in 1..4 {
                assert!((0..100).any(|i| case.input(rank, i) != case.input(0, i)), "ranks 0 and {rank} are alike");
            }
            for shift in [1, 2, 64, 256, 1024] {
                assert!((0..100).any(|i| case.input(0, i) != case.input(0, i + shift)), "shift {shift} is undetected");
            }
        }
    }

    #[test]
    fn wrong_elements_are_counted() {
        let case = Case::new(true, ReduceOp::Sum, [2, 0, 0], 1000);
        let mut result: Vec<f32> = (0..1000).map(|i| case.reduced(i)).collect();
        let count = |result: &[f32]| wrong(result, |i| Some(case.reduced(i)));
        assert_eq!(count(&result), 0);
        result[0] = f32::NAN;
        result[999] += 1.0;
        assert_eq!(count(&result), 2);
        assert_eq!(count(&[f32::of(POISON); 1000]), 1000);
        assert_eq!(wrong(&result, |_| None), 0);
    }
}
