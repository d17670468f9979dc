//! A rank's call as data: compared between ranks, sent ahead of every message, shown in errors.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr, VariantArray};

use super::shape::find_shape;
use super::{DType, ReduceOp};

/// The kind of an operation. Its text is the name of the method of [`Group`](crate::Group), such as `all_reduce`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr, VariantArray)]
#[repr(u8)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Operation {
    /// All ranks get the reduction.
    AllReduce = 0,
    /// The root gets the reduction.
    Reduce,
    /// All ranks get the root's elements.
    Broadcast,
    /// All ranks get the parts of all ranks. Also `all_gather_v`.
    AllGather,
    /// Each rank gets its part of the reduction. Also `reduce_scatter_v`.
    ReduceScatter,
    /// All ranks wait for each other.
    Barrier,
    /// Point to point: `send` on one rank, `recv` on its peer.
    Send,
    /// Each rank gets a part from every rank.
    AllToAll,
    /// The root gets the parts of all ranks. Also `gather_v`.
    Gather,
    /// Each rank gets its part of the root's elements. Also `scatter_v`.
    Scatter,
    /// `all_to_all` with separate sizes for every pair of ranks.
    AllToAllV,
    /// Point to point: send to one rank and receive from one at the same time. Also the messages of a batch.
    Exchange,
    /// The messages by which the members of a subgroup create it.
    Subgroup,
}

impl Operation {
    /// All operations, in the order of their numbers on the wire.
    pub(crate) const ALL: &[Operation] = Operation::VARIANTS;

    /// Whether all ranks of the group take part, so that the operation has a number in the group's sequence.
    pub const fn is_collective(self) -> bool {
        !matches!(self, Operation::Send | Operation::Exchange | Operation::Subgroup)
    }
}

/// The call of one rank: everything on which the ranks of an operation must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// The element type.
    pub dtype: DType,
    /// Number of elements: of one rank's vector for reductions, `broadcast` and `all_to_all`; of the parts of all ranks
    /// together for `all_gather`, `gather` and `scatter`; of the message for `send`. 0 for all others.
    pub count: usize,
    /// The reduction, if the operation has one.
    pub reduction: Option<ReduceOp>,
    /// The root, if the operation has one.
    pub root: Option<usize>,
    /// Fingerprint of the sizes or shape on which the ranks must also agree, if any.
    pub(crate) sizes: Option<Fingerprint>,
}

/// Returns the FNV-1a hash (Fowler, Noll and Vo) of the bytes. It is the same in every build.
pub fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The functions of layers above whose operations errors and traces name after them. Such a call has the fingerprint of
/// the function's name in place of a shape, so ranks that call different functions disagree.
const FUNCTIONS: [&str; 12] = [
    "a message between devices",
    "announced gathers",
    "end of pass",
    "end of step",
    "gathering updated parameters",
    "mean",
    "root block",
    "seeded",
    "step",
    "sync",
    "training step",
    "weights",
];

/// Blocks of parameters are functions too, named by their numbers. So many names are tried in an error.
const BLOCKS: usize = 1000;

/// A hash of the sizes of the ranks' parts, if the caller gave them, and of a tensor's shape or a function's name. Odd
/// if it covers sizes, even otherwise. Never 0, which encodes `None` on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Fingerprint(u32);

impl Fingerprint {
    /// Hashes numbers on which several ranks must agree.
    pub fn of(numbers: impl IntoIterator<Item = usize>) -> u32 {
        (hash(numbers.into_iter().flat_map(|number| (number as u64).to_le_bytes())) % 0xffff_ffff) as u32 + 1
    }

    const fn has_sizes(self) -> bool {
        self.0 & 1 == 1
    }

    /// Returns 16 bits of it that are never 0 and keep whether it covers sizes.
    pub fn shortened(self) -> u16 {
        match self.0 as u16 {
            0 => 2,
            word => word,
        }
    }

    /// Returns the numbers that stand for a function's name.
    pub fn name(function: &str) -> impl Iterator<Item = usize> {
        function.bytes().map(usize::from)
    }

    pub fn to_word(fingerprint: Option<Fingerprint>) -> u32 {
        fingerprint.map_or(0, |Fingerprint(word)| word)
    }

    pub fn from_word(word: u32) -> Option<Fingerprint> {
        (word != 0).then_some(Fingerprint(word))
    }
}

impl Call {
    /// Creates a call on `count` elements, without reduction or root.
    pub const fn new(operation: Operation, dtype: DType, count: usize) -> Call {
        Call { operation, dtype, count, reduction: None, root: None, sizes: None }
    }

