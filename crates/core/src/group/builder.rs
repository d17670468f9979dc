//! Settings of a group, and the functions that create groups.

use std::sync::Arc;
use std::time::Duration;

use super::core::Core;
use super::handle::Group;
#[cfg(unix)]
use super::interrupt;
use crate::control::invitation::random;
use crate::plan::Selection;
use crate::transport::threads::ThreadEndpoint;
use crate::transport::{Engines, GroupEndpoint, Transport};
use crate::types::Error;
#[cfg(unix)]
use crate::{
    auth::Secret,
    plan,
    rendezvous::{Launched, Numbers, StopSettings, StopSignal, TransportKind, env::unknown_variables},
    report,
    sync::from_env,
};

/// The default deadline of an operation: long enough for a rank that evaluates or saves.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// The largest group of threads. Each rank has counters for each other one, so memory grows with the square: 0.6 GiB
/// with so many.
const MAX_THREADS: usize = 4096;

/// Settings of a group, from code; see [`Group::from_env`] for settings from the environment.
///
/// Environment variables count only in a builder of [`from_env`](Self::from_env), and code overrides them.
/// [`Group::builder`] begins with the defaults: one rank, and what each method says. [`threads`](Self::threads) and
/// [`on`](Self::on) use the deadline and the algorithms only, and `threads` what is said of the
/// [stop signal](Self::stop_signal).
///
/// ```no_run
/// # let rank = 0;
/// let group = bonfire_core::Group::builder().rank(rank).world_size(4).address("127.0.0.1:29500").connect()?;
/// # Ok::<(), bonfire_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    deadline: Duration,
    hang_timeout: Option<Duration>,
    algorithms: Selection,
    #[cfg(unix)]
    settings: crate::rendezvous::Settings,
    #[cfg(unix)]
    leave_on_interrupt: bool,
    #[cfg(unix)]
    stop: StopSettings,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            deadline: DEADLINE,
            hang_timeout: None,
            algorithms: Selection::default(),
            #[cfg(unix)]
            settings: crate::rendezvous::Settings::default(),
            #[cfg(unix)]
            leave_on_interrupt: false,
            #[cfg(unix)]
            stop: StopSettings::default(),
        }
    }
}

impl Builder {
    /// Sets how long an operation may take: 300 s unless set here, by `BONFIRE_DEADLINE` (seconds) or by
    /// [`Group::with_deadline`]. After a tenth of it a warning in the log names the missing ranks.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how long a rank that is alive may keep the others waiting in [`Group::shrink`] before they leave it out, if
    /// they are the majority; also set by `BONFIRE_HANG_TIMEOUT` (seconds). The time counts from the first call of
    /// `shrink` on the rank that waits. For ranks that a failed operation has waited for ([`Error::Timeout`],
    /// [`Error::Stalled`]) it counts from the start of that operation, and they have 5 s more. Unless set, it is the
    /// deadline less 30 s, or half the deadline if that is more.
    ///
    /// It must be longer than the longest pause between two calls of a rank, such as an evaluation: a rank that comes
    /// later is excluded.
    pub fn hang_timeout(mut self, timeout: Duration) -> Self {
        self.hang_timeout = Some(timeout);
        self
    }

    /// Sets which algorithms run operations of which size: one algorithm for all, or a table in the syntax of
    /// [`Selection`]; also set by `BONFIRE_ALGORITHMS`. The default is [`Selection::default`]. Reductions that need a
    /// wide accumulator (16-bit floats, integer means) run as a direct exchange wherever they run as a plan.
    ///
    /// All ranks must set the same. Processes that differ are rejected when they [`connect`](Self::connect). On a
    /// custom transport nothing compares them: ranks that wait for each other in different plans time out.
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

