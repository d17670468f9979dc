//! The state of a sharded optimizer in a set.
//!
//! It has the names and the shapes of the state of an optimizer that is not sharded, so either loads what the other has
//! saved. Of what several ranks hold, each writes a part.

use std::ops::Range;
use std::sync::Arc;

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::{Optimizer, SimpleOptimizer};
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;

use super::ShardedOptimizer;
use crate::train::agree::Parameter;
use crate::train::checkpoint::{
    Load, NOT_ELEMENTWISE, OwnParts, Parts, SAVING, Save, Set, Sink, Snapshot, Split, TensorBytes, argument,
    check_state, encode, has_states, join, loaded, split, state_name,
};
use crate::train::record::{load_compact, record_compact};
use crate::train::training_state::TrainingState;
use bonfire_core::{Error, partition};

impl<O, M, B> ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    /// Returns the size of this rank's state in bytes: of its tensors, with elements of the parameters' types. It
    /// records the whole state to count them, so do not call it in every step.
    ///
    /// # Errors
    /// [`Error::Io`] if the state cannot be recorded, [`Error::Broken`] if it is not element-wise.
    pub fn state_bytes(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        for ((own, parameter), state) in self.own_slices().into_iter().zip(&self.shards.parameters).zip(&self.states) {
            if let Some(state) = state {
                let (_, Split { tensors, .. }) = split_slice::<B, _>(state.clone(), own.len(), &parameter.path)?;
                bytes += tensors.len() * own.len() * parameter.element.size();
            }
        }
        Ok(bytes)
    }

    /// Returns this rank's slice of each parameter, by position.
    fn own_slices(&self) -> Vec<Range<usize>> {
        let mut own = vec![0..0; self.shards.parameters.len()];
        for span in self.shards.layout.iter().flat_map(|layout| &layout.spans) {
            own[span.position] = span.slice();
        }
        own
    }

    /// Reads the state for this rank's slice of a parameter.
    fn read_slice(&self, set: &Set, parameter: &Parameter<B>, own: Range<usize>) -> Result<Option<O::State<1>>, Error> {
        let invalid = |reason: &str| argument(format!("the optimizer's state for `{}`: {reason}", parameter.path));
        let Some(skeleton) = set.value(&state_name(&parameter.path, None))?.filter(|_| !own.is_empty()) else {
            return Ok(None);
        };
        let tensor = |field: &str| {
            let name = state_name(&parameter.path, Some(field));
            let tensor = set.tensor(&name).ok_or_else(|| invalid("a part of it is missing"))?;
            if tensor.shape != parameter.shape.as_slice() {
                return Err(invalid(NOT_ELEMENTWISE));
            }
            let dtype = loaded(tensor.dtype).ok_or_else(|| invalid(NOT_ELEMENTWISE))?;
            Ok(TensorBytes { bytes: set.read(&name, own.clone())?, dtype, shape: vec![own.len()] })
        };
        let state = join(&skeleton, tensor, invalid)?;
        let record = encode(&state).map_err(invalid)?;
        load_compact::<B::InnerBackend, _>(record, &parameter.device).map(Some)
    }
}

impl<O, M, B, P, S, U> Save for (&TrainingState<B, M, P, S, U>, &ShardedOptimizer<O, M, B>)
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
    P: Optimizer<M, B>,
    S: LrScheduler,
    U: Record<B> + Clone,
{
    fn snapshot(self) -> Result<Snapshot, Error> {
        let (state, optimizer) = self;
        if let Some(error) = &optimizer.failure {
            return Err(error.clone());
        }
        // Ranks that hold the same part have the same index in their blocks.
        let replicas = (optimizer.shards.replica_group.world_size(), optimizer.shards.replica_group.rank());
        let slices = optimizer.own_slices().into_iter().zip(&optimizer.shards.parameters).zip(&optimizer.states);
        let slices = slices.filter_map(|((own, parameter), state)| Some((own, parameter.clone(), state.clone()?)));
        let slices: Vec<_> = slices.collect();
        let collect = move |parts: &mut Parts| {
            let add = |(own, parameter, state)| add_slice(state, own, &parameter, replicas, parts);
            slices.into_iter().try_for_each(add)
        };
        state.snapshot_with(&OwnParts::new(), Box::new(collect))
    }
}

impl<O, M, B, P, S, U> Load for (&mut TrainingState<B, M, P, S, U>, &mut ShardedOptimizer<O, M, B>)
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
    P: Optimizer<M, B>,
    S: LrScheduler,
    U: Record<B> + Clone,
{
    type Loaded = (TrainingState<B, M, P, S, U>, Vec<Option<O::State<1>>>);

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let (state, optimizer) = self;
        let loaded = state.read_without_optimizer(set, &OwnParts::new())?;
        has_states(set)?;
        let slices = optimizer.own_slices().into_iter().zip(&optimizer.shards.parameters);
        let states = slices.map(|(own, parameter)| optimizer.read_slice(set, parameter, own));
        Ok((loaded, states.collect::<Result<_, _>>()?))
    }

    fn replace(self, (loaded, states): Self::Loaded) {
        let (state, optimizer) = self;
        *state = loaded;
        // As after the start: the next two steps compare the models.
        (optimizer.states, optimizer.steps) = (states, 0);
    }
}

/// Adds a part of the state of a slice, which several ranks hold.
fn add_slice<B: AutodiffBackend, R: Record<B::InnerBackend>>(
    state: R,
    own: Range<usize>,
    parameter: &Parameter<B>,
    (replicas, replica): (usize, usize),
    parts: &mut Parts,
) -> Result<(), Error> {
    let (record, Split { skeleton, tensors }) = split_slice::<B, _>(state, own.len(), &parameter.path)?;
    check_state(parameter, &tensors)?;
    let part = partition(own.len(), replicas, replica);
    let range = own.start + part.start..own.start + part.end;
    // One rank holds the first element.
    if range.start == 0 && !range.is_empty() {
        parts.add_own_value(state_name(&parameter.path, None), skeleton)?;
    }
    let record = Arc::new(record);
    for tensor in tensors {
        let (record, width) = (record.clone(), tensor.dtype.size());
        let start = tensor.bytes.start + part.start * width;
        let bytes = start..start + part.len() * width;
        let name = state_name(&parameter.path, Some(&tensor.path));
        let read = Box::new(move |sink: Sink<'_>| sink(&record[bytes]));
        parts.add(name, tensor.dtype, parameter.shape.as_slice(), range.clone(), read)?;
    }
    Ok(())
}

/// Records the state of a slice of `len` elements, and takes the record apart.
fn split_slice<B: AutodiffBackend, R: Record<B::InnerBackend>>(
    state: R,
    len: usize,
    path: &str,
) -> Result<(Vec<u8>, Split), Error> {
    let broken = |reason: &str| Error::broken(SAVING, format!("the optimizer's state for `{path}`: {reason}"));
    let record = record_compact::<B::InnerBackend, _>(state)?;
    let split = split(&record).map_err(broken)?;
    match split.tensors.iter().all(|tensor| tensor.shape == [len]) {
        true => Ok((record, split)),
        false => Err(broken(NOT_ELEMENTWISE)),
    }
}
