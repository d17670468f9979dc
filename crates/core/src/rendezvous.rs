//! How processes find each other and connect.
//!
//! Rank 0 listens at an address that all ranks know. Every other rank listens on a port of its own, dials rank 0 and
//! registers its rank and its address. Once all ranks have registered, rank 0 sends the table of addresses to all of
//! them, and neighbours dial each other: every pair in a small group, a star in a larger one (`neighbours`). The higher
//! rank of a pair dials the lower. Every connection begins with the handshake of `auth`, in which the ranks also learn
//! the session number that rank 0 has drawn for the job. Finally the ranks find out which of them are on one host and
//! can share memory.
//!
//! # What is final
//! Before the handshake proves that a peer is of this job, nothing is final but this rank's own settings: a rank turns
//! strangers away, and dials again whatever has answered, until its time is up (`dial`). Its error then lists what it
//! tried. Once it is proved, a rank that does not fit (another world size or table of algorithms, a rank that is taken,
//! a registered rank that leaves) fails the rendezvous at once, on all ranks with the same message.

#[cfg(all(feature = "shm", target_os = "linux"))]
mod descriptor;
mod dial;
pub(crate) mod env;
mod interface;
mod join;
mod listen;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod memory;
mod neighbours;
mod package;
mod registration;
mod regroup;
mod source;
mod stop;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use serde::{Deserialize, Serialize};

pub use self::dial::Dialler;
use self::join::Joined;
pub use self::package::{PackageSettings, TransportPackage};
use self::regroup::{HeldOpen, ProcessGroup};
pub use self::source::Launched;
pub(crate) use self::source::{Numbers, Source};
pub use self::stop::{StopSettings, StopSignal};
use crate::auth::{self, Secret};
use crate::control::{HeartbeatTimeout, MAX_DATA_CONNECTIONS, turn};
use crate::sync::{Mutex, OwnRuntime};
use crate::transport::tcp::Tcp;
use crate::transport::{Engines, GroupEndpoint};
use crate::types::Error;

/// Default time limit of the rendezvous.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);

/// Default time without a message from a peer after which the peer is declared lost.
const DEFAULT_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// Default number of data connections to each peer.
const DEFAULT_CONNECTIONS: usize = 1;

/// Describes this rank, its group, and how the group connects.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub rank: usize,
    pub world_size: usize,
    /// Where rank 0 listens, as `host:port`.
    pub address: String,
    /// The address that this rank listens on, if configured.
    pub host: Option<String>,
    /// Network interfaces whose address is used between hosts: names or prefixes of names, in order of preference.
    pub interface: Option<String>,
    /// Where the rank, the world size and the address come from.
    pub source: Source,
    pub timeout: Duration,
    /// How long a peer may be silent before it is declared lost.
    pub heartbeat_timeout: Duration,
    pub kind: TransportKind,
    /// Data connections to each peer.
    pub connections: usize,
    /// The group's algorithm table as text, the same on all ranks.
    pub algorithms: String,
    /// Replaces the name by which this rank's machine is recognised.
    pub machine: Option<String>,
    /// The largest group in which all ranks are connected from the start. Rank 0's value applies to all ranks.
    pub full_mesh_limit: usize,
    /// The secret that all ranks share. Without one the group is restricted to loopback.
    pub secret: Option<Secret>,
}

/// The transport between processes; see [`Builder::transport`](crate::Builder::transport). Its text is the value of
/// `BONFIRE_TRANSPORT`, such as `mpi-blocking`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TransportKind {
    /// Shared memory among the ranks of a host where it is available, TCP between hosts.
    #[default]
    Auto,
    /// TCP between all ranks, also on one host. If one rank sets it, it applies to all ranks.
    Tcp,
    /// Shared memory among all ranks, or an error that says why it is not available. If one rank sets it, it applies to
    /// all ranks, unless one sets [`Tcp`](TransportKind::Tcp): that is an error.
    Shm,
    /// MPI's own operations, in a job that an MPI launcher started. MPI assigns the ranks. Needs the package
    /// `bonfire-mpi`, in `bonfire-burn` the feature `mpi`. Missing ranks and mismatched calls are errors, as with the
    /// other transports. A rank that is stopped once MPI has the ranks' buffers aborts the whole job.
    Mpi,
    /// As [`Mpi`](TransportKind::Mpi), but with blocking MPI calls: as fast as MPI itself. A rank that waits longer
    /// than its deadline aborts the whole job, and mismatched calls are not reported.
    MpiBlocking,
}

impl TransportKind {
    /// All variants.
    pub const ALL: [TransportKind; 5] =
        [TransportKind::Auto, TransportKind::Tcp, TransportKind::Shm, TransportKind::Mpi, TransportKind::MpiBlocking];

    /// Whether MPI carries the operations and assigns the ranks.
    pub(crate) fn is_mpi(self) -> bool {
        matches!(self, TransportKind::Mpi | TransportKind::MpiBlocking)
    }
}

/// The spelling of `BONFIRE_TRANSPORT`.
impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransportKind::Auto => "auto",
            TransportKind::Tcp => "tcp",
            TransportKind::Shm => "shm",
            TransportKind::Mpi => "mpi",
            TransportKind::MpiBlocking => "mpi-blocking",
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
            timeout: DEFAULT_TIMEOUT,
            heartbeat_timeout: DEFAULT_HEARTBEAT_TIMEOUT,
            kind: TransportKind::default(),
            connections: DEFAULT_CONNECTIONS,
            algorithms: String::new(),
            machine: None,
            full_mesh_limit: neighbours::FULL_MESH_LIMIT,
            secret: None,
        }
    }
}

/// Whether this build can share memory with other processes.
const SHM_SUPPORTED: bool = cfg!(all(feature = "shm", target_os = "linux"));