    /// Creates a group of `world_size` ranks in this process; see [`Group::threads`].
    ///
    /// # Errors
    /// See [`Group::threads`].
    pub fn threads(self, world_size: usize) -> Result<Vec<Group>, Error> {
        if world_size == 0 {
            return Err(Error::argument("threads", "a group needs at least one rank"));
        }
        if world_size > MAX_THREADS {
            let reason = format!("{world_size} ranks in one process: give at most {MAX_THREADS}, or start processes");
            return Err(Error::argument("threads", reason));
        }
        let session = random()?;
        #[cfg(unix)]
        interrupt::set_stop(self.stop);
        let limits = (self.deadline, self.hang_timeout);
        let group = |local| {
            Group::of(Core::new(GroupEndpoint::threads(local, session), self.algorithms.clone(), None), limits, None)
        };
        Ok(ThreadEndpoint::group(world_size).into_iter().map(group).collect())
    }

    /// Creates a group on a custom transport; see [`Group::on`].
    pub fn on(self, transport: Arc<dyn Transport>) -> Group {
        let base = GroupEndpoint { transport, engines: Engines::None, session: None, regroup: None, neighbours: None };
        Group::of(Core::new(base, self.algorithms, None), (self.deadline, self.hang_timeout), None)
    }
}

/// # Creating a group
impl Group {
    /// Returns the default settings. See [`Builder`].
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Connects to the group that the environment of this process describes. Blocks until all ranks are connected, for
    /// up to 120 s unless `BONFIRE_RENDEZVOUS_TIMEOUT` sets another time.
    ///
    /// These launchers set the environment: `bonfire run`, torchrun, Slurm's srun, mpirun and mpiexec of Open MPI,
    /// MPICH, Intel MPI and MVAPICH2, Kubeflow's Trainer and PyTorchJob. `docs/guide/launch.md` explains how to run
    /// under each. Ranks on several hosts need a [`secret`](Builder::secret). SIGINT and SIGTERM make the process leave
    /// the group gracefully, see [`Builder::leave_on_interrupt`].
    ///
    /// Each setting is looked up by itself: settings from code (see [`Builder::from_env`]) take precedence over
    /// Bonfire's variables, and these over the launcher's. Bonfire's variables are `BONFIRE_RANK`,
    /// `BONFIRE_WORLD_SIZE`, `BONFIRE_ADDRESS` and, if needed, `BONFIRE_HOST` or `BONFIRE_IFACE` (see
    /// [`Builder::host`]), `BONFIRE_SECRET_FILE` or `BONFIRE_SECRET` (see [`Builder::secret`]), `BONFIRE_TRANSPORT`
    /// (see [`TransportKind`](crate::TransportKind)), `BONFIRE_ALGORITHMS` (see [`Selection`]),
    /// `BONFIRE_TCP_CONNECTIONS` (see [`Builder::tcp_connections`]), `BONFIRE_RENDEZVOUS_TIMEOUT` (seconds, see
    /// [`Builder::rendezvous_timeout`]), `BONFIRE_HEARTBEAT_TIMEOUT` (seconds, see
    /// [`Builder::heartbeat_timeout`]), `BONFIRE_DEADLINE` and `BONFIRE_HANG_TIMEOUT` (seconds, see
    /// [`Builder::deadline`] and [`Builder::hang_timeout`]), `BONFIRE_STOP_SIGNAL` and `BONFIRE_GRACE` (see
    /// [`Builder::stop_signal`] and [`Builder::grace`]).
    ///
    /// # Errors
    /// [`Error::Config`] if variables are missing, malformed or contradict each other; otherwise see
    /// [`Builder::connect`].
    #[cfg(unix)]
    pub fn from_env() -> Result<Group, Error> {
        Builder::from_env()?.connect()
    }

    /// Creates a group of `world_size` ranks in this process. Returns one handle per rank, in rank order; use each on
    /// its own thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `world_size` is 0 or above 4096. [`Error::Io`] if the system has no random
    /// numbers.
    pub fn threads(world_size: usize) -> Result<Vec<Group>, Error> {
        Builder::default().threads(world_size)
    }

    /// Creates a group on a custom transport. Operations run as plans on it. [`subgroup`](Self::subgroup),
    /// [`split`](Self::split), [`by_host`](Self::by_host) and [`shrink`](Self::shrink) return
    /// [`Error::InvalidArgument`].
    pub fn on(transport: Arc<dyn Transport>) -> Group {
        Builder::default().on(transport)
    }
}

