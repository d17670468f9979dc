//! Fields of recorded optimizer state.
//!
//! An optimizer's state for a parameter is a record whose fields only burn knows. burn writes records as MessagePack
//! with field names, in which a tensor is always a map of `bytes`, `shape` and `dtype`. So a record is taken apart into
//! its tensors, which are saved in ranges like those of the model, and its numbers, such as a step count. Put together,
//! the tensors may have other ranges than before, so state of slices becomes state of whole parameters or of other
//! slices. A field without a value is left out: to burn it is the same.
//!
//! Fields come from files and are not trusted. Serde would accept a tensor in many forms, and burn does not check a
//! tensor's claimed length. So tensors are accepted exactly as burn writes them, and their lengths are checked.

use std::ops::Range;

use rmpv::decode::read_value_ref_with_max_depth;
use rmpv::encode::write_value;
use rmpv::{Value, ValueRef};

use bonfire_train::checkpoint::{Dtype, Field, Fields, LoadedTensor, Scalar, width};

/// A tensor in a record.
#[derive(Debug, PartialEq)]
pub(in crate::train) struct RecordedTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// The place of its elements in the record.
    pub bytes: Range<usize>,
}

/// The states in the record of an optimizer, with the ids of parameters.
pub(in crate::train) type StatesById = Vec<(String, Fields<RecordedTensor>)>;

const INVALID: &str = "it is no state that burn recorded, or was damaged";

/// The keys of a tensor, in the order in which burn writes them.
const BYTES: &str = "bytes";
const SHAPE: &str = "shape";
const DTYPE: &str = "dtype";
/// The element types in records.
const TYPES: [(&str, Dtype); 3] = [("F64", Dtype::F64), ("F32", Dtype::F32), ("I64", Dtype::I64)];
/// The names around the state of a parameter of a rank in the record of burn's `OptimizerAdaptor`.
const VERSION: &str = "V1";
const RANK: &str = "Rank";

/// The deepest nesting that is accepted. Records nest a few levels.
const DEPTH: usize = 128;

/// Takes the record of a state apart.
pub(in crate::train) fn split(record: &[u8]) -> Result<Fields<RecordedTensor>, &'static str> {
    split_value(record, &parse(record)?)
}

/// Takes the record of burn's `OptimizerAdaptor` apart: returns the ids of parameters and the states for them. `None`
/// if the record is that of another optimizer.
pub(in crate::train) fn split_by_id(record: &[u8]) -> Result<Option<StatesById>, &'static str> {
    let ValueRef::Map(entries) = parse(record)? else { return Ok(None) };
    let states = entries.iter().map(|(id, value)| {
        let state = single(value, VERSION).and_then(|value| single(value, RANK))?;
        Some((text(id)?.to_owned(), split_value(record, state).ok()?))
    });
    Ok(states.collect())
}

/// Puts the record of a state together.
pub(in crate::train) fn join(fields: Fields<LoadedTensor>) -> Result<Value, &'static str> {
    let mut state = Value::Map(Vec::new());
    for (path, field) in fields {
        let value = match field {
            Field::Scalar(scalar) => number(scalar),
            Field::Tensor(tensor) => recorded(tensor)?,
        };
        *place(&mut state, &path)? = value;
    }
    Ok(state)
}

/// Returns the numbers in the skeleton of a state, as sets of version 1 have it: a record with placeholders for
/// tensors.
pub(super) fn numbers(skeleton: &[u8]) -> Result<Vec<(String, Scalar)>, &'static str> {
    let fields = split(skeleton)?.into_iter().filter_map(|(path, field)| match field {
        Field::Scalar(scalar) => Some((path, scalar)),
        Field::Tensor(_) => None,
    });
    Ok(fields.collect())
}

/// Returns the number that a record is. `None` if it is something else.
pub(super) fn as_number(record: &[u8]) -> Option<Scalar> {
    scalar(&parse(record).ok()?)
}

/// Returns the record that is this number.
pub(super) fn of_number(scalar: Scalar) -> Result<Vec<u8>, &'static str> {
    encode(&number(scalar))
}

