//! A [`TrainingState`] in a set.

use std::ops::Range;
use std::sync::Arc;

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::Record;
use burn::tensor::backend::{AutodiffBackend, BackendTypes};
use burn::tensor::{DType, Element};
use rmpv::Value;

use super::state::{
    NOT_ELEMENTWISE, RecordedTensor, Split, TensorBytes, encode, join, of_parameter, rename, split_by_id,
};
use super::{Load, OwnParts, Save, loaded, module, stored};
use crate::train::model::{Parameter, Parameters, rebuild, restore};
use crate::train::record::{load, load_compact, record};
use crate::train::training_state::{AnyState, LateRecord, Of, TrainingState};
use bonfire_core::Error;
use bonfire_train::checkpoint::{Collect, OwnPart, Parts, SAVING, Set, Sink, Snapshot, argument, width};

/// The names of what a set has.
const MODEL: &str = "model/";
const AVERAGE: &str = "average/";
/// The record of scheduler, the user's state, epoch and batch.
const TRAINING: &str = "training";
/// The record of an optimizer that has no states by parameter, and the ids in it with the parameters' paths.
const OPTIMIZER: &str = "optimizer";
const IDS: &str = "optimizer ids";

/// What [`TRAINING`] is a record of.
type Rest<B, S, U> = (<S as LrScheduler>::Record<B>, U, (u64, u64));

impl<T: AnyState> Save for &T {
    fn snapshot(self) -> Result<Snapshot, Error> {
        self.state().snapshot_of(OwnParts::new(), self.optimizer_record())
    }
}

impl<T: AnyState> Load for &mut T {
    type Loaded = Of<T>;

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        self.state().read_of(set, &OwnParts::new())
    }

    fn replace(self, loaded: Self::Loaded) {
        *self.state_mut() = loaded;
    }
}

impl<B, M, O, S, U> TrainingState<B, M, O, S, U>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    S: LrScheduler,
    U: Record<B> + Clone,
{
    /// Returns what is to be saved of a state whose model has these parts, and whose optimizer has the state for them.
    pub(in crate::train) fn snapshot_of(&self, own: OwnParts, optimizer: LateRecord) -> Result<Snapshot, Error> {
        let (model, parameters) = (own.clone(), Parameters::<B>::of(&self.model).1);
        let optimizer = move |parts: &mut Parts| collect_optimizer::<B>(optimizer()?, &parameters, &own, parts);
        self.snapshot_with(&model, Box::new(optimizer))
    }

    /// Returns what is to be saved, with this in place of the state's optimizer.
    pub(in crate::train) fn snapshot_with(&self, own: &OwnParts, optimizer: Collect) -> Result<Snapshot, Error> {
        let position = (self.epoch as u64, self.batch as u64);
        let rest: Rest<B, S, U> = (self.scheduler.to_record::<B>(), self.user.clone(), position);
        let rest = record::<B, _>(rest)?;
        // A running state's last update is pending until `valid`.
        let mut collect = module::collect(MODEL, &self.model.valid(), own);
        collect.extend(self.average.iter().flat_map(|average| module::collect(AVERAGE, average, own)));
        collect.push(Box::new(|parts| parts.add_value(TRAINING.into(), rest)));
        collect.push(optimizer);
        let collect = Box::new(|parts: &mut Parts| collect.into_iter().try_for_each(|collect| collect(parts)));
        Ok(Snapshot { position, collect })
    }

    /// Reads a state whose model has these parts.
    pub(in crate::train) fn read_of(&self, set: &Set, own: &OwnParts) -> Result<Self, Error> {
        let mut state = self.read_without_optimizer(set, own)?;
        let Some(device) = state.model.devices().first().cloned() else { return Ok(state) };
        let record = load_optimizer::<B, M>(set, &state.model, own)?;
        state.optimizer = state.optimizer.load_record(load_compact::<B, O::Record>(record, &device)?);
        Ok(state)
    }

    /// Reads all but the optimizer's state.
    pub(in crate::train) fn read_without_optimizer(&self, set: &Set, own: &OwnParts) -> Result<Self, Error> {
        let (rebuilt, identities) = rebuild(self.model.clone());
        let model = restore(M::from_inner(module::load(MODEL, rebuilt.valid(), set, own)?), identities);
        let Some(device) = model.devices().first().cloned() else {
            return Err(argument("the model has no parameters"));
        };
        let Some(rest) = set.value(TRAINING)? else { return Err(argument("it has no training")) };
        let (scheduler, user, position) = load::<B, Rest<B, S, U>>(rest, &device)?;
        let average = set.names(AVERAGE).next().map(|_| module::load(AVERAGE, model.valid(), set, own));
        Ok(TrainingState {
            average: average.transpose()?,
            model,
            optimizer: self.optimizer.clone(),
            scheduler: self.scheduler.clone().load_record::<B>(scheduler),
            epoch: position.0 as usize,
            batch: position.1 as usize,
            user,
        })
    }
}

