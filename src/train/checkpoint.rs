//! Checkpoints that any number of ranks can load.
//!
//! Every rank writes its own part of the training: one `n`th of what is the same on all ranks, and its own part of what
//! is sharded. The files of all ranks are a *set*, in a folder of its own. A set becomes valid at once, when all of it
//! is on disk: a rank that is killed, a full disk or a power cut leaves the set before it. [`Checkpoints`] is a folder
//! of sets.
//!
//! ```
//! use bonfire::{Checkpoints, DataParallel, Group, ShardedSampler, TrainingState};
//! # use burn::backend::{Autodiff, Flex};
//! # use burn::nn::LinearConfig;
//! # use burn::optim::AdamConfig;
//! # use burn::tensor::Tensor;
//! # type B = Autodiff<Flex>;
//!
//! fn train(group: Group, folder: std::path::PathBuf) -> Result<usize, bonfire::Error> {
//!     let device = Default::default();
//!     let (model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
//!     let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
//!     let mut checkpoints = Checkpoints::new(ddp.group(), folder)?;
//!     checkpoints.load(&mut state)?;                      // goes on from the newest set, if there is one
//!     let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
//!     for shard in sampler.epoch(state.epoch)?.after(state.samples).take(4) {
//!         let input = Tensor::<B, 2>::ones([shard.len(), 2], &device);
//!         let gradients = ddp.run(&state.model, [input], |model, input| (model.forward(input).mean(), shard.len()))?;
//!         state.step(gradients, 16);
//!         if state.samples.is_multiple_of(32) {
//!             checkpoints.save_in_background(&state)?;    // training goes on while it is written
//!         }
//!     }
//!     checkpoints.wait()?;
//!     Ok(state.samples)
//! }
//!
//! let folder = tempfile::tempdir().expect("a folder");
//! for (ranks, samples) in [(3, 64), (2, 112)] {           // two ranks go on where three have ended
//!     let path = folder.path().to_path_buf();
//!     let ended = bonfire::launch::run(Group::threads(ranks)?, move |group| train(group, path.clone()))?;
//!     assert!(ended.iter().all(|ended| *ended == samples));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What can be saved is a [`TrainingState`](crate::TrainingState), and a pair of a state and the
//! [`ShardedOptimizer`](crate::ShardedOptimizer) or the [`FullyShardedParallel`](crate::FullyShardedParallel) that
//! trains its model. A set can be loaded into any of them, whichever has saved it, and by the package for burn 0.22. It
//! says what it holds, so loading it into another kind of optimizer or scheduler is an error that names both. Sets of
//! Bonfire's first format can be loaded too, here only. [`bonfire_train::checkpoint`] has the format of the files, and
//! says what survives a crash.
//!
//! A tuple of two to four of these, each [`Named`], is one set too: of models that train together, such as a generator
//! and a critic.
//!
//! ```
//! # use bonfire::{Checkpoints, DataParallel, Group, TrainingState};
//! # use bonfire::train::checkpoint::Named;
//! # use burn::backend::{Autodiff, Flex};
//! # use burn::nn::LinearConfig;
//! # use burn::optim::AdamConfig;
//! # let group = Group::threads(1)?.remove(0);
//! # let linear = || LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&Default::default());
//! # let (critic, judging) = DataParallel::new(group.clone(), linear())?;
//! # let (generator, making) = DataParallel::new(group.clone(), linear())?;
//! # let mut critic = TrainingState::new(critic, AdamConfig::new().init(), 1e-3, ());
//! # let mut generator = TrainingState::new(generator, AdamConfig::new().init(), 1e-3, ());
//! # let folder = tempfile::tempdir().expect("a folder");
//! let mut checkpoints = Checkpoints::new(&group, folder.path())?;
//! checkpoints.load((Named("critic", &mut critic), Named("generator", &mut generator)))?;
//! checkpoints.save((Named("critic", &critic), Named("generator", &generator)))?;
//! # Ok::<(), bonfire::Error>(())
//! ```

mod module;
mod named;
mod state;
mod training;

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use burn::module::ParamId;
use burn::tensor::backend::Backend;
use burn::tensor::{BoolStore, DType, Tensor};

