//! A fully sharded training in a set.
//!
//! It has the names and the shapes of whole parameters and of the optimizer's state for them, so a training of any
//! form, and on any number of ranks, loads what another has saved.

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;

use super::FullyShardedParallel;
use crate::train::checkpoint::{LOADING, Load, OwnPart, OwnParts, SAVING, Save, Set, Snapshot};
use crate::train::training_state::TrainingState;
use bonfire_core::Error;

impl<B: AutodiffBackend> FullyShardedParallel<B> {
    /// Returns this rank's parts in a model, which must be the one in training.
    fn own_parts<M: AutodiffModule<B>>(&self, operation: &'static str, model: &M) -> Result<OwnParts, Error> {
        self.part_values(operation, model)?;
        let Some(engine) = &self.engine else { return Err(self.failure()) };
        let replicas = (engine.scatterer.replicas.world_size(), engine.scatterer.replicas.rank());
        let parts = self.parameters.iter().zip(&self.layout.parts).map(|(parameter, part)| {
            let shapes = (parameter.shape.as_slice(), part.shape.as_slice());
            (parameter.id, OwnPart::new(shapes.0, shapes.1, self.layout.rank, replicas))
        });
        Ok(parts.collect())
    }
}

impl<B, M, O, S, U> Save for (&TrainingState<B, M, O, S, U>, &FullyShardedParallel<B>)
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    O::Record: 'static,
    S: LrScheduler,
    U: Record<B> + Clone,
{
    fn snapshot(self) -> Result<Snapshot, Error> {
        let (state, parallel) = self;
        state.snapshot_of(parallel.own_parts(SAVING, &state.model)?)
    }
}

impl<B, M, O, S, U> Load for (&mut TrainingState<B, M, O, S, U>, &FullyShardedParallel<B>)
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    S: LrScheduler,
    U: Record<B> + Clone,
{
    type Loaded = TrainingState<B, M, O, S, U>;

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let (state, parallel) = self;
        state.read_of(set, &parallel.own_parts(LOADING, &state.model)?)
    }

    fn replace(self, loaded: Self::Loaded) {
        *self.0 = loaded;
    }
}
