//! The state of an optimizer in a set.
//!
//! burn's record of it has a tensor or a number for each field, called `ID.FIELD`. A set has the same fields, under the
//! paths of parameters. Of each parameter a rank has the whole, a part, or a slice: [`OwnParts`] says which.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::store::RecordError;
use burn::tensor::{Bytes, DType, Device, TensorData};
use burn_pack::{Reader, Tensor, Writer};

use super::{OwnParts, loaded, stored};
use crate::train::model::{Parameter, Parameters};
use bonfire_core::Error;
use bonfire_train::checkpoint::{
    Collect, Field, Fields, Item, LOADING, LoadedTensor, Parts, SAVING, Scalar, Set, Sink, StateTensor, argument,
    state_name, width,
};

/// The field in which burn notes the number of dimensions of a parameter.
const RANK: &str = "__rank";

/// Fails if an optimizer should have states and has none, which it is told.
pub(in crate::train) type Check = Box<dyn FnOnce(bool) -> Result<(), Error> + Send>;

/// Returns what adds the state of an optimizer for these parameters.
pub(super) fn collect(
    item: &'static str,
    optimizer: ModuleOptimizer,
    parameters: Parameters,
    own: OwnParts,
    check: Check,
) -> Collect {
    Box::new(move |parts: &mut Parts| {
        let states = states(&optimizer).map_err(|error| Error::io(SAVING, error))?;
        check(states.is_empty())?;
        for (id, fields) in states {
            let Some(position) = parameters.position(ParamId::from(id)) else { continue };
            let parameter = &parameters[position];
            check_type(SAVING, parameter, !fields.is_empty())?;
            let fields = fields.into_iter().map(|(field, value)| Ok((field, to_save(parameter, value)?)));
            let fields: Fields<StateTensor> = fields.collect::<Result<_, Error>>()?;
            parts.add_state(&state_name(item, &parameter.path), own.get(&parameter.id), fields)?;
        }
        Ok(())
    })
}

/// Returns an optimizer like this one with the state in a set.
pub(super) fn load(
    item: &Item,
    optimizer: &ModuleOptimizer,
    set: &Set,
    parameters: &Parameters,
    own: &OwnParts,
) -> Result<ModuleOptimizer, Error> {
    if set.tensor(&item.name).is_some() {
        return Err(argument("the optimizer's state in it is a record for burn 0.21 only, not one by parameter"));
    }
    let mut record = Record::default();
    for parameter in parameters.iter() {
        let part = own.get(&parameter.id);
        if part.is_some_and(|part| part.shape.contains(&0)) {
            continue;
        }
        let Some(fields) = set.state(&state_name(&item.name, &parameter.path), part)? else { continue };
        check_type(LOADING, parameter, !fields.is_empty())?;
        let dimensions = part.map_or(parameter.shape.rank(), |part| part.shape.len());
        record.add(parameter, dimensions, fields)?;
    }
    let names = record.names();
    let optimizer = optimizer.clone().load_record(record.into_burn().map_err(|error| Error::io(LOADING, error))?);
    // burn leaves out what an optimizer does not take, without an error.
    let taken = states(&optimizer).map_err(|error| Error::io(LOADING, error))?;
    let missing = names.into_iter().find(|(id, _, field)| {
        let fields = taken.get(id);
        !fields.is_some_and(|fields| field.is_empty() || fields.iter().any(|(name, _)| name == field))
    });
    match missing {
        None => Ok(optimizer),
        Some((_, path, field)) => Err(argument(format!(
            "{item} does not take `{field}` of the state for `{path}`; load it into the optimizer that was saved{}",
            match set.contents().and_then(|contents| contents.items.iter().find(|saved| saved.name == item.name)) {
                Some(saved) => format!(", {saved}"),
                None => String::new(),
            }
        ))),
    }
}

/// Whether the optimizer has a state for any parameter.
pub(in crate::train) fn has_states(optimizer: &ModuleOptimizer) -> Result<bool, Error> {
    states(optimizer).map(|states| !states.is_empty()).map_err(|error| Error::io(SAVING, error))
}

/// Whether the optimizer has a state with numbers or tensors in it.
pub(super) fn has_fields(optimizer: &ModuleOptimizer) -> Result<bool, Error> {
    let states = states(optimizer).map_err(|error| Error::io(SAVING, error))?;
    Ok(states.values().any(|fields| !fields.is_empty()))
}

/// Fails if burn would load the state for this parameter in another float type: it loads all states in that of the
/// default device.
pub(super) fn check_type(operation: &str, parameter: &Parameter, has_fields: bool) -> Result<(), Error> {
    let (own, loaded) = (parameter.spec.dtype, DType::from(Device::default().settings().float_dtype));
    if own == loaded || !has_fields {
        return Ok(());
    }
    let reason = format!(
        "`{}` is {own:?}, and burn loads an optimizer's state in the float type of the default device, {loaded:?}; \
         configure that device (`Device::configure`) for the type of the parameters",
        parameter.path
    );
    Err(Error::argument(operation, reason))
}