/// Returns the record of burn's `OptimizerAdaptor` with a state of a parameter with this number of dimensions.
pub(in crate::train) fn of_parameter(state: Value, dimensions: usize) -> Value {
    let map = |name: String, value| Value::Map(vec![(name.into(), value)]);
    map(VERSION.into(), map(format!("{RANK}{dimensions}"), state))
}

/// Returns a record of any form with other names for the ids in it, which are keys of maps.
pub(in crate::train) fn rename(record: &[u8], new: &impl Fn(&str) -> Option<String>) -> Result<Vec<u8>, &'static str> {
    fn renamed(value: Value, new: &impl Fn(&str) -> Option<String>) -> Value {
        match value {
            Value::Map(entries) => {
                let entries = entries.into_iter().map(|(key, value)| {
                    let name = key.as_str().and_then(new).map(Value::from);
                    (name.unwrap_or(key), renamed(value, new))
                });
                Value::Map(entries.collect())
            }
            Value::Array(items) => Value::Array(items.into_iter().map(|item| renamed(item, new)).collect()),
            other => other,
        }
    }
    encode(&renamed(parse(record)?.to_owned(), new))
}

/// Encodes a record.
pub(in crate::train) fn encode(record: &Value) -> Result<Vec<u8>, &'static str> {
    let mut bytes = Vec::new();
    write_value(&mut bytes, record).map_err(|_| INVALID)?;
    Ok(bytes)
}

fn parse(record: &[u8]) -> Result<ValueRef<'_>, &'static str> {
    let mut rest = record;
    let value = read_value_ref_with_max_depth(&mut rest, DEPTH).map_err(|_| INVALID)?;
    if rest.is_empty() { Ok(value) } else { Err(INVALID) }
}

/// Returns the only value of a map whose key begins with `name`.
fn single<'a, 'b>(value: &'a ValueRef<'b>, name: &str) -> Option<&'a ValueRef<'b>> {
    match value {
        ValueRef::Map(entries) => match &entries[..] {
            [(key, value)] if text(key)?.starts_with(name) => Some(value),
            _ => None,
        },
        _ => None,
    }
}

fn split_value(record: &[u8], value: &ValueRef<'_>) -> Result<Fields<RecordedTensor>, &'static str> {
    let mut fields = Vec::new();
    add_fields(record, value, "", &mut fields)?;
    Ok(fields)
}

fn add_fields(
    record: &[u8],
    value: &ValueRef<'_>,
    path: &str,
    fields: &mut Fields<RecordedTensor>,
) -> Result<(), &'static str> {
    match value {
        ValueRef::Map(entries) if entries.first().is_some_and(|(key, _)| text(key) == Some(BYTES)) => {
            let (bytes, shape, dtype) = tensor_parts(value).ok_or(INVALID)?;
            let start = bytes.as_ptr().addr() - record.as_ptr().addr();
            let tensor = RecordedTensor { dtype, shape, bytes: start..start + bytes.len() };
            fields.push((path.into(), Field::Tensor(tensor)));
        }
        ValueRef::Map(entries) => {
            for (key, value) in entries {
                let name = text(key).filter(|name| *name != BYTES && !name.contains(['.', '/'])).ok_or(INVALID)?;
                let below = if path.is_empty() { name.into() } else { format!("{path}.{name}") };
                add_fields(record, value, &below, fields)?;
            }
        }
        // A tensor's place in a skeleton.
        ValueRef::Nil | ValueRef::Ext(0, []) => {}
        // Optimizer states have no other values. One alone has no name.
        _ if path.is_empty() => return Err(INVALID),
        other => fields.push((path.into(), Field::Scalar(scalar(other).ok_or(INVALID)?))),
    }
    Ok(())
}

fn scalar(value: &ValueRef<'_>) -> Option<Scalar> {
    match value {
        ValueRef::Integer(value) => value.as_u64().map(Scalar::UInt).or(value.as_i64().map(Scalar::Int)),
        ValueRef::F32(value) => Some(Scalar::Float((*value).into())),
        ValueRef::F64(value) => Some(Scalar::Float(*value)),
        ValueRef::Boolean(value) => Some(Scalar::Bool(*value)),
        _ => None,
    }
}

