//! Transports of groups of processes that another package brings. Today that is MPI, by `bonfire-mpi`.

use std::time::Duration;

use super::{Settings, TransportKind};
use crate::transport::GroupEndpoint;
use crate::types::Error;

/// A transport that another package brings: with it, a program connects groups by the kind that its user asks for.
///
/// The package registers one in a static, without a call of the program:
///
/// ```ignore
/// inventory::submit! {
///     TransportPackage { kinds: &[TransportKind::Mpi, TransportKind::MpiBlocking], connect: my_connect }
/// }
/// ```
///
/// A static is part of a program only if the crate that has it is: a dependency that no code names is not linked. So a
/// package that passes the transport on names it, as in `use bonfire_mpi as _;`.
///
/// Only the kinds of [`TransportKind`] can be asked for, because a rank's settings depend on the kind: on MPI they need
/// no address. A transport of any other kind is for [`Group::on`](crate::Group::on).
pub struct TransportPackage {
    /// The kinds that the package connects. No two packages of a program have the same.
    pub kinds: &'static [TransportKind],
    /// Returns this rank's endpoint of a group. All ranks call it, in the same order.
    pub connect: fn(&PackageSettings<'_>) -> Result<GroupEndpoint, Error>,
}

// `linkme` needs no code before `main`, but does not support all unix systems.
inventory::collect!(TransportPackage);

/// The settings of a group for a transport that assigns the ranks itself.
#[derive(Clone, Copy, Debug)]
pub struct PackageSettings<'a> {
    /// The kind that the user asked for.
    pub kind: TransportKind,
    /// The table of algorithms as text, which must be the same on all ranks.
    pub algorithms: &'a str,
    /// How long to wait for all ranks.
    pub timeout: Duration,
}

/// Connects a group by the package that has the kind of transport.
pub(super) fn connect(settings: &Settings) -> Result<GroupEndpoint, Error> {
    let kind = settings.kind;
    let package = inventory::iter::<TransportPackage>.into_iter().find(|package| package.kinds.contains(&kind));
    let Some(package) = package else {
        let reason = format!(
            "the transport '{kind}' needs Bonfire's feature `mpi` (without burn: the package bonfire-mpi), which this \
             program was built without: build it with that, or set BONFIRE_TRANSPORT or Builder::transport to auto"
        );
        return Err(Error::Config(reason));
    };
    (package.connect)(&PackageSettings { kind, algorithms: &settings.algorithms, timeout: settings.timeout })
}
