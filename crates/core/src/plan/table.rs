//! Default plans by size, for operations that no engine runs. Sizes decide nowhere else.
//!
//! Where there is an engine it gets every size. `scripts/no-collapse` checks for performance cliffs around every power
//! of two from 4 KiB to 256 MiB.
//!
//! # Measurements
//!
//! The sizes were measured over TCP on loopback with 2, 3 and 4 ranks on two cores, algorithms in turn, best of three
//! rounds. For all_reduce:
//!
//! * Doubling takes 60 % of the time of direct at 4 KiB with two ranks, and 40 % of a ring's with three.
//! * Halving is twice as fast as a ring from 2 MiB on with four ranks. With three ranks it is at best half as fast
//!   there, because the passive rank sends its whole buffer to its partner.
//! * A tree took 10 to 45 % less time than halving between 32 and 128 KiB, with more ranks than cores. It is no default
//!   because it sends every byte through the root, and over a network that counts.

use super::Algorithm::{self, Direct, Doubling, Halving, Ring, Tree};
use crate::types::Operation;

/// Algorithms in ascending order of size, each with the smallest size in bytes that it is for.
type Row = (Operation, &'static [(Algorithm, usize)]);

const TWO_RANKS: [Row; 5] = [
    (Operation::AllReduce, &[(Doubling, 0), (Direct, 48 << 10)]),
    (Operation::Reduce, &[(Tree, 0), (Direct, 64 << 10)]),
    (Operation::Broadcast, &[(Tree, 0)]),
    (Operation::AllGather, &[(Direct, 0)]),
    (Operation::ReduceScatter, &[(Direct, 0)]),
];

/// Halving is at its best here: it sends as few bytes as a ring, in fewer messages.
const POWERS_OF_TWO: [Row; 5] = [
    (Operation::AllReduce, &[(Doubling, 0), (Halving, 48 << 10)]),
    (Operation::Reduce, &[(Tree, 0), (Halving, 256 << 10)]),
    (Operation::Broadcast, &[(Tree, 0), (Halving, 256 << 10)]),
    (Operation::AllGather, &[(Halving, 0)]),
    (Operation::ReduceScatter, &[(Halving, 0)]),
];

const OTHERS: [Row; 5] = [
    (Operation::AllReduce, &[(Doubling, 0), (Halving, 48 << 10), (Ring, 256 << 10)]),
    (Operation::Reduce, &[(Tree, 0), (Ring, 256 << 10)]),
    (Operation::Broadcast, &[(Tree, 0), (Ring, 256 << 10)]),
    (Operation::AllGather, &[(Halving, 0), (Ring, 256 << 10)]),
    (Operation::ReduceScatter, &[(Halving, 0), (Ring, 256 << 10)]),
];

/// Returns the plans of `operation` by size.
pub(super) fn plans(operation: Operation, world_size: usize) -> &'static [(Algorithm, usize)] {
    let tables = match world_size {
        0..=2 => &TWO_RANKS,
        n if n.is_power_of_two() => &POWERS_OF_TWO,
        _ => &OTHERS,
    };
    let table = tables.iter().find(|(of, _)| *of == operation);
    // Other operations have one plan, or need none.
    table.map_or(&[(Direct, 0)], |(_, entries)| *entries)
}

/// Returns the plan for an operation on this many bytes.
pub(crate) fn plan(operation: Operation, bytes: usize, world_size: usize) -> Algorithm {
    at(plans(operation, world_size), bytes)
}

/// Returns a table's entry for this many bytes. Entries are in ascending order of size, from 0 on.
pub(super) fn at<P: Copy>(table: &[(P, usize)], bytes: usize) -> P {
    let after = table.partition_point(|(_, from)| *from <= bytes);
    table[after.saturating_sub(1)].0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_begin_at_zero_ascend_and_name_algorithms_that_the_operation_has() {
        for (operation, entries) in TWO_RANKS.into_iter().chain(POWERS_OF_TWO).chain(OTHERS) {
            assert_eq!(entries[0].1, 0, "{operation}");
            assert!(entries.is_sorted_by(|(_, from), (_, next)| from < next), "{operation}");
            assert!(entries.iter().all(|(algorithm, _)| algorithm.supports(operation)), "{operation}");
        }
    }
}
