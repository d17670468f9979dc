//! The state of a sharded optimizer in a set.
//!
//! It has the names and the shapes of the state of an optimizer that is not sharded, so either loads what the other has
//! saved. Of what several ranks hold, each writes a part.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ShardedOptimizer;
use crate::train::checkpoint::{Load, OwnParts, OwnState, Save, has_states};
use crate::train::training_state::TrainingState;
use bonfire_core::Error;
use bonfire_train::checkpoint::{OwnPart, SAVING, Set, Snapshot};

impl ShardedOptimizer {
    /// Returns what this rank has of the optimizer's state.
    fn own_state(&self) -> OwnState {
        let parameters = self.of.parameters.iter().enumerate();
        let slice = |(position, parameter): (usize, &crate::train::model::Parameter)| {
            let range = self.of.layout.range(position);
            (parameter.id, OwnPart::slice(parameter.shape.as_slice(), range, self.of.groups.replica()))
        };
        OwnState {
            model: OwnParts::new(),
            optimizer: parameters.map(slice).collect(),
            sharding: Some(self.of.groups.sharding("slices")),
        }
    }
}

impl<M, U> Save for (&TrainingState<M, U>, &ShardedOptimizer)
where
    M: Module + 'static,
    U: Serialize + DeserializeOwned + Clone,
{
    fn snapshot(self) -> Result<Snapshot, Error> {
        let (state, optimizer) = self;
        if let Some(error) = optimizer.of.groups.main.failure() {
            return Err(error);
        }
        if has_states(&state.optimizer)? {
            let reason = "the optimizer in the state has states of its own, which the sharded one replaces; load into \
                          the pair, and train with the sharded optimizer only";
            return Err(Error::argument(SAVING, reason));
        }
        state.snapshot_of(&optimizer.optimizer, optimizer.own_state(), Box::new(|_| Ok(())))
    }
}

impl<M, U> Load for (&mut TrainingState<M, U>, &mut ShardedOptimizer)
where
    M: Module + 'static,
    U: Serialize + DeserializeOwned + Clone,
{
    type Loaded = (TrainingState<M, U>, ModuleOptimizer);

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let (state, sharded) = self;
        let mut loaded = state.read_of(set, &sharded.optimizer, &sharded.own_state())?;
        let optimizer = std::mem::replace(&mut loaded.optimizer, state.optimizer.clone());
        Ok((loaded, optimizer))
    }

    fn replace(self, (loaded, optimizer): Self::Loaded) {
        let (state, sharded) = self;
        (*state, sharded.optimizer) = (loaded, optimizer);
        sharded.replicas.steps.restart();
    }

    fn check_savable(&self) -> Result<(), Error> {
        self.0.check_optimizer()
    }
}
