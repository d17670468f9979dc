//! Settings of a group.

use std::sync::Arc;
use std::time::Duration;

use super::core::Core;
use super::handle::Group;
#[cfg(unix)]
use super::interrupt;
#[cfg(unix)]
use crate::auth::Secret;
use crate::control::invitation::random;
use crate::plan::{self, Selection};
#[cfg(unix)]
use crate::rendezvous::{Launched, Medium};
use crate::transport::threads::Local;
use crate::transport::{Base, Near, Transport};
use crate::types::Error;

/// How long an operation may take by default: long enough for a rank that evaluates or saves.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// Settings of a group, from code; see [`Group::from_env`] for those from the environment.
///
/// ```no_run
/// # let rank = 0;
/// let group = bonfire_core::Group::builder().rank(rank).world_size(4).address("127.0.0.1:29500").connect()?;
/// # Ok::<(), bonfire_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    deadline: Duration,
    algorithms: Selection,
    #[cfg(unix)]
    settings: crate::rendezvous::Settings,
    #[cfg(unix)]
    leave_on_interrupt: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            deadline: DEADLINE,
            algorithms: Selection::default(),
            #[cfg(unix)]
            settings: crate::rendezvous::Settings::default(),
            #[cfg(unix)]
            leave_on_interrupt: false,
        }
    }
}

impl Builder {
    /// How long an operation may take: 300 s unless set here, by `BONFIRE_DEADLINE` or by [`Group::with_deadline`]. At a
    /// tenth of it a warning in the log names the ranks that are missing.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Which algorithms run operations of which size: one for all, or a table as [`Selection`] reads it. Reductions that
    /// need a wide accumulator (16-bit floats, integer means) run as a direct exchange where they run as a plan.
    ///
    /// All ranks must say the same. Processes that do not are refused when they [`connect`](Self::connect); on a
    /// transport from elsewhere, operations in which ranks wait for each other in different plans run into their
    /// deadline.
    ///
    /// ```
    /// # use bonfire_core::{Algorithm, Builder, Selection};
    /// let ring = Builder::default().algorithms(Algorithm::Ring);
    /// let by_size = Builder::default().algorithms("native:0-65535;ring:65536-".parse::<Selection>()?);
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    pub fn algorithms(mut self, algorithms: impl Into<Selection>) -> Self {
        self.algorithms = algorithms.into();
        self
    }

    /// A group of `world_size` ranks in this process; see [`Group::threads`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty group.
    pub fn threads(self, world_size: usize) -> Result<Vec<Group>, Error> {
        if world_size == 0 {
            return Err(Error::argument("threads", "a group needs at least one rank"));
        }
        let session = random()?;
        let group =
            |local| Group::of(Core::new(Base::threads(local, session), self.algorithms.clone()), self.deadline, None);
        Ok(Local::group(world_size).into_iter().map(group).collect())
    }

    /// A group on a transport from elsewhere; see [`Group::on`].
    pub fn on(self, transport: Arc<dyn Transport>) -> Group {
        let base = Base { transport, near: Near::Nobody, session: None, regroup: None };
        Group::of(Core::new(base, self.algorithms), self.deadline, None)
    }
}

/// # Making a group
impl Group {
    /// Settings for a group whose ranks are processes.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The group that the environment describes, as the launcher made it that started this process: `bonfire run`, torchrun,
    /// Slurm's srun, mpirun and mpiexec of Open MPI, MPICH, Intel MPI and MVAPICH2, Kubeflow's Trainer and PyTorchJob.
    /// `docs/launchers.md` has how to run under each. Ranks on several hosts need a [`secret`](Builder::secret).
    ///
    /// Bonfire's own variables win over the launcher's, each by itself, and what code says over both (see
    /// [`Builder::from_env`]): `BONFIRE_RANK`, `BONFIRE_WORLD_SIZE`, `BONFIRE_ADDRESS` and, if needed, `BONFIRE_HOST` or
    /// `BONFIRE_IFACE` (see [`Builder::host`]), `BONFIRE_SECRET_FILE` or `BONFIRE_SECRET` (see [`Builder::secret`]),
    /// `BONFIRE_TRANSPORT` (see [`Medium`](crate::Medium)), `BONFIRE_ALGORITHMS` (see [`Selection`]),
    /// `BONFIRE_TCP_CONNECTIONS` (see [`Builder::tcp_connections`]), `BONFIRE_SILENCE` (seconds, see
    /// [`Builder::silence`]) and `BONFIRE_DEADLINE` (seconds).
    /// Blocks until all ranks are connected. SIGINT and SIGTERM become a farewell to the other ranks, see
    /// [`Builder::leave_on_interrupt`].
    ///
    /// # Errors
    /// [`Error::Config`] where variables are missing, malformed or contradict each other, [`Error::Rendezvous`] where the
    /// ranks do not find each other within 120 s or disagree about who they are.
    #[cfg(unix)]
    pub fn from_env() -> Result<Group, Error> {
        Builder::from_env()?.connect()
    }

