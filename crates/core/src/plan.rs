//! Algorithms as data.
//!
//! A [`Plan`] lists what one rank sends and receives, in *parts*: the buffer is split by
//! [`partition`](crate::partition()) into as many parts as there are ranks, and ranges of parts stand for the elements
//! between them. So a plan depends on the operation, the algorithm, the rank, the world size and the root, not on the
//! length; it does no I/O and knows no clock, and everything about it can be tested without a network.
//!
//! # How ranks that disagree are detected
//!
//! A rank ends a plan only after a chain of messages has reached it from every other rank. If a rank called something
//! else, the first message of its chain carries another tag, and the receiver detects the mismatch. Where data flows
//! one way, the empty messages of [`Plan::agree`] form the chains.
//!
//! Tags carry no number of a step, because the ranks of one operation run different numbers of steps. Messages between
//! two ranks arrive in order, and the tests check that both sides agree on each.

mod by_size;
mod direct;
mod halving;
mod ring;
mod selection;
mod table;
#[cfg(test)]
mod tests;
mod tree;

use std::ops::Range;

use strum::{Display, VariantArray};

pub use self::by_size::BySize;
pub use self::selection::Selection;
#[cfg(unix)]
pub(crate) use self::selection::parse;
pub(crate) use self::table::plan as by_default;
use crate::types::Operation;

/// An algorithm that carries out an operation by messages. Its text is in lower case: `ring`.
///
/// For n ranks and S bytes: the messages that one rank sends one after the other, and the bytes that it sends.
///
/// | algorithm | all_reduce: messages | bytes | good for |
/// |---|---|---|---|
/// | direct | 2(n-1) | 2S(n-1)/n | 16-bit floats and integer means (one rounding), two ranks |
/// | ring | 2(n-1) | 2S(n-1)/n | large buffers: every rank talks to two neighbours only |
/// | halving | 2 log n | 2S(n-1)/n | medium buffers |
/// | doubling | log n | S log n | small buffers |
/// | tree | 2 log n | 2S | small rooted operations |
///
/// all_to_all, gather, scatter and barrier have one plan each, which is called direct: in the first three a part
/// concerns two ranks only, and a barrier moves no data. Only all_reduce has doubling.
///
/// Ring: Patarasuk and Yuan, JPDC 2009. Halving and doubling: Thakur, Rabenseifner and Gropp, IJHPCA 2005.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Display, VariantArray)]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank exchanges parts with every other; the owner of a part combines all ranks' parts.
    Direct,
    /// Parts travel around a ring, combined on the way, and then once more to reach all ranks.
    Ring,
    /// Recursive halving reduces and scatters, recursive doubling gathers.
    Halving,
    /// Recursive doubling on whole buffers.
    Doubling,
    /// Data moves along a binomial tree of ranks.
    Tree,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: &[Algorithm] = Algorithm::VARIANTS;

    /// Whether `operation` has this algorithm.
    fn supports(self, operation: Operation) -> bool {
        self.nearest(operation) == self && selection::SELECTABLE.contains(&operation)
    }

    /// Returns this algorithm or, if `operation` lacks it, the nearest one that it has.
    fn nearest(self, operation: Operation) -> Algorithm {
        match operation {
            Operation::AllReduce => self,
            Operation::Reduce | Operation::Broadcast | Operation::AllGather | Operation::ReduceScatter => match self {
                Algorithm::Doubling => Algorithm::Halving,
                _ => self,
            },
            _ => Algorithm::Direct,
        }
    }
}

/// The steps of one rank in one operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    /// Empty messages that form a chain from every rank to every rank. Operations in which some rank depends on no
    /// other begin with them, so that no rank returns success if ranks disagree.
    pub agree: Vec<Step>,
    /// Combines parts. With an accumulator wider than the element, all combining goes into `owned`.
    pub reduce: Vec<Step>,
    /// The parts that are complete on this rank after `reduce`. There the mean is divided and a wide accumulator is
    /// rounded.
    pub owned: Range<usize>,
    /// Whether several ranks complete the same parts, each by its own arithmetic.
    pub replicated: bool,
    /// Moves finished parts.
    pub distribute: Vec<Step>,
}

