//! A job that is restarted while the job before it is still ending.

use std::thread;

use bonfire_core::Group;
use bonfire_testing::{DEADLINE, assert_connected, free_address, logged};

#[test]
fn a_restarted_job_waits_until_the_job_before_has_ended() {
    logged::record();
    let address = free_address();
    let start = |ranks: usize| {
        let builder = Group::builder().world_size(ranks).address(&address).rendezvous_timeout(DEADLINE);
        let rank = |rank| {
            let builder = builder.clone().rank(rank).deadline(DEADLINE);
            thread::spawn(move || builder.connect())
        };
        (0..ranks).map(rank).collect::<Vec<_>>()
    };
    let before: Vec<Group> = start(2).into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
    // The port is taken, and a rank of the job before answers there.
    let restarted = start(3);
    for rank in ["rank 0 retries", "rank 1 retries", "rank 2 retries"] {
        logged::wait_for(&[rank, &address]);
    }
    drop(before);
    assert_connected(restarted.into_iter().map(|rank| rank.join().unwrap()).collect());
}