    /// A group of `world_size` ranks in this process, one handle for each, by rank. Give each to a thread of its own.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty group.
    pub fn threads(world_size: usize) -> Result<Vec<Group>, Error> {
        Builder::default().threads(world_size)
    }

    /// A group on a transport from elsewhere: operations run as plans on it.
    pub fn on(transport: Arc<dyn Transport>) -> Group {
        Builder::default().on(transport)
    }
}

#[cfg(unix)]
impl Builder {
    /// Settings from the environment: see [`Group::from_env`]. What is set afterwards in code wins, so what is missing is an
    /// error of [`connect`](Self::connect) only.
    ///
    /// # Errors
    /// [`Error::Config`] where a variable is malformed, or variables contradict each other.
    pub fn from_env() -> Result<Builder, Error> {
        let mut environment = crate::rendezvous::env::read(|name| std::env::var(name).ok())?;
        environment.settings.secret = Secret::from_env()?;
        let algorithms = environment.algorithms.map_or(Ok(Selection::default()), |text| {
            plan::parse(&text).map_err(|reason| Error::Config(format!("BONFIRE_ALGORITHMS is '{text}': {reason}")))
        })?;
        Ok(Builder {
            deadline: environment.deadline.unwrap_or(DEADLINE),
            algorithms,
            settings: environment.settings,
            leave_on_interrupt: true,
        })
    }

    /// What the environment says of this process as a rank, or `None` where nobody started it as one: for programs that
    /// otherwise run alone, or with threads.
    pub fn launched(&self) -> Option<Launched> {
        self.settings.launched()
    }

    /// This process's rank, from 0 to `world_size - 1`.
    pub fn rank(mut self, rank: usize) -> Self {
        self.settings.rank = rank;
        self.settings.source.missing.rank = None;
        self
    }

    /// The number of ranks.
    pub fn world_size(mut self, world_size: usize) -> Self {
        self.settings.world_size = world_size;
        self.settings.source.missing.world_size = None;
        // That they are all here was said of other ranks.
        self.settings.source.several.take_if(|several| !*several);
        self
    }

    /// Where rank 0 listens, as `host:port` or `[v6]:port`: the same on all ranks.
    pub fn address(mut self, address: impl Into<String>) -> Self {
        self.settings.address = address.into();
        (self.settings.source.address, self.settings.source.missing.address) = (None, None);
        self
    }

