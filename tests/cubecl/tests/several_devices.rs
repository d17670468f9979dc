//! cubecl's own tests of communication. On other runtimes they pass without running, as they need several devices of
//! type 0.

use bonfire_suites::{Indexed, clients_made};
use cubecl_core::runtime_tests::all_reduce::test_all_reduce_sync_collective;
use cubecl_core::runtime_tests::to_client::test_to_client;

fn all_reduce<const N: u16>() {
    test_all_reduce_sync_collective::<Indexed<N>>();
    // One client to list the devices, then one for each device.
    assert_eq!(clients_made(), 1 + usize::from(N));
}

fn to_client<const N: u16>() {
    test_to_client::<Indexed<N>>();
    // One client to list the devices, then two for each pair of devices.
    assert_eq!(clients_made(), 1 + usize::from(N) * (usize::from(N) - 1));
}

#[test]
fn all_reduce_on_2_devices() {
    all_reduce::<2>();
}

#[test]
fn all_reduce_on_3_devices() {
    all_reduce::<3>();
}

#[test]
fn all_reduce_on_5_devices() {
    all_reduce::<5>();
}

#[test]
fn to_client_between_2_devices() {
    to_client::<2>();
}

#[test]
fn to_client_between_3_devices() {
    to_client::<3>();
}

#[test]
fn to_client_between_5_devices() {
    to_client::<5>();
}