    /// Returns the size of [`count`](Self::count) elements in bytes.
    ///
    /// # Panics
    /// If the size overflows, in builds that check for it. That of a call on a group's buffers cannot.
    pub const fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Returns the call with this reduction.
    pub const fn reducing(self, op: ReduceOp) -> Call {
        Call { reduction: Some(op), ..self }
    }

    /// Returns the call with this root.
    pub const fn rooted(self, root: usize) -> Call {
        Call { root: Some(root), ..self }
    }

    /// Returns the call with these sizes of the ranks' parts.
    pub(crate) fn sized(self, sizes: &[usize]) -> Call {
        Call { sizes: Some(Fingerprint(Fingerprint::of(sizes.iter().copied()) | 1)), ..self }
    }

    /// Whether the caller gave the sizes of the ranks' parts, as in `all_gather_v`.
    pub const fn is_sized(&self) -> bool {
        matches!(self.sizes, Some(sizes) if sizes.has_sizes())
    }

    /// Returns the call on tensors whose shape has this [`Fingerprint::of`].
    pub(crate) fn shaped(self, shape: u32) -> Call {
        let sizes = match self.sizes {
            Some(Fingerprint(sizes)) if self.is_sized() => sizes ^ shape | 1,
            _ => (shape & !1).max(2),
        };
        Call { sizes: Some(Fingerprint(sizes)), ..self }
    }

    /// Returns the function of a layer above that this call is a part of, if its name can be found.
    fn function(&self) -> Option<Cow<'static, str>> {
        self.sizes?;
        let bare = Call { sizes: None, ..*self };
        let blocks = (1..=BLOCKS).map(|number| Cow::Owned(format!("block {number}")));
        let mut functions = FUNCTIONS.into_iter().map(Cow::Borrowed).chain(blocks);
        functions.find(|function| *self == bare.shaped(Fingerprint::of(Fingerprint::name(function))))
    }

    /// Returns the tensors' shape, if this is a call on tensors and the shape can be found.
    fn shape(&self) -> Option<Vec<usize>> {
        let bare = Call { sizes: None, ..*self };
        let is_it = |shape: &[usize]| *self == bare.shaped(Fingerprint::of(shape.iter().copied()));
        // A trace has the lower half of it.
        let whole = self.sizes.is_some_and(|sizes| !sizes.has_sizes() && sizes.0 > u32::from(u16::MAX));
        if whole { find_shape(self.count, is_it) } else { None }
    }

    /// Whether nothing but the sizes of parts or the shapes of tensors differ.
    pub(crate) fn differs_in_shape_only(&self, other: &Call) -> bool {
        self != other && Call { sizes: other.sizes, ..*self } == *other && self.function() == other.function()
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = matches!(
            self.operation,
            Operation::AllGather | Operation::ReduceScatter | Operation::Gather | Operation::Scatter
        );
        let function = self.function();
        if let Some(function) = &function {
            write!(f, "{function}'s ")?;
        }
        write!(f, "{}{}", self.operation, if parts && self.is_sized() { "_v" } else { "" })?;
        match self.operation {
            Operation::Barrier | Operation::Subgroup => return Ok(()),
            Operation::AllToAllV | Operation::Exchange => write!(f, "({}", self.dtype)?,
            _ => write!(f, "({} x {}", self.dtype, self.count)?,
        }
        if let Some(reduction) = self.reduction {
            write!(f, ", {reduction}")?;
        }
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        if let (Some(Fingerprint(sizes)), None) = (self.sizes, function) {
            match self.shape() {
                Some(shape) => write!(f, ", shape {shape:?}")?,
                None => write!(f, ", {} #{sizes:04x}", if self.is_sized() { "sizes" } else { "shape" })?,
            }
        }
        write!(f, ")")
    }
}

/// Returns the function of a layer above that a call is a part of, if its name can be found.
pub fn function(call: &Call) -> Option<Cow<'static, str>> {
    call.function()
}

/// An operation in its group: the call and its sequence number. It tags every message of the operation. The messages
/// between two ranks need no number of their own: they arrive in order, and the two plans agree on that order.
///
/// A receiver compares the tag with the one that it expects, so messages of different operations are never confused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Site {
    /// The call.
    pub call: Call,
    /// Its number among the group's collectives, counted from 0. Messages of `send` are numbered per sender and
    /// receiver instead; an exchange and the creation of a subgroup have 0.
    pub sequence: u64,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.call, self.sequence)
    }
}

/// Encodes an absent reduction or root on the wire.
const NONE: u32 = u32::MAX;

impl Site {
    /// Length of [`Site::to_bytes`] in bytes.
    pub const BYTES: usize = 32;

