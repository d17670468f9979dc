//! Means over the ranks of values that each computes of the outputs of its model, such as metrics.
//!
//! One rank, the leader, needs the means. A training framework computes its values on a thread of its own, which must
//! not wait for other ranks. So the others compute theirs on the threads that train, all ranks add them up between two
//! iterations, and only then the leader hands its output over: the sum lies in a queue ([`Shares`]) when the thread
//! comes to compute the leader's value.

use std::collections::VecDeque;
use std::mem::take;
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

/// Adds up what all ranks have, element by element, on rank 0. The others get zeros. Without elements it does not
/// communicate.
#[track_caller]
fn add_up(group: &Group, own: Option<Vec<Weighted>>, len: usize) -> Result<Vec<Weighted>, Error> {
    let mut sums = own.unwrap_or_else(|| vec![Weighted::default(); len]);
    if len > 0 {
        let mut all: Vec<_> = sums.iter().flat_map(|own| [own.sum, own.weight]).collect();
        group.reduce(&mut all, ReduceOp::Sum, 0)?;
        let is_leader = group.rank() == 0;
        for (sum, [value, weight]) in sums.iter_mut().zip(all.as_chunks().0) {
            *sum = if is_leader { Weighted { sum: *value, weight: *weight } } else { Weighted::default() };
        }
    }
    Ok(sums)
}

/// A rank's last output, until the values that the ranks have computed of theirs are added up. Rank 0 is the leader.
#[derive(Debug)]
pub struct Pending<I> {
    last: Option<(I, u64)>,
    /// On the leader: the others' values since the last output, by value.
    others: Vec<Weighted>,
    /// This rank's samples in the epoch.
    samples: u64,
}

impl<I> Pending<I> {
    /// Of so many values. They are the same on all ranks.
    pub fn new(values: usize) -> Self {
        Pending { last: None, others: vec![Weighted::default(); values], samples: 0 }
    }

    /// Takes the output of an iteration, of so many samples. The leader has taken the one before by [`leave`] then.
    ///
    /// [`leave`]: Self::leave
    pub fn enter(&mut self, output: I, samples: u64) {
        self.samples += samples;
        self.last = Some((output, samples));
    }

    /// Adds up the values of the last iteration. All ranks must call it after each iteration, also one in which they
    /// had no batch. `values` returns those of an output, or `None` where it has none; the leader's is not asked.
    ///
    /// # Errors
    /// Those of [`Group::reduce`].
    #[track_caller]
    pub fn add_up(&mut self, group: &Group, values: impl FnOnce(I) -> Vec<Option<f64>>) -> Result<(), Error> {
        let last = if group.rank() == 0 { None } else { self.last.take() };
        let own = last.map(|(output, samples)| weighted(values(output), samples));
        let sums = add_up(group, own, self.others.len())?;
        for (others, sum) in self.others.iter_mut().zip(sums) {
            *others = others.and(sum);
        }
        Ok(())
    }

    /// Takes the leader's last output, with the share of each value. While the leader has no further batch, it leaves
    /// the output here: the iterations of the others belong to it.
    pub fn leave(&mut self) -> Option<(I, Vec<Share>)> {
        let (output, own) = self.last.take()?;
        Some((output, self.others.iter_mut().map(|others| Share { own, others: take(others) }).collect()))
    }

    /// Ends an epoch: adds up the values of all of it. All ranks must call it. `values` returns a rank's; neither the
    /// leader nor a rank without samples is asked. Returns the shares, on all but the leader without meaning.
    ///
    /// # Errors
    /// Those of [`Group::reduce`].
    #[track_caller]
    pub fn end_epoch(&mut self, group: &Group, values: impl FnOnce() -> Vec<Option<f64>>) -> Result<Vec<Share>, Error> {
        let samples = take(&mut self.samples);
        let own = (group.rank() != 0 && samples > 0).then(|| weighted(values(), samples));
        let sums = add_up(group, own, self.others.len())?;
        self.begin_epoch();
        Ok(sums.into_iter().map(|others| Share { own: samples, others }).collect())
    }

    /// Forgets what no output of the leader's has taken.
    pub fn begin_epoch(&mut self) {
        self.samples = 0;
        self.others.fill(Weighted::default());
    }
}

fn weighted(values: Vec<Option<f64>>, samples: u64) -> Vec<Weighted> {
    let weighted = |value: Option<f64>| value.map_or_else(Weighted::default, |value| Weighted::of(value, samples));
    values.into_iter().map(weighted).collect()
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
        [2.0, 4.0].into_iter().for_each(|value| shares.clone().push(others(value)));
        assert_eq!(
            [(); 3].map(|()| shares.take().with(Some(0.0)).mean()),
            [Some((1.0, 2)), Some((2.0, 2)), Some((0.0, 1))]
        );
    }

    /// Three ranks with 2, 0 and 3 batches, and two values: the batch's number, which rank 1 would not have, and none.
    #[test]
    fn the_leader_gets_the_values_of_all_ranks_and_those_after_its_last_batch() {
        let found = bonfire_testing::ranks(3, |group| {
            let rank = group.rank();
            let (batches, mut pending, mut left) = ([2, 0, 3][rank], Pending::new(2), Vec::new());
            for _ in 0..2 {
                for batch in 0..4 {
                    if batch > 0 {
                        pending.add_up(&group, |batch: usize| vec![Some(batch as f64), None]).unwrap();
                    }
                    if rank == 0 && (batch < batches || batch == 3) {
                        left.extend(pending.leave().map(|(batch, shares)| {
                            [0, 1].map(|value| shares[value].with((value == 0).then_some(batch as f64)).mean())
                        }));
                    }
                    if batch < batches {
                        pending.enter(batch, 1 + rank as u64);
                    }
                }
                let shares = pending.end_epoch(&group, || vec![None, Some(rank as f64)]).unwrap();
                left.push([0, 1].map(|value| shares[value].with((value == 1).then_some(0.5)).mean()));
            }
            left
        });
        // Of one and three samples; of one, three and three; and of the epoch's two and nine.
        let epoch = [[Some((0.0, 4)), None], [Some((10.0 / 7.0, 7)), None], [None, Some((19.0 / 11.0, 11))]];
        assert_eq!(found[0], [epoch, epoch].concat());
    }

    #[test]
    fn without_values_nothing_is_exchanged() {
        let mut groups = bonfire_core::Group::threads(2).unwrap();
        groups.truncate(1);
        let mut pending = Pending::new(0);
        pending.enter((), 1);
        pending.add_up(&groups[0], |()| Vec::new()).unwrap();
        assert!(pending.leave().is_some() && pending.end_epoch(&groups[0], Vec::new).unwrap().is_empty());
    }
}
