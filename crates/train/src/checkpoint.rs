//! Checkpoints that any number of ranks can load.
//!
//! Every rank writes its own part of the training: one `n`th of what is the same on all ranks, and its own part of what
//! is sharded. The files of all ranks are a *set*, in a folder of its own. A set becomes valid at once, when all of it
//! is on disk: a rank that is killed, a full disk or a power cut leaves the set before it. [`Checkpoints`] is a folder
//! of sets.
//!
//! # Files
//!
//! ```text
//! FOLDER/set-00000012/set.json                the manifest: what the set holds, length and checksum of each file
//!                     rank-0.safetensors      one file for each rank
//!                     rank-1.safetensors
//!        .part-4f1c.../                       a set that is being written, or that was interrupted
//! ```
//!
//! The files are safetensors: other programs can read them. A file has ranges of tensors, each as one dimension; the
//! metadata's `ranges` have their whole shapes and where they start. Names are `model/PATH`, `average/PATH`,
//! `optimizer/PATH/FIELD` and `scheduler/FIELD`; numbers, such as a count of steps, are tensors without dimensions. The
//! manifest lists what begins with which name, of which type it was, and the position in the data: completed
//! epochs, and samples of the next one.
//!
//! # What survives
//! When [`save`](Checkpoints::save) or [`wait`](Checkpoints::wait) has returned, the files, the entries of their folder
//! and the folder's own entry were flushed to disk (`fsync`): the set survives a power cut, if the disk keeps what it
//! has reported as flushed. Before that moment the set before it is the newest one.

mod bytes;
mod contents;
mod folder;
mod format;
mod model;
mod own_part;
mod parts;
mod scalar;
mod set;
mod state;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use log::warn;

pub use self::bytes::{from_bytes, to_bytes};
pub use self::contents::{Contents, Item, Kind, LOADING, argument};
use self::folder::{Draft, begin, commit, discard, file_name, newest, sync};
pub use self::format::{Dtype, ReadBytes, Sink, width};
use self::format::{FileId, FileSummary, Manifest};
pub use self::model::ModelReader;
pub use self::own_part::OwnPart;
use self::parts::check_equal;
pub use self::parts::{Parts, describe};
pub use self::scalar::Scalar;
pub use self::set::{SavedTensor, Set};
pub use self::state::{Field, Fields, LoadedTensor, NOT_ELEMENTWISE, ReadRange, StateTensor, state_name};
use crate::agree::{all_or_none, lane};
use crate::parameters::Digested;
use bonfire_core::internal::{AgreedOperations, random};
use bonfire_core::{Error, Group};

/// How long the ranks wait for the slowest of them to write or to read, at least.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// The number of sets that are kept, unless set.
const KEEP: usize = 2;

/// A folder with the checkpoints of a training. Each rank of a group has one.
///
/// All ranks make the same calls in the same order, and get the same errors. Communication is on a group of its own, so
/// a save in the background does not disturb that of the training. After a loss of ranks make a new one.
///
/// See the [module](self) for the files, and for what survives a crash or a power cut.
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    lane: Group,
    in_flight: Option<JoinHandle<Result<(), Error>>>,
}

/// What a rank saves. It does not change with the training.
pub struct Snapshot {
    /// What it is, which must be the same on all ranks.
    pub contents: Contents,
    /// Adds the parts of this rank.
    pub collect: Collect,
}

/// Adds the parts of this rank. Runs on another thread if the save is in the background.
pub type Collect = Box<dyn FnOnce(&mut Parts) -> Result<(), Error> + Send>;

impl Checkpoints {
    /// Opens a folder of sets. It need not exist. All ranks must call this; it blocks until they have.
    ///
    /// All ranks use the same folder: with several hosts it must be on a file system that they share. Two trainings
    /// must not use one folder at the same time.
    ///
    /// # Errors
    /// The errors of [`Group::subgroup`].
    #[track_caller]
    pub fn new(group: &Group, folder: impl Into<PathBuf>) -> Result<Checkpoints, Error> {
        let lane = lane(group)?;
        let lane = lane.with_deadline(lane.deadline().max(TIMEOUT));
        Ok(Checkpoints { folder: folder.into(), keep: KEEP, lane, in_flight: None })
    }