use crate::tensor::host::{Kind, Source};
use bonfire_core::{Error, Group};
use bonfire_train::checkpoint::{self, Dtype, OwnPart, Set, Sink, Snapshot};

pub use bonfire_train::checkpoint::{Named, SavedSet, Scored, Which};

pub(super) use self::state::{RecordedTensor, encode, split, split_by_id};
pub(super) use self::training::{
    OPTIMIZER, check_savable, check_state, has_states, optimizer_item, read_state, to_save,
};

/// A folder with the checkpoints of a training. Each rank of a group has one.
///
/// All ranks make the same calls in the same order, and get the same errors. Communication is on a group of its own, so
/// a save in the background does not disturb that of the training. After [`DataParallel::shrink`] make a new one.
///
/// See the [module](self) for a training loop, for the files, and for what survives a crash or a power cut.
///
/// [`DataParallel::shrink`]: crate::DataParallel::shrink
#[derive(Debug)]
pub struct Checkpoints(checkpoint::Checkpoints);

/// What can be saved: a [`TrainingState`], and a pair of a state and the [`ShardedOptimizer`] or the
/// [`FullyShardedParallel`] that trains its model. A set can be loaded into any of them. Two to four of these, each
/// [`Named`], are a set too.
///
/// [`TrainingState`]: crate::TrainingState
/// [`ShardedOptimizer`]: crate::ShardedOptimizer
/// [`FullyShardedParallel`]: crate::FullyShardedParallel
pub trait Save {
    /// Returns what is to be saved. It does not change with the training.
    #[doc(hidden)]
    fn snapshot(self) -> Result<Snapshot, Error>;

    /// Returns how good it is.
    #[doc(hidden)]
    fn score(&self) -> Option<f64> {
        None
    }
}

impl<S: Save> Save for Scored<S> {
    fn snapshot(self) -> Result<Snapshot, Error> {
        self.0.snapshot()
    }

    fn score(&self) -> Option<f64> {
        Some(self.1)
    }
}

/// What can be loaded: see [`Save`].
pub trait Load {
    /// What was read.
    #[doc(hidden)]
    type Loaded;

    /// Reads this rank's part.
    #[doc(hidden)]
    fn read(&self, set: &Set) -> Result<Self::Loaded, Error>;

    /// Takes over what was read.
    #[doc(hidden)]
    fn replace(self, loaded: Self::Loaded);

    /// Fails if the state of the optimizer could not be saved once it has made a step.
    #[doc(hidden)]
    fn check_savable(&self) -> Result<(), Error>;
}

impl Checkpoints {
    /// Opens a folder, to save sets in it and to load them. Makes it if it does not exist, and takes it over from the
    /// job that has saved there before. All ranks must call this; it blocks until they have.
    ///
    /// All ranks use the same folder: with several hosts it must be on a file system that they share. Two jobs must not
    /// save into one folder at the same time: their sets would mix. The one that called this later has the folder, and
    /// the next save of the other fails.
    ///
    /// # Errors
    /// On all ranks the same: [`Error::Io`] if a rank cannot write into the folder; [`Error::InvalidArgument`] if a
    /// rank does not see it, or if another job saves there that certainly still runs: as a process of rank 0's machine,
    /// on Linux, which has not dropped its `Checkpoints`. Otherwise the errors of [`Group::subgroup`].
    #[track_caller]
    pub fn new(group: &Group, folder: impl Into<PathBuf>) -> Result<Checkpoints, Error> {
        checkpoint::Checkpoints::new(group, folder).map(Checkpoints)
    }

    /// Opens a folder to load sets only, and changes nothing in it: it may be read-only, and another job may save
    /// there. It need not exist. All ranks must call this; it blocks until they have.
    ///
    /// # Errors
    /// The errors of [`Group::subgroup`].
    #[track_caller]
    pub fn read_only(group: &Group, folder: impl Into<PathBuf>) -> Result<Checkpoints, Error> {
        checkpoint::Checkpoints::read_only(group, folder).map(Checkpoints)
    }

    /// Keeps the newest `sets` sets, at least one, and besides them the best of those that were saved with a score: see
    /// [`Scored`]. A save removes others when it is complete. Default: 2
    pub fn keep(self, sets: usize) -> Self {
        Checkpoints(self.0.keep(sets))
    }

