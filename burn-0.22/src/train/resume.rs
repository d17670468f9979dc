//! Giving all ranks the state of one: at the start, and after a loss of ranks.

use burn::module::Module;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::batch_norm::give_ranks;
use super::checkpoint::{Load, Save};
use super::data_parallel::DataParallel;
use super::training_state::TrainingState;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};
use bonfire_train::agree::{all_or_none, broadcast_value, furthest};
use bonfire_train::checkpoint::{from_bytes, to_bytes};
use bonfire_train::shards::Cut;
use bonfire_train::step::Groups;

impl<M: Module + 'static, U: Serialize + DeserializeOwned + Clone> TrainingState<M, U> {
    /// Returns the state as bytes, for [`DataParallel::resume`](crate::DataParallel::resume): a checkpoint in memory.
    /// Since all ranks have the same state, one rank's is enough. That rank holds all of it once more: use
    /// [`Checkpoints`](crate::Checkpoints) unless one file is what you need.
    ///
    /// Write them to a file that is complete or absent: under another name first, then synced to disk and renamed.
    ///
    /// # Errors
    /// Those of [`Checkpoints::save`](crate::Checkpoints::save) that have to do with the state.
    pub fn save(&self) -> Result<Vec<u8>, Error> {
        to_bytes(self.snapshot()?)
    }

    /// Replaces the state by a saved one. After an error it is unchanged.
    fn load(&mut self, bytes: Vec<u8>) -> Result<(), Error> {
        let loaded = Load::read(&&mut *self, &from_bytes(bytes)?)?;
        Load::replace(self, loaded);
        Ok(())
    }
}

