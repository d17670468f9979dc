//! Groups: who the ranks are, in which order their operations run, and what happens after a failure.

mod buffer;
mod builder;
#[cfg(unix)]
mod interrupt;
mod operation;
mod progress;
pub(crate) mod recorder;
mod shrink;
mod subgroup;
mod trace;
mod turn;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use self::buffer::Buffer;
pub use self::buffer::zeroed;
pub use self::builder::Builder;
pub use self::builder::DEADLINE;
pub(crate) use self::progress::Progress;
pub use self::progress::Work;
pub(crate) use self::recorder::CallSite;
use self::recorder::Recorder;
use self::subgroup::Lineage;
pub use self::trace::{Message, Record, State, Trace};
use self::turn::{Queue, Turn};
use crate::plan::{self, Algorithm, Plan, Selection};
use crate::reduce::Scratch;
use crate::sync::{Mutex, lock};
use crate::transport::{Near, Regroup, Transport};
use crate::types::{Call, Element, Error, Fault, Operation, fingerprint};

/// One rank's handle to a group of ranks: threads of a process, or processes.
///
/// Handles are cheap to clone, and clones may be used from any thread of the rank; operations of one rank run one after
/// the other, in the order in which they were called. All ranks must call the same operations in the same order;
/// where they don't, all get the same [`Error::Mismatch`]. The first failure poisons the group: every later call
/// returns that first cause.
///
/// Dropping the last handle waits for the operations that were started, then says farewell to the other ranks.
///
/// ```
/// use bonfire_core::{Group, ReduceOp};
///
/// let ranks: Vec<_> = Group::threads(4)?
///     .into_iter()
///     .map(|group| std::thread::spawn(move || {
///         let mut gradients = vec![group.rank() as f32; 3];
///         group.all_reduce(&mut gradients, ReduceOp::Mean).map(|()| gradients)
///     }))
///     .collect();
/// for rank in ranks {
///     assert_eq!(rank.join().unwrap()?, [1.5; 3]);
/// }
/// # Ok::<(), bonfire_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Group {
    #[doc(hidden)]
    pub core: Arc<Core>,
    deadline: Duration,
    /// A fingerprint of the shape of the tensors that this handle's operations are on.
    shape: Option<u16>,
    // Dropped with the last handle, while started operations still hold the core.
    anchor: Arc<Anchor>,
    // After the anchor: a subgroup says farewell before its parent does.
    lineage: Option<Arc<Lineage>>,
}

/// What handles and started operations share.
pub struct Core {
    transport: Arc<dyn Transport>,
    near: Near,
    algorithms: Selection,
    queue: Queue,
    lane: Mutex<Lane>,
    failure: OnceLock<Error>,
    /// A number that all ranks of the group have, and no other group, where there is one.
    session: Option<u64>,
    regroup: Option<Arc<dyn Regroup>>,
    /// Whether another group was made of this one's ranks, or was to be.
    shrunk: AtomicBool,
    recorder: Recorder,
    /// Whether this rank's trace was left where `BONFIRE_TRACE` says.
    traced: Mutex<bool>,
}

/// What belongs to the operation whose turn it is.
pub(crate) struct Lane {
    /// Collective operations so far.
    sequence: u64,
    /// Messages so far, to and from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    pub plans: Plans,
    /// Memory that is grown once and kept.
    pub scratch: [Scratch; 3],
}

/// This rank's plans so far, by operation, algorithm, number of ranks and root. They do not depend on the length, so there
/// are few.
#[derive(Default)]
pub(crate) struct Plans(HashMap<(Operation, Algorithm, usize, usize), Arc<Plan>>);

impl Plans {
    /// The plan of `rank`, which is the same in all groups of so many ranks.
    pub fn plan(
        &mut self,
        operation: Operation,
        algorithm: Algorithm,
        rank: usize,
        world_size: usize,
        root: usize,
    ) -> Arc<Plan> {
        let make = || Arc::new(plan::plan(operation, algorithm, rank, world_size, root));
        self.0.entry((operation, algorithm, world_size, root)).or_insert_with(make).clone()
    }
}

struct Anchor {
    core: Arc<Core>,
    progress: OnceLock<Progress>,
    /// What a layer above has for this group.
    kept: Mutex<Option<Kept>>,
}

/// What a layer above has for a group, as the group knows it.
pub trait Keepsake: Any + Send + Sync {
    /// The group has failed, or ranks are gone: what needs them does not come to an end.
    fn part(&self);
}

type Kept = Arc<dyn Keepsake>;

