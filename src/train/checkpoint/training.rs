//! A [`TrainingState`] in a set.

use std::ops::Range;
use std::sync::Arc;

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::Record;
use burn::tensor::Element;
use burn::tensor::backend::{AutodiffBackend, BackendTypes};
use rmpv::Value;

use super::state::{RecordedTensor, as_number, encode, join, numbers, of_number, of_parameter, rename, split_by_id};
use super::{Load, OwnParts, Save, module};
use crate::train::model::{Parameter, Parameters, rebuild, restore};
use crate::train::record::{load, load_compact, record_compact};
use crate::train::training_state::{AnyState, LateRecord, Of, TrainingState, tried};
use bonfire_core::Error;
use bonfire_train::checkpoint::{
    Collect, Contents, Field, Fields, Item, Kind, OwnPart, Parts, SAVING, Scalar, Set, Sink, Snapshot, StateTensor,
    argument, state_name, width,
};

/// The names of what a set has.
const MODEL: &str = "model";
const AVERAGE: &str = "average";
pub(in crate::train) const OPTIMIZER: &str = "optimizer";
const SCHEDULER: &str = "scheduler";
const USER: &str = "user";
/// The ids in the record of an optimizer that has no states by parameter, with the parameters' paths.
const IDS: &str = "optimizer ids";
/// In sets of version 1, the record of scheduler, the user's state, epoch and batch.
const TRAINING: &str = "training";

/// Who can read a record of burn's own form.
const BURN: &str = "burn 0.21";

/// The form of the user's record. Unless it has tensors, the package for burn 0.22 reads it too.
const MESSAGE_PACK: &str = "MessagePack";

/// The schedulers of burn whose record is one number, and the name of the number: burn 0.22 records it so.
const SCHEDULERS: [(&str, &str); 5] = [
    ("LinearLrScheduler", "remaining_iters"),
    ("CosineAnnealingLrScheduler", "current_iter"),
    ("ExponentialLrScheduler", "previous_lr"),
    ("NoamLrScheduler", "step"),
    ("StepLrScheduler", "iter_idx"),
];

/// What [`TRAINING`] is a record of.
type Rest<B, S, U> = (<S as LrScheduler>::Record<B>, U, (u64, u64));