    /// Creates the site of `call` as operation number `sequence`.
    pub const fn new(call: Call, sequence: u64) -> Self {
        Site { call, sequence }
    }

    /// Encodes the site, little endian:
    /// `sequence u64 | count u64 | root u32 | reduction u32 | operation u8 | dtype u8 | 0 u16 | sizes u32`.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&(self.call.count as u64).to_le_bytes());
        bytes[16..20].copy_from_slice(&self.call.root.map_or(NONE, |root| root as u32).to_le_bytes());
        bytes[20..24].copy_from_slice(&self.call.reduction.map_or(NONE, |op| op as u32).to_le_bytes());
        bytes[24] = self.call.operation as u8;
        bytes[25] = self.call.dtype as u8;
        bytes[28..].copy_from_slice(&Fingerprint::to_word(self.call.sizes).to_le_bytes());
        bytes
    }

    /// Decodes a site. Returns `None` for bytes that [`Site::to_bytes`] cannot produce.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let u64_at = |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        let u32_at = |at: usize| bytes[at..at + 4].iter().rev().fold(0u32, |n, b| n << 8 | u32::from(*b));
        let reduction = match u32_at(20) {
            NONE => None,
            number => Some(*ReduceOp::ALL.get(number as usize)?),
        };
        let call = Call {
            operation: *Operation::ALL.get(usize::from(bytes[24]))?,
            dtype: *DType::ALL.get(usize::from(bytes[25]))?,
            count: usize::try_from(u64_at(8)).ok()?,
            reduction,
            root: Some(u32_at(16)).filter(|root| *root != NONE).map(|root| root as usize),
            sizes: Fingerprint::from_word(u32_at(28)),
        };
        (bytes[26..28] == [0; 2]).then_some(Site { call, sequence: u64_at(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sites_round_trip(
            sequence in any::<u64>(),
            (operation, dtype, count) in (0..Operation::ALL.len(), 0..DType::ALL.len(), any::<usize>()),
            reduction in proptest::option::of(0..ReduceOp::ALL.len()),
            root in proptest::option::of(0usize..1 << 20),
            sizes in any::<u32>(),
        ) {
            let sizes = Fingerprint::from_word(sizes);
            let reduction = reduction.map(|i| ReduceOp::ALL[i]);
            let (operation, dtype) = (Operation::ALL[operation], DType::ALL[dtype]);
            let site = Site { sequence, call: Call { operation, dtype, count, reduction, root, sizes } };
            prop_assert_eq!(Site::from_bytes(&site.to_bytes()), Some(site));
        }

        #[test]
        fn a_shape_preserves_whether_a_call_has_sizes(
            sizes in proptest::collection::vec(any::<usize>(), 0..5),
            shape in 1u32..,
        ) {
            let call = Call::new(Operation::AllGather, DType::F32, 0);
            prop_assert!(call.sized(&sizes).is_sized() && call.sized(&sizes).shaped(shape).is_sized());
            let shaped = call.shaped(shape);
            prop_assert!(!call.is_sized() && !shaped.is_sized() && shaped.sizes.is_some_and(|sizes| sizes.0 > 0));
        }

        #[test]
        fn a_part_of_a_function_is_shown_as_such(count in any::<usize>(), i in 0..FUNCTIONS.len()) {
            let call = Call::new(Operation::AllGather, DType::U64, count);
            prop_assert_eq!(call.to_string(), format!("all_gather(u64 x {count})"));
            let part = call.shaped(Fingerprint::of(Fingerprint::name(FUNCTIONS[i])));
            prop_assert_eq!(part.to_string(), format!("{}'s all_gather(u64 x {count})", FUNCTIONS[i]));
            let shaped = call.shaped(Fingerprint::of([2, 3]));
            prop_assert!(call.differs_in_shape_only(&shaped) && !part.differs_in_shape_only(&shaped));
        }

        #[test]
        fn a_shape_of_a_few_dimensions_is_shown(shape in proptest::collection::vec(1usize..20, 1..=4)) {
            let count = shape.iter().product();
            let call = Call::new(Operation::Broadcast, DType::U64, count).shaped(Fingerprint::of(shape.clone()));
            prop_assert_eq!(call.to_string(), format!("broadcast(u64 x {count}, shape {shape:?})"));
        }

        #[test]
        fn arbitrary_bytes_are_refused_or_round_trip(bytes in any::<[u8; Site::BYTES]>()) {
            if let Some(site) = Site::from_bytes(&bytes) {
                prop_assert_eq!(site.to_bytes(), bytes);
            }
        }
    }
}