    /// Keeps the newest `sets` sets, at least one. A save removes older ones when it is complete. Default: 2
    pub fn keep(mut self, sets: usize) -> Self {
        self.keep = sets.max(1);
        self
    }

    /// Saves a new set. Returns on all ranks when it is complete and on disk. The ranks may take an hour to write.
    ///
    /// # Errors
    /// On all ranks the same, that of the lowest rank that fails: that of its snapshot; [`Error::Io`] if a file cannot
    /// be written, because the disk is full for example; [`Error::InvalidArgument`] if the ranks are not at the same
    /// position in the data, if they differ in what each saves a part of, or if they do not share the folder. The sets
    /// before are unchanged, and the ranks can save again. The error of a save in the background, which then was the
    /// last one. Otherwise the errors of [`Group::all_gather`]: some ranks may take the set for complete then.
    pub fn save(&mut self, snapshot: Result<Snapshot, Error>) -> Result<(), Error> {
        self.wait()?;
        self.job(snapshot).run()
    }

    /// As [`save`](Self::save), on another thread: returns at once. First waits for the save before it, so that one is
    /// in flight at most. On Linux the thread has the lowest priority.
    ///
    /// # Errors
    /// Those of the save before it, and then this one is not started; [`Error::Config`] with the transport
    /// `mpi-blocking`. [`wait`](Self::wait) or the next call returns those of this one.
    pub fn save_in_background(&mut self, snapshot: Result<Snapshot, Error>) -> Result<(), Error> {
        self.wait()?;
        self.lane.check_concurrent("Checkpoints::save_in_background")?;
        let job = self.job(snapshot);
        let thread = thread::Builder::new().name("bonfire checkpoint".into()).spawn(move || {
            lower_priority();
            job.run()
        });
        // No rank would wait for this one.
        let thread = thread.map_err(|e| self.lane.abandon(Error::io("starting a thread to save a checkpoint", e)))?;
        self.in_flight = Some(thread);
        Ok(())
    }

    /// Waits for a save in the background, if there is one.
    ///
    /// # Errors
    /// Those of [`save`](Self::save).
    pub fn wait(&mut self) -> Result<(), Error> {
        let Some(thread) = self.in_flight.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|panic| Err(panicked(&*panic)))
    }

    /// Loads the newest set, which rank 0 chooses: returns what `read` makes of it on each rank. `None` if the folder
    /// has none.
    ///
    /// # Errors
    /// On all ranks the same, that of the lowest rank that fails: that of `read`; [`Error::InvalidArgument`] if a file
    /// of the set is missing, truncated, damaged or of another save; [`Error::Io`] if a file cannot be read. Otherwise
    /// the errors of [`Group::all_gather`]; some ranks may have loaded then. The error of a save in the background.
    pub fn load<T>(&mut self, read: impl FnOnce(&Set) -> Result<T, Error>) -> Result<Option<T>, Error> {
        self.wait()?;
        let own = if self.lane.rank() == 0 { self.newest() } else { Ok(None) };
        let Some((name, manifest)) = self.lane.all_gather_results(own)?.swap_remove(0) else { return Ok(None) };
        let set = Set::open(&self.folder.join(name), &manifest);
        let loaded = all_or_none(&self.lane, set.and_then(|set| read(&set)))?;
        self.lane.rewind();
        Ok(Some(loaded))
    }

    /// Returns the name of the newest set's folder, and its manifest.
    fn newest(&self) -> Result<Option<(PathBuf, Manifest)>, Error> {
        let failed = |error| Error::io(format!("{}: reading {}", LOADING, self.folder.display()), error);
        let Some((path, text)) = newest(&self.folder).map_err(failed)? else { return Ok(None) };
        let manifest = text.map_err(|e| e.to_string()).and_then(|text| Manifest::parse(&text));
        let manifest = manifest.map_err(|reason| set::invalid(&path.join(folder::MANIFEST), &reason))?;
        Ok(path.file_name().map(|name| (name.into(), manifest)))
    }

    fn job(&self, snapshot: Result<Snapshot, Error>) -> Job {
        let (lane, folder) = (self.lane.clone(), self.folder.clone());
        Job { lane, folder, keep: self.keep, snapshot }
    }
}

