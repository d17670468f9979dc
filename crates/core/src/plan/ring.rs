//! Ring: each part travels around all ranks, so every rank exchanges messages with its two neighbours only.

use super::{Combine, Step};

/// Part `p` starts at rank `p + 1` and is combined on its way to rank `p`, where it is complete.
pub(super) fn reduce_scatter(rank: usize, n: usize) -> Vec<Step> {
    steps(rank, n, 1, Combine::Fold)
}

/// Part `p` starts at rank `p` and is copied on its way around.
pub(super) fn all_gather(rank: usize, n: usize) -> Vec<Step> {
    steps(rank, n, 0, Combine::Replace)
}

fn steps(rank: usize, n: usize, offset: usize, combine: Combine) -> Vec<Step> {
    let part = |distance: usize| {
        let part = (rank + 2 * n - distance) % n;
        part..part + 1
    };
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    (offset..offset + n - 1).map(|d| Step::exchange(next, part(d), previous, part(d + 1), combine)).collect()
}
