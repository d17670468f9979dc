//! Continuing a training without lost ranks.
//!
//! A gradient exchange that fails may have completed on some ranks. They are one step ahead then, and fail in the next
//! exchange. Batches do not depend on the world size, so the remaining ranks end where all ranks would have ended, up
//! to rounding.
//!
//! All ranks take over the state of one of them, also those that are not behind: only a comparison of everything would
//! find what else differs between them.

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;

use super::agree::all_gather_values;
use super::data_parallel::DataParallel;
use super::training_state::TrainingState;
use bonfire_core::Error;

impl<B: AutodiffBackend> DataParallel<B> {
    /// Continues without lost ranks: makes a group of the remaining ranks ([`Group::shrink`](crate::Group::shrink)) and
    /// brings all of them to the same state.
    ///
    /// Ranks may have failed in the same call of [`sync`](Self::sync) or in two consecutive calls, so some ranks may be
    /// one step ahead. All ranks take over the state of the lowest rank among those that are furthest, by epoch and
    /// batch: model, parameter ids, optimizer, scheduler and all else that [`TrainingState`] holds. Ranks that are lost
    /// during this call are left out too.
    ///
    /// Call it on every remaining rank. The gradients of each successful `sync` must have been applied with
    /// [`TrainingState::step`] before anything else was done. Afterwards
    /// [`epoch`](TrainingState::epoch) and [`batch`](TrainingState::batch) are the position in the data, the same on
    /// all ranks. Everything else that holds the old group must be made anew: samplers, and layers such as
    /// [`SyncBatchNorm`](crate::SyncBatchNorm), by loading the model's record into a model for the new group.
    /// What a program does next must follow from the state alone, since some ranks may have been further than others.
    /// After the last step make one more collective call, such as [`verify`](Self::verify), and shrink if it fails:
    /// otherwise a rank that ends first can leave others a step behind.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Error, Group, ShardedSampler, TrainingState};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{AdamConfig, GradientsParams};
    /// # use burn::tensor::Tensor;
    /// # type B = Autodiff<Flex>;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// let (model, mut ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
    /// let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    /// 'training: while state.epoch < 3 {
    ///     // Batches do not depend on the number of ranks, so the ones already used can be skipped.
    ///     let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
    ///     for shard in sampler.epoch(state.epoch).skip(state.batch) {
    ///         let loss = state.model.forward(Tensor::<B, 2>::ones([shard.len(), 2], &device)).mean();
    ///         let grads = GradientsParams::from_grads(loss.backward(), &state.model);
    ///         match ddp.sync(&state.model, grads, shard.len()) {
    ///             Ok(grads) => state.step(grads),
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
    /// The errors of [`Group::shrink`](crate::Group::shrink) and of [`Group::broadcast`](crate::Group::broadcast). On
    /// all ranks: [`Error::InvalidArgument`] if burn cannot restore the state exactly, as
    /// [`TrainingState::save`] describes it (here frozen parameters may have any float type, unless there is an
    /// average); [`Error::Io`] if burn cannot record or load it. After an error each rank has its old state or that of
    /// the furthest rank, as a whole.
    ///
    /// # Panics
    /// If a state cannot be read from its device.
    pub fn shrink<M, O, S, U>(&mut self, state: &mut TrainingState<B, M, O, S, U>) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
        U: Record<B> + Clone,
    {
        loop {
            let group = self.reducer.group.shrink()?;
            // Memory for buckets is in the old group's shared segment, and lanes are made of the old group.
            self.reducer = self.reducer.over(group);
            let rank = self.reducer.group.rank();
            self.reducer.compressor = self.reducer.compressor.take().map(|compressor| compressor.anew(rank));
            self.overlap = None;
            match self.catch_up(state) {
                Err(Error::PeerLost { .. } | Error::Disconnected { .. } | Error::Left { .. }) => {}
                result => return result,
            }
        }
    }

    /// Brings all ranks to the state of the lowest rank among those that are furthest.
    fn catch_up<M, O, S, U>(&mut self, state: &mut TrainingState<B, M, O, S, U>) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
        U: Record<B> + Clone,
    {
        let positions = all_gather_values(&self.reducer.group, [state.epoch as u64, state.batch as u64])?;
        let furthest = positions.iter().max();
        let leader = positions.iter().position(|position| Some(position) == furthest).unwrap_or(0);
        self.take_over(state, leader)
    }
}
