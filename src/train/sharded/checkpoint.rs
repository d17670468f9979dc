//! The state of a sharded optimizer in a set.
//!
//! It has the names and the shapes of the state of an optimizer that is not sharded, so either loads what the other has
//! saved. Of what several ranks hold, each writes a part.

use std::ops::Range;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::SimpleOptimizer;
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;

use super::ShardedOptimizer;
use crate::train::checkpoint::{
    Load, NOT_ELEMENTWISE, OwnParts, Save, Split, TensorBytes, check_state, encode, has_states, join, loaded, split,
    state_name, stored,
};
use crate::train::model::Parameter;
use crate::train::record::{load_compact, record_compact};
use crate::train::training_state::{AnyState, Of};
use bonfire_core::{Error, partition};
use bonfire_train::checkpoint::{Parts, SAVING, Set, Sink, Snapshot, argument};

/// The backend of a state without gradients.
type Inner<T> = <<T as AnyState>::Backend as AutodiffBackend>::InnerBackend;

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
        for (position, (parameter, state)) in self.of.parameters.iter().zip(&self.states).enumerate() {
            if let Some(state) = state {
                let own = self.of.layout.range(position);
                let (_, Split { tensors, .. }) = split_slice::<B, _>(state.clone(), own.len(), &parameter.path)?;
                bytes += tensors.len() * own.len() * parameter.element.size();
            }
        }
        Ok(bytes)
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

impl<T, O> Save for (&T, &ShardedOptimizer<O, T::Model, T::Backend>)
where
    T: AnyState,
    O: SimpleOptimizer<Inner<T>> + 'static,
{
    fn snapshot(self) -> Result<Snapshot, Error> {
        let (state, optimizer) = self;
        let groups = &optimizer.of.groups;
        if let Some(error) = groups.main.failure() {
            return Err(error);
        }
        // Ranks that hold the same part have the same index in their blocks.
        let replicas = (groups.replicas.world_size(), groups.replicas.rank());
        let states = optimizer.of.parameters.iter().zip(&optimizer.states).enumerate();
        let slices = states.filter_map(|(position, (parameter, state))| {
            Some((optimizer.of.layout.range(position), parameter.clone(), state.clone()?))
        });
        let slices: Vec<_> = slices.collect();
        let collect = move |parts: &mut Parts| {
            let add = |(own, parameter, state)| add_slice(state, own, &parameter, replicas, parts);
            slices.into_iter().try_for_each(add)
        };
        state.state().snapshot_with(&OwnParts::new(), Box::new(collect))
    }
}

impl<T, O> Load for (&mut T, &mut ShardedOptimizer<O, T::Model, T::Backend>)
where
    T: AnyState,
    O: SimpleOptimizer<Inner<T>> + 'static,
{
    type Loaded = (Of<T>, Vec<Option<O::State<1>>>);

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let (state, optimizer) = self;
        let loaded = state.state().read_without_optimizer(set, &OwnParts::new())?;
        has_states(set)?;
        let parameters = optimizer.of.parameters.iter().enumerate();
        let states = parameters
            .map(|(position, parameter)| optimizer.read_slice(set, parameter, optimizer.of.layout.range(position)));
        Ok((loaded, states.collect::<Result<_, _>>()?))
    }

    fn replace(self, (loaded, states): Self::Loaded) {
        let (state, optimizer) = self;
        *state.state_mut() = loaded;
        optimizer.states = states;
        optimizer.replicas.steps.restart();
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
        let dtype = stored(&name, tensor.dtype)?;
        parts.add(name, dtype, parameter.shape.as_slice(), range.clone(), read)?;
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