impl Drop for Anchor {
    fn drop(&mut self) {
        // What was started completes also where nobody waits for it.
        if let Some(progress) = self.progress.take() {
            progress.finish();
        }
        if let Some(kept) = lock(&self.kept).take() {
            let gone = self.core.transport.trouble().is_some_and(|fault| !matches!(fault, Fault::Left { .. }));
            if gone || self.core.failure.get().is_some() {
                kept.part();
            }
            // It may still have to do with the other ranks.
            drop(kept);
        }
        self.core.transport.leave();
    }
}

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

    /// This rank, from 0 to `world_size - 1`.
    pub fn rank(&self) -> usize {
        self.core.transport.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.core.transport.world_size()
    }

    /// How long an operation of this handle may take.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// A handle to the same group whose operations may take this long.
    ///
    /// ```
    /// # let group = bonfire_core::Group::threads(1)?.remove(0);
    /// group.with_deadline(std::time::Duration::from_secs(5)).barrier()?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    pub fn with_deadline(&self, deadline: Duration) -> Group {
        Group { deadline, ..self.clone() }
    }

    /// What poisoned the group, if anything did.
    pub fn failure(&self) -> Option<Error> {
        self.core.failure.get().cloned()
    }

    /// This rank's last operations, up to 1024, as they are now: also while one of them hangs on another thread.
    pub fn trace(&self) -> Trace {
        self.core.trace()
    }

    /// Writes [`trace`](Self::trace) to a file for `bonfire trace`, which reads those of all ranks together. The file is
    /// there as a whole or not at all; an earlier one of that name is replaced.
    ///
    /// Where the variable `BONFIRE_TRACE` names a folder, each rank writes by itself when the group fails, and in groups
    /// [from the environment](Self::from_env) also when the process is interrupted.
    ///
    /// ```
    /// # let group = bonfire_core::Group::threads(1)?.remove(0);
    /// # let folder = tempfile::tempdir().unwrap();
    /// group.barrier()?;
    /// group.write_trace(folder.path().join(format!("trace-{}.json", group.rank())))?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be written; the group stays sound.
    pub fn write_trace(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.core.trace().write(path.as_ref())
    }

    /// Which algorithms run `operation` in this group, by size: the default, or what [`Builder::algorithms`] or the
    /// environment said.
    pub fn algorithms(&self, operation: Operation) -> Selection {
        self.core.algorithms.in_effect(operation, self.world_size(), self.core.near.is_somebody())
    }

    /// A buffer of zeros in memory that suits this group: shared memory where its ranks share some, ordinary memory
    /// elsewhere. Large operations between ranks that share memory are faster where every rank's buffers come from here:
    /// ranks then reach each other's, and nothing is copied on the way. See [`Buffer`].
    ///
    /// ```
    /// # let group = bonfire_core::Group::threads(1)?.remove(0);
    /// let mut weights = group.allocate::<f32>(1 << 20)?;
    /// weights.fill(1.0);
    /// group.all_reduce(&mut weights, bonfire_core::ReduceOp::Sum)?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Io`] where the system has not so much memory; the group stays sound.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Buffer<T>, Error> {
        Buffer::new(len, |bytes| self.core.near.allocate(bytes))
    }

    /// A handle whose blocking operations fail on all ranks where another rank's are on tensors of another shape.
    #[doc(hidden)]
    pub fn shaped(&self, shape: &[usize]) -> Group {
        Group { shape: Some(fingerprint(shape.iter().copied())), ..self.clone() }
    }

    /// The call as this handle makes it.
    #[doc(hidden)]
    pub fn stamp(&self, call: Call) -> Call {
        self.shape.map_or(call, |shape| call.shaped(shape))
    }

    pub(crate) fn turn(&self) -> Turn<'_> {
        self.core.queue.turn()
    }

    /// Ends the group because this rank cannot go on in it, so that nobody waits for it.
    #[doc(hidden)]
    pub fn abandon(&self, error: Error) {
        let _turn = self.turn();
        self.core.abandon(error);
    }

    /// What a layer above has for this group: made when it is first asked for, and kept until the last handle is dropped.
    /// It must hold no handle itself.
    #[doc(hidden)]
    pub fn keep<T: Keepsake>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
        let mut kept = lock(&self.anchor.kept);
        if let Some(kept) = kept.clone() {
            let kept: Arc<dyn Any + Send + Sync> = kept;
            if let Ok(kept) = kept.downcast() {
                return Ok(kept);
            }
        }
        let made = Arc::new(make()?);
        *kept = Some(made.clone());
        Ok(made)
    }

    pub(crate) fn progress(&self) -> Result<&Progress, Error> {
        if let Some(progress) = self.anchor.progress.get() {
            return Ok(progress);
        }
        let progress = Progress::spawn(self.rank()).map_err(|e| Error::io("starting the progress thread", e))?;
        Ok(self.anchor.progress.get_or_init(|| progress))
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("rank", &self.rank()).field("world_size", &self.world_size()).finish()
    }
}