impl<T: AnyState> Save for &T {
    fn snapshot(self) -> Result<Snapshot, Error> {
        self.state().snapshot_of(OwnParts::new(), self.stepped_record(), None)
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

    fn check_savable(&self) -> Result<(), Error> {
        check_savable(self.state().optimizer.clone(), &self.state().model)
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
    pub(in crate::train) fn snapshot_of(
        &self,
        own: OwnParts,
        optimizer: LateRecord,
        sharding: Option<String>,
    ) -> Result<Snapshot, Error> {
        let (model, parameters) = (own.clone(), Parameters::<B>::of(&self.model).1);
        let item = Item { sharding, ..optimizer_item::<O>() };
        let collect = move |parts: &mut Parts| collect_optimizer::<B>(optimizer()?, &parameters, &own, parts);
        self.snapshot_with(&model, item, Box::new(collect))
    }

    /// Reads a state whose model has these parts.
    pub(in crate::train) fn read_of(&self, set: &Set, own: &OwnParts) -> Result<Self, Error> {
        let mut state = self.read_without_optimizer(set, own)?;
        let Some(device) = state.model.devices().first().cloned() else { return Ok(state) };
        let (item, record) = (optimizer_item::<O>(), load_optimizer::<B, M>(set, &state.model, own)?);
        set.check(&item)?;
        let record = load_compact::<B, O::Record>(record, &device).map_err(|error| {
            argument(format!("the optimizer's state does not fit {item}: {error}; load it into what was saved"))
        })?;
        state.optimizer = state.optimizer.load_record(record);
        Ok(state)
    }

    /// Returns what is to be saved, with this for the optimizer.
    pub(in crate::train) fn snapshot_with(
        &self,
        own: &OwnParts,
        optimizer: Item,
        collect_optimizer: Collect,
    ) -> Result<Snapshot, Error> {
        let (scheduler, scheduler_record) = self.scheduler_item()?;
        let mut items = vec![Item::new(MODEL, Kind::Model).of(&of_any_backend::<M, B>())];
        items[0].sharding.clone_from(&optimizer.sharding.clone().filter(|_| !own.is_empty()));
        // A running state's last update is pending until `valid`.
        let mut collect = module::collect(MODEL, &self.model.valid(), own);
        if let Some(average) = &self.average {
            items.push(Item { name: AVERAGE.into(), kind: Kind::Average, ..items[0].clone() });
            collect.extend(module::collect(AVERAGE, average, own));
        }
        match (as_number(&scheduler_record), scheduler_field(&scheduler)) {
            (Some(number), Some(field)) => {
                let name = format!("{SCHEDULER}/{field}");
                collect.push(Box::new(move |parts| parts.add_scalar(name, number)));
            }
            _ if scheduler.record.is_none() => {}
            _ => collect.push(Box::new(|parts| parts.add_value(SCHEDULER.into(), scheduler_record))),
        }
        let user = Self::user_item();
        if user.record.is_some() {
            let record = record_compact::<B, _>(self.user.clone())?;
            collect.push(Box::new(|parts| parts.add_value(USER.into(), record)));
        }
        items.extend([optimizer, scheduler, user]);
        collect.push(collect_optimizer);
        let collect = Box::new(|parts: &mut Parts| collect.into_iter().try_for_each(|collect| collect(parts)));
        let contents = Contents { epoch: self.epoch as u64, samples: self.samples as u64, items };
        Ok(Snapshot { contents, collect })
    }

    /// Returns the scheduler as an item, and its record. It has no record of burn's own form if it is nothing or a
    /// number.
    fn scheduler_item(&self) -> Result<(Item, Vec<u8>), Error> {
        let item = Item::new(SCHEDULER, Kind::Scheduler).of(std::any::type_name::<S>());
        let record = record_compact::<B, _>(self.scheduler.to_record::<B>())?;
        let is_nothing = record == record_compact::<B, ()>(())?;
        let is_number = as_number(&record).is_some() && scheduler_field(&item).is_some();
        Ok((if is_nothing || is_number { item } else { item.record(BURN) }, record))
    }

    fn user_item() -> Item {
        let item = Item::new(USER, Kind::User).of(&of_any_backend::<U, B>());
        if std::any::type_name::<U>() == "()" { item } else { item.record(MESSAGE_PACK) }
    }

    /// Reads all but the optimizer's state.
    pub(in crate::train) fn read_without_optimizer(&self, set: &Set, own: &OwnParts) -> Result<Self, Error> {
        set.check_unnamed()?;
        let (rebuilt, identities) = rebuild(self.model.clone());
        let model = restore(M::from_inner(module::load(MODEL, rebuilt.valid(), set, own)?), identities);
        let Some(device) = model.devices().first().cloned() else {
            return Err(argument("the model has no parameters"));
        };
        let prefix = format!("{AVERAGE}/");
        let average = set.names(&prefix).next().map(|_| module::load(AVERAGE, model.valid(), set, own)).transpose()?;
        let (scheduler, user, position) = match set.contents() {
            Some(contents) => {
                let (scheduler, user) = self.read_records(set, &device)?;
                (scheduler, user, (contents.epoch, contents.samples))
            }
            None => {
                let Some(rest) = set.value(TRAINING)? else { return Err(argument("it has no training")) };
                let rest = load::<B, Rest<B, S, U>>(rest, &device)?;
                let (_, _, (_, batches)) = &rest;
                if *batches > 0 {
                    log::warn!(
                        "the checkpoint of an older version counts {batches} batches of its epoch, and not their \
                         samples: set `samples` of the state to {batches} times the size of a batch"
                    );
                }
                rest
            }
        };
        Ok(TrainingState {
            average,
            model,
            optimizer: self.optimizer.clone(),
            scheduler: self.scheduler.clone().load_record::<B>(scheduler),
            epoch: position.0 as usize,
            samples: position.1 as usize,
            user,
        })
    }

    /// Reads the records of the scheduler and of the user's state.
    fn read_records(&self, set: &Set, device: &B::Device) -> Result<(S::Record<B>, U), Error> {
        let (item, own) = self.scheduler_item()?;
        set.check(&item)?;
        let lacks = |item: &Item| argument(format!("it has no record of {item}; load it into what was saved"));
        let field = scheduler_field(&item);
        set.check_fields(&item, field.as_slice())?;
        let record = match field {
            Some(field) => {
                let number = set.scalar(&format!("{SCHEDULER}/{field}"))?.ok_or_else(|| lacks(&item))?;
                of_number(like(number, as_number(&own))).map_err(argument)?
            }
            None if item.record.is_none() => own,
            None => set.value(SCHEDULER)?.ok_or_else(|| lacks(&item))?,
        };
        let unfit =
            |item: &Item, error: Error| argument(format!("{item} cannot be read: {error}; load what was saved"));
        let scheduler = load_compact::<B, S::Record<B>>(record, device).map_err(|error| unfit(&item, error))?;
        let item = Self::user_item();
        set.check(&item)?;
        let user = match item.record {
            None => self.user.clone(),
            Some(_) => {
                let record = set.value(USER)?.ok_or_else(|| lacks(&item))?;
                load_compact::<B, U>(record, device).map_err(|error| unfit(&item, error))?
            }
        };
        Ok((scheduler, user))
    }
}

/// Returns the name of a type, with `B` for the backend: a set can be loaded on another one.
fn of_any_backend<T: ?Sized, B: AutodiffBackend>() -> String {
    let name = std::any::type_name::<T>().replace(std::any::type_name::<B>(), "B");
    name.replace(std::any::type_name::<B::InnerBackend>(), "B")
}

/// Returns an optimizer as an item: its kind counts, and not for which model and backend burn's adaptor is.
pub(in crate::train) fn optimizer_item<O: ?Sized>() -> Item {
    let name = std::any::type_name::<O>();
    let name = name.rsplit_once("OptimizerAdaptor<").map_or(name, |(_, inner)| inner);
    Item::new(OPTIMIZER, Kind::Optimizer).of(name.split(['<', ',']).next().unwrap_or(name))
}

/// Returns a number of the type of another one: burn 0.22's Noam scheduler counts in floats, 0.21's does not.
fn like(number: Scalar, own: Option<Scalar>) -> Scalar {
    match (number, own) {
        (Scalar::Float(value), Some(Scalar::Int(_) | Scalar::UInt(_))) if value.fract() == 0.0 => {
            Scalar::Int(value as i64)
        }
        _ => number,
    }
}

/// Returns the name of the number that is the record of this scheduler.
fn scheduler_field(scheduler: &Item) -> Option<&'static str> {
    let found = SCHEDULERS.iter().find(|(of, _)| scheduler.of.as_deref() == Some(of));
    found.map(|(_, field)| *field)
}

/// Fails if burn would load the state for this parameter in another float type.
pub(in crate::train) fn check_state<B: AutodiffBackend>(
    parameter: &Parameter<B>,
    fields: &Fields<RecordedTensor>,
) -> Result<(), Error> {
    let own = <B as BackendTypes>::FloatElem::dtype();
    if parameter.dtype == own || !fields.iter().any(|(_, field)| matches!(field, Field::Tensor(_))) {
        return Ok(());
    }
    let Parameter { path, dtype, .. } = parameter;
    let reason = format!(
        "`{path}` is {dtype:?}, and burn loads an optimizer's state in the backend's own float type, {own:?}; use a \
         backend whose float type is that of the parameters"
    );
    Err(Error::argument(SAVING, reason))
}

/// Fails if burn could not load the state of an optimizer for a parameter of another float type than the backend's.
pub(in crate::train) fn check_savable<B, M, O>(optimizer: O, model: &M) -> Result<(), Error>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let own = <B as BackendTypes>::FloatElem::dtype();
    let Some((record, parameter)) = tried(optimizer, model, |parameter| parameter.dtype != own)? else { return Ok(()) };
    let broken = |reason| Error::broken(SAVING, format!("the optimizer's state: {reason}"));
    // The states of other optimizers are saved as a whole.
    let states = split_by_id(&record).map_err(broken)?.unwrap_or_default();
    let of_parameter = states.iter().find(|(id, _)| *id == parameter.id.serialize());
    of_parameter.map_or(Ok(()), |(_, fields)| check_state(&parameter, fields))
}

