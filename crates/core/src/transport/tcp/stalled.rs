//! Why an operation has ended at its deadline though no rank is missing: what ranks send each other does not arrive.

use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use crate::auth::{LostPackets, smaller_mtu, unacknowledged};
use crate::control::Watch;
use crate::types::Fault;

/// Returns the fault of an operation that has failed with `fault` while it sent to `to` and received. `to`: a peer, and
/// the connections to it. `idle`: since when no byte was moved. As long as bytes are moved the network is merely slow.
pub(super) fn explained(
    fault: Fault,
    idle: Option<Instant>,
    to: Option<(usize, &[TcpStream])>,
    watch: &Watch<'_>,
) -> Fault {
    let Fault::Timeout { missing } = &fault else { return fault };
    let all_called = watch.all_called();
    if idle.is_none_or(|since| since.elapsed() < watch.long()) || watch.is_collective() && !all_called {
        return fault;
    }
    let called = if all_called { "all ranks have called it, and " } else { "" };
    let (peer, streams) = to.unwrap_or_default();
    let bytes: u64 = streams.iter().map(unacknowledged).sum();
    if let Some(first) = streams.first().filter(|_| bytes > 0) {
        let at = first.peer_addr().map_or(String::new(), |address| format!(" ({})", address.ip().to_canonical()));
        let remedy = smaller_mtu(first.local_addr().ok().map(|own| own.ip()));
        let reason = format!(
            "{called}{bytes} bytes that this rank has sent were not acknowledged by the host of rank {peer}{at}; the \
             network between them is down, or if shorter operations pass, it loses all packets above a size: then \
             {remedy}"
        );
        return watch.stalled(peer, reason);
    }
    match missing[..] {
        [peer] if all_called => {
            let reason = format!(
                "{called}all that this rank has sent was acknowledged, but rank {peer} sends nothing; if its own error \
                 does not say why, it is too slow: raise the deadline (BONFIRE_DEADLINE, or `Group::with_deadline`)"
            );
            watch.stalled(peer, reason)
        }
        _ => fault,
    }
}

/// Returns the fault of an operation that has failed with `fault` while it waited until `peer` had connected to this
/// rank for data. `lost`: what was lost on its connections.
pub(super) fn not_connected(
    fault: Fault,
    (peer, address): (usize, &SocketAddr),
    lost: LostPackets,
    watch: &Watch<'_>,
) -> Fault {
    match &fault {
        Fault::Timeout { .. } if lost.is_likely(watch.all_called()) => watch.packets_lost(peer, address, lost),
        Fault::Timeout { .. } if watch.all_called() => {
            let reason = format!(
                "all ranks have called it, and rank {peer} has not connected from {address} for data; its own error \
                 may say why"
            );
            watch.stalled(peer, reason)
        }
        _ => fault,
    }
}

/// What this rank has met while it connected to a peer for data.
#[derive(Default)]
pub(super) struct Attempts {
    pub lost: LostPackets,
    /// The last error.
    pub error: Option<String>,
}

impl Attempts {
    /// Returns the fault of an operation that has failed with `fault` while this rank connected to `peer`.
    pub fn explained(&self, fault: Fault, peer: usize, address: &SocketAddr, watch: &Watch<'_>) -> Fault {
        match (&fault, &self.error) {
            (Fault::Timeout { .. }, _) if self.lost.is_likely(watch.all_called()) => {
                watch.packets_lost(peer, address, self.lost)
            }
            (Fault::Timeout { .. }, Some(error)) if watch.all_called() => {
                let reason = format!("all ranks have called it, and connecting to {address} for data fails: {error}");
                watch.stalled(peer, reason)
            }
            _ => fault,
        }
    }
}