fn number(scalar: Scalar) -> Value {
    match scalar {
        Scalar::Int(value) => value.into(),
        Scalar::UInt(value) => value.into(),
        Scalar::Float(value) => value.into(),
        Scalar::Bool(value) => value.into(),
    }
}

/// Returns the place of a field in a record, with maps around it.
fn place<'a>(record: &'a mut Value, path: &str) -> Result<&'a mut Value, &'static str> {
    path.split('.').take(DEPTH).try_fold(record, |place, name| {
        let Value::Map(entries) = place else { return Err(INVALID) };
        let found = entries.iter().position(|(key, _)| key.as_str() == Some(name));
        let position = found.unwrap_or_else(|| {
            entries.push((name.into(), Value::Map(Vec::new())));
            entries.len() - 1
        });
        Ok(&mut entries[position].1)
    })
}

/// Returns a tensor as burn records it.
fn recorded(LoadedTensor { dtype, shape, bytes }: LoadedTensor) -> Result<Value, &'static str> {
    let (name, _) = TYPES.iter().find(|(_, known)| *known == dtype).ok_or("burn 0.21 records f32, f64 and i64 only")?;
    if shape.iter().product::<usize>().checked_mul(width(dtype)) != Some(bytes.len())
        || u32::try_from(bytes.len()).is_err()
    {
        return Err("a tensor in it has a length that cannot be recorded");
    }
    let shape = Value::Array(shape.into_iter().map(Value::from).collect());
    let entries = [(BYTES, Value::Binary(bytes)), (SHAPE, shape), (DTYPE, (*name).into())];
    Ok(Value::Map(entries.into_iter().map(|(key, value)| (key.into(), value)).collect()))
}

/// Returns the bytes, the shape and the element type of a tensor whose length is right.
fn tensor_parts<'a>(tensor: &ValueRef<'a>) -> Option<(&'a [u8], Vec<usize>, Dtype)> {
    let ValueRef::Map(entries) = tensor else { return None };
    let [(bytes, ValueRef::Binary(data)), (shape, ValueRef::Array(dimensions)), (dtype, name)] = &entries[..] else {
        return None;
    };
    let dimension = |value: &ValueRef<'_>| match value {
        ValueRef::Integer(len) => usize::try_from(len.as_u64()?).ok(),
        _ => None,
    };
    let dimensions: Vec<usize> = dimensions.iter().map(dimension).collect::<Option<_>>()?;
    let known = [bytes, shape, dtype].map(text) == [BYTES, SHAPE, DTYPE].map(Some);
    let (_, dtype) = TYPES.into_iter().find(|(known, _)| text(name) == Some(known))?;
    let len = dimensions.iter().try_fold(width(dtype), |product, dimension| product.checked_mul(*dimension))?;
    (known && len == data.len()).then_some((data, dimensions, dtype))
}

