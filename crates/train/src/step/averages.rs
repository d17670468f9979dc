//! Means over the ranks of values that each computes of its own batches, such as metrics.
//!
//! One rank, the leader, needs the means. It has its own values later than the others have theirs, on a thread of the
//! training framework, which must not wait for other ranks. So the others' sums travel first, on the threads that
//! train, and lie in a queue of [`Shares`] when that thread comes to compute the leader's value.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use bonfire_core::internal::lock;
use bonfire_core::{Error, Group, ReduceOp};

/// Values, added up with their weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weighted {
    sum: f64,
    weight: f64,
}

impl Weighted {
    /// A value with its weight: the number of samples that it is of. One of no samples counts nothing, whatever it is.
    pub fn of(value: f64, weight: u64) -> Weighted {
        if weight == 0 { Weighted::default() } else { Weighted { sum: value * weight as f64, weight: weight as f64 } }
    }

    /// The values of both.
    pub fn and(self, other: Weighted) -> Weighted {
        Weighted { sum: self.sum + other.sum, weight: self.weight + other.weight }
    }

    /// Returns the mean and its weight, or `None` if there are no values.
    pub fn mean(self) -> Option<(f64, usize)> {
        (self.weight > 0.0).then(|| (self.sum / self.weight, self.weight as usize))
    }
}

/// Adds up what all ranks have, element by element, on rank 0. The others get zeros. All ranks must call it with as many
/// elements; without any it does not communicate.
///
/// # Errors
/// Those of [`Group::reduce`].
#[track_caller]
pub fn add_up(group: &Group, own: &[Weighted]) -> Result<Vec<Weighted>, Error> {
    if own.is_empty() {
        return Ok(Vec::new());
    }
    let mut all: Vec<_> = own.iter().flat_map(|own| [own.sum, own.weight]).collect();
    group.reduce(&mut all, ReduceOp::Sum, 0)?;
    let sum = |pair: &[f64; 2]| Weighted { sum: pair[0], weight: pair[1] };
    Ok(if group.rank() == 0 {
        all.as_chunks().0.iter().map(sum).collect()
    } else {
        vec![Weighted::default(); own.len()]
    })
}

/// What the leader's value of a batch or an epoch is averaged with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// The weight of the leader's own value.
    pub own: u64,
    /// The values of the other ranks.
    pub others: Weighted,
}

impl Share {
    /// Adds the leader's own value, if it has one.
    pub fn with(self, own: Option<f64>) -> Weighted {
        self.others.and(own.map_or_else(Weighted::default, |own| Weighted::of(own, self.own)))
    }
}

/// The shares of a metric, in the order of the values that they belong to.
#[derive(Clone, Debug, Default)]
pub struct Shares(Arc<Mutex<VecDeque<Share>>>);

impl Shares {
    /// Adds the share of the next value. The leader calls it before it hands over what the value is computed of.
    pub fn push(&self, share: Share) {
        lock(&self.0).push_back(share);
    }

    /// Takes the share of the next value. Where nothing was pushed, the value is the only one.
    pub fn take(&self) -> Share {
        lock(&self.0).pop_front().unwrap_or(Share { own: 1, others: Weighted::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_the_samples_and_values_of_none_count_nothing() {
        let two = Weighted::of(3.0, 1).and(Weighted::of(6.0, 2));
        assert_eq!(two.mean(), Some((5.0, 3)));
        assert_eq!(two.and(Weighted::of(f64::NAN, 0)).mean(), Some((5.0, 3)));
        assert_eq!(Weighted::of(f64::NAN, 0).mean(), None);
        let share = Share { own: 3, others: two };
        assert_eq!((share.with(Some(7.0)).mean(), share.with(None).mean()), (Some((6.0, 6)), Some((5.0, 3))));
    }

    #[test]
    fn shares_are_taken_in_order_and_a_value_without_one_stands_alone() {
        let shares = Shares::default();
        let others = |value| Share { own: 1, others: Weighted::of(value, 1) };
        [2.0, 4.0].map(|value| shares.clone().push(others(value)));
        assert_eq!(
            [(); 3].map(|()| shares.take().with(Some(0.0)).mean()),
            [Some((1.0, 2)), Some((2.0, 2)), Some((0.0, 1))]
        );
    }

    #[test]
    fn rank_0_gets_the_sums_of_all_ranks() {
        let sums = bonfire_testing::ranks(3, |group| {
            let rank = group.rank() as u64;
            let own = [Weighted::of(rank as f64, rank), Weighted::of(1.0, 1), Weighted::default()];
            assert!(add_up(&group, &[]).unwrap().is_empty());
            add_up(&group, &own).unwrap()
        });
        let expected = [Weighted { sum: 5.0, weight: 3.0 }, Weighted { sum: 3.0, weight: 3.0 }, Weighted::default()];
        assert_eq!(sums[0], expected);
        assert_eq!(sums[2], [Weighted::default(); 3]);
    }
}
