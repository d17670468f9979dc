//! How processes find each other.
//!
//! Rank 0 listens at an address that all know. Every other rank listens on a port of its own, dials rank 0 and says who
//! it is. When all have come, rank 0 sends everybody the table of addresses, and the ranks dial each other, or in larger
//! groups a few others (`neighbours`): the higher rank of a pair dials the lower. A rank that does not fit (another world size, a rank that is taken) fails the
//! rendezvous for all with the same words; a stranger is turned away. Every connection begins with the handshake of
//! `auth`. Then they find out which of them are on one host and can share memory.

#[cfg(all(feature = "shm", target_os = "linux"))]
mod descriptor;
pub(crate) mod env;
mod guests;
mod interface;
mod join;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod memory;
mod neighbours;
mod reach;
mod regroup;
mod source;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use self::join::Joined;
use self::regroup::{Kept, Processes};
pub use self::source::Launched;
pub(crate) use self::source::Source;
use crate::auth::{self, Secret};
use crate::control::{MOST, Silence};
use crate::transport::tcp::Tcp;
use crate::transport::{Base, Near};
use crate::types::Error;

/// How long ranks may take to find each other by default.
const TIMEOUT: Duration = Duration::from_secs(120);

/// How long a peer may be silent by default.
const SILENCE: Duration = Duration::from_secs(5);

/// Connections for data to a peer by default.
const CONNECTIONS: usize = 1;

/// Who this rank is and where the others are.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub rank: usize,
    pub world_size: usize,
    /// Where rank 0 listens, `host:port`.
    pub address: String,
    /// Where this rank listens, where that was said.
    pub host: Option<String>,
    /// Network interfaces whose address is used between hosts: names or how they begin, by preference.
    pub interface: Option<String>,
    /// Who said what of these.
    pub source: Source,
    pub timeout: Duration,
    /// How long a peer may be silent before it counts as lost.
    pub silence: Duration,
    pub medium: Medium,
    /// Connections for data to a peer.
    pub connections: usize,
    /// Which algorithms the group chooses, as text: the same on all ranks.
    pub algorithms: String,
    /// A name of this rank's machine, instead of the machine's own.
    pub machine: Option<String>,
    /// The most ranks of which all are connected from the start: rank 0's counts.
    pub mesh: usize,
    /// What all ranks share. None is for loopback only.
    pub secret: Option<Secret>,
}

/// What carries the operations between processes; see [`Builder::transport`](crate::Builder::transport).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Medium {
    /// Shared memory among the ranks of a host, where they can have it, and TCP between hosts.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// Shared memory among all ranks, or an error that says why it cannot be.
    Shm,
    /// MPI's own operations, in a job that MPI's launcher started; MPI says who the ranks are. Needs the feature `mpi`. Ranks
    /// that do not come, or come to something else, are errors as elsewhere; one that is stopped later, when MPI has the
    /// ranks' memory, ends the whole job.
    Mpi,
    /// As [`Mpi`](Medium::Mpi), by calls that block in MPI: as fast as MPI itself. A rank that waits longer than its deadline
    /// ends the whole job, and ranks that disagree are not told so.
    MpiBlocking,
}

impl Medium {
    /// Every medium.
    pub const ALL: [Medium; 5] = [Medium::Auto, Medium::Tcp, Medium::Shm, Medium::Mpi, Medium::MpiBlocking];

    /// Whether MPI carries the operations, and says who the ranks are.
    pub(crate) fn is_mpi(self) -> bool {
        matches!(self, Medium::Mpi | Medium::MpiBlocking)
    }
}

/// As in `BONFIRE_TRANSPORT`.
impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Medium::Auto => "auto",
            Medium::Tcp => "tcp",
            Medium::Shm => "shm",
            Medium::Mpi => "mpi",
            Medium::MpiBlocking => "mpi-blocking",
        })
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            rank: 0,
            world_size: 1,
            address: String::new(),
            host: None,
            interface: None,
            source: Source::default(),
            timeout: TIMEOUT,
            silence: SILENCE,
            medium: Medium::default(),
            connections: CONNECTIONS,
            algorithms: String::new(),
            machine: None,
            mesh: neighbours::MESH,
            secret: None,
        }
    }
}

/// Whether this program can share memory with other processes at all.
const SHARES: bool = cfg!(all(feature = "shm", target_os = "linux"));

