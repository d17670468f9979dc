//! One rank's handle to its group, and what happens when the last one is dropped.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::buffer::Buffer;
use super::core::Core;
use super::progress::Progress;
use super::trace::Trace;
use super::turn::Turn;
use crate::plan::Selection;
use crate::sync::{Mutex, lock};
use crate::types::{Element, Error, Fault, Operation};

/// Where a subgroup comes from.
pub(super) struct Lineage {
    pub parent: Group,
    /// Its ranks' ranks in the parent, by their ranks in it.
    pub members: Vec<usize>,
}

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
    pub(super) core: Arc<Core>,
    deadline: Duration,
    // Dropped with the last handle, while started operations still hold the core.
    anchor: Arc<Anchor>,
    // After the anchor: a subgroup says farewell before its parent does.
    pub(super) lineage: Option<Arc<Lineage>>,
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
            let gone = self.core.executor.transport.trouble().is_some_and(|fault| !matches!(fault, Fault::Left { .. }));
            if gone || self.core.failure().is_some() {
                kept.part();
            }
            // It may still have to do with the other ranks.
            drop(kept);
        }
        self.core.executor.transport.leave();
    }
}

impl Group {
    /// This rank, from 0 to `world_size - 1`.
    #[inline]
    pub fn rank(&self) -> usize {
        self.core.rank()
    }

    /// The number of ranks.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.core.world_size()
    }

    /// How long an operation of this handle may take.
    #[inline]
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
        self.core.failure().cloned()
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

    /// Which algorithms run `operation` in this group, by size: the default, or what [`Builder::algorithms`](crate::Builder::algorithms) or the
    /// environment said.
    pub fn algorithms(&self, operation: Operation) -> Selection {
        self.core.executor.algorithms.in_effect(operation, self.world_size(), self.core.executor.near.is_somebody())
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
        Buffer::new(len, |bytes| self.core.executor.near.allocate(bytes))
    }

    pub(super) fn of(core: Core, deadline: Duration, lineage: Option<Lineage>) -> Group {
        let core = Arc::new(core);
        let anchor = Arc::new(Anchor { core: core.clone(), progress: OnceLock::new(), kept: Mutex::default() });
        Group { core, deadline, anchor, lineage: lineage.map(Arc::new) }
    }

    /// This rank's place among the ranks, and how many there are.
    #[inline]
    pub(super) fn place(&self) -> (usize, usize) {
        (self.rank(), self.world_size())
    }

    #[inline]
    pub(super) fn turn(&self) -> Turn<'_> {
        self.core.queue.turn()
    }

    /// What a layer above has for this group: made when it is first asked for.
    pub(super) fn kept<T: Keepsake>(&self, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
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

    pub(super) fn progress(&self) -> Result<&Progress, Error> {
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