/// One message out, one in, or both at once.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    /// The receiver and the parts to send.
    pub send: Option<(usize, Range<usize>)>,
    /// The sender, the parts to receive, and what to do with them.
    pub receive: Option<(usize, Range<usize>, Combine)>,
}

/// What to do with received parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Combine {
    /// Replaces the local parts.
    Replace,
    /// Combines, with the local parts as the left operand and the received ones as the right.
    Fold,
    /// Combines, with the received parts as the left operand.
    FoldUnder,
    /// Replaces the local parts, which the same step sends: they are read to the end before they are overwritten.
    Swap,
}

impl Step {
    fn send(to: usize, parts: Range<usize>) -> Step {
        Step { send: Some((to, parts)), receive: None }
    }

    fn receive(from: usize, parts: Range<usize>, combine: Combine) -> Step {
        Step { send: None, receive: Some((from, parts, combine)) }
    }

    fn exchange(to: usize, outgoing: Range<usize>, from: usize, incoming: Range<usize>, combine: Combine) -> Step {
        Step { send: Some((to, outgoing)), receive: Some((from, incoming, combine)) }
    }
}

/// Returns the plan of `rank` for `operation`; `root` matters if the operation has one.
pub(crate) fn plan(operation: Operation, algorithm: Algorithm, rank: usize, world_size: usize, root: usize) -> Plan {
    let n = world_size;
    if n == 1 {
        return Plan { owned: 0..1, ..Plan::default() };
    }
    match operation {
        Operation::AllReduce => match algorithm {
            Algorithm::Doubling => halving::doubling(rank, n),
            Algorithm::Tree => {
                let owned = if rank == 0 { 0..n } else { 0..0 };
                Plan {
                    reduce: tree::reduce(rank, n, 0),
                    owned,
                    distribute: tree::broadcast(rank, n, 0),
                    ..Plan::default()
                }
            }
            _ => {
                let distribute = all_gather(algorithm, rank, n);
                Plan {
                    reduce: reduce_scatter(algorithm, rank, n),
                    owned: owned(algorithm, rank, n),
                    distribute,
                    ..Plan::default()
                }
            }
        },
        Operation::ReduceScatter => match algorithm {
            Algorithm::Tree => {
                let owned = if rank == 0 { 0..n } else { 0..0 };
                let scatter = scatter_from(0, rank, n, |r| r..r + 1);
                Plan { reduce: tree::reduce(rank, n, 0), owned, distribute: scatter, ..Plan::default() }
            }
            _ => {
                let mut plan = Plan {
                    reduce: reduce_scatter(algorithm, rank, n),
                    owned: owned(algorithm, rank, n),
                    ..Plan::default()
                };
                if matches!(algorithm, Algorithm::Halving | Algorithm::Doubling) {
                    plan.distribute = halving::to_passive(rank, n, |rank| rank..rank + 1);
                }
                plan
            }
        },
        Operation::AllGather => match algorithm {
            Algorithm::Tree => {
                let mut distribute = gather_to(0, rank, n, |r| r..r + 1);
                distribute.extend(tree::broadcast(rank, n, 0));
                Plan { owned: rank..rank + 1, distribute, ..Plan::default() }
            }
            Algorithm::Halving | Algorithm::Doubling => {
                let mut distribute = halving::from_passive(rank, n, |rank| rank..rank + 1, Combine::Replace);
                distribute.extend(halving::all_gather(rank, n));
                Plan { owned: rank..rank + 1, distribute, ..Plan::default() }
            }
            _ => Plan { owned: rank..rank + 1, distribute: all_gather(algorithm, rank, n), ..Plan::default() },
        },
        Operation::Reduce => {
            let agree = dissemination(rank, n);
            match algorithm {
                Algorithm::Tree => {
                    let owned = if rank == root { 0..n } else { 0..0 };
                    Plan { agree, reduce: tree::reduce(rank, n, root), owned, ..Plan::default() }
                }
                _ => Plan {
                    agree,
                    reduce: reduce_scatter(algorithm, rank, n),
                    owned: owned(algorithm, rank, n),
                    distribute: gather_to(root, rank, n, |r| owned(algorithm, r, n)),
                    ..Plan::default()
                },
            }
        }
        Operation::Broadcast => {
            let distribute = match algorithm {
                Algorithm::Tree => tree::broadcast(rank, n, root),
                Algorithm::Direct => scatter_from(root, rank, n, |_| 0..n),
                _ => {
                    let mut steps = scatter_from(root, rank, n, |r| owned(algorithm, r, n));
                    steps.extend(all_gather(algorithm, rank, n));
                    steps
                }
            };
            Plan { agree: dissemination(rank, n), distribute, ..Plan::default() }
        }
        Operation::Barrier => Plan { agree: dissemination(rank, n), ..Plan::default() },
        Operation::AllToAll => Plan { distribute: direct::all_to_all(rank, n), ..Plan::default() },
        Operation::Gather => Plan {
            agree: dissemination(rank, n),
            distribute: gather_to(root, rank, n, |r| r..r + 1),
            ..Plan::default()
        },
        Operation::Scatter => {
            let distribute = scatter_from(root, rank, n, |r| r..r + 1);
            Plan { agree: dissemination(rank, n), distribute, ..Plan::default() }
        }
        // Operations between pairs of ranks need no plan.
        Operation::Send | Operation::Exchange | Operation::AllToAllV | Operation::Subgroup => Plan::default(),
    }
}