    /// The address of this machine on which this rank listens for its peers, where it is not rank 0; set here or by
    /// `BONFIRE_HOST`. Otherwise it is that of the interface that `BONFIRE_IFACE` names, where ranks are on several hosts,
    /// or else the one from which this rank reaches rank 0: loopback where that is. Beyond loopback all ranks need a
    /// [`secret`](Self::secret).
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.settings.host = Some(host.into());
        self
    }

    /// The secret that all ranks share, and prove to each other on every connection; see [`Secret::from_file`]. Set here or
    /// by `BONFIRE_SECRET_FILE` or `BONFIRE_SECRET`. Without one, ranks listen and dial on loopback only, where every
    /// process of the machine can reach them. Data are not encrypted, with or without it.
    pub fn secret(mut self, secret: Secret) -> Self {
        self.settings.secret = Some(secret);
        self
    }

    /// For tests: ranks that are given different names here count as being on different machines.
    #[doc(hidden)]
    pub fn machine(mut self, name: impl Into<String>) -> Self {
        self.settings.machine = Some(name.into());
        self
    }

    /// For tests: the most ranks of which all are connected to each other from the start, as rank 0 says.
    #[doc(hidden)]
    pub fn mesh(mut self, ranks: usize) -> Self {
        self.settings.mesh = ranks;
        self
    }

    /// How long the ranks may take to find each other: 120 s unless set.
    pub fn rendezvous_timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// How long a peer may be silent before it counts as lost: 5 s unless set here or by `BONFIRE_SILENCE` (seconds), and no
    /// less than 3 s. Every rank speaks to every other once a second (in groups of more than 16 ranks, to rank 0), on a thread of its own, so a rank that computes is
    /// not silent: one is that was stopped, or that an unplugged cable keeps away. Give more where
    /// ranks are halted in a debugger.
    pub fn silence(mut self, silence: Duration) -> Self {
        self.settings.silence = silence;
        self
    }

    /// What carries the operations: shared memory among the ranks of a host and TCP between hosts, unless set here or by
    /// `BONFIRE_TRANSPORT` (`auto`, `tcp`, `shm`, `mpi` or `mpi-blocking`; see [`Medium`]). A host is where ranks can all
    /// open the same segment: on one machine, in one network namespace, as one user. All ranks of it do or none does. What
    /// the ranks of a host bring to an operation crosses to other hosts as if they were one rank. `shm` means that all
    /// ranks are on one host, or an error; `tcp` means TCP everywhere. Messages between two ranks, all_to_all, means of integers over several hosts
    /// and operations with an [`algorithm`](Self::algorithms) of the user's choice go over TCP.
    pub fn transport(mut self, medium: Medium) -> Self {
        self.settings.medium = medium;
        self
    }

    /// Connections over TCP to each peer, from 1 to 8; unless set here or by `BONFIRE_TCP_CONNECTIONS` it is one. They
    /// share messages of 128 KiB and more. That pays where a network, or a limit in it, gives one flow less than all
    /// flows together. Of two ranks that say different numbers the higher rank's counts.
    pub fn tcp_connections(mut self, connections: usize) -> Self {
        self.settings.connections = connections;
        self
    }

    /// Whether SIGINT (Ctrl-C) and SIGTERM say farewell to the other ranks before the process ends as it would have.
    /// On for groups from the environment, off otherwise. Turn it off where the program handles these signals itself
    /// and drops the group in good order.
    pub fn leave_on_interrupt(mut self, leave: bool) -> Self {
        self.leave_on_interrupt = leave;
        self
    }

    /// Connects to the other ranks over TCP, and through shared memory to those with whom this one can have it; blocks
    /// until all are there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Config`] where settings are missing or cannot work, or ranks beyond loopback
    /// want a secret and there is none, [`Error::Rendezvous`] where the ranks do not find each other in time or disagree (a duplicate rank,
    /// another world size, other algorithms, another secret or release), or where shared memory was asked for and cannot
    /// be had.
    pub fn connect(self) -> Result<Group, Error> {
        let by_mpi = self.settings.medium.is_mpi();
        if !by_mpi {
            self.settings.check()?;
            self.settings.announce();
        }
        let group = if self.settings.world_size == 1 && !by_mpi {
            self.clone().threads(1)?.remove(0)
        } else {
            let mut settings = self.settings.clone();
            if !self.algorithms.is_native_anywhere() && !by_mpi {
                if settings.medium == Medium::Shm {
                    let reason = "the algorithms are plans, which run over TCP, and the transport is to be shared \
                                  memory: leave one of the two out, or give some sizes the algorithm native";
                    return Err(Error::Config(reason.into()));
                }
                settings.medium = Medium::Tcp;
            }
            settings.algorithms = self.algorithms.to_string();
            Group::of(Core::new(crate::rendezvous::connect(&settings)?, self.algorithms), self.deadline, None)
        };
        if self.leave_on_interrupt {
            interrupt::leave_on_interrupt(&group.core)?;
        }
        Ok(group)
    }

    /// Connects this process's ranks, one for each of its devices, and gives their handles by rank. Here rank and world
    /// size count processes, and each process has `count` ranks: process `p` has those from `p * count` on.
    ///
    /// ```no_run
    /// // Two of eight ranks, where `bonfire run -n 4` started the process.
    /// let groups = bonfire_core::Builder::from_env()?.connect_ranks(2)?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect). Processes with different counts contradict each other's world size.
    pub fn connect_ranks(self, count: usize) -> Result<Vec<Group>, Error> {
        let wrong = |reason| Err(Error::argument("connect_ranks", reason));
        if count == 0 {
            return wrong("a process needs at least one rank");
        }
        if self.settings.medium.is_mpi() {
            return match count {
                1 => self.connect().map(|group| vec![group]),
                _ => wrong("MPI's ranks are processes: start one for each device, and give 1"),
            };
        }
        self.settings.check()?;
        if self.settings.world_size == 1 {
            return self.threads(count);
        }
        let Some(world_size) = self.settings.world_size.checked_mul(count) else {
            return wrong("so many ranks cannot be counted");
        };
        let (connected, results) = std::sync::mpsc::channel();
        for rank in 0..count {
            let builder = self.clone().rank(self.settings.rank * count + rank).world_size(world_size);
            let connected = connected.clone();
            std::thread::Builder::new()
                .name(format!("bonfire-connect-{rank}"))
                .spawn(move || drop(connected.send((rank, builder.connect()))))
                .map_err(|e| Error::io("starting a thread that connects", e))?;
        }
        drop(connected);
        // After a failure the others may dial for as long as the rendezvous may take: nobody waits for them.
        let mut groups: Vec<_> =
            results.iter().map(|(rank, group)| Ok((rank, group?))).collect::<Result<_, Error>>()?;
        if groups.len() < count {
            return Err(Error::broken("connect", "its thread panicked, see above"));
        }
        groups.sort_by_key(|(rank, _)| *rank);
        Ok(groups.into_iter().map(|(_, group)| group).collect())
    }
}
