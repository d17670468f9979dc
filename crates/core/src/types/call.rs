//! What a rank called, as data: compared between ranks, sent before every message, shown in errors.

use std::fmt;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr, VariantArray};

use super::{DType, ReduceOp};

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr, VariantArray)]
#[repr(u8)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Operation {
    AllReduce = 0,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Barrier,
    /// Point to point: `send` on one rank, `recv` on the other.
    Send,
    AllToAll,
    Gather,
    Scatter,
    /// `all_to_all` with sizes of their own for every pair of ranks.
    AllToAllV,
    /// Point to point: send to one rank and receive from one at once.
    Exchange,
    /// Point to point: what the members of a subgroup tell each other to make it.
    Subgroup,
}

impl Operation {
    /// In the order of its number on the wire.
    pub(crate) const ALL: &[Operation] = Operation::VARIANTS;

    /// Whether all ranks of the group take part, so that it has a number in the group's sequence.
    pub const fn is_collective(self) -> bool {
        !matches!(self, Operation::Send | Operation::Exchange | Operation::Subgroup)
    }
}

/// What one rank called: everything on which the ranks of an operation must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// The type of its elements.
    pub dtype: DType,
    /// The number of elements of the whole: one rank's vector for reductions and `all_to_all`, all ranks' parts
    /// together for `all_gather`, `gather` and `scatter`. 0 where each rank has its own numbers.
    pub count: usize,
    /// The reduction, where the operation has one.
    pub reduction: Option<ReduceOp>,
    /// The root, where the operation has one.
    pub root: Option<usize>,
    /// What else the ranks must agree on, where there is something.
    pub(crate) sizes: Option<Fingerprint>,
}

/// The same number for the same bytes in every build. FNV-1a: Fowler, Noll and Vo.
pub fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Of the sizes of the ranks' parts, where the caller gave them, and of the shape of a tensor. Odd where there are sizes,
/// else even, and never 0, which stands for none on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Fingerprint(u16);

impl Fingerprint {
    /// Of numbers on which several ranks must agree.
    pub fn of(numbers: impl IntoIterator<Item = usize>) -> u16 {
        (hash(numbers.into_iter().flat_map(|number| (number as u64).to_le_bytes())) % 0xffff) as u16 + 1
    }

    const fn has_sizes(self) -> bool {
        self.0 & 1 == 1
    }

    pub fn to_word(fingerprint: Option<Fingerprint>) -> u16 {
        fingerprint.map_or(0, |Fingerprint(word)| word)
    }

    pub fn from_word(word: u16) -> Option<Fingerprint> {
        (word != 0).then_some(Fingerprint(word))
    }
}

impl Call {
    /// An operation on so many elements, without reduction or root.
    pub const fn new(operation: Operation, dtype: DType, count: usize) -> Call {
        Call { operation, dtype, count, reduction: None, root: None, sizes: None }
    }

    /// Size of the whole in bytes.
    pub const fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The call with this reduction.
    pub const fn reducing(self, op: ReduceOp) -> Call {
        Call { reduction: Some(op), ..self }
    }

    /// The call with this root.
    pub const fn rooted(self, root: usize) -> Call {
        Call { root: Some(root), ..self }
    }

    /// The call with these sizes of the ranks' parts.
    pub(crate) fn sized(self, sizes: &[usize]) -> Call {
        Call { sizes: Some(Fingerprint(Fingerprint::of(sizes.iter().copied()) | 1)), ..self }
    }

    /// Whether the ranks' parts have sizes of their own.
    pub const fn is_sized(&self) -> bool {
        matches!(self.sizes, Some(sizes) if sizes.has_sizes())
    }

