//! Backward passes beside those of full sharding, on ranks that are threads. Not shared: on burn 0.21 a backward pass
//! waits at its end for the graphs of all others.

use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use bonfire_testing::ranks;

use crate::burn_version::*;
use crate::shared::fully_sharded::Deep;

#[test]
fn a_rank_may_run_another_backward_pass_within_a_pass() {
    let (told, heard) = mpsc::channel();
    let heard = Mutex::new(heard);
    ranks(2, |group| {
        let rank = group.rank();
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(3)).unwrap();
        for round in 0..3 {
            let pass = fsdp.last_pass(&model, 1).unwrap();
            let loss = pass.model().loss(round);
            if rank == 0 {
                told.send(()).unwrap();
            } else {
                // Rank 0 is in its backward pass, or about to begin it, where it waits for this rank.
                heard.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
                Tensor::<1>::ones([3], &device()).require_grad().sum().backward();
            }
            let mut grads = loss.backward();
            pass.finish(&mut grads).map(drop).unwrap();
        }
    });
}