/// Fails if the optimizer's state in the set is not one by parameter, as that of burn's element-wise optimizers.
pub(in crate::train) fn has_states(set: &Set) -> Result<(), Error> {
    match set.tensor(OPTIMIZER) {
        None => Ok(()),
        Some(_) => Err(argument("it was saved with an optimizer whose state cannot be sharded")),
    }
}

/// Returns the name of a tensor of the optimizer's state for a parameter. Without a field it is that of the skeleton.
pub(in crate::train) fn state_name(parameter: &str, field: Option<&str>) -> String {
    let field = field.map(|field| format!("/{field}"));
    format!("optimizer/{parameter}{}", field.unwrap_or_default())
}

/// Fails if burn would load the state for this parameter in another float type.
pub(in crate::train) fn check_state<B: AutodiffBackend>(
    parameter: &Parameter<B>,
    tensors: &[RecordedTensor],
) -> Result<(), Error> {
    let own = <B as BackendTypes>::FloatElem::dtype();
    if parameter.dtype == own || tensors.is_empty() {
        return Ok(());
    }
    let Parameter { path, dtype, .. } = parameter;
    let reason = format!(
        "`{path}` is {dtype:?}, and burn loads an optimizer's state in the backend's own float type, {own:?}; use a \
         backend whose float type is that of the parameters"
    );
    Err(Error::argument(SAVING, reason))
}

/// Adds the state of an optimizer, which is the same on all ranks for parameters that are.
fn collect_optimizer<B: AutodiffBackend>(
    record: Vec<u8>,
    parameters: &[Parameter<B>],
    own: &OwnParts,
    parts: &mut Parts,
) -> Result<(), Error> {
    let record = Arc::new(record);
    let states = split_by_id(&record).map_err(|e| Error::broken(SAVING, format!("the optimizer's state: {e}")))?;
    let of = |id: &str| parameters.iter().find(|parameter| parameter.id.serialize() == id);
    let states: Option<Vec<_>> =
        states.and_then(|states| states.into_iter().map(|(id, split)| Some((of(&id)?, split))).collect());
    let Some(states) = states else {
        // State of no known form.
        if !own.is_empty() {
            let reason = "the optimizer's state is not one by parameter, so it cannot be saved in parts; use one of \
                          burn's element-wise optimizers";
            return Err(Error::argument(SAVING, reason));
        }
        let ids = parameters.iter().map(|parameter| (parameter.id.serialize(), &parameter.path));
        let ids = postcard::to_stdvec(&ids.collect::<Vec<_>>()).map_err(|e| Error::io(SAVING, e))?;
        parts.add_value(IDS.into(), ids)?;
        return parts.add_value(OPTIMIZER.into(), Arc::unwrap_or_clone(record));
    };
    for (parameter, Split { skeleton, tensors }) in states {
        check_state(parameter, &tensors)?;
        parts.add_value(state_name(&parameter.path, None), skeleton)?;
        for RecordedTensor { path, dtype, shape, bytes } in tensors {
            let (record, width, name) = (record.clone(), dtype.size(), state_name(&parameter.path, Some(&path)));
            let dtype = stored(&name, dtype)?;
            let read = move |range: Range<usize>, sink: Sink<'_>| {
                let start = bytes.start + range.start * width;
                sink(&record[start..start + range.len() * width])
            };
            match own.get(&parameter.id) {
                None => parts.add_replicated(name, dtype, &shape, read)?,
                Some(part) if part.shape == shape => part.add(parts, name, dtype, read)?,
                Some(_) => {
                    let reason = format!("the optimizer's state for `{}`: {NOT_ELEMENTWISE}", parameter.path);
                    return Err(Error::broken(SAVING, reason));
                }
            }
        }
    }
    Ok(())
}

