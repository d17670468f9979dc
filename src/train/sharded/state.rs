//! The recorded state of a slice, cut and joined.
//!
//! What an optimizer keeps for a parameter is a record whose fields only burn knows. But burn writes records as
//! MessagePack with names, in which a tensor is always a map of `bytes`, `shape` and `dtype`. So the state of a slice
//! can be made of those of others: tensors are cut and joined, and everything else, such as a count of steps, must be
//! the same in all of them.
//!
//! Records may be from files. Serde would take a tensor in many forms, and burn believes what it says of its length. So
//! what passes here is a map of maps with strings as keys, in which a tensor is written as burn writes it, and checked.

use std::ops::Range;

use burn::record::{DoublePrecisionSettings, NamedMpkBytesRecorder};
use rmpv::decode::read_value_ref_with_max_depth;
use rmpv::encode::write_value;
use rmpv::{Value, ValueRef};

/// Floats are recorded as f64 and integers as i64, so all narrower types come back as they were.
pub(super) type Records = NamedMpkBytesRecorder<DoublePrecisionSettings>;

/// The recorded state of a slice of `len` elements, of which those in `range` are wanted.
pub(super) struct Piece<'a> {
    pub record: &'a [u8],
    pub len: usize,
    pub range: Range<usize>,
}

/// The recorded state of the slice that consists of these pieces, in their order.
pub(super) fn join(pieces: &[Piece<'_>]) -> Result<Vec<u8>, &'static str> {
    let mut record = Vec::new();
    write_value(&mut record, &run(pieces)?.0).map_err(|_| BROKEN)?;
    Ok(record)
}

/// How many elements the tensors in the recorded state of a slice of `len` have, together.
pub(super) fn elements(record: &[u8], len: usize) -> Result<usize, &'static str> {
    run(&[Piece { record, len, range: 0..0 }]).map(|(_, tensors)| tensors * len)
}

const BROKEN: &str = "it is no state that burn recorded, or was damaged";
const APART: &str = "its parts were not saved in the same step";
const MIXED: &str = "it has tensors of another length than the parameter, so it is not kept element by element";

/// The keys of a tensor, in their order.
const BYTES: &str = "bytes";
const SHAPE: &str = "shape";
const DTYPE: &str = "dtype";
/// The types that records are of, with elements of 8 bytes.
const TYPES: [&str; 2] = ["F64", "I64"];
const WIDTH: usize = 8;

/// Records nest a few levels.
const DEPTH: usize = 128;

/// The joined record, and the number of tensors in it.
fn run(pieces: &[Piece<'_>]) -> Result<(Value, usize), &'static str> {
    let records = pieces.iter().map(|piece| {
        let mut rest = piece.record;
        let record = read_value_ref_with_max_depth(&mut rest, DEPTH).map_err(|_| BROKEN)?;
        if rest.is_empty() { Ok((piece, record)) } else { Err(BROKEN) }
    });
    let records = records.collect::<Result<Vec<_>, _>>()?;
    let mut tensors = 0;
    let joined = value(&records.iter().map(|(piece, record)| (*piece, record)).collect::<Vec<_>>(), &mut tensors)?;
    Ok((joined, tensors))
}

/// What all records have in the same place.
type Column<'a, 'b> = [(&'a Piece<'b>, &'a ValueRef<'b>)];

fn value(column: &Column<'_, '_>, tensors: &mut usize) -> Result<Value, &'static str> {
    let (_, first) = column.first().ok_or(BROKEN)?;
    match first {
        ValueRef::Map(entries) if entries.first().is_some_and(|(key, _)| text(key) == Some(BYTES)) => {
            *tensors += 1;
            tensor(column)
        }
        ValueRef::Map(entries) => {
            let joined = entries.iter().enumerate().map(|(at, (key, _))| {
                let name = text(key).filter(|name| *name != BYTES).ok_or(BROKEN)?;
                let values = column.iter().map(|(piece, value)| match value {
                    ValueRef::Map(other) if other.len() == entries.len() && other[at].0 == *key => {
                        Ok((*piece, &other[at].1))
                    }
                    _ => Err(APART),
                });
                Ok((name.into(), value(&values.collect::<Result<Vec<_>, _>>()?, tensors)?))
            });
            joined.collect::<Result<_, _>>().map(Value::Map)
        }
        // Optimizers' states have no arrays but that of nothing, for what holds no data, and no bytes but tensors'.
        ValueRef::Array(items) if !items.is_empty() => Err(BROKEN),
        ValueRef::Binary(_) | ValueRef::Ext(..) => Err(BROKEN),
        _ if column.iter().skip(1).all(|(_, other)| other == first) => Ok(ValueRef::to_owned(first)),
        _ => Err(APART),
    }
}

fn tensor(column: &Column<'_, '_>) -> Result<Value, &'static str> {
    let len: usize = column.iter().map(|(piece, _)| piece.range.len()).sum();
    if u32::try_from(len * WIDTH).is_err() {
        return Err("a slice has too many elements to be recorded");
    }
    let mut bytes = Vec::with_capacity(len * WIDTH);
    let mut dtype = None;
    for (piece, value) in column {
        let (data, shape, own) = parts(value).ok_or(BROKEN)?;
        if shape != piece.len as u64 {
            return Err(MIXED);
        }
        if *dtype.get_or_insert(own) != own {
            return Err(APART);
        }
        let fits = piece.len.checked_mul(WIDTH) == Some(data.len());
        let range = piece.range.start * WIDTH..piece.range.end * WIDTH;
        bytes.extend_from_slice(data.get(range).filter(|_| fits).ok_or(BROKEN)?);
    }
    let shape = Value::Array(vec![len.into()]);
    let dtype = dtype.ok_or(BROKEN)?.into();
    Ok(Value::Map(vec![(BYTES.into(), bytes.into()), (SHAPE.into(), shape), (DTYPE.into(), dtype)]))
}

/// The bytes, the length and the type of a tensor with one dimension.
fn parts<'a>(tensor: &ValueRef<'a>) -> Option<(&'a [u8], u64, &'static str)> {
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
    use bonfire_core::partition;

    type State = <Adam as SimpleOptimizer<Flex>>::State<1>;

    /// Adam's state for elements `range` of a parameter, after so many steps.
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

    /// What burn writes of what it reads: two records of one state may say numbers in other words.
    fn again(record: Vec<u8>) -> Vec<u8> {
        Recorder::<Flex>::record(&Records::default(), load(record).unwrap(), ()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]
        #[test]
        fn slices_of_any_partition_are_made_of_those_of_any_other(len in 1usize..300, from in 1usize..6, to in 1usize..6) {
            let (old, new) = (|i| partition(len, from, i), |i| partition(len, to, i));
            let records: Vec<_> = (0..from).map(|i| state(old(i), 3)).collect();
            for own in (0..to).map(new).filter(|own| !own.is_empty()) {
                let pieces = (0..from).filter_map(|i| {
                    let range = own.start.max(old(i).start)..own.end.min(old(i).end);
                    let within = range.start.wrapping_sub(old(i).start)..range.end.wrapping_sub(old(i).start);
                    (!range.is_empty()).then(|| Piece { record: &records[i], len: old(i).len(), range: within })
                });
                let joined = join(&pieces.collect::<Vec<_>>()).unwrap();
                prop_assert_eq!(elements(&joined, own.len()), Ok(3 * own.len()));
                prop_assert_eq!(again(joined), state(own, 3));
            }
        }
    }

    #[test]
    fn parts_that_do_not_belong_together_are_told_apart() {
        let (early, late) = (state(0..5, 2), state(5..9, 3));
        let piece = |record, len| Piece { record, len, range: 0..len };
        assert_eq!(join(&[piece(&early, 5), piece(&late, 4)]), Err(APART));
        assert_eq!(join(&[piece(&early, 4)]), Err(MIXED));
        assert_eq!(join(&[piece(&early[..9], 5)]), Err(BROKEN));
        assert_eq!(join(&[]), Err(BROKEN));
        assert_eq!(join(&[piece(&[&early[..], b"\xc0"].concat(), 5)]), Err(BROKEN));
    }

    #[test]
    fn fuzz_states() {
        bonfire_testing::fuzz::fuzz("sharded-state", [state(0..3, 1), state(0..3, 2)], |bytes| {
            let joined = join(&[Piece { record: bytes, len: 3, range: 1..3 }]);
            // Burn may find it wanting, but not fall over it.
            joined.is_ok_and(|record| load(record).is_ok())
        });
    }
}
