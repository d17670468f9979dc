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
    run(pieces).map(|join| join.record)
}

/// How many elements the tensors in the recorded state of a slice of `len` have, together.
pub(super) fn elements(record: &[u8], len: usize) -> Result<usize, &'static str> {
    run(&[Piece { record, len, range: 0..0 }]).map(|join| join.tensors * len)
}

const BROKEN: &str = "it is no state that burn recorded, or was damaged";
const APART: &str = "its parts were not saved in the same step";
const MIXED: &str = "it has tensors of another length than the parameter, so it is not kept element by element";

/// How a tensor begins: as a map of three, whose first key is `bytes`.
const TENSOR: &[u8] = b"\x83\xa5bytes";
const SHAPE: &[u8] = b"\xa5shape\x91";
const DTYPE: &[u8] = b"\xa5dtype";
/// The types that records are of, with elements of 8 bytes.
const TYPES: [&[u8]; 2] = [b"\xa3F64", b"\xa3I64"];
const WIDTH: usize = 8;

/// Records nest a few levels.
const DEPTH: usize = 64;

struct Join<'a> {
    /// Each piece, and what is left of its record.
    pieces: Vec<(&'a Piece<'a>, Reader<'a>)>,
    record: Vec<u8>,
    tensors: usize,
}

fn run<'a>(pieces: &'a [Piece<'a>]) -> Result<Join<'a>, &'static str> {
    let pieces = pieces.iter().map(|piece| (piece, Reader(piece.record))).collect();
    let mut join = Join { pieces, record: Vec::new(), tensors: 0 };
    join.value(0)?;
    if join.pieces.iter().all(|(_, rest)| rest.0.is_empty()) { Ok(join) } else { Err(BROKEN) }
}

impl<'a> Join<'a> {
    /// Goes on by one value, with all that is in it.
    fn value(&mut self, depth: usize) -> Result<(), &'static str> {
        if depth > DEPTH {
            return Err(BROKEN);
        }
        if self.pieces.iter().all(|(_, reader)| reader.0.starts_with(TENSOR)) {
            return self.tensor();
        }
        let Node { values, .. } = self.next_of_all()?;
        // Each value takes a byte at least, so a false number ends with the record.
        for _ in 0..values {
            if self.next_of_all()?.text.is_none_or(|key| key == b"bytes") {
                return Err(BROKEN);
            }
            self.value(depth + 1)?;
        }
        Ok(())
    }

    /// What all records go on with.
    fn next_of_all(&mut self) -> Result<Node<'a>, &'static str> {
        let mut same = None;
        for (_, reader) in &mut self.pieces {
            let node = reader.node().ok_or(BROKEN)?;
            if *same.get_or_insert(node) != node {
                return Err(APART);
            }
        }
        let node = same.ok_or(BROKEN)?;
        self.record.extend_from_slice(node.bytes);
        Ok(node)
    }

    fn tensor(&mut self) -> Result<(), &'static str> {
        let len: usize = self.pieces.iter().map(|(piece, _)| piece.range.len()).sum();
        let bytes = u32::try_from(len * WIDTH).map_err(|_| "a slice has too many elements to be recorded")?;
        self.record.extend_from_slice(TENSOR);
        self.record.push(0xc6);
        self.record.extend_from_slice(&bytes.to_be_bytes());
        let mut dtype = None;
        for (piece, reader) in &mut self.pieces {
            let (data, shape, own) = reader.tensor().ok_or(BROKEN)?;
            if shape != piece.len {
                return Err(MIXED);
            }
            if *dtype.get_or_insert(own) != own {
                return Err(APART);
            }
            let fits = piece.len.checked_mul(WIDTH) == Some(data.len());
            let range = piece.range.start * WIDTH..piece.range.end * WIDTH;
            self.record.extend_from_slice(data.get(range).filter(|_| fits).ok_or(BROKEN)?);
        }
        self.record.extend_from_slice(SHAPE);
        self.record.push(0xcf);
        self.record.extend_from_slice(&(len as u64).to_be_bytes());
        self.record.extend_from_slice(DTYPE);
        self.record.extend_from_slice(dtype.ok_or(BROKEN)?);
        self.tensors += 1;
        Ok(())
    }
}

/// The beginning of a value.
#[derive(Clone, Copy, PartialEq)]
struct Node<'a> {
    /// Its own bytes.
    bytes: &'a [u8],
    /// What it says, if it is a string.
    text: Option<&'a [u8]>,
    /// How many keys and values follow, if it is a map.
    values: usize,
}

/// What is left of a record.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn skip(&mut self, what: &[u8]) -> Option<()> {
        (self.take(what.len())? == what).then_some(())
    }

    fn number(&mut self, width: usize) -> Option<usize> {
        let number = self.take(width)?.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        usize::try_from(number).ok()
    }

    /// The bytes, the length and the type of a tensor with one dimension.
    fn tensor(&mut self) -> Option<(&'a [u8], usize, &'a [u8])> {
        self.skip(TENSOR)?;
        let width = match self.take(1)? {
            [0xc4] => 1,
            [0xc5] => 2,
            [0xc6] => 4,
            _ => return None,
        };
        let len = self.number(width)?;
        let data = self.take(len)?;
        self.skip(SHAPE)?;
        let shape = match self.take(1)? {
            [small @ 0..=0x7f] => usize::from(*small),
            [wide @ 0xcc..=0xcf] => self.number(1 << (wide - 0xcc))?,
            _ => return None,
        };
        self.skip(DTYPE)?;
        let dtype = self.take(TYPES[0].len())?;
        TYPES.contains(&dtype).then_some((data, shape, dtype))
    }

    fn node(&mut self) -> Option<Node<'a>> {
        let start = self.0;
        let marker = *self.take(1)?.first()?;
        let (mut own, mut values, mut text) = (0, 0, false);
        match marker {
            // Small integers, nil, false and true, and the array of nothing for what holds no data.
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 | 0x90 => {}
            // f32 and f64; unsigned and signed integers.
            0xca | 0xcb => own = 4 << (marker - 0xca),
            0xcc..=0xcf => own = 1 << (marker - 0xcc),
            0xd0..=0xd3 => own = 1 << (marker - 0xd0),
            0xa0..=0xbf => (own, text) = (usize::from(marker & 0x1f), true),
            0xd9..=0xdb => (own, text) = (self.number(1 << (marker - 0xd9))?, true),
            0x80..=0x8f => values = usize::from(marker & 0xf),
            0xde | 0xdf => values = self.number(2 << (marker - 0xde))?,
            // Other arrays, of which optimizers' states have none, and bytes that are no tensor's.
            _ => return None,
        }
        let content = self.take(own)?;
        Some(Node { bytes: &start[..start.len() - self.0.len()], text: text.then_some(content), values })
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
