//! Tensors in recorded optimizer state.
//!
//! An optimizer's state for a parameter is a record whose fields only burn knows. burn writes records as MessagePack
//! with field names, in which a tensor is always a map of `bytes`, `shape` and `dtype`. So a record is taken apart into
//! its tensors, which are saved in ranges like those of the model, and a skeleton: all else, such as a step count, with
//! placeholders. Put together, the tensors may have other ranges than before, so state of slices becomes state of whole
//! parameters or of other slices.
//!
//! Skeletons come from files and are not trusted. Serde would accept a tensor in many forms, and burn does not check a
//! tensor's claimed length. So tensors are accepted exactly as burn writes them, and their lengths are checked.

use std::ops::Range;

use burn::tensor::DType;
use rmpv::decode::read_value_ref_with_max_depth;
use rmpv::encode::write_value;
use rmpv::{Value, ValueRef};

/// A tensor in a record.
#[derive(Debug, PartialEq)]
pub(in crate::train) struct RecordedTensor {
    /// The names of the fields that lead to it, with dots between them.
    pub path: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// The place of its elements in the record.
    pub bytes: Range<usize>,
}

/// The elements and the shape of a tensor that is put into a record.
pub(in crate::train) struct TensorBytes {
    pub bytes: Vec<u8>,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

/// A record without its tensors.
pub(in crate::train) struct Split {
    pub skeleton: Vec<u8>,
    pub tensors: Vec<RecordedTensor>,
}

const INVALID: &str = "it is no state that burn recorded, or was damaged";

/// Why a state cannot be saved or loaded in parts.
pub(in crate::train) const NOT_ELEMENTWISE: &str =
    "it has tensors of another shape than the parameter, so it is not element-wise";

/// The keys of a tensor, in the order in which burn writes them.
const BYTES: &str = "bytes";
const SHAPE: &str = "shape";
const DTYPE: &str = "dtype";
/// The element types in records, with their width in bytes.
const TYPES: [(&str, DType, usize); 3] = [("F64", DType::F64, 8), ("F32", DType::F32, 4), ("I64", DType::I64, 8)];
/// The names around the state of a parameter of a rank in the record of burn's `OptimizerAdaptor`.
const VERSION: &str = "V1";
const RANK: &str = "Rank";

/// The deepest nesting that is accepted. Records nest a few levels.
const DEPTH: usize = 128;

/// Takes the record of a state apart.
pub(in crate::train) fn split(record: &[u8]) -> Result<Split, &'static str> {
    split_value(record, &parse(record)?)
}

/// Takes the record of burn's `OptimizerAdaptor` apart: returns the ids of parameters and the states for them. `None`
/// if the record is that of another optimizer.
pub(in crate::train) fn split_by_id(record: &[u8]) -> Result<Option<Vec<(String, Split)>>, &'static str> {
    let ValueRef::Map(entries) = parse(record)? else { return Ok(None) };
    let states = entries.iter().map(|(id, value)| {
        let state = single(value, VERSION).and_then(|value| single(value, RANK))?;
        Some((text(id)?.to_owned(), split_value(record, state).ok()?))
    });
    Ok(states.collect())
}

