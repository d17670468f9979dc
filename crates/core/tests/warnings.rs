//! At a tenth of its deadline, a rank that waits logs which ranks it waits for, in the rendezvous and in operations.

use std::time::Duration;

use bonfire_core::{Group, ReduceOp};
use bonfire_testing::{Kind, free_address, logged, run_ranks_with};

#[test]
fn missing_ranks_are_logged_at_a_tenth_of_the_deadline_and_may_still_call() {
    logged::record();
    for kind in Kind::ALL {
        logged::clear();
        run_ranks_with(
            kind,
            3,
            |builder| builder.deadline(Duration::from_secs(10)),
            |group| {
                if group.rank() == 2 {
                    // This rank calls once its peers have logged warnings about it.
                    let own = format!("in all_reduce at {}:{}", file!(), line!() + 6);
                    let absent = "rank 2 is in no call of Bonfire's yet";
                    logged::wait_for(&["rank 0 has waited", "for rank 2", &own, absent]);
                    logged::wait_for(&["rank 1 has waited", "for rank 2", &own, absent]);
                }
                let mut data = [1.0f32; 1000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3.0; 1000]);
            },
        );
    } // Nor does a rendezvous wait without a word.
    let alone = Group::builder().rank(0).world_size(2).address(free_address());
    alone.rendezvous_timeout(Duration::from_secs(2)).connect().expect_err("the other rank does not come");
    logged::wait_for(&["rank 0 has waited", "rank 1 did not come"]);
}
