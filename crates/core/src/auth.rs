//! Authentication: a secret that all ranks of a job share, and the handshake by which two ends prove that they know it.
//!
//! Every connection begins with a [`Prologue`] of fixed size: protocol version, purpose, source and destination rank,
//! job, byte order. With a secret, a Noise handshake follows. Its messages have fixed sizes too, and it
//! authenticates the prologue. Only then does a rank read anything whose length the peer chooses. Without a secret
//! there is only the prologue, and ranks listen and dial on loopback only.
//!
//! | from | bytes | |
//! |---|---|---|
//! | dialler | 32 | prologue |
//! | | 48 | `psk, e`: only with a secret |
//! | listener | 8 | accepted, or the reason for the refusal |
//! | | 8 or 56 | session number of the job; with a secret, as the payload of `e, ee` |
//! | dialler | 16 | only with a secret: an empty message under the transport keys |
//! | both | | only on data connections with a secret: the largest packets (`packets`) |
//! | listener | 1 | confirmation: the listener has taken the connection |
//!
//! The dialler's last message defeats replays: its key is derived from fresh random numbers of both ends, which a
//! recorded connection cannot match.
//!
//! # What a stranger can do
//! With a secret, a stranger joins no group, receives no address, data or memory, and ends no job, whether it floods a
//! port, guesses addresses and session numbers, replays whole recorded jobs, or listens where a rank is expected. The
//! worst that it can cause is a rendezvous that times out. No refusal is authenticated, so none of them is final: the
//! rank dials again until its time is up. The error of a rank that times out counts what it refused and what it was
//! refused. Another protocol version, another secret, and a secret on one side only are logged at once by both ends.
//!
//! Without a secret every process of the machine can connect to loopback. One that speaks the protocol can take part or
//! make the rendezvous fail. The session number, sent in the clear, is then only a weak token between the ranks.
//!
//! # Cost
//! Connecting eight ranks on one machine with two cores takes 4 ms longer with a secret: 0.15 ms for each of 28
//! connections.

mod accept_queue;
mod connect;
#[cfg(all(test, not(bonfire_loom)))]
mod fuzz;
mod handshake;
mod listener;
mod packets;
mod prologue;
mod secret;
mod socket;
mod tally;

use std::fmt::Display;
use std::net::SocketAddr;

pub use self::accept_queue::{AcceptQueue, RETRY};
pub use self::connect::{accept_handshake, confirm, confirmed_blocking, dial, dial_blocking};
pub use self::listener::{Listener, bind_all};
pub use self::packets::{
    LostPackets, PACKETS_TIMEOUT, exchange_packets, exchange_packets_blocking, largest_packet, smaller_mtu,
    unacknowledged,
};
pub use self::prologue::{Prologue, Purpose, Refusal};
pub use self::secret::Secret;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub use self::socket::uninterrupted;
pub use self::socket::{connect, keep_open, open, open_blocking, was_dropped};
pub use self::tally::{Seen, Tally};
use crate::types::Error;

/// The remedy for a missing or differing secret, for error messages.
pub(crate) const REMEDY: &str = "give all ranks the same BONFIRE_SECRET_FILE or BONFIRE_SECRET";

/// The identity of a rank in the handshake: what it proves, and what it requires of its peers.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub secret: Option<Secret>,
    /// A random number, the same on all ranks. Connections of another job or of an earlier run of this one are refused.
    pub session: u64,
    pub rank: usize,
    pub world_size: usize,
}

impl Identity {
    /// Returns the prologue of connection `number` of `of` to rank `to`.
    pub fn prologue(&self, purpose: Purpose, to: usize, (number, of): (usize, usize)) -> Prologue {
        // The settings were checked: ranks fit in 32 bits, and connections to a peer in 8.
        let (from, to, world_size) = (self.rank as u32, to as u32, self.world_size as u32);
        Prologue { purpose, session: self.session, from, to, world_size, number: number as u8, of: of as u8 }
    }

    /// Checks that the connection comes from another rank of this job and is addressed to this rank.
    pub fn check(&self, prologue: &Prologue) -> Result<(), String> {
        let Prologue { session, from, to, world_size, .. } = *prologue;
        if session != self.session {
            return Err("it belongs to another job".into());
        }
        let (from, to, world_size) = (from as usize, to as usize, world_size as usize);
        if to != self.rank || from == to || from >= self.world_size || world_size != self.world_size {
            let (rank, n) = (self.rank, self.world_size);
            return Err(format!("it connects rank {from} to {to} of {world_size}, but this is rank {rank} of {n}"));
        }
        Ok(())
    }
}

/// Returns an error if, without a secret, one of the addresses to listen at or to dial is not on loopback.
pub fn require_secret(secret: Option<&Secret>, addresses: &[SocketAddr]) -> Result<(), Error> {
    let open = addresses.iter().map(SocketAddr::ip).find(|address| !address.to_canonical().is_loopback());
    match open.filter(|_| secret.is_none()) {
        Some(address) => Err(secret_required(format!("{address} is not loopback"))),
        None => Ok(()),
    }
}

/// Returns the error of a rank that needs a secret, for this reason, and has none.
pub(crate) fn secret_required(reason: impl Display) -> Error {
    Error::Config(format!(
        "{reason}, and without a secret any process on their network could join: put at least {} random bytes into a \
         file that only you may read (openssl rand -hex 32, chmod 600), copy it to every host, and {REMEDY}, or \
         Builder::secret",
        Secret::MIN_BYTES
    ))
}