/// Puts a state together. `tensor` returns the tensor at a path.
pub(in crate::train) fn join<E>(
    skeleton: &[u8],
    mut tensor: impl FnMut(&str) -> Result<TensorBytes, E>,
    invalid: impl Fn(&'static str) -> E,
) -> Result<Value, E> {
    let skeleton = parse(skeleton).map_err(&invalid)?;
    join_value(&skeleton, "", &mut tensor, &invalid)
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

fn split_value(record: &[u8], value: &ValueRef<'_>) -> Result<Split, &'static str> {
    let mut tensors = Vec::new();
    let skeleton = skeleton(record, value, "", &mut tensors)?;
    Ok(Split { skeleton: encode(&skeleton)?, tensors })
}

fn skeleton(
    record: &[u8],
    value: &ValueRef<'_>,
    path: &str,
    tensors: &mut Vec<RecordedTensor>,
) -> Result<Value, &'static str> {
    match value {
        ValueRef::Map(entries) if entries.first().is_some_and(|(key, _)| text(key) == Some(BYTES)) => {
            let (bytes, shape, dtype) = tensor_parts(value).ok_or(INVALID)?;
            let start = bytes.as_ptr().addr() - record.as_ptr().addr();
            tensors.push(RecordedTensor { path: path.into(), dtype, shape, bytes: start..start + bytes.len() });
            Ok(placeholder())
        }
        ValueRef::Map(entries) => {
            let entries = entries.iter().map(|(key, value)| {
                let name = text(key).filter(|name| *name != BYTES && !name.contains('.')).ok_or(INVALID)?;
                Ok((name.into(), skeleton(record, value, &below(path, name), tensors)?))
            });
            entries.collect::<Result<_, _>>().map(Value::Map)
        }
        // Optimizer states have no bytes outside of tensors and no arrays except the empty one, for types without data.
        ValueRef::Array(items) if !items.is_empty() => Err(INVALID),
        ValueRef::Binary(_) | ValueRef::Ext(..) => Err(INVALID),
        other => Ok(ValueRef::to_owned(other)),
    }
}

fn join_value<E>(
    value: &ValueRef<'_>,
    path: &str,
    tensor: &mut impl FnMut(&str) -> Result<TensorBytes, E>,
    invalid: &impl Fn(&'static str) -> E,
) -> Result<Value, E> {
    match value {
        ValueRef::Map(entries) => {
            let entries = entries.iter().map(|(key, value)| {
                let name = text(key).filter(|name| *name != BYTES).ok_or_else(|| invalid(INVALID))?;
                Ok((name.into(), join_value(value, &below(path, name), tensor, invalid)?))
            });
            entries.collect::<Result<_, E>>().map(Value::Map)
        }
        ValueRef::Array(items) if !items.is_empty() => Err(invalid(INVALID)),
        ValueRef::Binary(_) => Err(invalid(INVALID)),
        ValueRef::Ext(..) if ValueRef::to_owned(value) != placeholder() => Err(invalid(INVALID)),
        ValueRef::Ext(..) => {
            let TensorBytes { bytes, dtype, shape } = tensor(path)?;
            let known = TYPES.iter().find(|(_, known, _)| *known == dtype).ok_or_else(|| invalid(INVALID))?;
            if shape.iter().product::<usize>().checked_mul(known.2) != Some(bytes.len())
                || u32::try_from(bytes.len()).is_err()
            {
                return Err(invalid("a tensor in it has a length that cannot be recorded"));
            }
            let shape = Value::Array(shape.into_iter().map(Value::from).collect());
            let entries = [(BYTES, Value::Binary(bytes)), (SHAPE, shape), (DTYPE, known.0.into())];
            Ok(Value::Map(entries.into_iter().map(|(key, value)| (key.into(), value)).collect()))
        }
        other => Ok(ValueRef::to_owned(other)),
    }
}

/// What stands for a tensor in a skeleton: records of burn have no extension types.
fn placeholder() -> Value {
    Value::Ext(0, Vec::new())
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

/// Returns the bytes, the shape and the element type of a tensor whose length is right.
fn tensor_parts<'a>(tensor: &ValueRef<'a>) -> Option<(&'a [u8], Vec<usize>, DType)> {
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
    let (_, dtype, width) = TYPES.into_iter().find(|(known, ..)| text(name) == Some(known))?;
    let len = dimensions.iter().try_fold(width, |product, dimension| product.checked_mul(*dimension))?;
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

    fn load(record: Vec<u8>) -> Result<State, impl std::fmt::Debug> {
        load_compact::<Flex, State>(record, &Default::default())
    }

    /// Loads and records the state again: two records of one state may encode numbers differently.
    fn rerecord(record: Vec<u8>) -> Vec<u8> {
        record_compact::<Flex, _>(load(record).unwrap()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]
        #[test]
        fn slices_of_any_partition_are_joined_from_any_other(len in 1usize..300, from in 1usize..6, to in 1usize..6) {
            let records: Vec<_> = (0..from).map(|i| state(partition(len, from, i), 3)).collect();
            let splits: Vec<_> = records.iter().map(|record| split(record).unwrap()).collect();
            for own in (0..to).map(|i| partition(len, to, i)).filter(|own| !own.is_empty()) {
                let tensor = |path: &str| {
                    let of = |(split, record): (&Split, &Vec<u8>)| {
                        let tensor = split.tensors.iter().find(|tensor| tensor.path == path).unwrap();
                        assert_eq!(tensor.dtype, DType::F32);
                        record[tensor.bytes.clone()].to_vec()
                    };
                    let whole: Vec<u8> = splits.iter().zip(&records).flat_map(of).collect();
                    let bytes = whole[4 * own.start..4 * own.end].to_vec();
                    Ok::<_, &str>(TensorBytes { bytes, dtype: DType::F32, shape: vec![own.len()] })
                };
                prop_assert_eq!(splits[0].tensors.len(), 3);
                let joined = encode(&join(&splits[0].skeleton, tensor, |e| e).unwrap()).unwrap();
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
        let skeleton = split(&record).unwrap().skeleton;
        let short = |_: &str| Ok(TensorBytes { bytes: vec![0; 16], dtype: DType::F32, shape: vec![5] });
        assert!(join(&skeleton, short, |e| e).unwrap_err().contains("a length that cannot be recorded"));
    }

    #[test]
    fn fuzz_states() {
        bonfire_testing::fuzz::fuzz("optimizer-state", [state(0..3, 1), state(0..3, 2)], |bytes| {
            let Ok(parts) = split(bytes) else { return false };
            let tensor = |path: &str| {
                let tensor = parts.tensors.iter().find(|tensor| tensor.path == path).ok_or(INVALID)?;
                let (bytes, shape) = (bytes[tensor.bytes.clone()].to_vec(), tensor.shape.clone());
                Ok(TensorBytes { bytes, dtype: tensor.dtype, shape })
            };
            let joined = join(&parts.skeleton, tensor, |e| e).and_then(|value| encode(&value));
            // burn may reject the joined record, but must not panic.
            joined.is_ok_and(|record| load(record).is_ok())
        });
    }

    #[test]
    fn fuzz_skeletons() {
        let skeletons = [1, 2].map(|steps| split(&state(0..3, steps)).unwrap().skeleton);
        bonfire_testing::fuzz::fuzz("optimizer-skeleton", skeletons, |bytes| {
            let tensor = |_: &str| Ok(TensorBytes { bytes: vec![0; 12], dtype: DType::F32, shape: vec![3] });
            let joined = join(bytes, tensor, |e| e).and_then(|value| encode(&value));
            joined.is_ok_and(|record| load(record).is_ok())
        });
    }
}
