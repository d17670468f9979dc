//! The state of a sharded optimizer in a set.
//!
//! It has the names and the shapes of the state of an optimizer that is not sharded, so either loads what the other has
//! saved. Of what several ranks hold, each writes a part.

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::SimpleOptimizer;
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;

use super::{Sharded, ShardedOptimizer};
use crate::train::checkpoint::{
    Load, OPTIMIZER, OwnParts, RecordedTensor, Save, check_savable, check_state, encode, has_states, optimizer_item,
    read_state, split, split_by_id, to_save,
};
use crate::train::record::{load_compact, record_compact};
use crate::train::training_state::{AnyState, Of};
use bonfire_core::Error;
use bonfire_train::checkpoint::{
    Field, Fields, NOT_ELEMENTWISE, OwnPart, Parts, SAVING, Set, Snapshot, argument, state_name,
};

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
                let (_, fields) = split_slice::<B, _>(state.clone(), own.len(), &parameter.path)?;
                let tensors = fields.iter().filter(|(_, field)| matches!(field, Field::Tensor(_))).count();
                bytes += tensors * own.len() * parameter.element.size();
            }
        }
        Ok(bytes)
    }

    /// Returns this rank's part of a parameter.
    fn part(&self, position: usize) -> OwnPart {
        let Sharded { parameters, layout, groups, .. } = &*self.of;
        // Ranks that hold the same part have the same index in their blocks.
        OwnPart::slice(parameters[position].shape.as_slice(), layout.range(position), groups.replica())
    }

    /// Reads the state for this rank's slice of a parameter.
    fn read_slice(&self, set: &Set, position: usize) -> Result<Option<O::State<1>>, Error> {
        let parameter = &self.of.parameters[position];
        if self.of.layout.range(position).is_empty() {
            return Ok(None);
        }
        let Some(state) = read_state(set, &parameter.path, Some(&self.part(position)))? else { return Ok(None) };
        let invalid = |reason| argument(format!("the optimizer's state for `{}`: {reason}", parameter.path));
        let record = encode(&state).map_err(|reason| invalid(reason.to_owned()))?;
        load_compact::<B::InnerBackend, _>(record, &parameter.device)
            .map(Some)
            .map_err(|error| invalid(format!("{error}; load it into the kind of optimizer that was saved")))
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
        let states = optimizer.of.parameters.iter().zip(&optimizer.states).enumerate();
        let slices = states.filter_map(|(position, (parameter, state))| {
            let len = optimizer.of.layout.range(position).len();
            Some((optimizer.part(position), len, parameter.clone(), state.clone()?))
        });
        let (slices, replaced): (Vec<_>, _) = (slices.collect(), state.optimizer_record());
        let collect = move |parts: &mut Parts| {
            check_new(&replaced()?)?;
            slices.into_iter().try_for_each(|(part, len, parameter, state)| {
                let (record, fields) = split_slice::<T::Backend, _>(state, len, &parameter.path)?;
                check_state(&parameter, &fields)?;
                let name = state_name(OPTIMIZER, &parameter.path);
                parts.add_state(&name, Some(&part), to_save(&Arc::new(record), fields))
            })
        };
        let item = optimizer_item::<O>().sharded(groups.sharding("slices"));
        state.state().snapshot_with(&OwnParts::new(), item, Box::new(collect))
    }
}

impl<T, O> Load for (&mut T, &mut ShardedOptimizer<O, T::Model, T::Backend>)
where
    T: AnyState,
    O: SimpleOptimizer<Inner<T>> + 'static,
{
    type Loaded = (Of<T>, Vec<Option<O::State<1>>>);

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let (state, optimizer) = (self.0.state(), &self.1);
        let loaded = state.read_without_optimizer(set, &OwnParts::new())?;
        has_states(set)?;
        set.check(&optimizer_item::<O>())?;
        let states = (0..optimizer.states.len()).map(|position| optimizer.read_slice(set, position));
        let states = states.collect::<Result<_, _>>()?;
        Ok((loaded, states))
    }

    fn replace(self, (loaded, states): Self::Loaded) {
        let (state, optimizer) = self;
        *state.state_mut() = loaded;
        optimizer.states = states;
        optimizer.replicas.steps.restart();
    }

    fn check_savable(&self) -> Result<(), Error> {
        check_savable(self.1.optimizer.clone(), &self.0.state().model)
    }
}

/// Fails if the optimizer in the state has states: a set has those of the sharded one instead.
fn check_new(record: &[u8]) -> Result<(), Error> {
    match split_by_id(record) {
        Ok(Some(states)) if !states.is_empty() => {
            let reason = "the optimizer in the state has states of its own, which the sharded one replaces; load into \
                          the pair, and train with the sharded optimizer only";
            Err(Error::argument(SAVING, reason))
        }
        _ => Ok(()),
    }
}

/// Records the state of a slice of `len` elements, and takes the record apart.
fn split_slice<B: AutodiffBackend, R: Record<B::InnerBackend>>(
    state: R,
    len: usize,
    path: &str,
) -> Result<(Vec<u8>, Fields<RecordedTensor>), Error> {
    let broken = |reason: &str| Error::broken(SAVING, format!("the optimizer's state for `{path}`: {reason}"));
    let record = record_compact::<B::InnerBackend, _>(state)?;
    let fields = split(&record).map_err(broken)?;
    let is_slice = |(_, field): &(String, Field<RecordedTensor>)| match field {
        Field::Tensor(tensor) => tensor.shape == [len],
        Field::Scalar(_) => true,
    };
    if fields.iter().all(is_slice) { Ok((record, fields)) } else { Err(broken(NOT_ELEMENTWISE)) }
}