/// Returns the record of an optimizer of this model, which has these parts.
fn load_optimizer<B: AutodiffBackend, M: AutodiffModule<B>>(
    set: &Set,
    model: &M,
    own: &OwnParts,
) -> Result<Vec<u8>, Error> {
    if !own.is_empty() {
        has_states(set)?;
    }
    let parameters = Parameters::<B>::of(model).1;
    let invalid = |reason: &'static str| argument(format!("the optimizer's state: {reason}"));
    if let Some(record) = set.value(OPTIMIZER)? {
        let ids = set.value(IDS)?.unwrap_or_default();
        let ids: Vec<(String, String)> = postcard::from_bytes(&ids).map_err(|_| invalid("its ids are damaged"))?;
        let new = |id: &str| {
            let (_, path) = ids.iter().find(|(saved, _)| saved == id)?;
            parameters.iter().find(|parameter| parameter.path == *path).map(|parameter| parameter.id.serialize())
        };
        return rename(&record, &new).map_err(invalid);
    }
    let mut states = Vec::new();
    for parameter in parameters.iter() {
        let Some(skeleton) = set.value(&state_name(&parameter.path, None))? else { continue };
        let part = own.get(&parameter.id);
        let tensor = |field: &str| read_tensor(set, &state_name(&parameter.path, Some(field)), part);
        let state = join(&skeleton, tensor, invalid)?;
        states.push((parameter.id.serialize().into(), of_parameter(state, parameter.shape.num_dims())));
    }
    encode(&Value::Map(states)).map_err(invalid)
}

/// Returns a tensor of an optimizer's state, or this rank's part of it.
fn read_tensor(set: &Set, name: &str, part: Option<&OwnPart>) -> Result<TensorBytes, Error> {
    let missing = || argument(format!("it has no `{name}`"));
    let tensor = set.tensor(name).ok_or_else(missing)?;
    let dtype: DType = loaded(tensor.dtype).ok_or_else(missing)?;
    match part {
        None => Ok(TensorBytes { bytes: set.read(name, 0..tensor.elements())?, dtype, shape: tensor.shape.clone() }),
        Some(part) if tensor.shape == part.whole => {
            Ok(TensorBytes { bytes: part.read(set, name, width(tensor.dtype))?, dtype, shape: part.shape.clone() })
        }
        Some(_) => Err(argument(format!("`{name}`: {NOT_ELEMENTWISE}"))),
    }
}

// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use bonfire_core::Group;
    use bonfire_train::checkpoint::Checkpoints;
    use burn::backend::{Autodiff, Flex};
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamConfig, GradientsParams};
    use burn::tensor::Tensor;

    use super::*;

    type B = Autodiff<Flex>;

    #[test]
    fn a_snapshot_does_not_change_with_the_training() {
        let linear = LinearConfig::new(2, 3).with_bias(false).init::<B>(&Default::default());
        let new = |model: Linear<B>| TrainingState::new(model, AdamConfig::new().init(), 0.1, ());
        let mut state = new(linear);
        let train = |state: &mut TrainingState<B, Linear<B>, _, _>| {
            let mut grads = GradientsParams::new();
            grads.register(state.model.weight.id, Tensor::<Flex, 2>::ones([2, 3], &Default::default()));
            state.step(grads);
        };
        train(&mut state);
        let (then, snapshot) = (state.save().unwrap(), (&state).snapshot());
        (0..3).for_each(|_| train(&mut state));
        assert_ne!(state.save().unwrap(), then);

        let folder = tempfile::tempdir().unwrap();
        let mut checkpoints = Checkpoints::new(&Group::threads(1).unwrap()[0], folder.path()).unwrap();
        checkpoints.save(snapshot).unwrap();
        let mut loaded = new(state.model.clone());
        let read = checkpoints.load(|set| Load::read(&&mut loaded, set)).unwrap();
        loaded = read.expect("a set");
        assert_eq!(loaded.save().unwrap(), then);
    }
}