impl Settings {
    /// Refuses what can never work.
    pub fn check(&self) -> Result<(), Error> {
        self.complete()?;
        let Settings { rank, world_size, address, .. } = self;
        if *world_size == 0 {
            return Err(Error::argument("connect", "a group needs at least one rank"));
        }
        if rank >= world_size {
            let reason =
                format!("rank {rank} is outside a world of {world_size}: ranks go from 0 to {}", world_size - 1);
            return Err(Error::argument("connect", reason));
        }
        if u32::try_from(*world_size).is_err() {
            return Err(Error::argument("connect", "so many ranks cannot be counted in 32 bits"));
        }
        if *world_size > 1 && !well_formed(address) {
            let reason = "give rank 0's address as host:port or [v6]:port, with a port from 1 to 65535";
            return Err(Error::Config(format!("the address '{address}' is malformed: {reason}")));
        }
        if *world_size > 1 && self.spans_hosts() {
            if self.secret.is_none() {
                return Err(auth::wanted("the ranks are on several hosts"));
            }
            interface::chosen(self)?;
        }
        if !(1..=MOST).contains(&self.connections) {
            let reason = format!("{} connections to a peer: give 1 to {MOST}", self.connections);
            return Err(Error::argument("connect", reason));
        }
        if self.silence < Silence::LEAST {
            let (given, least) = (self.silence, Silence::LEAST);
            let reason = format!("{given:?} of silence: give {least:?} or more, since ranks speak once a second");
            return Err(Error::argument("connect", reason));
        }
        if self.medium == Medium::Shm && !SHARES {
            let reason = "shared memory between processes needs Linux and Bonfire's feature `shm`: set \
                          BONFIRE_TRANSPORT or Builder::transport to auto or tcp";
            return Err(Error::Config(reason.into()));
        }
        Ok(())
    }

    /// What this rank can have.
    fn wanted(&self) -> Medium {
        if SHARES { self.medium } else { Medium::Tcp }
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

/// What a rank says when its connection to `rank` has ended.
fn gone(rank: usize, e: io::Error) -> String {
    format!("rank {rank} went away ({e}); look at its own output")
}

fn well_formed(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    !host.is_empty() && (bracketed || !host.contains(':')) && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// Connects to all ranks; blocks until they are there. The settings were checked.
pub(crate) fn connect(settings: &Settings) -> Result<Base, Error> {
    if settings.medium.is_mpi() {
        return by_mpi(settings);
    }
    let start = Instant::now();
    let runtime = control_runtime()?;
    let ends = runtime.block_on(async {
        let (joined, mesh) = join::join(settings, start).await?;
        Ends::share(Settings { mesh, ..settings.clone() }, start, joined).await
    })?;
    let silence = Silence { first: settings.timeout, later: settings.silence };
    assemble(runtime, ends, silence, Vec::new())
}

/// A group of all processes of the MPI job.
#[cfg(feature = "mpi")]
fn by_mpi(settings: &Settings) -> Result<Base, Error> {
    crate::transport::mpi::connect(&crate::transport::mpi::Terms {
        blocking: settings.medium == Medium::MpiBlocking,
        algorithms: &settings.algorithms,
        limit: settings.timeout,
    })
}

#[cfg(not(feature = "mpi"))]
fn by_mpi(settings: &Settings) -> Result<Base, Error> {
    let reason = format!(
        "the transport '{}' needs Bonfire's feature `mpi`, which this program was built without: build it with the \
         feature, or set BONFIRE_TRANSPORT or Builder::transport to auto",
        settings.medium
    );
    Err(Error::Config(reason))
}

/// What moves the words between ranks.
fn control_runtime() -> Result<Runtime, Error> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::io("starting the control runtime", e))
}

/// A rank's end of a group before anything moves on it.
struct Ends {
    settings: Settings,
    joined: Joined,
    #[cfg(all(feature = "shm", target_os = "linux"))]
    shared: Option<memory::Shared>,
}

impl Ends {
    /// Finds out who shares memory.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    async fn share(settings: Settings, start: Instant, mut joined: Joined) -> Result<Ends, Error> {
        let shared = memory::agree(&settings, start, &mut joined).await?;
        Ok(Ends { settings, joined, shared })
    }

    #[cfg(not(all(feature = "shm", target_os = "linux")))]
    async fn share(settings: Settings, _start: Instant, joined: Joined) -> Result<Ends, Error> {
        Ok(Ends { settings, joined })
    }
}

/// Begins to serve the connections; see [`Processes`] for what is `kept`.
fn assemble(runtime: Runtime, ends: Ends, silence: Silence, kept: Vec<Kept>) -> Result<Base, Error> {
    let Ends { settings, joined: Joined { mesh, medium, hosts }, .. } = ends;
    let tcp = Arc::new(Tcp::start(runtime, mesh, settings.connections, silence)?);
    #[cfg(all(feature = "shm", target_os = "linux"))]
    let near = ends.shared.map_or(Near::Nobody, |shared| shared.near(&tcp));
    #[cfg(not(all(feature = "shm", target_os = "linux")))]
    let near = Near::Nobody;
    let session = Some(tcp.session());
    let regroup = Processes { settings, medium, hosts, tcp: tcp.clone(), kept };
    Ok(Base { transport: tcp, near, session, regroup: Some(Arc::new(regroup)) })
}
