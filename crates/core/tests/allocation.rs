//! After warm-up, operations allocate no memory on any thread of any rank.

use bonfire_core::{Element, Group, ReduceOp};
use bonfire_testing::allocation::{self, Counting};
use bonfire_testing::{Kind, run_ranks};
use half::{bf16, f16};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CALLS: usize = 300;

/// Allocations of all threads while every rank calls `act` [`CALLS`] times, as rank 0 counts them, by round.
///
/// A rank that waits over TCP for a fifth of a second asks its peers what they are doing, which allocates a few times.
/// That may happen on a busy machine, but not in every round.
fn allocations(group: &Group, mut act: impl FnMut(&Group)) -> [u64; 5] {
    act(group);
    std::array::from_fn(|_| {
        group.barrier().unwrap();
        let before = allocation::allocations();
        // No rank starts before rank 0 has read the counter, and none continues before it has read it again.
        group.barrier().unwrap();
        (0..CALLS).for_each(|_| act(group));
        group.barrier().unwrap();
        let after = allocation::allocations();
        group.barrier().unwrap();
        let mut seen = [if group.rank() == 0 { after - before } else { 0 }];
        group.broadcast(&mut seen, 0).unwrap();
        seen[0]
    })
}

fn assert_none(kind: Kind, what: &str, group: &Group, act: impl FnMut(&Group)) {
    let rounds = allocations(group, act);
    let few = rounds.iter().all(|count| *count < CALLS as u64 / 4);
    assert!(few && rounds.contains(&0), "{what} of {} ranks, {kind:?}: {rounds:?}", group.world_size());
}

fn all_reduce<T: Element>(kind: Kind, group: &Group, len: usize, op: ReduceOp) {
    let (input, mut data) = (vec![T::zeroed(); len], vec![T::zeroed(); len]);
    assert_none(kind, &format!("all_reduce of {} x {len}, {op}", T::DTYPE), group, |group| {
        group.all_reduce(&mut data, op).unwrap();
    });
    assert_none(kind, &format!("all_reduce_into of {} x {len}, {op}", T::DTYPE), group, |group| {
        group.all_reduce_into(&input, &mut data, op).unwrap();
    });
}

fn every_operation(kind: Kind, group: &Group) {
    for len in [1, 60, 3000, 20_000] {
        all_reduce::<f32>(kind, group, len, ReduceOp::Sum);
    }
    all_reduce::<f64>(kind, group, 1000, ReduceOp::Max);
    all_reduce::<f16>(kind, group, 5000, ReduceOp::Sum);
    all_reduce::<bf16>(kind, group, 5000, ReduceOp::Mean);
    all_reduce::<i32>(kind, group, 5000, ReduceOp::Mean);
    let mut data = vec![0f32; 3000];
    let own = bonfire_core::partition(3000, group.world_size(), group.rank());
    assert_none(kind, "barrier", group, |group| group.barrier().unwrap());
    assert_none(kind, "broadcast", group, |group| group.broadcast(&mut data, 1).unwrap());
    assert_none(kind, "reduce", group, |group| group.reduce(&mut data, ReduceOp::Sum, 1).unwrap());
    assert_none(kind, "all_gather", group, |group| group.all_gather(&mut data).unwrap());
    assert_none(kind, "reduce_scatter", group, |group| group.reduce_scatter(&mut data, ReduceOp::Sum).unwrap());
    assert_none(kind, "all_to_all", group, |group| group.all_to_all(&mut data).unwrap());
    let input = data.clone();
    assert_none(kind, "all_to_all_into", group, |group| group.all_to_all_into(&input, &mut data).unwrap());
    let mut part = vec![0f32; own.len()];
    assert_none(kind, "reduce_scatter_into", group, |group| {
        group.reduce_scatter_into(&data, &mut part, ReduceOp::Sum).unwrap();
    });
    assert_none(kind, "send and recv", group, |group| match group.rank() {
        0 => group.send(&data, 1).unwrap(),
        1 => group.recv(&mut data, 0).unwrap(),
        _ => {}
    });
}

/// A single test, because the counter covers the whole process.
#[test]
fn warm_operations_allocate_nothing() {
    for kind in Kind::ALL {
        for n in [2, 3] {
            run_ranks(kind, n, move |group| every_operation(kind, &group));
        }
    }
}