    /// The call on tensors whose shape comes to this.
    pub(crate) fn shaped(self, shape: u16) -> Call {
        let sizes = match self.sizes {
            Some(Fingerprint(sizes)) if self.is_sized() => sizes ^ shape | 1,
            _ => (shape & !1).max(2),
        };
        Call { sizes: Some(Fingerprint(sizes)), ..self }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = matches!(
            self.operation,
            Operation::AllGather | Operation::ReduceScatter | Operation::Gather | Operation::Scatter
        );
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
        if let Some(Fingerprint(sizes)) = self.sizes {
            write!(f, ", {} #{sizes:04x}", if self.is_sized() { "sizes" } else { "shape" })?;
        }
        write!(f, ")")
    }
}

/// An operation in its group: what was called, and as which one. It names every message of the operation; those between two
/// ranks need no number of their own, since they arrive in order, and plans agree on it.
///
/// A receiver compares it with the one that it expects, so messages can neither cross nor be taken for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Site {
    /// What was called.
    pub call: Call,
    /// Its number in the group's sequence, counted from 0; for point to point, in the order of that pair.
    pub sequence: u64,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.call, self.sequence)
    }
}

/// Absent reduction or root on the wire.
const NONE: u32 = u32::MAX;

impl Site {
    /// Length of [`Site::to_bytes`].
    pub const BYTES: usize = 32;

    /// This call as the operation with this number.
    pub const fn new(call: Call, sequence: u64) -> Self {
        Site { call, sequence }
    }

    /// The site as bytes, little endian:
    /// `sequence u64 | count u64 | root u32 | reduction u32 | operation u8 | dtype u8 | sizes u16 | 0 u32`.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&(self.call.count as u64).to_le_bytes());
        bytes[16..20].copy_from_slice(&self.call.root.map_or(NONE, |root| root as u32).to_le_bytes());
        bytes[20..24].copy_from_slice(&self.call.reduction.map_or(NONE, |op| op as u32).to_le_bytes());
        bytes[24] = self.call.operation as u8;
        bytes[25] = self.call.dtype as u8;
        bytes[26..28].copy_from_slice(&Fingerprint::to_word(self.call.sizes).to_le_bytes());
        bytes
    }

    /// The inverse of [`Site::to_bytes`]; `None` for bytes that no site gives.
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
            sizes: Fingerprint::from_word(u16::from_le_bytes([bytes[26], bytes[27]])),
        };
        (bytes[28..] == [0; 4]).then_some(Site { call, sequence: u64_at(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sites_survive_the_wire(
            sequence in any::<u64>(),
            (operation, dtype, count) in (0..Operation::ALL.len(), 0..DType::ALL.len(), any::<usize>()),
            reduction in proptest::option::of(0..ReduceOp::ALL.len()),
            root in proptest::option::of(0usize..1 << 20),
            sizes in any::<u16>(),
        ) {
            let sizes = Fingerprint::from_word(sizes);
            let reduction = reduction.map(|i| ReduceOp::ALL[i]);
            let (operation, dtype) = (Operation::ALL[operation], DType::ALL[dtype]);
            let site = Site { sequence, call: Call { operation, dtype, count, reduction, root, sizes } };
            prop_assert_eq!(Site::from_bytes(&site.to_bytes()), Some(site));
        }

        #[test]
        fn a_shape_changes_no_call_with_sizes_into_one_without(
            sizes in proptest::collection::vec(any::<usize>(), 0..5),
            shape in 1u16..,
        ) {
            let call = Call::new(Operation::AllGather, DType::F32, 0);
            prop_assert!(call.sized(&sizes).is_sized() && call.sized(&sizes).shaped(shape).is_sized());
            let shaped = call.shaped(shape);
            prop_assert!(!call.is_sized() && !shaped.is_sized() && shaped.sizes.is_some_and(|sizes| sizes.0 > 0));
        }

        #[test]
        fn any_bytes_are_refused_or_read_back_the_same(bytes in any::<[u8; Site::BYTES]>()) {
            if let Some(site) = Site::from_bytes(&bytes) {
                prop_assert_eq!(site.to_bytes(), bytes);
            }
        }
    }
}
