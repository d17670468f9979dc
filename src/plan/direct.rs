//! Direct: every rank exchanges with every other, in rounds in which each sends to one and receives from one.

use super::{Combine, Step};

/// Every rank receives its own part from all others.
pub(super) fn reduce_scatter(rank: usize, n: usize) -> Vec<Step> {
    let step = |to: usize, from: usize| Step::exchange(to, to..to + 1, from, rank..rank + 1, Combine::Fold);
    rounds(rank, n).map(|(to, from)| step(to, from)).collect()
}

/// Every rank sends its own part to all others.
pub(super) fn all_gather(rank: usize, n: usize) -> Vec<Step> {
    let step = |to: usize, from: usize| Step::exchange(to, rank..rank + 1, from, from..from + 1, Combine::Replace);
    rounds(rank, n).map(|(to, from)| step(to, from)).collect()
}

fn rounds(rank: usize, n: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..n).map(move |d| ((rank + d) % n, (rank + n - d) % n))
}
