//! Binomial tree over whole buffers. Ranks are numbered from the root; a rank's parent is its number without the lowest
//! set bit.

use super::{Combine, Step};

/// Combines toward the root. Each rank's partial result covers the ranks numbered from its own on, in order.
pub(super) fn reduce(rank: usize, n: usize, root: usize) -> Vec<Step> {
    let number = (rank + n - root) % n;
    let mut steps: Vec<_> =
        children(number, n).map(|child| Step::receive((child + root) % n, 0..n, Combine::Fold)).collect();
    if number > 0 {
        steps.push(Step::send((parent(number) + root) % n, 0..n));
    }
    steps
}

/// Sends from the root to all ranks, the largest subtree first.
pub(super) fn broadcast(rank: usize, n: usize, root: usize) -> Vec<Step> {
    let number = (rank + n - root) % n;
    let mut steps = Vec::new();
    if number > 0 {
        steps.push(Step::receive((parent(number) + root) % n, 0..n, Combine::Replace));
    }
    let mut children: Vec<_> = children(number, n).collect();
    children.reverse();
    steps.extend(children.into_iter().map(|child| Step::send((child + root) % n, 0..n)));
    steps
}

fn parent(number: usize) -> usize {
    number & (number - 1)
}

/// Returns the children of a number, the smallest subtree first.
fn children(number: usize, n: usize) -> impl Iterator<Item = usize> {
    let bits = std::iter::successors(Some(1), |bit| Some(bit * 2));
    bits.take_while(move |bit| number & bit == 0 && *bit < n).map(move |bit| number + bit).take_while(move |c| *c < n)
}