fn reduce_scatter(algorithm: Algorithm, rank: usize, n: usize) -> Vec<Step> {
    match algorithm {
        Algorithm::Ring => ring::reduce_scatter(rank, n),
        Algorithm::Halving | Algorithm::Doubling => halving::reduce_scatter(rank, n),
        Algorithm::Direct | Algorithm::Tree => direct::reduce_scatter(rank, n),
    }
}

/// Gathers the parts that each rank has according to [`owned`].
fn all_gather(algorithm: Algorithm, rank: usize, n: usize) -> Vec<Step> {
    match algorithm {
        Algorithm::Ring => ring::all_gather(rank, n),
        Algorithm::Halving | Algorithm::Doubling => halving::all_gather(rank, n),
        Algorithm::Direct | Algorithm::Tree => direct::all_gather(rank, n),
    }
}

/// Returns the parts that are complete on `rank` after [`reduce_scatter`].
fn owned(algorithm: Algorithm, rank: usize, n: usize) -> Range<usize> {
    match algorithm {
        Algorithm::Halving | Algorithm::Doubling => halving::owned(rank, n),
        _ => rank..rank + 1,
    }
}

/// Every rank sends its `parts` to `root`. Ranks without parts send nothing: they have taken part in the agreement.
fn gather_to(root: usize, rank: usize, n: usize, parts: impl Fn(usize) -> Range<usize>) -> Vec<Step> {
    if rank != root {
        return Some(parts(rank)).filter(|p| !p.is_empty()).map(|p| Step::send(root, p)).into_iter().collect();
    }
    (1..n)
        .map(|i| (root + i) % n)
        .filter(|from| !parts(*from).is_empty())
        .map(|from| Step::receive(from, parts(from), Combine::Replace))
        .collect()
}

/// `root` sends every other rank its `parts`.
fn scatter_from(root: usize, rank: usize, n: usize, parts: impl Fn(usize) -> Range<usize>) -> Vec<Step> {
    if rank != root {
        let own = Some(parts(rank)).filter(|p| !p.is_empty());
        return own.map(|p| Step::receive(root, p, Combine::Replace)).into_iter().collect();
    }
    let others = (1..n).map(|i| (root + i) % n).filter(|to| !parts(*to).is_empty());
    others.map(|to| Step::send(to, parts(to))).collect()
}

/// A dissemination barrier: empty messages in log n rounds, which form a chain from every rank to every rank. Hensgen,
/// Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 1988.
fn dissemination(rank: usize, n: usize) -> Vec<Step> {
    let distances = std::iter::successors(Some(1), |d| Some(d * 2)).take_while(|d| *d < n);
    distances.map(|d| Step::exchange((rank + d) % n, 0..0, (rank + n - d) % n, 0..0, Combine::Replace)).collect()
}
