//! Who may connect: a secret that all ranks of a job share, and how two ends prove to each other that they know it.
//!
//! Every connection begins with an [`Opening`] of a fixed size: which version, for what, from which rank to which, of which
//! job. With a secret, messages of the Noise protocol follow, of fixed sizes too, into which the opening is hashed. Only
//! then is anything read whose length the peer says. Without a secret the opening is all there is, and nothing but
//! loopback is listened at or dialled.
//!
//! | from | bytes | |
//! |---|---|---|
//! | the end that dials | 32 | the opening |
//! | | 48 | `psk, e`: with a secret only |
//! | the end that listens | 8 | whether it goes on, and why not |
//! | | 8 or 56 | the job's number; with a secret as the payload of `e, ee` |
//! | the end that dials | 16 | with a secret only: an empty message under the keys that came out |
//! | the end that listens | 1 | it has taken the connection |
//!
//! The last message of the end that dials is what a recorded connection cannot have: its key comes from both ends' fresh
//! random numbers.

mod connect;
#[cfg(all(test, not(bonfire_loom)))]
mod fuzz;
mod handshake;
mod lobby;
mod opening;
mod secret;

use std::fmt::Display;
use std::net::SocketAddr;

pub use self::connect::{answer, confirm, dial, prove};
pub use self::lobby::{Lobby, RETRY};
pub use self::opening::{Opening, Purpose, Refusal};
pub use self::secret::Secret;
use crate::types::Error;

/// What a user does who lacks a secret, or has another one than the other ranks.
pub(crate) const REMEDY: &str = "give all ranks the same BONFIRE_SECRET_FILE or BONFIRE_SECRET";

/// What a rank proves on its connections, and what it wants proved.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub secret: Option<Secret>,
    /// Random, the same on all ranks: connections of another job, or of an earlier run of this one, are refused.
    pub session: u64,
    pub rank: usize,
    pub world_size: usize,
}

impl Member {
    /// What this rank says first on connection `number` of `of` to rank `to`.
    pub fn opening(&self, purpose: Purpose, to: usize, (number, of): (usize, usize)) -> Opening {
        // The settings were checked: ranks fit 32 bits, and connections to a peer are few.
        let (from, to, world_size) = (self.rank as u32, to as u32, self.world_size as u32);
        Opening { purpose, session: self.session, from, to, world_size, number: number as u8, of: of as u8 }
    }

    /// Whether a connection that begins so is from another rank of this job to this rank.
    pub fn expects(&self, opening: &Opening) -> Result<(), String> {
        let Opening { session, from, to, world_size, .. } = *opening;
        if session != self.session {
            return Err("it belongs to another job".into());
        }
        let (from, to, world_size) = (from as usize, to as usize, world_size as usize);
        if to != self.rank || from == to || from >= self.world_size || world_size != self.world_size {
            let (rank, n) = (self.rank, self.world_size);
            return Err(format!("it goes from rank {from} to {to} of {world_size}, and this is rank {rank} of {n}"));
        }
        Ok(())
    }
}

/// Refuses to listen at addresses that strangers reach, or to dial there, without a secret.
pub fn permit(secret: Option<&Secret>, addresses: &[SocketAddr]) -> Result<(), Error> {
    let open = addresses.iter().map(SocketAddr::ip).find(|address| !address.to_canonical().is_loopback());
    match open.filter(|_| secret.is_none()) {
        Some(address) => Err(wanted(format!("{address} is not loopback"))),
        None => Ok(()),
    }
}

/// The error of a rank that has no secret and, for this reason, needs one.
pub(crate) fn wanted(reason: impl Display) -> Error {
    Error::Config(format!(
        "{reason}, and without a secret anybody on their network could join: put at least {} random bytes into a file that \
         only you may read (openssl rand -hex 32, chmod 600), copy it to every host, and {REMEDY}, or Builder::secret",
        Secret::LEAST
    ))
}