    /// Saves a new set. Returns on all ranks when it is complete and on disk.
    ///
    /// Each rank writes what only it has. It writes tensors of 64 KiB or more in part, where all ranks have the same,
    /// and rank 0 writes all else. So the model of a [`FullyShardedParallel`](crate::FullyShardedParallel) is to be
    /// saved as a pair with it: a state alone is taken for the same on all ranks. The ranks compare digests of all
    /// that several of them have: each reads all of its model and optimizer, beside what it writes.
    ///
    /// States that differ between ranks, such as running statistics, must be made equal before, by
    /// [`DataParallel::average_states`](crate::DataParallel::average_states). The ranks may take an hour to write.
    ///
    /// # Errors
    /// On all ranks the same, that of the lowest rank that fails: [`Error::Io`] if a file cannot be written,
    /// because the disk is full for example; [`Error::InvalidArgument`] if the ranks are not at the same epoch and
    /// sample, if their models differ, if they do not share the folder, if it was opened to load only, if another job
    /// has taken it over, which the error names, if a [`Scored`] has another score on some ranks or one that is not
    /// finite, if burn could not load the optimizer's state, or if the optimizer in the state has made no step though
    /// batches were trained: a sharded one was left out.
    /// The sets before are unchanged, and the ranks can save again. The error of a save in the background, which then
    /// was the last one. Otherwise the errors of [`Group::all_gather`]: some ranks may take the set for complete then.
    #[track_caller]
    pub fn save(&mut self, what: impl Save) -> Result<(), Error> {
        let _call = self.0.enter("Checkpoints::save");
        self.wait()?;
        let score = what.score();
        self.0.save(what.snapshot(), score)
    }

    /// As [`save`](Self::save), on another thread: returns at once. First waits for the save before it, so that one is
    /// in flight at most.
    ///
    /// On Linux the thread has the lowest priority: it gets the time that the training leaves, so a save takes longer
    /// where all cores are busy.
    ///
    /// What is saved is the state at this call. The thread holds its tensors until they are written, while the training
    /// makes new ones: at most as many bytes as this rank holds of model and optimizer state.
    ///
    /// # Errors
    /// Those of the save before it, and then this one is not started; [`Error::Config`] with the transport
    /// `mpi-blocking`. [`wait`](Self::wait) or the next call returns those of this one.
    #[track_caller]
    pub fn save_in_background(&mut self, what: impl Save) -> Result<(), Error> {
        let _call = self.0.enter("Checkpoints::save_in_background");
        self.wait()?;
        let score = what.score();
        self.0.save_in_background(what.snapshot(), score)
    }

    /// Waits for a save in the background, if there is one.
    ///
    /// # Errors
    /// Those of [`save`](Self::save).
    #[track_caller]
    pub fn wait(&mut self) -> Result<(), Error> {
        let _call = self.0.enter("Checkpoints::wait");
        self.0.wait()
    }

    /// Compares all that [`save`](Self::save) compares, and writes nothing: what several ranks have of models,
    /// averages, optimizers and learning rates, in every form of training. [`DataParallel::verify`] needs no folder,
    /// and compares one model and its optimizer.
    ///
    /// # Errors
    /// On all ranks the same: [`Error::InvalidArgument`] if anything differs, which it names, or if the ranks are not
    /// at the same epoch and sample. Otherwise the errors of [`Group::all_gather`]. The error of a save in the
    /// background.
    ///
    /// [`DataParallel::verify`]: crate::DataParallel::verify
    #[track_caller]
    pub fn verify(&mut self, what: impl Save) -> Result<(), Error> {
        let _call = self.0.enter("Checkpoints::verify");
        self.0.verify(what.snapshot())
    }

    /// Returns the sets in the folder, by number: what each holds, its position in the data, and its score.
    ///
    /// # Errors
    /// On all ranks [`Error::Io`] if rank 0 cannot read the folder. One that does not exist has no sets. Otherwise the
    /// errors of [`Group::all_gather`]. The error of a save in the background.
    #[track_caller]
    pub fn sets(&mut self) -> Result<Vec<SavedSet>, Error> {
        let _call = self.0.enter("Checkpoints::sets");
        self.0.sets()
    }

