//! Slices and joins recorded optimizer state.
//!
//! An optimizer's state for a parameter is a record whose fields only burn knows. burn writes records as MessagePack
//! with field names, in which a tensor is always a map of `bytes`, `shape` and `dtype`. So the state of a slice can be
//! assembled from the states of other slices: tensors are sliced and joined, and everything else, such as a step count,
//! must be equal in all of them.
//!
//! Records may come from files and are not trusted. Serde would accept a tensor in many forms, and burn does not check
//! a tensor's claimed length. This module therefore accepts only maps of maps with strings as keys, with tensors
//! exactly as burn writes them, and checks their lengths.

use std::ops::Range;

use rmpv::decode::read_value_ref_with_max_depth;
use rmpv::encode::write_value;
use rmpv::{Value, ValueRef};

/// The recorded state of a slice of `len` elements, and the range of elements to take from it.
pub(super) struct RecordedSlice<'a> {
    pub record: &'a [u8],
    pub len: usize,
    pub range: Range<usize>,
}

/// Joins the selected elements of all records, in order, to the record of one slice.
pub(super) fn join(slices: &[RecordedSlice<'_>]) -> Result<Vec<u8>, &'static str> {
    let mut record = Vec::new();
    write_value(&mut record, &join_records(slices)?.0).map_err(|_| INVALID)?;
    Ok(record)
}

/// Returns the total number of elements of the tensors in the recorded state of a slice of `len` elements.
pub(super) fn elements(record: &[u8], len: usize) -> Result<usize, &'static str> {
    join_records(&[RecordedSlice { record, len, range: 0..0 }]).map(|(_, tensors)| tensors * len)
}

const INVALID: &str = "it is no state that burn recorded, or was damaged";
const DIFFERENT_STEPS: &str = "its parts were not saved in the same step";
const NOT_ELEMENTWISE: &str = "it has tensors of another length than the parameter, so it is not element-wise";

/// The keys of a tensor, in the order in which burn writes them.
const BYTES: &str = "bytes";
const SHAPE: &str = "shape";
const DTYPE: &str = "dtype";
/// The element types in records.
const TYPES: [&str; 2] = ["F64", "I64"];
/// Bytes per element of these types.
const WIDTH: usize = 8;

/// The deepest nesting that is accepted. Records nest a few levels.
const DEPTH: usize = 128;

/// Returns the joined record, and the number of tensors in it.
fn join_records(slices: &[RecordedSlice<'_>]) -> Result<(Value, usize), &'static str> {
    let records = slices.iter().map(|slice| {
        let mut rest = slice.record;
        let record = read_value_ref_with_max_depth(&mut rest, DEPTH).map_err(|_| INVALID)?;
        if rest.is_empty() { Ok((slice, record)) } else { Err(INVALID) }
    });
    let records = records.collect::<Result<Vec<_>, _>>()?;
    let mut tensors = 0;
    let joined =
        join_values(&records.iter().map(|(slice, record)| (*slice, record)).collect::<Vec<_>>(), &mut tensors)?;
    Ok((joined, tensors))
}

/// The values at the same place in all records.
type Column<'a, 'b> = [(&'a RecordedSlice<'b>, &'a ValueRef<'b>)];

fn join_values(column: &Column<'_, '_>, tensors: &mut usize) -> Result<Value, &'static str> {
    let (_, first) = column.first().ok_or(INVALID)?;
    match first {
        ValueRef::Map(entries) if entries.first().is_some_and(|(key, _)| text(key) == Some(BYTES)) => {
            *tensors += 1;
            join_tensors(column)
        }
        ValueRef::Map(entries) => {
            let joined = entries.iter().enumerate().map(|(at, (key, _))| {
                let name = text(key).filter(|name| *name != BYTES).ok_or(INVALID)?;
                let values = column.iter().map(|(slice, value)| match value {
                    ValueRef::Map(other) if other.len() == entries.len() && other[at].0 == *key => {
                        Ok((*slice, &other[at].1))
                    }
                    _ => Err(DIFFERENT_STEPS),
                });
                Ok((name.into(), join_values(&values.collect::<Result<Vec<_>, _>>()?, tensors)?))
            });
            joined.collect::<Result<_, _>>().map(Value::Map)
        }
        // Optimizer states have no bytes outside of tensors and no arrays except the empty one, for types without data.
        ValueRef::Array(items) if !items.is_empty() => Err(INVALID),
        ValueRef::Binary(_) | ValueRef::Ext(..) => Err(INVALID),
        _ if column.iter().skip(1).all(|(_, other)| other == first) => Ok(ValueRef::to_owned(first)),
        _ => Err(DIFFERENT_STEPS),
    }
}

fn join_tensors(column: &Column<'_, '_>) -> Result<Value, &'static str> {
    let len: usize = column.iter().map(|(slice, _)| slice.range.len()).sum();
    if u32::try_from(len * WIDTH).is_err() {
        return Err("a slice has too many elements to be recorded");
    }
    let mut bytes = Vec::with_capacity(len * WIDTH);
    let mut dtype = None;
    for (slice, value) in column {
        let (data, shape, own) = tensor_parts(value).ok_or(INVALID)?;
        if shape != slice.len as u64 {
            return Err(NOT_ELEMENTWISE);
        }
        if *dtype.get_or_insert(own) != own {
            return Err(DIFFERENT_STEPS);
        }
        let fits = slice.len.checked_mul(WIDTH) == Some(data.len());
        let range = slice.range.start * WIDTH..slice.range.end * WIDTH;
        bytes.extend_from_slice(data.get(range).filter(|_| fits).ok_or(INVALID)?);
    }
    let shape = Value::Array(vec![len.into()]);
    let dtype = dtype.ok_or(INVALID)?.into();
    Ok(Value::Map(vec![(BYTES.into(), bytes.into()), (SHAPE.into(), shape), (DTYPE.into(), dtype)]))
}

/// Returns the bytes, the length and the element type of a tensor with one dimension.
fn tensor_parts<'a>(tensor: &ValueRef<'a>) -> Option<(&'a [u8], u64, &'static str)> {
    let ValueRef::Map(entries) = tensor else { return None };
    let [(bytes, ValueRef::Binary(data)), (shape, ValueRef::Array(dimensions)), (dtype, name)] = &entries[..] else {
        return None;
    };
    let [ValueRef::Integer(len)] = dimensions[..] else { return None };
    let known = [bytes, shape, dtype].map(text) == [BYTES, SHAPE, DTYPE].map(Some);
    let name = TYPES.into_iter().find(|known| text(name) == Some(known))?;
    known.then_some((data, len.as_u64()?, name))
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
    use burn::record::Recorder;
    use burn::tensor::Tensor;
    use proptest::prelude::*;

    use super::*;
    use crate::train::record::Records;
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
        Recorder::<Flex>::record(&Records::default(), state.unwrap(), ()).unwrap()
    }

    fn load(record: Vec<u8>) -> Result<State, impl std::fmt::Debug> {
        Recorder::<Flex>::load(&Records::default(), record, &Default::default())
    }

    /// Loads and records the state again: two records of one state may encode numbers differently.
    fn rerecord(record: Vec<u8>) -> Vec<u8> {
        Recorder::<Flex>::record(&Records::default(), load(record).unwrap(), ()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]
        #[test]
        fn slices_of_any_partition_are_joined_from_any_other(len in 1usize..300, from in 1usize..6, to in 1usize..6) {
            let (old, new) = (|i| partition(len, from, i), |i| partition(len, to, i));
            let records: Vec<_> = (0..from).map(|i| state(old(i), 3)).collect();
            for own in (0..to).map(new).filter(|own| !own.is_empty()) {
                let slices = (0..from).filter_map(|i| {
                    let range = own.start.max(old(i).start)..own.end.min(old(i).end);
                    let within = range.start.wrapping_sub(old(i).start)..range.end.wrapping_sub(old(i).start);
                    (!range.is_empty()).then(|| RecordedSlice { record: &records[i], len: old(i).len(), range: within })
                });
                let joined = join(&slices.collect::<Vec<_>>()).unwrap();
                prop_assert_eq!(elements(&joined, own.len()), Ok(3 * own.len()));
                prop_assert_eq!(rerecord(joined), state(own, 3));
            }
        }
    }

    #[test]
    fn records_that_do_not_belong_together_are_refused() {
        let (early, late) = (state(0..5, 2), state(5..9, 3));
        let slice = |record, len| RecordedSlice { record, len, range: 0..len };
        assert_eq!(join(&[slice(&early, 5), slice(&late, 4)]), Err(DIFFERENT_STEPS));
        assert_eq!(join(&[slice(&early, 4)]), Err(NOT_ELEMENTWISE));
        assert_eq!(join(&[slice(&early[..9], 5)]), Err(INVALID));
        assert_eq!(join(&[]), Err(INVALID));
        assert_eq!(join(&[slice(&[&early[..], b"\xc0"].concat(), 5)]), Err(INVALID));
    }

    #[test]
    fn fuzz_states() {
        bonfire_testing::fuzz::fuzz("sharded-state", [state(0..3, 1), state(0..3, 2)], |bytes| {
            let joined = join(&[RecordedSlice { record: bytes, len: 3, range: 1..3 }]);
            // burn may reject the joined record, but must not panic.
            joined.is_ok_and(|record| load(record).is_ok())
        });
    }
}
