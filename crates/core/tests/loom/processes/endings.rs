//! Ranks that end: orderly, by a failure, or by a deadline.
//!
//! These models found that a rank that gave up after its own share was done left its peers with a result from an input
//! that its caller may have overwritten. The word `gave_up` in the segment prevents that.

use std::time::Duration;

use loom::thread;

use super::{Buffer, Rank};
use crate::models::{check, memory, never};
use crate::sync::Deadline;
use crate::types::Operation::AllReduce;
use crate::types::{Error, Fault};

impl Rank {
    /// Does what the control connections do when this rank has left.
    fn leave(&self) {
        let begun = self.statuses[self.rank].begun();
        self.peers().for_each(|peer| self.statuses[peer].mark_left(self.rank, begun));
    }

    /// Does what the control connections do when this rank has failed.
    fn fail(&self, error: &Error, completed: u64) {
        self.peers().for_each(|peer| self.statuses[peer].fail(Fault::Failed(error.clone()), completed));
    }

    fn peers(&self) -> impl Iterator<Item = usize> {
        (0..self.world_size()).filter(|peer| *peer != self.rank)
    }
}

/// Runs one closure on each of two ranks.
fn two<A, B: 'static>(zero: impl FnOnce(&Rank) -> A, one: impl FnOnce(&Rank) -> B + 'static) -> (A, B) {
    let [first, second]: [Rank; 2] = Rank::group(2).try_into().unwrap_or_else(|_| unreachable!());
    let other = thread::spawn(move || one(&second));
    let result = zero(&first);
    (result, other.join().unwrap())
}

fn sum(rank: &Rank, sequence: u64, data: &mut [u64]) -> Result<(), Fault> {
    rank.run((sequence, AllReduce), None, data, &never())
}

/// The rank that leaves has completed the first operation, so the other completes it too.
fn leaves_after<const COUNT: usize>() {
    let (second, ()) = two(
        |rank| {
            rank.check((0, AllReduce), &mut [0; COUNT]);
            sum(rank, 1, &mut [0; COUNT])
        },
        |rank| {
            rank.check((0, AllReduce), &mut [0; COUNT]);
            rank.leave();
        },
    );
    assert_eq!(second, Err(Fault::Left { peer: 1 }));
}

#[test]
fn a_rank_leaves_after_a_small_operation() {
    check(3, || leaves_after::<1>());
}

#[test]
fn a_rank_leaves_after_a_large_operation() {
    check(2, || leaves_after::<4>());
}

/// As for a rank that leaves: both complete the first operation, and neither the second.
#[test]
fn a_group_fails_between_two_operations() {
    check(3, || {
        let error = || Error::InvalidArgument { operation: "second".into(), reason: "none".into() };
        let (second, ()) = two(
            |rank| {
                rank.check((0, AllReduce), &mut [0]);
                sum(rank, 1, &mut [0])
            },
            move |rank| {
                rank.check((0, AllReduce), &mut [0]);
                rank.fail(&error(), 1);
            },
        );
        assert_eq!(second, Err(Fault::Failed(error())));
    });
}

/// A rank's deadline passes, and its caller overwrites its lent buffer. If the other rank succeeds, it had read that
/// before.
#[test]
fn a_rank_gives_up_while_the_other_arrives() {
    check(3, || {
        const INPUT: [u64; 4] = [1, 2, 3, 4];
        let run = |deadline: Deadline| {
            move |rank: &Rank| {
                let (mut input, mut output) = (Buffer::new(rank, 4), Buffer::new(rank, 4));
                input.elements().copy_from_slice(&INPUT);
                memory::lend(input.elements());
                let given = rank.run((0, AllReduce), Some(input.elements()), output.elements(), &deadline);
                match &given {
                    Ok(()) => assert_eq!(output.elements(), INPUT.map(|element| 2 * element)),
                    Err(_) => {
                        memory::mark_overwritten(input.elements());
                        rank.fail(&Error::Config("the deadline".into()), 0);
                    }
                }
                // Both ranks keep their memory until the end, since regions are identified by address.
                (input, output)
            }
        };
        two(run(Deadline::after(Duration::ZERO)), run(never()));
    });
}
