//! A fully sharded training in a set.
//!
//! It has the names and the shapes of whole parameters and of the optimizer's state for them, so a training of any
//! form, and on any number of ranks, loads what another has saved.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;

use super::FullyShardedParallel;
use crate::train::checkpoint::{Load, OwnParts, Save, check_savable};
use crate::train::training_state::{AnyState, Of};
use bonfire_core::Error;
use bonfire_train::checkpoint::{LOADING, OwnPart, SAVING, Set, Snapshot};

impl<B: AutodiffBackend> FullyShardedParallel<B> {
    /// Returns where this rank's parts in a model are, which must be the one in training.
    fn places<M: AutodiffModule<B>>(&self, operation: &str, model: &M) -> Result<OwnParts, Error> {
        self.own_parts(operation, &self.in_model(model))?;
        let groups = &self.of.groups;
        if let Some(error) = groups.main.failure() {
            return Err(error);
        }
        let replicas = groups.replica();
        let parts = self.parameters.iter().enumerate().map(|(position, parameter)| {
            let (whole, layout) = (parameter.shape.as_slice(), &self.of.layout);
            (parameter.id, OwnPart::new(whole, layout.shape(position), layout.rank, replicas))
        });
        Ok(parts.collect())
    }
}

impl<T: AnyState> Save for (&T, &FullyShardedParallel<T::Backend>) {
    fn snapshot(self) -> Result<Snapshot, Error> {
        let (state, parallel) = self;
        let places = parallel.places(SAVING, &state.state().model)?;
        let sharding = parallel.of.groups.sharding("parts");
        state.state().snapshot_of(places, state.stepped_record(), Some(sharding))
    }
}

impl<T: AnyState> Load for (&mut T, &FullyShardedParallel<T::Backend>) {
    type Loaded = Of<T>;

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let (state, parallel) = (self.0.state(), self.1);
        state.read_of(set, &parallel.places(LOADING, &state.model)?)
    }

    fn replace(self, loaded: Self::Loaded) {
        *self.0.state_mut() = loaded;
    }

    fn check_savable(&self) -> Result<(), Error> {
        check_savable(self.0.state().optimizer.clone(), &self.0.state().model)
    }
}