/// Returns the fields of a state as they are saved.
pub(in crate::train) fn to_save(record: &Arc<Vec<u8>>, fields: Fields<RecordedTensor>) -> Fields<StateTensor> {
    let field = |field| match field {
        Field::Scalar(scalar) => Field::Scalar(scalar),
        Field::Tensor(RecordedTensor { dtype, shape, bytes }) => {
            let (record, width) = (record.clone(), width(dtype));
            let read = move |range: Range<usize>, sink: Sink<'_>| {
                let start = bytes.start + range.start * width;
                sink(&record[start..start + range.len() * width])
            };
            Field::Tensor(StateTensor { dtype, shape, read: Box::new(read) })
        }
    };
    fields.into_iter().map(|(path, value)| (path, field(value))).collect()
}

/// Returns the state for a parameter in a set, or this rank's part of it, as burn's record.
pub(in crate::train) fn read_state(set: &Set, parameter: &str, part: Option<&OwnPart>) -> Result<Option<Value>, Error> {
    let name = state_name(OPTIMIZER, parameter);
    let invalid = |reason| argument(format!("the optimizer's state for `{parameter}`: {reason}"));
    let Some(mut fields) = set.state(&name, part)? else { return Ok(None) };
    if set.contents().is_none() {
        let skeleton = set.value(&name)?.ok_or_else(|| invalid("a part of it is missing"))?;
        let numbers = numbers(&skeleton).map_err(invalid)?.into_iter();
        fields.extend(numbers.map(|(path, number)| (path, Field::Scalar(number))));
    }
    join(fields).map(Some).map_err(invalid)
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
        states.and_then(|states| states.into_iter().map(|(id, fields)| Some((of(&id)?, fields))).collect());
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
    for (parameter, fields) in states {
        check_state(parameter, &fields)?;
        let name = state_name(OPTIMIZER, &parameter.path);
        parts.add_state(&name, own.get(&parameter.id), to_save(&record, fields))?;
    }
    Ok(())
}

