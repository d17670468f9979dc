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

/// Every rank swaps with every other the parts that they hold for each other, so no part is overwritten before it is
/// sent, and scratch memory for one chunk is enough. All parts have one length, because part `i` of rank `j` takes the
/// place of part `j` of rank `i`. The rounds are those of a round-robin tournament: in each, a rank has one partner or
/// rests.
///
/// There is no deadlock: a rank waits only for its partner of the round it is in. Of the ranks in the earliest round
/// that any rank is in, each has its partner in the same round, since neither ends it without the other.
pub(super) fn all_to_all(rank: usize, n: usize) -> Vec<Step> {
    // Two ranks meet in the round equal to the sum of their numbers, modulo the odd one of n - 1 and n. In each round
    // one rank would meet itself: with an even n it meets the last rank instead, with an odd n it rests.
    let odd = (n - 1) | 1;
    let partner = |round: usize| {
        let alone = round * odd.div_ceil(2) % odd;
        if rank == odd {
            alone
        } else if rank == alone {
            odd
        } else {
            (round + odd - rank) % odd
        }
    };
    let swap = |peer: usize| Step::exchange(peer, peer..peer + 1, peer, peer..peer + 1, Combine::Swap);
    (0..odd).map(partner).filter(|peer| *peer < n).map(swap).collect()
}

fn rounds(rank: usize, n: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..n).map(move |d| ((rank + d) % n, (rank + n - d) % n))
}
