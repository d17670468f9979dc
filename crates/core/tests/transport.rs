//! Custom transports: one from outside the crate runs every operation, and if it fails, no rank hangs.

use std::sync::Arc;

use bonfire_conformance::{Losses, check_group, every_lost_message, every_operation};
use bonfire_core::{Group, ReduceOp, Transport};
use bonfire_testing::transport::{Channels, Faults, run_on_channels};

#[test]
fn a_custom_transport_runs_every_operation() {
    every_operation(Channels::group);
}

#[test]
fn a_transport_can_be_a_trait_object() {
    let mut ends = Channels::group(1);
    let object: Arc<dyn Transport> = Arc::new(ends.remove(0));
    let group = Group::on(object);
    assert_eq!((group.rank(), group.world_size()), (0, 1));
    check_group(&group);
}

#[test]
fn started_operations_run_on_a_custom_transport() {
    run_on_channels(
        3,
        |builder| builder,
        |_| Faults::default(),
        |group| {
            let works: Vec<_> =
                (0..20).map(|i| group.start_all_reduce(vec![i as u64; 100], ReduceOp::Sum).unwrap()).collect();
            drop(group);
            for (i, work) in works.into_iter().enumerate().rev() {
                assert_eq!(work.wait().map_err(|(error, _)| error).unwrap(), vec![3 * i as u64; 100]);
            }
        },
    );
}

#[test]
fn all_ranks_get_the_same_error_if_the_transport_notifies_them() {
    every_lost_message(Channels::group, Losses { every_algorithm: true, ..Losses::default() });
}

#[test]
fn no_rank_hangs_if_the_transport_notifies_none() {
    every_lost_message(Channels::group, Losses { told: false, every_algorithm: true, ..Losses::default() });
}

#[test]
fn delays_do_not_change_the_errors() {
    every_lost_message(Channels::group, Losses { delays: Some(7), ..Losses::default() });
}
