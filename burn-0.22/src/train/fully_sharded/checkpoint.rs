//! A fully sharded training in a set.
//!
//! It has the names and the shapes of whole parameters and of the optimizer's state for them, so a training of any
//! form, and on any number of ranks, loads what another has saved.

use burn::module::Module;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::FullyShardedParallel;
use crate::train::checkpoint::{Load, OwnParts, OwnState, Save};
use crate::train::training_state::TrainingState;
use bonfire_core::Error;
use bonfire_train::checkpoint::{LOADING, OwnPart, SAVING, Set, Snapshot};

impl FullyShardedParallel {
    /// Returns where this rank's parts are in a model, which must be the one in training, and in its optimizer's state.
    fn own_state<M: Module>(&self, operation: &str, model: &M) -> Result<OwnState, Error> {
        self.own_parts(operation, &self.in_model(model))?;
        let groups = &self.of.groups;
        if let Some(error) = groups.main.failure() {
            return Err(error);
        }
        let parts = self.parameters.iter().enumerate().map(|(position, parameter)| {
            let (whole, layout) = (parameter.shape.as_slice(), &self.of.layout);
            (parameter.id, OwnPart::new(whole, layout.shape(position), layout.rank, groups.replica()))
        });
        let parts: OwnParts = parts.collect();
        Ok(OwnState { model: parts.clone(), optimizer: parts, sharding: Some(groups.sharding("parts")) })
    }
}

impl<M, U> Save for (&TrainingState<M, U>, &FullyShardedParallel)
where
    M: Module + 'static,
    U: Serialize + DeserializeOwned + Clone,
{
    fn snapshot(self) -> Result<Snapshot, Error> {
        let (state, parallel) = self;
        let own = parallel.own_state(SAVING, &state.model)?;
        state.snapshot_of(&state.optimizer, own, state.check_stepped())
    }
}

impl<M, U> Load for (&mut TrainingState<M, U>, &FullyShardedParallel)
where
    M: Module + 'static,
    U: Serialize + DeserializeOwned + Clone,
{
    type Loaded = TrainingState<M, U>;

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let (state, parallel) = self;
        state.read_of(set, &state.optimizer, &parallel.own_state(LOADING, &state.model)?)
    }

    fn replace(self, loaded: Self::Loaded) {
        *self.0 = loaded;
    }

    fn check_savable(&self) -> Result<(), Error> {
        self.0.check_optimizer()
    }
}
