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
//!        job.json                             the job that saves here
//!        .part-4f1c.../                       a set that is being written, or that was interrupted
//! ```
//!
//! The files are safetensors: other programs can read them. A file has ranges of tensors, each as one dimension; the
//! metadata's `ranges` have their whole shapes and where they start. Names are `model/PATH`, `average/PATH`,
//! `optimizer/PATH/FIELD` and `scheduler/FIELD`; numbers, such as a count of steps, are tensors without dimensions. Of
//! several trainings in one set they begin with the training's own, as in `critic/model/PATH`, and `critic/epoch` and
//! `critic/samples` are its position in the data. The manifest lists what begins with which name, of which type it was,
//! the position (completed epochs, and samples of the next one), and the score if there is one.
//!
//! # What survives
//! When [`save`](Checkpoints::save) or [`wait`](Checkpoints::wait) has returned, the files, the entries of their folder
//! and the folder's own entry were flushed to disk (`fsync`): the set survives a power cut, if the disk keeps what it
//! has reported as flushed. Before that moment the set before it is the newest one.

mod bytes;
mod claim;
mod contents;
mod folder;
mod format;
mod model;
mod named;
mod own_part;
mod parts;
mod saving;
mod scalar;
mod set;
mod state;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use log::error;

pub use self::bytes::{from_bytes, to_bytes};
use self::claim::Claim;
pub use self::contents::{Contents, Item, Kind, LOADING, argument};
pub use self::folder::SavedSet;
use self::folder::{best, list, read_manifest};
use self::format::Manifest;
pub use self::format::{Dtype, ReadBytes, Sink, width};
pub use self::model::ModelReader;
pub use self::named::{Named, about, check_names};
pub use self::own_part::OwnPart;
pub use self::parts::{Parts, describe};
use self::saving::{Saving, compare, lower_priority, open, panicked};
pub use self::scalar::Scalar;
pub use self::set::{SavedTensor, Set};
pub use self::state::{Field, Fields, LoadedTensor, NOT_ELEMENTWISE, ReadRange, StateTensor, state_name};
use crate::agree::{all_or_none, lane};
use bonfire_core::internal::{AgreedOperations, CallSite, Entered, call_site};
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
    access: Access,
    in_flight: Option<InFlight>,
}

/// A save in the background, and where the program has called it.
struct InFlight {
    thread: JoinHandle<Result<(), Error>>,
    at: CallSite,
}

/// What a folder was opened for.
enum Access {
    Load,
    /// Rank 0 has the claim.
    Save(Option<Arc<Claim>>),
}

/// Which set of a folder is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The newest one.
    Newest,
    /// That with the highest score; of several, the newest.
    Best,
    /// That of this number: 12 is `set-00000012`.
    Number(u64),
}

impl From<u64> for Which {
    fn from(number: u64) -> Which {
        Which::Number(number)
    }
}