fn text<'a>(value: &'a ValueRef<'_>) -> Option<&'a str> {
    match value {
        ValueRef::String(text) => text.as_str(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::optim::{Adam, AdamConfig, SimpleOptimizer};
    use burn::tensor::Tensor;
    use proptest::prelude::*;

    use super::*;
    use crate::train::record::{load_compact, record_compact};
    use bonfire_core::partition;

    type State = <Adam as SimpleOptimizer<Flex>>::State<1>;

    /// Adam's state for elements `range` of a parameter after `steps` steps.
    fn state(range: Range<usize>, steps: usize) -> Vec<u8> {
        let (device, adam) = (Default::default(), AdamConfig::new().with_amsgrad(true).build());
        let mut state: Option<State> = None;
        for step in 0..steps {
            let grad: Vec<f32> = range.clone().map(|i| ((i * 7 + step) as f32).sin()).collect();
            let (value, grad) =
                (Tensor::<Flex, 1>::ones([range.len()], &device), Tensor::from_floats(&grad[..], &device));
            state = adam.step(0.1, value, grad, state).1;
        }
        record_compact::<Flex, _>(state.unwrap()).unwrap()
    }

    fn load_state(record: Vec<u8>) -> Result<State, impl std::fmt::Debug> {
        load_compact::<Flex, State>(record, &Default::default())
    }

    /// Loads and records the state again: two records of one state may encode numbers differently.
    fn rerecord(record: Vec<u8>) -> Vec<u8> {
        record_compact::<Flex, _>(load_state(record).unwrap()).unwrap()
    }

    /// What `range` of the elements of these fields would be after they were saved and loaded.
    fn loaded(fields: &[(String, Field<RecordedTensor>)], record: &[u8], range: Range<usize>) -> Fields<LoadedTensor> {
        let load = |field: &Field<RecordedTensor>| match field {
            Field::Scalar(scalar) => Field::Scalar(*scalar),
            Field::Tensor(tensor) => {
                let bytes = record[tensor.bytes.clone()][4 * range.start..4 * range.end].to_vec();
                Field::Tensor(LoadedTensor { dtype: tensor.dtype, shape: vec![range.len()], bytes })
            }
        };
        fields.iter().map(|(path, field)| (path.clone(), load(field))).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]
        #[test]
        fn states_of_parts_are_taken_from_the_state_of_the_whole(len in 1usize..300, n in 1usize..6) {
            let record = state(0..len, 3);
            let fields = split(&record).unwrap();
            prop_assert_eq!(fields.len(), 4);
            for own in (0..n).map(|i| partition(len, n, i)).filter(|own| !own.is_empty()) {
                let joined = encode(&join(loaded(&fields, &record, own.clone())).unwrap()).unwrap();
                prop_assert_eq!(rerecord(joined), state(own, 3));
            }
        }
    }

    #[test]
    fn what_burn_did_not_record_is_refused() {
        let record = state(0..5, 2);
        assert_eq!(split(&record[..9]).err(), Some(INVALID));
        assert_eq!(split(&[&record[..], b"\xc0"].concat()).err(), Some(INVALID));
        // The map of a state is not one of parameters.
        assert!(split_by_id(&record).unwrap().is_none());
        let tensor = |dtype, bytes| {
            let tensor = LoadedTensor { dtype, shape: vec![5], bytes: vec![0; bytes] };
            join(vec![("a.b".into(), Field::Tensor(tensor))])
        };
        assert!(tensor(Dtype::F32, 20).is_ok());
        assert!(tensor(Dtype::F32, 16).unwrap_err().contains("a length that cannot be recorded"));
        assert!(tensor(Dtype::BF16, 10).unwrap_err().contains("records f32"));
        let inside = vec![("a".into(), Field::Scalar(Scalar::UInt(1))), ("a.b".into(), Field::Scalar(Scalar::UInt(1)))];
        assert_eq!(join(inside).unwrap_err(), INVALID);
    }

    #[test]
    fn the_skeleton_of_version_1_has_the_numbers() {
        let record = state(0..5, 2);
        let Value::Map(mut entries) = parse(&record).unwrap().to_owned() else { panic!("no map") };
        let Value::Map(momentum) = &mut entries[0].1 else { panic!("no map") };
        for (_, value) in momentum.iter_mut().filter(|(_, value)| value.is_map()) {
            *value = Value::Ext(0, Vec::new());
        }
        let skeleton = encode(&Value::Map(entries)).unwrap();
        assert_eq!(numbers(&skeleton).unwrap(), [("momentum.time".to_owned(), Scalar::UInt(2))]);
    }

    #[test]
    fn fuzz_states() {
        bonfire_testing::fuzz::fuzz("optimizer-state", [state(0..3, 1), state(0..3, 2)], |bytes| {
            let Ok(fields) = split(bytes) else { return false };
            let load = |field| match field {
                Field::Scalar(scalar) => Field::Scalar(scalar),
                Field::Tensor(RecordedTensor { dtype, shape, bytes: range }) => {
                    Field::Tensor(LoadedTensor { dtype, shape, bytes: bytes[range].to_vec() })
                }
            };
            let joined = join(fields.into_iter().map(|(path, field)| (path, load(field))).collect());
            // burn may reject the joined record, but must not panic.
            joined.and_then(|value| encode(&value)).is_ok_and(|record| load_state(record).is_ok())
        });
    }
}
