//! One rank's handle to its group, and what happens when the last handle is dropped.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::buffer::Buffer;
use super::core::Core;
use super::progress::Progress;
use super::trace::Trace;
use crate::plan::Selection;
use crate::sync::{Deadline, Mutex, lock};
use crate::types::{Element, Error, Fault, Operation};

/// Where a subgroup comes from.
pub(super) struct Lineage {
    pub parent: Group,
    /// The members' ranks in the parent, by rank in the subgroup.
    pub members: Vec<usize>,
}

/// One rank's handle to a group of ranks, which are threads of one process, or processes.
///
/// Handles are cheap to clone, and clones may be used from any thread of the rank. Operations of one rank run one at a
/// time, in call order. All ranks must call the same operations in the same order; if they do not, all get the same
/// [`Error::Mismatch`].
///
/// Dropping the last handle waits for started operations, then leaves the group gracefully: operations of peers that
/// need this rank return [`Error::Left`], or [`Error::PeerLost`] if its thread is panicking. In a process that was
/// forked from a rank, dropping a handle does nothing to the group, and no operation may be called.
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
///
/// # Failures
/// Every call but the `start_` forms blocks until its operation is complete or has failed. It fails at its
/// [deadline](Self::deadline) at the latest, 300 s unless set, which starts at the call. Between processes, a rank that
/// dies is noticed at once, and one that is stopped or unreachable after 5 s
/// ([`Builder::heartbeat_timeout`](crate::Builder::heartbeat_timeout)). Threads and MPI have no heartbeats: there the
/// deadline decides, and MPI's launcher ends the job of a process that dies.
///
/// The first failure of an operation poisons the group on all ranks: every later call returns that first error. The
/// contents of the buffers that the failed operation writes are then unspecified. [`shrink`](Self::shrink) continues
/// without lost ranks. [`Error::InvalidArgument`] does not poison the group and leaves the buffers untouched.
#[derive(Clone)]
pub struct Group {
    pub(super) core: Arc<Core>,
    deadline: Duration,
    /// See [`Builder::hang_timeout`](crate::Builder::hang_timeout).
    pub(super) hang_timeout: Option<Duration>,
    // Dropped with the last handle, while started operations still hold the core.
    guard: Arc<DropGuard>,
    // After the guard: a subgroup is left before its parent.
    pub(super) lineage: Option<Arc<Lineage>>,
}

struct DropGuard {
    core: Arc<Core>,
    /// The process that made the group.
    process: u32,
    progress: OnceLock<Progress>,
    /// State that a layer above attached to the group.
    attachment: Mutex<Option<SharedAttachment>>,
}

/// State that a layer above attaches to a group.
pub trait Attachment: Any + Send + Sync {
    /// Aborts: the group has failed or ranks are gone, so whatever waits for them will not complete.
    fn part(&self);
}

type SharedAttachment = Arc<dyn Attachment>;

impl Drop for DropGuard {
    fn drop(&mut self) {
        // A process that was forked from a rank has copies of its sockets and none of its threads. The rank goes on.
        if self.process != std::process::id() {
            std::mem::forget((self.progress.take(), lock(&self.attachment).take()));
            return;
        }
        // Started operations complete even if nothing waits for them.
        if let Some(progress) = self.progress.take() {
            progress.finish();
        }
        if let Some(attachment) = lock(&self.attachment).take() {
            let gone =
                self.core.executor.transport.known_failure().is_some_and(|fault| !matches!(fault, Fault::Left { .. }));
            if gone || self.core.failure().is_some() {
                attachment.part();
            }
            // Its drop may still involve the other ranks.
            drop(attachment);
        }
        self.core.executor.transport.leave();
    }
}

impl Group {
    /// Returns this rank, from 0 to `world_size - 1`.
    #[inline]
    pub fn rank(&self) -> usize {
        self.core.rank()
    }