/// What is to be saved, with a score: how good the training is by the program's own measure, such as an accuracy, or a
/// loss with a minus sign. More is better. It must be finite, and the same on all ranks.
///
/// [`Checkpoints::keep`] keeps the best set besides the newest ones, and [`Which::Best`] loads it.
#[derive(Clone, Copy, Debug)]
pub struct Scored<S>(pub S, pub f64);

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
    /// Opens a folder, to save sets in it and to load them. Makes it if it does not exist, and takes it over from the
    /// job that has saved there before. All ranks must call this; it blocks until they have.
    ///
    /// All ranks use the same folder: with several hosts it must be on a file system that they share. Two jobs must not
    /// save into one folder at the same time: their sets would mix.
    ///
    /// # Errors
    /// On all ranks the same: [`Error::Io`] if a rank cannot write into the folder; [`Error::InvalidArgument`] if a
    /// rank does not see it, or if another job saves there that certainly still runs: as a process of rank 0's machine,
    /// which has not dropped its `Checkpoints`. Otherwise those of [`Group::subgroup`].
    #[track_caller]
    pub fn new(group: &Group, folder: impl Into<PathBuf>) -> Result<Checkpoints, Error> {
        let _call = group.enter("Checkpoints::new");
        let mut checkpoints = Checkpoints::read_only(group, folder)?;
        checkpoints.access = Access::Save(open(&checkpoints.lane, &checkpoints.folder)?);
        Ok(checkpoints)
    }

    /// Opens a folder to load sets only, and changes nothing in it: it may be read-only, and another job may save
    /// there. It need not exist. All ranks must call this; it blocks until they have.
    ///
    /// # Errors
    /// Those of [`Group::subgroup`].
    #[track_caller]
    pub fn read_only(group: &Group, folder: impl Into<PathBuf>) -> Result<Checkpoints, Error> {
        let _call = group.enter("Checkpoints::read_only");
        let lane = lane(group)?;
        let lane = lane.with_deadline(lane.deadline().max(TIMEOUT));
        Ok(Checkpoints { folder: folder.into(), keep: KEEP, lane, access: Access::Load, in_flight: None })
    }

    /// Keeps the newest `sets` sets, at least one, and besides them the one with the best score. A save removes others
    /// when it is complete. Default: 2
    pub fn keep(mut self, sets: usize) -> Self {
        self.keep = sets.max(1);
        self
    }

    /// Saves a new set. Returns on all ranks when it is complete and on disk. The ranks may take an hour to write.
    ///
    /// `score` tells how good the training is by the program's own measure, more being better. The best set is kept.
    ///
    /// # Errors
    /// On all ranks the same, that of the lowest rank that fails: that of its snapshot; [`Error::Io`] if a file cannot
    /// be written, because the disk is full for example; [`Error::InvalidArgument`] if the ranks are not at the same
    /// position in the data, if they differ in what each saves a part of or in the score, if that is not finite, if
    /// they do not share the folder, if it was opened to load only, or if another job has taken it over, which it
    /// names. The sets before are unchanged, and the ranks can save again. The error of a save in the background, which
    /// then was the last one. Otherwise the errors of [`Group::all_gather`]: some ranks may take the set for complete
    /// then.
    #[track_caller]
    pub fn save(&mut self, snapshot: Result<Snapshot, Error>, score: Option<f64>) -> Result<(), Error> {
        let _call = self.enter("Checkpoints::save");
        self.wait()?;
        self.saving(snapshot, score)?.run()
    }

    /// As [`save`](Self::save), on another thread: returns at once. First waits for the save before it, so that one is
    /// in flight at most. On Linux the thread has the lowest priority.
    ///
    /// # Errors
    /// Those of the save before it, and then this one is not started; [`Error::Config`] with the transport
    /// `mpi-blocking`. [`wait`](Self::wait) or the next call returns those of this one.
    #[track_caller]
    pub fn save_in_background(&mut self, snapshot: Result<Snapshot, Error>, score: Option<f64>) -> Result<(), Error> {
        let _call = self.enter(IN_BACKGROUND);
        let at = call_site();
        self.wait()?;
        self.lane.check_concurrent(IN_BACKGROUND)?;
        let saving = self.saving(snapshot, score)?;
        let thread = thread::Builder::new().name("bonfire checkpoint".into()).spawn(move || {
            lower_priority();
            let _call = saving.lane.enter_behind(IN_BACKGROUND, at);
            saving.run()
        });
        // No rank would wait for this one.
        let thread = thread.map_err(|e| self.lane.abandon(Error::io("starting a thread to save a checkpoint", e)))?;
        self.in_flight = Some(InFlight { thread, at });
        Ok(())
    }

    /// Waits for a save in the background, if there is one.
    ///
    /// # Errors
    /// Those of [`save`](Self::save).
    #[track_caller]
    pub fn wait(&mut self) -> Result<(), Error> {
        let Some(InFlight { thread, .. }) = self.in_flight.take() else { return Ok(()) };
        let (_call, _waits) = (self.enter("Checkpoints::wait"), self.lane.waits());
        thread.join().unwrap_or_else(|panic| Err(panicked(&*panic)))
    }

    /// Compares what the ranks would save, and writes nothing.
    ///
    /// # Errors
    /// On all ranks the same: that of the snapshot of the lowest rank that fails; [`Error::InvalidArgument`] if the
    /// ranks are not at the same position in the data, or if what several of them have differs. Otherwise those of
    /// [`Group::all_gather`]. The error of a save in the background.
    #[track_caller]
    pub fn verify(&mut self, snapshot: Result<Snapshot, Error>) -> Result<(), Error> {
        let _call = self.enter("Checkpoints::verify");
        self.wait()?;
        compare(&self.lane, snapshot)
    }

    /// Fails on all ranks if `check` fails on one, unless the folder was opened to load only: what could not be saved
    /// is known before the training then.
    ///
    /// # Errors
    /// That of the lowest rank that fails. Otherwise those of [`Group::all_gather`].
    #[track_caller]
    pub fn check_savable(&self, check: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        match self.access {
            Access::Load => Ok(()),
            Access::Save(_) => all_or_none(&self.lane, check()),
        }
    }

    /// Returns the sets in the folder as rank 0 sees them, by number.
    ///
    /// # Errors
    /// On all ranks [`Error::Io`] if the folder cannot be read; none of one that does not exist is no error. Otherwise
    /// the errors of [`Group::all_gather`]. The error of a save in the background.
    #[track_caller]
    pub fn sets(&mut self) -> Result<Vec<SavedSet>, Error> {
        let _call = self.enter("Checkpoints::sets");
        self.wait()?;
        let own = if self.lane.rank() == 0 { self.list() } else { Ok(Vec::new()) };
        Ok(self.lane.all_gather_results(own)?.swap_remove(0))
    }

    /// Loads a set, which rank 0 finds: returns what `read` makes of it on each rank. `None` if the folder has no set,
    /// or no set with a score if the best is wanted.
    ///
    /// # Errors
    /// On all ranks the same, that of the lowest rank that fails: that of `read`; [`Error::InvalidArgument`] if there
    /// is no set of the number, or if a file of the set is missing, truncated, damaged or of another save;
    /// [`Error::Io`] if a file cannot be read. Otherwise the errors of [`Group::all_gather`]; some ranks may have
    /// loaded then. The error of a save in the background.
    #[track_caller]
    pub fn load<T>(&mut self, which: Which, read: impl FnOnce(&Set) -> Result<T, Error>) -> Result<Option<T>, Error> {
        let _call = self.enter("Checkpoints::load");
        self.wait()?;
        let own = if self.lane.rank() == 0 { self.find(which) } else { Ok(None) };
        let Some((number, manifest)) = self.lane.all_gather_results(own)?.swap_remove(0) else { return Ok(None) };
        let set = Set::open(&folder::path(&self.folder, number), &manifest);
        let loaded = all_or_none(&self.lane, set.and_then(|set| read(&set)))?;
        self.lane.rewind();
        Ok(Some(loaded))
    }

    /// Enters a function that the program calls, until the result is dropped: errors of ranks that wait for this one
    /// name it.
    #[track_caller]
    pub fn enter(&self, function: &'static str) -> Entered {
        self.lane.enter(function)
    }

    fn list(&self) -> Result<Vec<SavedSet>, Error> {
        let failed = |error| Error::io(format!("{LOADING}: reading {}", self.folder.display()), error);
        list(&self.folder).map_err(failed)
    }

    /// Returns the number of a set and its manifest.
    fn find(&self, which: Which) -> Result<Option<(u64, Manifest)>, Error> {
        let sets = self.list()?;
        let found = match which {
            Which::Newest => sets.last(),
            Which::Best => best(&sets),
            Which::Number(number) => {
                let found = sets.iter().find(|set| set.number == number);
                Some(found.ok_or_else(|| {
                    let numbers: Vec<_> = sets.iter().map(|set| set.number.to_string()).collect();
                    let all = if numbers.is_empty() { "none".into() } else { numbers.join(", ") };
                    argument(format!("{} has no set {number}; it has {all}", self.folder.display()))
                })?)
            }
        };
        let Some(number) = found.map(|set| set.number) else { return Ok(None) };
        let path = folder::path(&self.folder, number);
        let manifest = read_manifest(&path).map_err(|reason| set::invalid(&path.join(folder::MANIFEST), &reason))?;
        Ok(Some((number, manifest)))
    }

    fn saving(&self, snapshot: Result<Snapshot, Error>, score: Option<f64>) -> Result<Saving, Error> {
        let Access::Save(claim) = &self.access else {
            let reason = "this folder was opened to load only; open it with `Checkpoints::new` to save";
            return Err(Error::argument(SAVING, reason));
        };
        let (lane, folder) = (self.lane.clone(), self.folder.clone());
        // A training of the group compares it: a rank that does not save would not notice a save in the background.
        lane.parent().filter(|_| lane.world_size() > 1).unwrap_or(&lane).begin_save();
        Ok(Saving { lane, folder, keep: self.keep, claim: claim.clone(), snapshot, score })
    }
}

/// What errors of opening a folder name.
const OPENING: &str = "opening a folder of checkpoints";

/// The function that saves on another thread.
const IN_BACKGROUND: &str = "Checkpoints::save_in_background";

/// What errors of a save name.
pub const SAVING: &str = "saving a checkpoint";

/// What errors of a comparison name.
const COMPARING: &str = "comparing what the ranks have";

impl Drop for Checkpoints {
    fn drop(&mut self) {
        // A drop has no caller.
        let _call = self.in_flight.as_ref().map(|save| self.lane.enter_at(IN_BACKGROUND, save.at));
        if let Err(error) = self.wait() {
            error!("rank {}: {error}", self.lane.rank());
        }
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Checkpoints { folder, keep, lane, .. } = self;
        f.debug_struct("Checkpoints").field("folder", folder).field("keep", keep).field("lane", lane).finish()
    }
}