#[cfg(unix)]
impl Builder {
    /// Reads settings from the environment: see [`Group::from_env`]. Settings made afterwards in code take precedence,
    /// so a missing setting is only an error of [`connect`](Self::connect).
    ///
    /// # Errors
    /// [`Error::Config`] if a variable is malformed, or variables contradict each other.
    pub fn from_env() -> Result<Builder, Error> {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        unknown_variables(names).iter().for_each(|warning| log::warn!("{warning}"));
        let mut environment = from_env(|variable| crate::rendezvous::env::read(variable))?;
        environment.settings.secret = Secret::from_env()?;
        let algorithms = environment.algorithms.map_or(Ok(Selection::default()), |text| {
            plan::parse(&text).map_err(|reason| Error::Config(format!("BONFIRE_ALGORITHMS is '{text}': {reason}")))
        })?;
        Ok(Builder {
            deadline: environment.deadline.unwrap_or(DEADLINE),
            hang_timeout: environment.hang_timeout,
            algorithms,
            settings: environment.settings,
            leave_on_interrupt: true,
            stop: environment.stop,
        })
    }

    /// Returns what the environment says about this process as a rank, or `None` if it was not started as one. Only a
    /// builder of [`from_env`](Self::from_env) knows it. For programs that otherwise run alone, or with threads.
    pub fn launched(&self) -> Option<Launched> {
        self.settings.launched()
    }

    /// Sets this process's rank, from 0 to `world_size - 1`; also set by `BONFIRE_RANK` or a launcher.
    pub fn rank(mut self, rank: usize) -> Self {
        self.settings.rank = rank;
        self.settings.source.missing.rank = None;
        self.settings.source.numbers = Numbers::Unknown;
        self
    }

    /// Sets the number of ranks; also set by `BONFIRE_WORLD_SIZE` or a launcher.
    pub fn world_size(mut self, world_size: usize) -> Self {
        self.settings.world_size = world_size;
        self.settings.source.missing.world_size = None;
        self.settings.source.numbers = Numbers::Unknown;
        // A launcher's statement that all ranks are on this host was about another number of ranks.
        self.settings.source.several.take_if(|several| !*several);
        self
    }

    /// Sets where rank 0 listens, as `host:port` or `[v6]:port`, the same on all ranks; also set by `BONFIRE_ADDRESS`
    /// or a launcher. Needed from two ranks on. The port must not be 0.
    pub fn address(mut self, address: impl Into<String>) -> Self {
        self.settings.address = address.into();
        (self.settings.source.address, self.settings.source.missing.address) = (None, None);
        self
    }

