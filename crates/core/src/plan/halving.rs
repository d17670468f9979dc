//! Recursive halving and doubling.
//!
//! The algorithms need a power of two of ranks. Otherwise the first `2 * extra` ranks form pairs: the odd rank of a
//! pair is *passive*, sends its data to the even rank before and gets the result after. The active ranks have *numbers*
//! in rank order. Number `v` stands for the parts of its rank and of its passive partner, so the parts of consecutive
//! numbers are contiguous and in order.

use std::ops::Range;

use super::{Combine, Plan, Step};

/// Recursive doubling of whole buffers: log n exchanges.
pub(super) fn doubling(rank: usize, n: usize) -> Plan {
    let whole = |_| 0..n;
    let mut plan = Plan {
        reduce: from_passive(rank, n, whole, Combine::Fold),
        distribute: to_passive(rank, n, whole),
        ..Plan::default()
    };
    if let Some(number) = active(rank, n) {
        for distance in distances(n) {
            let peer = rank_of(number ^ distance, n);
            // The lower rank's elements are the left operand on both ranks, so the results are bit-identical.
            let combine = if number & distance == 0 { Combine::Fold } else { Combine::FoldUnder };
            plan.reduce.push(Step::exchange(peer, 0..n, peer, 0..n, combine));
        }
        plan.owned = 0..n;
        plan.replicated = true;
    }
    plan
}

/// Recursive halving, after which every active rank has the parts in [`owned`] complete.
pub(super) fn reduce_scatter(rank: usize, n: usize) -> Vec<Step> {
    let mut steps = from_passive(rank, n, |_| 0..n, Combine::Fold);
    let Some(number) = active(rank, n) else { return steps };
    let (mut low, mut high) = (0, actives(n));
    while high - low > 1 {
        let middle = low.midpoint(high);
        let peer = rank_of(number ^ (middle - low), n);
        let (lower, upper) = (parts(low..middle, n), parts(middle..high, n));
        if number < middle {
            steps.push(Step::exchange(peer, upper, peer, lower, Combine::Fold));
            high = middle;
        } else {
            steps.push(Step::exchange(peer, lower, peer, upper, Combine::FoldUnder));
            low = middle;
        }
    }
    steps
}

/// Recursive doubling of the parts that each rank has according to [`owned`]. Passive ranks get the whole at the end.
pub(super) fn all_gather(rank: usize, n: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    if let Some(number) = active(rank, n) {
        for distance in distances(n) {
            let peer = number ^ distance;
            let block = |number: usize| {
                let first = number / distance * distance;
                parts(first..first + distance, n)
            };
            let to = rank_of(peer, n);
            steps.push(Step::exchange(to, block(number), to, block(peer), Combine::Replace));
        }
    }
    steps.extend(to_passive(rank, n, |_| 0..n));
    steps
}

/// Returns the parts that are complete on `rank` after [`reduce_scatter`]: none on passive ranks.
pub(super) fn owned(rank: usize, n: usize) -> Range<usize> {
    active(rank, n).map_or(0..0, |number| parts(number..number + 1, n))
}

/// Passive ranks send `what(passive rank)` to their partners.
pub(super) fn from_passive(rank: usize, n: usize, what: impl Fn(usize) -> Range<usize>, combine: Combine) -> Vec<Step> {
    match partner(rank, n) {
        Some(partner) if active(rank, n).is_some() => vec![Step::receive(partner, what(partner), combine)],
        Some(partner) => vec![Step::send(partner, what(rank))],
        None => Vec::new(),
    }
}

/// Passive ranks get `what(passive rank)` from their partners.
pub(super) fn to_passive(rank: usize, n: usize, what: impl Fn(usize) -> Range<usize>) -> Vec<Step> {
    match partner(rank, n) {
        Some(partner) if active(rank, n).is_some() => vec![Step::send(partner, what(partner))],
        Some(partner) => vec![Step::receive(partner, what(rank), Combine::Replace)],
        None => Vec::new(),
    }
}

/// Returns the number of active ranks: the largest power of two up to `n`.
fn actives(n: usize) -> usize {
    1 << n.ilog2()
}

fn extra(n: usize) -> usize {
    n - actives(n)
}

fn distances(n: usize) -> impl Iterator<Item = usize> {
    let actives = actives(n);
    std::iter::successors(Some(1), |d| Some(d * 2)).take_while(move |d| *d < actives)
}

/// Returns the number of `rank`, unless it is passive.
fn active(rank: usize, n: usize) -> Option<usize> {
    if rank >= 2 * extra(n) { Some(rank - extra(n)) } else { rank.is_multiple_of(2).then_some(rank / 2) }
}

fn partner(rank: usize, n: usize) -> Option<usize> {
    (rank < 2 * extra(n)).then_some(rank ^ 1)
}

fn rank_of(number: usize, n: usize) -> usize {
    number + number.min(extra(n))
}

fn parts(numbers: Range<usize>, n: usize) -> Range<usize> {
    rank_of(numbers.start, n)..if numbers.end == actives(n) { n } else { rank_of(numbers.end, n) }
}
