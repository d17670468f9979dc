//! Transports that a package registers in a static of the program, as this program does.
#![cfg(unix)]

use std::time::Duration;

use bonfire_core::internal::{GroupEndpoint, PackageSettings, TransportPackage};
use bonfire_core::{Algorithm, Error, Group, TransportKind};

inventory::submit! {
    TransportPackage { kinds: &[TransportKind::MpiBlocking], connect }
}

/// Fails with what it was asked for.
fn connect(settings: &PackageSettings<'_>) -> Result<GroupEndpoint, Error> {
    Err(Error::Config(format!("{} {} {:?}", settings.kind, settings.algorithms, settings.timeout)))
}

/// Returns why there is no group on this transport.
fn refused(kind: TransportKind) -> String {
    let builder = Group::builder().transport(kind).algorithms(Algorithm::Ring);
    match builder.rendezvous_timeout(Duration::from_secs(7)).connect() {
        Err(Error::Config(reason)) => reason,
        outcome => panic!("{:?}", outcome.map(|group| group.rank())),
    }
}

#[test]
fn a_package_connects_the_groups_of_its_kinds() {
    assert_eq!(refused(TransportKind::MpiBlocking), "mpi-blocking ring:0- 7s");
}

#[test]
fn a_kind_that_no_package_has_is_refused_with_a_remedy() {
    let reason = refused(TransportKind::Mpi);
    for part in ["the transport 'mpi'", "feature `mpi`", "bonfire-mpi", "BONFIRE_TRANSPORT"] {
        assert!(reason.contains(part), "{reason}");
    }
}