/// Lets the threads of the training run before this one, which may take longer.
fn lower_priority() {
    // Linux has a priority for each thread, and anyone may lower it. Elsewhere it would be that of the process.
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, 19) {
        log::debug!("the priority of the thread that saves a checkpoint cannot be lowered: {error}");
    }
}

/// A save.
struct Job {
    lane: Group,
    folder: PathBuf,
    keep: usize,
    snapshot: Result<Snapshot, Error>,
}

impl Job {
    fn run(self) -> Result<(), Error> {
        let Job { lane, folder, keep, snapshot } = self;
        let (contents, collect) = match snapshot {
            Ok(Snapshot { contents, collect }) => (Ok(contents), Some(collect)),
            Err(error) => (Err(error), None),
        };
        let contents = same_contents(&lane.all_gather_results(contents)?)?;
        let leads = lane.rank() == 0;
        let failed = |error| Error::io(format!("{SAVING} in {}", folder.display()), error);
        let draft = match leads {
            true => random().and_then(|id| begin(&folder, format!("{id:016x}")).map(Some).map_err(failed)),
            false => Ok(None),
        };
        let draft = lane.all_gather_results(draft)?.swap_remove(0);
        let draft = draft.ok_or_else(|| Error::broken(SAVING, "rank 0 has begun no set"))?;
        let written = catch_unwind(AssertUnwindSafe(|| write(&lane, &folder, &draft, collect)));
        let written = written.unwrap_or_else(|panic| Err(panicked(&*panic)));
        let saved = lane.all_gather_results(written).and_then(|written| {
            let (files, digests): (Vec<_>, Vec<_>) = written.into_iter().unzip();
            check_equal(&digests)?;
            let manifest = Manifest::new(&draft.id, files, contents);
            let committed = if leads { commit(&folder, &draft, &manifest, keep).map_err(failed) } else { Ok(()) };
            lane.all_gather_results(committed).map(drop)
        });
        if leads && saved.is_err() {
            // Another rank may still write there; then the next save removes it.
            discard(&folder, &draft);
        }
        saved
    }
}

/// Writes this rank's file of a set.
fn write(
    lane: &Group,
    folder: &Path,
    draft: &Draft,
    collect: Option<Collect>,
) -> Result<(FileSummary, Vec<Digested>), Error> {
    let (rank, world_size, path) = (lane.rank(), lane.world_size(), draft.path(folder));
    if !path.is_dir() {
        let reason = format!(
            "rank {rank} does not see the folder {}, which rank 0 has made; give a folder that all ranks share",
            path.display()
        );
        return Err(Error::argument(SAVING, reason));
    }
    let mut parts = Parts::new(rank, world_size);
    if let Some(collect) = collect {
        collect(&mut parts)?;
    }
    let id = FileId::new(&draft.id, rank, world_size);
    let (parts, digests) = parts.into_list();
    let summary = format::write(&path.join(file_name(rank)), id, parts)?;
    sync(&path).map_err(|e| Error::io(format!("{SAVING}: flushing {}", path.display()), e))?;
    Ok((summary, digests))
}

/// Returns what all ranks save. Fails if they are not at the same position, or save different things.
fn same_contents(of_ranks: &[Contents]) -> Result<Contents, Error> {
    let first = of_ranks[0].clone();
    let Some((rank, other)) = (0..).zip(of_ranks).find(|(_, contents)| **contents != first) else { return Ok(first) };
    let position = |contents: &Contents| format!("epoch {}, sample {}", contents.epoch, contents.samples);
    let items = |contents: &Contents| contents.items.iter().map(Item::to_string).collect::<Vec<_>>().join(", ");
    let reason = if first.items == other.items {
        let (first, other) = (position(&first), position(other));
        format!("rank 0 is at {first}, rank {rank} at {other}; save on all ranks after the same step")
    } else {
        let (first, other) = (items(&first), items(other));
        format!("rank 0 saves {first}, and rank {rank} {other}; save the same on all ranks")
    };
    Err(Error::argument(SAVING, reason))
}

/// What errors of a save name.
pub const SAVING: &str = "saving a checkpoint";

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    Error::broken(SAVING, format!("it panicked: {}", text.unwrap_or("without a message")))
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            warn!("{error}");
        }
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Checkpoints { folder, keep, lane, .. } = self;
        f.debug_struct("Checkpoints").field("folder", folder).field("keep", keep).field("lane", lane).finish()
    }
}