impl Settings {
    /// Rejects settings that can never work.
    pub fn check(&self) -> Result<(), Error> {
        self.complete()?;
        let Settings { rank, world_size, address, host, .. } = self;
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
        let addresses = [("the address", Some(address)), ("the host", host.as_ref())];
        for (name, text) in addresses.into_iter().filter_map(|(name, text)| Some((name, text?))) {
            source::without_zone(name, text)?;
        }
        if *world_size > 1 && !well_formed(address) {
            let reason = "give rank 0's address as host:port or [v6]:port, with a port from 1 to 65535";
            return Err(Error::Config(format!("the address '{address}' is malformed: {reason}")));
        }
        if *world_size > 1 && self.spans_hosts() {
            if self.secret.is_none() {
                return Err(auth::secret_required("the ranks are on several hosts"));
            }
            interface::chosen(self)?;
        }
        if !(1..=MAX_DATA_CONNECTIONS).contains(&self.connections) {
            let reason = format!("{} connections to a peer: give 1 to {MAX_DATA_CONNECTIONS}", self.connections);
            return Err(Error::argument("connect", reason));
        }
        if self.heartbeat_timeout < HeartbeatTimeout::MIN {
            let (given, least) = (self.heartbeat_timeout, HeartbeatTimeout::MIN);
            let reason = format!(
                "a heartbeat timeout of {given:?}: give {least:?} or more, since heartbeats come once a second"
            );
            return Err(Error::argument("connect", reason));
        }
        if self.kind == TransportKind::Shm && !SHM_SUPPORTED {
            let reason = "shared memory between processes needs Linux and Bonfire's feature `shm`: set \
                          BONFIRE_TRANSPORT or Builder::transport to auto or tcp";
            return Err(Error::Config(reason.into()));
        }
        Ok(())
    }

    /// Returns the transport that this rank asks for.
    fn requested_transport(&self) -> TransportKind {
        if SHM_SUPPORTED { self.kind } else { TransportKind::Tcp }
    }

    /// Returns a rendezvous error of this rank.
    fn failed(&self, start: Instant, reason: impl Into<String>) -> Error {
        Error::Rendezvous {
            rank: self.rank,
            address: self.address.clone(),
            reason: reason.into(),
            elapsed: start.elapsed(),
        }
    }
}

/// Returns the reason to report when the connection to `rank` has ended.
fn connection_ended(rank: usize, e: io::Error) -> String {
    format!("the connection to rank {rank} ended ({e}); look at the output of that rank")
}

fn well_formed(address: &str) -> bool {
    let Some((host, port)) = address.rsplit_once(':') else { return false };
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let right = match bracketed {
        Some(host) => host.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '[', ']']),
    };
    right && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// Connects to the other ranks of the group and blocks until all are connected. The caller has checked the settings.
pub(crate) fn connect(settings: &Settings) -> Result<GroupEndpoint, Error> {
    if settings.kind.is_mpi() {
        return package::connect(settings);
    }
    let start = Instant::now();
    let runtime = OwnRuntime::new()?;
    let connected = runtime.run(|| async {
        let (joined, full_mesh_limit) = join::join(settings, start).await?;
        Connected::share(Settings { full_mesh_limit, ..settings.clone() }, start, joined).await
    })??;
    let heartbeat_timeout = HeartbeatTimeout { first: settings.timeout, later: settings.heartbeat_timeout };
    start_group(runtime, connected, heartbeat_timeout, Vec::new())
}

/// This rank's connections in a group, before anything is served on them.
struct Connected {
    settings: Settings,
    joined: Joined,
    #[cfg(all(feature = "shm", target_os = "linux"))]
    shared: Option<memory::Shared>,
}

impl Connected {
    /// Finds out which ranks share memory.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    async fn share(settings: Settings, start: Instant, mut joined: Joined) -> Result<Connected, Error> {
        let shared = memory::agree(&settings, start, &mut joined).await?;
        Ok(Connected { settings, joined, shared })
    }

    #[cfg(not(all(feature = "shm", target_os = "linux")))]
    async fn share(settings: Settings, _start: Instant, joined: Joined) -> Result<Connected, Error> {
        Ok(Connected { settings, joined })
    }
}

/// Returns how long one turn of the processors of this rank's host may take. `hosts` as in [`Joined`].
fn turn_on_host(hosts: &[usize], rank: usize) -> Duration {
    turn(hosts.iter().filter(|host| **host == hosts[rank]).count())
}

/// Starts serving the connections. See [`ProcessGroup`] for `held`.
fn start_group(
    runtime: OwnRuntime,
    connected: Connected,
    heartbeat_timeout: HeartbeatTimeout,
    held: Vec<Arc<HeldOpen>>,
) -> Result<GroupEndpoint, Error> {
    let Connected { settings, joined: Joined { mut setup, kind, hosts }, .. } = connected;
    setup.turn = turn_on_host(&hosts, settings.rank);
    let tcp = Arc::new(Tcp::start(runtime, setup, settings.connections, heartbeat_timeout)?);
    #[cfg(all(feature = "shm", target_os = "linux"))]
    let engines = connected.shared.map_or(Engines::None, |shared| shared.engine(&tcp));
    #[cfg(not(all(feature = "shm", target_os = "linux")))]
    let engines = Engines::None;
    let session = Some(tcp.session());
    let unfinished = Mutex::default();
    let regroup = ProcessGroup { settings, kind, hosts, tcp: tcp.clone(), held, unfinished };
    Ok(GroupEndpoint {
        transport: tcp.clone(),
        engines,
        session,
        regroup: Some(Arc::new(regroup)),
        neighbours: Some(tcp),
    })
}