impl DataParallel {
    /// Gives all ranks a saved state, which rank 0 reads: the bytes that
    /// [`TrainingState::save`](crate::TrainingState::save) returned.
    ///
    /// Call it on all ranks, with the state at the start of a training. Only rank 0 calls `read`, so files that other
    /// ranks may have, older ones for example, do not matter. Any number of ranks can resume. Afterwards the position
    /// in the data is that of the saved state, and all ranks have the same state, bit by bit, also in what depends on
    /// one rank, such as running statistics. `read` must return within the [deadline](crate::Group::deadline), because
    /// the other ranks wait for it.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group, TrainingState};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::AdamConfig;
    /// # use burn::tensor::Device;
    /// # let device = Device::flex().autodiff();
    /// # let file = std::env::temp_dir().join(format!("bonfire-resume-0.22-{}", std::process::id()));
    /// # let group = || Ok::<_, bonfire::Error>(Group::threads(1)?.remove(0));
    /// # let linear = LinearConfig::new(2, 1).init(&device);
    /// # let (model, ddp) = DataParallel::new(group()?, linear.clone())?;
    /// # let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    /// # std::fs::write(&file, state.save()?).expect("a file");
    /// let (model, mut ddp) = DataParallel::new(group()?, linear)?;
    /// let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    /// ddp.resume(&mut state, || std::fs::read(&file))?;
    /// # std::fs::remove_file(&file).expect("the file");
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// On all ranks: [`Error::Io`] if `read` fails; [`Error::InvalidArgument`] if the bytes are not a saved state, were
    /// damaged, or belong to a model with other parameters or to another kind of optimizer or scheduler. Otherwise the
    /// errors of [`Group::broadcast`](crate::Group::broadcast); some ranks may have resumed then. A program that goes
    /// on with [`shrink`](Self::shrink) resumes again only if the state is still that of the start.
    #[track_caller]
    pub fn resume<M: Module + 'static, U: Serialize + DeserializeOwned + Clone>(
        &mut self,
        state: &mut TrainingState<M, U>,
        read: impl FnOnce() -> std::io::Result<Vec<u8>>,
    ) -> Result<(), Error> {
        let _call = self.group().enter("DataParallel::resume");
        let own = match self.group().rank() {
            0 => read().map_err(|error| Error::io("reading a saved training", error)),
            _ => Ok(Vec::new()),
        };
        let bytes = all_or_none(self.group(), own)?;
        self.take_over(state, bytes, 0)
    }

    /// Continues without lost ranks: makes a group of the remaining ranks ([`Group::shrink`](crate::Group::shrink)) and
    /// brings all of them to the same state.
    ///
    /// Ranks may have failed in the same step or in two consecutive ones, so some ranks may be one step ahead. All
    /// ranks take over the state of the lowest rank among those that are furthest, by epoch and samples: all that
    /// [`TrainingState`](crate::TrainingState) holds. Ranks that are lost during this call are left out too.
    ///
    /// Call it on every remaining rank. The gradients of each successful step must have been applied with
    /// [`TrainingState::step`](crate::TrainingState::step) before anything else was done. Afterwards
    /// [`epoch`](crate::TrainingState::epoch) and [`samples`](crate::TrainingState::samples) are the position in the
    /// data, the same on all ranks. Everything else that holds the old group must be made anew, such as samplers;
    /// layers of the model get the new one. What a program does next must follow from the state alone, since some ranks
    /// may have been further than others. After the last step make one more collective call, such as
    /// [`verify`](Self::verify), and shrink if it fails: otherwise a rank that ends first can leave others a step
    /// behind.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Error, Group, ShardedSampler, TrainingState};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::AdamConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # let device = Device::flex().autodiff();
    /// # let group = Group::threads(1)?.remove(0);
    /// let (model, mut ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init(&device))?;
    /// let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    /// 'training: while state.epoch < 3 {
    ///     // Batches do not depend on the number of ranks, so the ones already used can be skipped.
    ///     let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
    ///     for shard in sampler.epoch(state.epoch)?.after(state.samples) {
    ///         let input = Tensor::<2>::ones([shard.len(), 2], &device);
    ///         match ddp.run(&state.model, [input], |model, input| (model.forward(input).mean(), shard.len())) {
    ///             Ok(gradients) => state.step(gradients, 16),
    ///             Err(Error::PeerLost { .. } | Error::Disconnected { .. }) => {
    ///                 ddp.shrink(&mut state)?;
    ///                 continue 'training;
    ///             }
    ///             Err(error) => return Err(error),
    ///         }
    ///     }
    ///     state.next_epoch();
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Group::shrink`](crate::Group::shrink) and of [`Group::broadcast`](crate::Group::broadcast), and
    /// on all ranks those of [`TrainingState::save`](crate::TrainingState::save). After an error each rank has its old
    /// state or that of the furthest rank, as a whole.
    #[track_caller]
    pub fn shrink<M: Module + 'static, U: Serialize + DeserializeOwned + Clone>(
        &mut self,
        state: &mut TrainingState<M, U>,
    ) -> Result<(), Error> {
        let _call = self.group().enter("DataParallel::shrink");
        // A step that fails may have completed on some ranks, which are one step ahead then and fail in the next one.
        // Batches do not depend on the world size, so the remaining ranks end where all would have ended, up to
        // rounding. All take over the state of one, also those that are not behind: only a comparison of everything
        // would find what else differs.
        loop {
            let group = self.group().shrink()?;
            match self.continue_in(group, state) {
                Err(Error::PeerLost { .. } | Error::Disconnected { .. } | Error::Left { .. }) => {}
                result => return result,
            }
        }
    }

    /// As [`shrink`](Self::shrink), for a program with several models: continues in the group that another of its
    /// `DataParallel`s has shrunk to. Call `shrink` for one model, and this for each of the others, on all ranks in the
    /// same order, with [`group`](Self::group) of the first:
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group, TrainingState};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::SgdConfig;
    /// # let linear = || LinearConfig::new(2, 2).init(&burn::tensor::Device::flex().autodiff());
    /// # let group = Group::threads(1)?.remove(0);
    /// # let ((critic, mut judging), (generator, mut making)) =
    /// #     (DataParallel::new(group.clone(), linear())?, DataParallel::new(group, linear())?);
    /// # let mut critic = TrainingState::new(critic, SgdConfig::new().init(), 0.1, ());
    /// # let mut generator = TrainingState::new(generator, SgdConfig::new().init(), 0.1, ());
    /// judging.shrink(&mut critic)?;
    /// making.shrink_to(judging.group(), &mut generator)?;
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// Each state is that of a rank which is furthest with this model, so their positions in the data may differ: a
    /// rank may have failed between two models' steps of one batch. The program goes on with the one that is behind.
    ///
    /// # Errors
    /// Those of [`shrink`](Self::shrink). If another rank is lost meanwhile, call both again.
    #[track_caller]
    pub fn shrink_to<M: Module + 'static, U: Serialize + DeserializeOwned + Clone>(
        &mut self,
        group: &Group,
        state: &mut TrainingState<M, U>,
    ) -> Result<(), Error> {
        let _call = group.enter("DataParallel::shrink_to");
        self.continue_in(group.clone(), state)
    }

    /// Continues in another group, and brings all ranks to the state of the lowest rank among those that are furthest.
    fn continue_in<M: Module + 'static, U: Serialize + DeserializeOwned + Clone>(
        &mut self,
        group: Group,
        state: &mut TrainingState<M, U>,
    ) -> Result<(), Error> {
        // Lanes, and memory for buckets, are those of the old group.
        self.replicas.steps = self.replicas.steps.over(Groups::replicas(group)?, Cut::Rows);
        self.catch_up(state)
    }

    /// Brings all ranks to the state of the lowest rank among those that are furthest.
    fn catch_up<M: Module + 'static, U: Serialize + DeserializeOwned + Clone>(
        &mut self,
        state: &mut TrainingState<M, U>,
    ) -> Result<(), Error> {
        let leader = furthest(self.group(), [state.epoch as u64, state.samples as u64])?;
        let own = if self.group().rank() == leader { state.save() } else { Ok(Vec::new()) };
        let bytes = all_or_none(self.group(), own)?;
        self.take_over(state, bytes, leader)
    }

    /// Gives all ranks the state that `root` has as bytes. After an error every rank has its old state or the new one,
    /// as a whole.
    fn take_over<M: Module + 'static, U: Serialize + DeserializeOwned + Clone>(
        &mut self,
        state: &mut TrainingState<M, U>,
        bytes: Vec<u8>,
        root: usize,
    ) -> Result<(), Error> {
        let bytes: Vec<u8> = broadcast_value(self.group(), &bytes, root)?;
        // A state that is loaded has new tensors. Nothing is replaced unless all ranks have loaded theirs.
        let mut loaded = state.clone();
        all_or_none(self.group(), loaded.load(bytes))?;
        *state = loaded;
        state.model = give_ranks(state.model.clone(), self.group());
        self.replicas.unused.end();
        self.replicas.steps.restart();
        Ok(())
    }
}
