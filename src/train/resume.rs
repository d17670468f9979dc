//! Giving all ranks the state of one.

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;
use serde::{Deserialize, Serialize};

use super::agree::{all_or_none, broadcast_parameters, broadcast_value, rebuild};
use super::data_parallel::{DataParallel, describe_parameters};
use super::record::recordable;
use super::training_state::{Rest, TrainingState};
use bonfire_core::{Error, Group};

impl<B: AutodiffBackend> DataParallel<B> {
    /// Gives all ranks a saved state, which rank 0 reads: the bytes that [`TrainingState::save`] returned.
    ///
    /// Call it on all ranks, with the state at the start of a training. Only rank 0 calls `read`, so files that other
    /// ranks may have, older ones for example, do not matter. Any number of ranks can resume. Afterwards the position
    /// in the data is that of the saved state, and all ranks have the same state, bit by bit, also in what depends on
    /// one rank, such as running statistics. `read` must return within the [deadline](Group::deadline), because the
    /// other ranks wait for it.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group, TrainingState};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::AdamConfig;
    /// # let device = Default::default();
    /// # let file = std::env::temp_dir().join(format!("bonfire-resume-{}", std::process::id()));
    /// # let group = || Ok::<_, bonfire::Error>(Group::threads(1)?.remove(0));
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (model, ddp) = DataParallel::new(group()?, linear.clone())?;
    /// # let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    /// # state.next_epoch();
    /// # std::fs::write(&file, state.save()?).expect("a file");
    /// let (model, mut ddp) = DataParallel::new(group()?, linear)?;
    /// let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    /// ddp.resume(&mut state, || std::fs::read(&file))?;
    /// assert_eq!(state.epoch, 1);
    /// # std::fs::remove_file(&file).expect("the file");
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// On all ranks: [`Error::Io`] if `read` fails; [`Error::InvalidArgument`] if the bytes are not a saved state, were
    /// damaged, or belong to a model with other parameters; [`Error::Io`] if burn cannot load them, into another kind
    /// of optimizer for example. Otherwise the errors of [`Group::broadcast`]; some ranks may have resumed then. A
    /// program that goes on with [`shrink`](Self::shrink) resumes again only if the state is still that of the start.
    #[track_caller]
    pub fn resume<M, O, S, U>(
        &mut self,
        state: &mut TrainingState<B, M, O, S, U>,
        read: impl FnOnce() -> std::io::Result<Vec<u8>>,
    ) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
        U: Record<B> + Clone,
    {
        let own = if self.reducer.group.rank() == 0 {
            read().map_err(|e| Error::io("reading a saved training", e)).and_then(|bytes| state.load(&bytes))
        } else {
            Ok(())
        };
        all_or_none(&self.reducer.group, own)?;
        self.take_over(state, 0)
    }

    /// Gives all ranks the state of `root`. After an error every rank has its old state or the new one, as a whole.
    pub(super) fn take_over<M, O, S, U>(
        &mut self,
        state: &mut TrainingState<B, M, O, S, U>,
        root: usize,
    ) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
        S: LrScheduler,
        U: Record<B> + Clone,
    {
        let is_root = self.reducer.group.rank() == root;
        let rest = if is_root {
            let parameters = describe_parameters::<B, M>(&state.model).1;
            // Parameters travel exactly. The optimizer has state for those that it trains, an average for all.
            let recorded = parameters.iter().filter(|parameter| parameter.trained || state.average.is_some());
            recordable(recorded).and_then(|()| state.record_rest())
        } else {
            Ok(Rest::default())
        };
        let (model, rest) = share(&self.reducer.group, state.model.clone(), rest, root)?;
        let taken = if is_root { Ok(None) } else { state.with_rest(model, rest).map(Some) };
        if let Some(taken) = all_or_none(&self.reducer.group, taken)? {
            *state = taken;
        }
        // Of the root, too: its ids have changed if it has just loaded the state.
        self.describe(&state.model);
        self.unused.end();
        // The same on all ranks, one of which may have been behind; and the next two steps compare the models.
        self.steps = 0;
        Ok(())
    }
}

/// Returns the model with `root`'s parameters and their ids, and `root`'s record. Optimizers find their state by ids.
/// The returned model shares no running states with the one that was passed.
pub(super) fn share<B, M, R>(group: &Group, model: M, record: Result<R, Error>, root: usize) -> Result<(M, R), Error>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    R: Serialize + for<'de> Deserialize<'de>,
{
    let record = all_or_none(group, record)?;
    let record = broadcast_value(group, &record, root)?;
    let (model, mut identities) = rebuild(model);
    let mut ids = identities.ids();
    group.broadcast(&mut ids, root)?;
    identities.set_ids(&ids);
    Ok((broadcast_parameters(group, model, identities, root)?, record))
}