    /// Loads the newest set, which rank 0 chooses. Returns false if the folder has none.
    ///
    /// Call it on all ranks, with the state at the start of a training. Any number of ranks can load a set, and a state
    /// with and without a [`ShardedOptimizer`](crate::ShardedOptimizer) or a
    /// [`FullyShardedParallel`](crate::FullyShardedParallel), whichever has saved it. Each rank reads what it needs: of
    /// what is sharded its part. Afterwards all ranks have the same state, bit by bit, as when it was saved.
    ///
    /// # Errors
    /// On all ranks the same, that of the lowest rank that fails, and nothing is changed: [`Error::InvalidArgument`] if
    /// a file of the set is missing, truncated, damaged or of another save, or if it was saved for a model with other
    /// parameters, with another kind of optimizer or scheduler, or with another type of the user's state; [`Error::Io`]
    /// if a file cannot be read. The error names the file and what to do. [`Error::InvalidArgument`] also if burn could
    /// not load the state that the optimizer will have, so that no later set could be saved: parameters of 16 bits with
    /// Adam, for example. [`read_only`](Self::read_only) leaves that out. Otherwise the errors of
    /// [`Group::all_gather`]; some ranks may have loaded then. The error of a save in the background.
    #[track_caller]
    pub fn load<L: Load>(&mut self, into: L) -> Result<bool, Error> {
        let _call = self.0.enter("Checkpoints::load");
        self.load_set(Which::Newest, into)
    }

    /// As [`load`](Self::load), of another set: the best one, or that of a number. Returns false if the folder has no
    /// set, or no set with a score if the best is wanted.
    ///
    /// A save numbers its set after the newest one, whichever was loaded. To go on from an older set as the newest,
    /// remove the folders of those after it, or save into another folder.
    ///
    /// # Errors
    /// Those of [`load`](Self::load); [`Error::InvalidArgument`] on all ranks if there is no set of this number: it
    /// lists those that there are.
    #[track_caller]
    pub fn load_set<L: Load>(&mut self, which: impl Into<Which>, into: L) -> Result<bool, Error> {
        let _call = self.0.enter("Checkpoints::load_set");
        self.wait()?;
        self.0.check_savable(|| into.check_savable())?;
        let Some(loaded) = self.0.load(which.into(), |set| into.read(set))? else { return Ok(false) };
        into.replace(loaded);
        Ok(true)
    }
}

/// The parts that a rank has of parameters.
pub(super) type OwnParts = HashMap<ParamId, OwnPart>;

/// Passes the bytes of these elements of a tensor on.
fn read<B: Backend, K: Kind<B>, const D: usize>(
    tensor: Tensor<B, D, K>,
    range: Range<usize>,
    sink: Sink<'_>,
) -> Result<(), Error> {
    let len = tensor.shape().num_elements();
    let flat: Tensor<B, 1, K> = tensor.reshape([len]);
    let flat = if range.len() == len { flat } else { flat.slice(range) };
    let (source, _) = Source::read::<B, K>("reading a tensor to save it", flat.into_primitive())?;
    sink(source.bytes())
}

/// The element types that can be saved, and in which form. Bools are saved as bytes.
const TYPES: [(DType, Dtype); 14] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::Flex32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::U64, Dtype::U64),
    (DType::U32, Dtype::U32),
    (DType::U16, Dtype::U16),
    (DType::U8, Dtype::U8),
    (DType::Bool(BoolStore::Native), Dtype::BOOL),
];

/// The element type in which elements of this type are saved.
pub(super) fn stored(name: &str, dtype: DType) -> Result<Dtype, Error> {
    let dtype = if dtype.is_bool() { DType::Bool(BoolStore::Native) } else { dtype };
    let found = TYPES.into_iter().find(|(own, _)| *own == dtype).map(|(_, stored)| stored);
    found.ok_or_else(|| Error::argument("checkpoint", format!("`{name}` has elements of {dtype:?}, which no file has")))
}

/// The element type of saved elements in host memory.
pub(super) fn loaded(dtype: Dtype) -> Option<DType> {
    TYPES.into_iter().find(|(_, stored)| *stored == dtype).map(|(own, _)| own)
}