    /// Returns the number of ranks.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.core.world_size()
    }

    /// Returns how long an operation of this handle may take, from its call on: 300 s unless
    /// [`with_deadline`](Self::with_deadline), [`Builder::deadline`](crate::Builder::deadline) or, in groups from the
    /// environment, `BONFIRE_DEADLINE` set another time.
    #[inline]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns a handle to the same group whose operations may take up to `deadline`. This handle keeps its own.
    ///
    /// ```
    /// # let group = bonfire_core::Group::threads(1)?.remove(0);
    /// group.with_deadline(std::time::Duration::from_secs(5)).barrier()?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    pub fn with_deadline(&self, deadline: Duration) -> Group {
        Group { deadline, ..self.clone() }
    }

    /// Returns a handle for the next step of a call whose deadline this is.
    pub(super) fn within(&self, deadline: &Deadline) -> Group {
        self.with_deadline(deadline.remaining())
    }

    /// Returns the error that poisoned the group, if any. A failure of another rank is known only once an operation of
    /// this rank has failed with it.
    pub fn failure(&self) -> Option<Error> {
        self.core.failure().cloned()
    }

    /// Returns this rank's last operations, at most 1024. Works while an operation hangs on another thread.
    pub fn trace(&self) -> Trace {
        self.core.trace()
    }

    /// Writes [`trace`](Self::trace) to a file for `bonfire trace`, which reads the files of all ranks together. The
    /// file is written atomically and replaces an existing file of that name. Works while an operation hangs.
    ///
    /// If the variable `BONFIRE_TRACE` names a folder, each rank writes its trace there when the group fails, and in
    /// groups [from the environment](Self::from_env) also when the process is interrupted.
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
    /// [`Error::Io`] if the file cannot be written; the group stays usable.
    pub fn write_trace(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.core.trace().write(path.as_ref())
    }

    /// Returns which algorithms run `operation` in this group, by size: the default, or what
    /// [`Builder::algorithms`](crate::Builder::algorithms) or the environment set. [`Selection::default`] for
    /// operations without a choice, such as `send`.
    pub fn algorithms(&self, operation: Operation) -> Selection {
        self.core.executor.algorithms.in_effect(operation, self.world_size(), self.core.executor.engines.is_some())
    }

    /// Allocates a zeroed buffer of `len` elements in the memory that suits this group: shared memory if all its ranks
    /// share memory as processes of one host, ordinary memory otherwise. Large operations in shared memory are faster
    /// if every rank's buffers come from here: the ranks then access each other's buffers, and nothing is copied on the
    /// way. Not a collective: each rank allocates by itself. See [`Buffer`].
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
    /// [`Error::Io`] if the system does not have the memory; the group stays usable.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Buffer<T>, Error> {
        Buffer::new(len, |bytes| self.core.executor.engines.allocate(bytes))
    }

    /// Creates this rank's handle with a deadline and a hang timeout.
    pub(super) fn of(
        core: Core,
        (deadline, hang_timeout): (Duration, Option<Duration>),
        lineage: Option<Lineage>,
    ) -> Group {
        let core = Arc::new(core);
        let (progress, attachment) = (OnceLock::new(), Mutex::default());
        let guard = Arc::new(DropGuard { core: core.clone(), process: std::process::id(), progress, attachment });
        Group { core, deadline, hang_timeout, guard, lineage: lineage.map(Arc::new) }
    }

    /// Returns the limits of this handle, for a group that is made of this one.
    pub(super) fn limits(&self) -> (Duration, Option<Duration>) {
        (self.deadline, self.hang_timeout)
    }

    /// Returns this rank and the world size.
    #[inline]
    pub(super) fn rank_and_size(&self) -> (usize, usize) {
        (self.rank(), self.world_size())
    }

    /// Returns the attached state, which `make` creates on first use.
    pub(super) fn attachment<T: Attachment>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
        let mut attachment = lock(&self.guard.attachment);
        if let Some(attachment) = downcast(&attachment) {
            return Ok(attachment);
        }
        let made = Arc::new(make()?);
        *attachment = Some(made.clone());
        Ok(made)
    }

    /// Returns the attached state, if there is one.
    pub(super) fn attached<T: Attachment>(&self) -> Option<Arc<T>> {
        downcast(&lock(&self.guard.attachment))
    }

    pub(super) fn progress(&self) -> Result<&Progress, Error> {
        if let Some(progress) = self.guard.progress.get() {
            return Ok(progress);
        }
        let progress = Progress::spawn(self.rank()).map_err(|e| Error::io("starting the progress thread", e))?;
        Ok(self.guard.progress.get_or_init(|| progress))
    }
}

/// Returns the attached state, if it is of this type.
fn downcast<T: Attachment>(attachment: &Option<SharedAttachment>) -> Option<Arc<T>> {
    let attachment: Arc<dyn Any + Send + Sync> = attachment.clone()?;
    attachment.downcast().ok()
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("rank", &self.rank()).field("world_size", &self.world_size()).finish()
    }
}