    /// Sets the address of this machine on which this rank listens for its peers, if it is not rank 0; also set by
    /// `BONFIRE_HOST`. The default is the address of the interface that `BONFIRE_IFACE` names, if ranks are on several
    /// hosts, and otherwise the address from which this rank reaches rank 0, which is loopback if rank 0 is there.
    /// Beyond loopback all ranks need a [`secret`](Self::secret).
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.settings.host = Some(host.into());
        self
    }

    /// Sets the secret that all ranks share, and prove to each other on every connection; see [`Secret::from_file`].
    /// Also set by `BONFIRE_SECRET_FILE` or `BONFIRE_SECRET`. Without a secret, ranks listen and dial on loopback only,
    /// where every process of the machine can connect to them. Data is not encrypted, with or without a secret.
    pub fn secret(mut self, secret: Secret) -> Self {
        self.settings.secret = Some(secret);
        self
    }

    /// For tests: ranks with different names here count as being on different machines.
    #[doc(hidden)]
    pub fn machine(mut self, name: impl Into<String>) -> Self {
        self.settings.machine = Some(name.into());
        self
    }

    /// For tests: the largest group whose ranks are all connected to each other from the start. Rank 0's value applies.
    #[doc(hidden)]
    pub fn full_mesh_limit(mut self, ranks: usize) -> Self {
        self.settings.full_mesh_limit = ranks;
        self
    }

    /// Sets how long the ranks may take to find each other: 120 s unless set here or by `BONFIRE_RENDEZVOUS_TIMEOUT`
    /// (seconds). Until a rank has proved to another one that both belong to the job, nothing ends the wait earlier: a
    /// server of another kind at rank 0's address, an earlier job, another release and another secret are warnings in
    /// the log, and the error of a rank whose time is up lists what it tried. All ranks should set the same.
    pub fn rendezvous_timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// Sets how long a peer may be silent before it is declared lost: 5 s unless set here or by
    /// `BONFIRE_HEARTBEAT_TIMEOUT` (seconds), and at least 3 s; fractions of a second do not count. Every rank sends
    /// every other (in groups of more than 16 ranks, rank 0) a heartbeat once a second, from a thread of its own, so a
    /// rank that computes is not silent. A rank that was stopped is, and so is one behind an unplugged cable. Use a
    /// longer time if ranks are halted in a debugger. Where a host has more ranks than processors, they wait longer by
    /// themselves: for each rank of the group, 50 µs for each further rank that a processor has.
    pub fn heartbeat_timeout(mut self, heartbeat_timeout: Duration) -> Self {
        self.settings.heartbeat_timeout = heartbeat_timeout;
        self
    }

    /// Sets what carries the operations; also set by `BONFIRE_TRANSPORT` (`auto`, `tcp`, `shm`, `mpi` or
    /// `mpi-blocking`; see [`TransportKind`]). The default is shared memory among the ranks of a host and TCP between
    /// hosts. `shm` requires all ranks to be on one host and is an error otherwise; `tcp` means TCP everywhere.
    ///
    /// Ranks are on one host if they can all open the same shared memory segment: on one machine, in one network
    /// namespace, as one user. Either all ranks of a host use the segment or none does. What the ranks of a host
    /// contribute to an operation crosses to other hosts as if they were one rank. Messages between two ranks,
    /// all_to_all_v, and operations for which [`algorithms`](Self::algorithms) selects an algorithm go over TCP. So do,
    /// on several hosts, all_to_all, gather, scatter, variable-size parts and means of integers.
    pub fn transport(mut self, kind: TransportKind) -> Self {
        self.settings.kind = kind;
        self
    }

    /// Sets the number of TCP data connections to each peer, 1 to 8; also set by `BONFIRE_TCP_CONNECTIONS`. The default
    /// is 1. Messages of 128 KiB and more are striped across them. That pays off if one flow gets less bandwidth from
    /// the network, or a limit in it, than all flows together. If two ranks set different numbers, the higher rank's
    /// applies.
    pub fn tcp_connections(mut self, connections: usize) -> Self {
        self.settings.connections = connections;
        self
    }

    /// Sets whether SIGINT (Ctrl-C), SIGTERM and the [stop signal](Self::stop_signal) make the process leave the group
    /// and its subgroups gracefully, before it ends as it would have. On for builders from the environment, off
    /// otherwise. A signal for which the program has a handler when it arrives, installed before or after this call, is
    /// left to the program, and so is one that is ignored.
    pub fn leave_on_interrupt(mut self, leave: bool) -> Self {
        self.leave_on_interrupt = leave;
        self
    }

    /// Sets the signal that asks this process to stop in order; also set by `BONFIRE_STOP_SIGNAL` (`TERM`, `USR1` or
    /// `USR2`). The default is SIGTERM. A program that asks after each training step whether it should stop, by
    /// `DataParallel::should_stop` of `bonfire-burn`, hears of the signal on all ranks after the same step. In others,
    /// and before the first question, [`leave_on_interrupt`](Self::leave_on_interrupt) applies. It is a setting of the
    /// process: of several groups, the last that sets it counts.
    pub fn stop_signal(mut self, signal: StopSignal) -> Self {
        self.stop.signal = Some(signal);
        self
    }

    /// Sets how long the program may take to hear of the [stop signal](Self::stop_signal), 10 s by default; also set by
    /// `BONFIRE_GRACE` (seconds) and `bonfire run --grace`. After nine tenths of it the process says so and ends. A
    /// save afterwards may take any time, but a signal that comes a second after the first or later ends the process.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.stop.grace = Some(grace);
        self
    }

    /// Connects to the other ranks, over the [transport](Self::transport) that is set. Blocks until all ranks are
    /// connected, for up to the [rendezvous timeout](Self::rendezvous_timeout). All ranks call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Config`] if settings are missing or cannot work, or if ranks beyond
    /// loopback have no secret. [`Error::Rendezvous`] if the ranks do not find each other in time or contradict each
    /// other (a duplicate rank, another world size, other algorithms, another secret or release), or if shared memory
    /// is required and not available. [`Error::Io`] if the system refuses a thread or another resource. [`Error::Mpi`]
    /// if MPI fails.
    pub fn connect(self) -> Result<Group, Error> {
        let connected = self.connect_group();
        // The errors of a rendezvous name ranks in their text only.
        connected.as_ref().map_or_else(|error| report::failed(error, |_| None), |_| report::connected());
        connected
    }

    fn connect_group(self) -> Result<Group, Error> {
        let by_mpi = self.settings.kind.is_mpi();
        if !by_mpi {
            self.settings.check()?;
            self.settings.announce();
        }
        let group = if self.settings.world_size == 1 && !by_mpi {
            self.clone().threads(1)?.remove(0)
        } else {
            let mut settings = self.settings.clone();
            if !self.algorithms.is_native_anywhere() && !by_mpi {
                if settings.kind == TransportKind::Shm {
                    let reason = "all algorithms are plans, which run over TCP, but the transport is required to be \
                                  shared memory: drop one of the two, or set native for some sizes";
                    return Err(Error::Config(reason.into()));
                }
                settings.kind = TransportKind::Tcp;
            }
            settings.algorithms = self.algorithms.to_string();
            let core = Core::new(crate::rendezvous::connect(&settings)?, self.algorithms, None);
            Group::of(core, (self.deadline, self.hang_timeout), None)
        };
        interrupt::set_stop(self.stop);
        if self.leave_on_interrupt {
            interrupt::leave_on_interrupt(&group.core)?;
        }
        Ok(group)
    }

    /// Connects several ranks of this process, one for each of its devices, and returns their handles in rank order.
    /// The settings for rank and world size count processes here, and each process has `count` ranks: process `p` has
    /// those from `p * count` on.
    ///
    /// ```no_run
    /// // Two of eight ranks, in a process that `bonfire run -n 4` started.
    /// let groups = bonfire_core::Builder::from_env()?.connect_ranks(2)?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `count` is 0, or not 1 on MPI; otherwise see [`connect`](Self::connect). Processes
    /// with different counts disagree on the world size. After an error, threads of this process may still dial until
    /// the rendezvous times out.
    pub fn connect_ranks(self, count: usize) -> Result<Vec<Group>, Error> {
        let wrong = |reason| Err(Error::argument("connect_ranks", reason));
        if count == 0 {
            return wrong("a process needs at least one rank");
        }
        if self.settings.kind.is_mpi() {
            return match count {
                1 => self.connect().map(|group| vec![group]),
                _ => wrong("MPI's ranks are processes: start one process for each device, and pass 1"),
            };
        }
        self.settings.check()?;
        if self.settings.world_size == 1 {
            return self.threads(count);
        }
        let Some(world_size) = self.settings.world_size.checked_mul(count) else {
            return wrong("the number of ranks overflows");
        };
        let (connected, results) = std::sync::mpsc::channel();
        for rank in 0..count {
            let mut builder = self.clone().rank(self.settings.rank * count + rank).world_size(world_size);
            if let Numbers::PerProcess(_) = self.settings.source.numbers {
                builder.settings.source.numbers = Numbers::PerProcess(count);
            }
            let connected = connected.clone();
            std::thread::Builder::new()
                .name(format!("bonfire-connect-{rank}"))
                .spawn(move || drop(connected.send((rank, builder.connect()))))
                .map_err(|e| Error::io("starting a connection thread", e))?;
        }
        drop(connected);
        // After a failure the other threads may dial until the rendezvous times out. They are not waited for.
        let mut groups: Vec<_> =
            results.iter().map(|(rank, group)| Ok((rank, group?))).collect::<Result<_, Error>>()?;
        if groups.len() < count {
            return Err(Error::broken("connect", "a connection thread panicked: see its message above"));
        }
        groups.sort_by_key(|(rank, _)| *rank);
        Ok(groups.into_iter().map(|(_, group)| group).collect())
    }
}
