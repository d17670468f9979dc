//! How processes find each other.
//!
//! Rank 0 listens at an address that all know. Every other rank listens on a port of its own, dials rank 0 and says who
//! it is. When all have come, rank 0 sends everybody the table of addresses, and the ranks dial each other: the higher
//! rank of a pair dials the lower. A rank that does not fit (another world size, a rank that is taken) fails the
//! rendezvous for all with the same words; a stranger is turned away.

pub(crate) mod env;
mod join;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use crate::error::Error;
use crate::transport::tcp::Tcp;

/// How long ranks may take to find each other by default.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Who this rank is and where the others are.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub rank: usize,
    pub world_size: usize,
    /// Where rank 0 listens, `host:port`.
    pub address: String,
    /// Where this rank listens, if not on loopback.
    pub host: Option<String>,
    pub timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { rank: 0, world_size: 1, address: String::new(), host: None, timeout: TIMEOUT }
    }
}

impl Settings {
    /// Refuses what can never work.
    pub fn check(&self) -> Result<(), Error> {
        let Settings { rank, world_size, address, .. } = self;
        if *world_size == 0 {
            return Err(Error::argument("connect", "a group needs at least one rank"));
        }
        if rank >= world_size {
            let reason =
                format!("rank {rank} is outside a world of {world_size}: ranks go from 0 to {}", world_size - 1);
            return Err(Error::argument("connect", reason));
        }
        if *world_size > 1 && !well_formed(address) {
            let reason = "give rank 0's address as host:port or [v6]:port, with a port from 1 to 65535";
            return Err(Error::Config(format!("the address '{address}' is malformed: {reason}")));
        }
        Ok(())
    }

    /// A rendezvous error of this rank.
    fn failed(&self, start: Instant, reason: impl Into<String>) -> Error {
        Error::Rendezvous {
            rank: self.rank,
            address: self.address.clone(),
            reason: reason.into(),
            elapsed: start.elapsed(),
        }
    }
}

fn well_formed(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    !host.is_empty() && (bracketed || !host.contains(':')) && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// Connects to all ranks; blocks until they are there.
pub(crate) fn connect(settings: &Settings) -> Result<Tcp, Error> {
    settings.check()?;
    let start = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::io("starting the control runtime", e))?;
    let mesh = runtime.block_on(join::join(settings, start))?;
    Tcp::start(runtime, mesh)
}