/// Returns the fields of an optimizer's states, by the ids of parameters.
fn states(optimizer: &ModuleOptimizer) -> Result<BTreeMap<u64, Fields<TensorData>>, RecordError> {
    let reader = Reader::from_bytes(optimizer.to_record().into_bytes()?)?;
    let mut states: BTreeMap<u64, Fields<TensorData>> = BTreeMap::new();
    for (name, scalar) in reader.scalars() {
        let Some((id, field)) = split_name(name) else { continue };
        let fields = states.entry(id).or_default();
        if field != RANK {
            fields.push((field.into(), Field::Scalar(from_burn(*scalar))));
        }
    }
    for tensor in reader.into_tensors()? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts()?;
        let Some((id, field)) = split_name(&name) else { continue };
        let data = TensorData::from_bytes(bytes, shape, dtype);
        states.entry(id).or_default().push((field.into(), Field::Tensor(data)));
    }
    Ok(states)
}

fn split_name(name: &str) -> Option<(u64, &str)> {
    let (id, field) = name.split_once('.')?;
    Some((id.parse().ok()?, field))
}

/// Returns a field as it is saved.
fn to_save(parameter: &Parameter, field: Field<TensorData>) -> Result<Field<StateTensor>, Error> {
    Ok(match field {
        Field::Scalar(scalar) => Field::Scalar(scalar),
        Field::Tensor(data) => {
            let (dtype, shape) = (stored(&parameter.path, data.dtype())?, data.shape().as_slice().to_vec());
            let width = width(dtype);
            let read = move |range: Range<usize>, sink: Sink<'_>| {
                sink(&data.as_bytes()[range.start * width..range.end * width])
            };
            Field::Tensor(StateTensor { dtype, shape, read: Box::new(read) })
        }
    })
}

/// burn's record of an optimizer, in parts.
#[derive(Default)]
struct Record {
    tensors: Vec<Tensor>,
    scalars: Vec<(String, burn_pack::Scalar)>,
    paths: BTreeMap<u64, String>,
}

impl Record {
    fn add(&mut self, parameter: &Parameter, dimensions: usize, fields: Fields<LoadedTensor>) -> Result<(), Error> {
        let id = parameter.id.val();
        self.paths.insert(id, parameter.path.clone());
        self.scalars.push((format!("{id}.{RANK}"), dimensions.into()));
        for (field, value) in fields {
            let name = format!("{id}.{field}");
            match value {
                Field::Scalar(scalar) => self.scalars.push((name, to_burn(scalar))),
                Field::Tensor(LoadedTensor { dtype, shape, bytes }) => {
                    let unknown = || argument(format!("burn has no tensors of {dtype:?}, as `{field}` is"));
                    let dtype = loaded(dtype).ok_or_else(unknown)?;
                    self.tensors.push(Tensor::new(name, dtype, shape, Some(id), Bytes::from_bytes_vec(bytes)));
                }
            }
        }
        Ok(())
    }

    /// Returns the ids of parameters with their paths and the names of the fields. The name of a state itself is empty.
    fn names(&self) -> Vec<(u64, String, String)> {
        let names = self.scalars.iter().map(|(name, _)| name).chain(self.tensors.iter().map(|tensor| &tensor.name));
        let names = names.filter_map(|name| {
            let (id, field) = split_name(name)?;
            Some((id, self.paths.get(&id)?.clone(), if field == RANK { String::new() } else { field.to_owned() }))
        });
        names.collect()
    }

    fn into_burn(self) -> Result<OptimizerRecord, RecordError> {
        let mut writer = Writer::new(self.tensors);
        for (name, scalar) in &self.scalars {
            writer = writer.with_scalar(name, *scalar);
        }
        for (id, path) in &self.paths {
            writer = writer.with_metadata(&id.to_string(), path);
        }
        OptimizerRecord::from_bytes(writer.into_bytes()?)
    }
}

pub(super) fn from_burn(scalar: burn_pack::Scalar) -> Scalar {
    match scalar {
        burn_pack::Scalar::Int(value) => Scalar::Int(value),
        burn_pack::Scalar::UInt(value) => Scalar::UInt(value),
        burn_pack::Scalar::Float(value) => Scalar::Float(value),
        burn_pack::Scalar::Bool(value) => Scalar::Bool(value),
    }
}

pub(super) fn to_burn(scalar: Scalar) -> burn_pack::Scalar {
    match scalar {
        Scalar::Int(value) => value.into(),
        Scalar::UInt(value) => value.into(),
        Scalar::Float(value) => value.into(),
        Scalar::Bool(value) => value.into(),
    }
}
