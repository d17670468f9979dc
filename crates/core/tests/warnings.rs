//! At a tenth of its deadline, a rank that waits logs which ranks it waits for, in the rendezvous and in operations.

use std::time::Duration;

use bonfire_core::{Group, ReduceOp};
use bonfire_testing::{Kind, free_address, logged, run_ranks_with};

/// What a process logs is of one test only.
#[test]
fn missing_ranks_are_logged_at_a_tenth_of_the_deadline_and_may_still_call() {
    logged::record();
    for kind in Kind::ALL {
        three(kind, a_rank_outside_of_any_call);
        three(kind, a_rank_in_a_call_of_another_group);
    }
    // Nor does a rendezvous wait without a word.
    let alone = Group::builder().rank(0).world_size(2).address(free_address());
    alone.rendezvous_timeout(Duration::from_secs(2)).connect().expect_err("the other rank does not come");
    logged::wait_for(&["rank 0 has waited", "rank 1 did not come"]);
}

fn three(kind: Kind, rank: fn(Group)) {
    logged::clear();
    run_ranks_with(kind, 3, |builder| builder.deadline(Duration::from_secs(10)), rank);
}

const ABSENT: &str = "rank 2 is in no call of Bonfire's yet";

#[track_caller]
fn all_reduce(group: &Group) {
    let mut data = [1.0f32; 1000];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [3.0; 1000]);
}

fn a_rank_outside_of_any_call(group: Group) {
    if group.rank() == 2 {
        // This rank calls once its peers have logged warnings about it.
        let own = format!("in all_reduce at {}:{}", file!(), line!() + 4);
        logged::wait_for(&["rank 0 has waited", "for rank 2", &own, ABSENT]);
        logged::wait_for(&["rank 1 has waited", "for rank 2", &own, ABSENT]);
    }
    all_reduce(&group);
}

/// Rank 0 waits for rank 2 in a group of these two, and rank 1 for both in another.
fn a_rank_in_a_call_of_another_group(group: Group) {
    let pair = [0, 2].contains(&group.rank()).then(|| group.subgroup(&[0, 2]).unwrap());
    let line = line!() + 13;
    if group.rank() == 2 {
        let own = format!("in barrier at {}:{line}", file!());
        // As the group of the two numbers this rank.
        logged::wait_for(&["rank 0 has waited", "for rank 1: ", &own]);
        logged::wait_for(&[
            "rank 1 has waited",
            "for ranks 0, 2: ",
            &format!("rank 0 is {own}"),
            "rank 2 is in no call",
        ]);
    }
    if let Some(pair) = pair {
        pair.barrier().unwrap();
    }
    all_reduce(&group);
}
