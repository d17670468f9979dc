//! Models of `transport::threads`: ranks as threads.

use std::time::Duration;

use loom::thread;

use super::{all_reduce, check, memory, never};
use crate::sync::Deadline;
use crate::transport::threads::ThreadEndpoint;
use crate::transport::{Buffers, Collectives, Transport};
use crate::types::{Error, Fault, Parts, Site};

/// Runs one closure on each of two ranks.
fn two<A, B: Send + 'static>(
    zero: impl FnOnce(&ThreadEndpoint) -> A,
    one: impl FnOnce(&ThreadEndpoint) -> B + Send + 'static,
) -> (A, B) {
    let [first, second]: [ThreadEndpoint; 2] = ThreadEndpoint::group(2).try_into().unwrap_or_else(|_| unreachable!());
    let other = thread::spawn(move || one(&second));
    let result = zero(&first);
    (result, other.join().unwrap())
}

/// Runs an all-reduce in place.
fn sum(rank: &ThreadEndpoint, sequence: u64, data: &mut [u64], deadline: &Deadline) -> Result<(), Fault> {
    let site = all_reduce(sequence, data.len());
    let mut buffers = Buffers { input: None, output: bytemuck::cast_slice_mut(data), parts: Parts::Even };
    rank.run(&site, &mut buffers, deadline)
}

/// Runs `operations` sums of `count` elements. Each result is checked and then overwritten at once, as a caller may do.
fn sums(rank: &ThreadEndpoint, operations: u64, count: usize) {
    let mine = rank.rank() as u64 + 1;
    let mut data = vec![0; count];
    // One region for each of the two parts.
    memory::watch(&*data, data.len().div_ceil(2) * size_of::<u64>());
    for sequence in 0..operations {
        memory::write(data.as_ptr().cast(), size_of_val(&*data));
        data.fill(mine << (8 * sequence));
        sum(rank, sequence, &mut data, &never()).unwrap();
        memory::read(data.as_ptr().cast(), size_of_val(&*data));
        assert!(data.iter().all(|element| *element == 3 << (8 * sequence)), "{data:x?}");
    }
}

/// Three operations, so that the first one's offer is reused.
#[test]
fn small_all_reduces_in_a_row() {
    check(3, || two(|rank| sums(rank, 3, 1), |rank| sums(rank, 3, 1)));
}

/// Too large for an offer: each rank writes to the other's memory.
#[test]
fn large_all_reduces_in_a_row() {
    check(3, || two(|rank| sums(rank, 2, 40), |rank| sums(rank, 2, 40)));
}

/// Either both complete and the group goes on, or neither does.
#[test]
fn a_rank_gives_up_while_the_other_arrives() {
    check(3, || {
        let once = |deadline: Deadline| {
            move |rank: &ThreadEndpoint| {
                let mut data = [rank.rank() as u64 + 1; 40];
                let given = sum(rank, 0, &mut data, &deadline).map(|()| assert_eq!(data, [3; 40]));
                given.map(|()| sum(rank, 1, &mut [1], &never()).unwrap())
            }
        };
        let (zero, one) = two(once(Deadline::after(Duration::ZERO)), once(never()));
        assert_eq!(zero.is_ok(), one.is_ok(), "{zero:?} {one:?}");
    });
}

#[test]
fn a_rank_leaves() {
    check(3, || {
        let (zero, ()) = two(|rank| sum(rank, 0, &mut [1], &never()), |rank| rank.leave());
        assert_eq!(zero, Err(Fault::Left { peer: 1 }));
    });
}

/// The rank that fails has completed the first operation, so the other completes it too; neither completes the second.
#[test]
fn a_group_fails_between_two_operations() {
    check(3, || {
        let error = || Error::InvalidArgument { operation: "second".into(), reason: "none".into() };
        let (second, ()) = two(
            |rank| {
                sum(rank, 0, &mut [1], &never()).unwrap();
                sum(rank, 1, &mut [1], &never())
            },
            move |rank| {
                sum(rank, 0, &mut [2], &never()).unwrap();
                rank.fail(&error(), 1);
            },
        );
        assert_eq!(second, Err(Fault::Failed(error())));
    });
}

fn tag() -> Site {
    all_reduce(0, 1)
}

#[test]
fn a_message() {
    check(3, || {
        two(
            |rank| rank.send(&tag(), 1, &[1, 2, 3], &never()).unwrap(),
            |rank| {
                let mut bytes = [0; 3];
                rank.recv(&tag(), 0, &mut bytes, &never()).unwrap();
                assert_eq!(bytes, [1, 2, 3]);
            },
        );
    });
}

/// The sender gets its bytes back only if the receiver does not read them: it succeeds exactly if the receiver does.
#[test]
fn a_message_is_withdrawn_while_it_is_taken() {
    check(3, || {
        let (sent, received) = two(
            |rank| {
                let mut bytes = [1, 2, 3];
                let sent = rank.send(&tag(), 1, &bytes, &Deadline::after(Duration::ZERO));
                bytes.fill(0);
                rank.leave();
                sent
            },
            |rank| {
                let mut bytes = [0; 3];
                let received = rank.recv(&tag(), 0, &mut bytes, &never());
                received.map(|()| assert_eq!(bytes, [1, 2, 3]))
            },
        );
        assert_eq!(sent.is_ok(), received.is_ok(), "{sent:?} {received:?}");
    });
}