/// Fails if the optimizer's state in the set is not one by parameter, as that of burn's element-wise optimizers.
pub(in crate::train) fn has_states(set: &Set) -> Result<(), Error> {
    match set.tensor(OPTIMIZER) {
        None => Ok(()),
        Some(_) => Err(argument("it was saved with an optimizer whose state cannot be sharded")),
    }
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
        if let Some(state) = read_state(set, &parameter.path, own.get(&parameter.id))? {
            states.push((parameter.id.serialize().into(), of_parameter(state, parameter.shape.num_dims())));
        }
    }
    encode(&Value::Map(states)).map_err(invalid)
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
    use crate::train::checkpoint::Which;

    type B = Autodiff<Flex>;

    #[test]
    fn a_snapshot_does_not_change_with_the_training() {
        let linear = LinearConfig::new(2, 3).with_bias(false).init::<B>(&Default::default());
        let new = |model: Linear<B>| TrainingState::new(model, AdamConfig::new().init(), 0.1, ());
        let mut state = new(linear);
        let train = |state: &mut TrainingState<B, Linear<B>, _, _>| {
            let mut grads = GradientsParams::new();
            grads.register(state.model.weight.id, Tensor::<Flex, 2>::ones([2, 3], &Default::default()));
            state.step(grads, 1);
        };
        train(&mut state);
        let (then, snapshot) = (state.save().unwrap(), (&state).snapshot());
        (0..3).for_each(|_| train(&mut state));
        assert_ne!(state.save().unwrap(), then);

        let folder = tempfile::tempdir().unwrap();
        let mut checkpoints = Checkpoints::new(&Group::threads(1).unwrap()[0], folder.path()).unwrap();
        checkpoints.save(snapshot, None).unwrap();
        let mut loaded = new(state.model.clone());
        let read = checkpoints.load(Which::Newest, |set| Load::read(&&mut loaded, set)).unwrap();
        loaded = read.expect("a set");
        assert_eq!(loaded.save().unwrap(), then);
    }
}
