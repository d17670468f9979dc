//! What a rank called, as data: compared between ranks, sent before every message, shown in errors.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::{DType, ReduceOp};

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
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
    pub(crate) const ALL: [Operation; 13] = [
        Operation::AllReduce,
        Operation::Reduce,
        Operation::Broadcast,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::Barrier,
        Operation::Send,
        Operation::AllToAll,
        Operation::Gather,
        Operation::Scatter,
        Operation::AllToAllV,
        Operation::Exchange,
        Operation::Subgroup,
    ];

    /// Whether all ranks of the group take part, so that it has a number in the group's sequence.
    pub const fn is_collective(self) -> bool {
        !matches!(self, Operation::Send | Operation::Exchange | Operation::Subgroup)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::AllReduce => "all_reduce",
            Operation::Reduce => "reduce",
            Operation::Broadcast => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Barrier => "barrier",
            Operation::Send => "send",
            Operation::AllToAll => "all_to_all",
            Operation::Gather => "gather",
            Operation::Scatter => "scatter",
            Operation::AllToAllV => "all_to_all_v",
            Operation::Exchange => "exchange",
            Operation::Subgroup => "subgroup",
        })
    }
}

/// What one rank called: everything on which the ranks of an operation must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// Where the caller said how many elements each rank has, a fingerprint of these numbers, which is odd. Where it said
    /// of what shape a tensor is, of that too; of that alone it is even.
    pub sizes: Option<u16>,
}

/// The same number for the same bytes in every build. FNV-1a: Fowler, Noll and Vo.
pub fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// A fingerprint of what several ranks must agree on, never 0.
pub(crate) fn fingerprint(numbers: impl IntoIterator<Item = usize>) -> u16 {
    (hash(numbers.into_iter().flat_map(|number| (number as u64).to_le_bytes())) % 0xffff) as u16 + 1
}

impl Call {
    /// Size of the whole in bytes.
    pub const fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The call with these sizes of the ranks' parts.
    pub(crate) fn sized(self, sizes: &[usize]) -> Call {
        Call { sizes: Some(fingerprint(sizes.iter().copied()) | 1), ..self }
    }

    /// Whether the ranks' parts have sizes of their own.
    #[doc(hidden)]
    pub const fn is_sized(&self) -> bool {
        matches!(self.sizes, Some(sizes) if sizes & 1 == 1)
    }

    /// The call on tensors whose shape has this fingerprint.
    #[doc(hidden)]
    pub fn shaped(self, shape: u16) -> Call {
        let sizes = match self.sizes {
            Some(sizes) if self.is_sized() => sizes ^ shape | 1,
            _ => (shape & !1).max(2),
        };
        Call { sizes: Some(sizes), ..self }
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
        if let Some(sizes) = self.sizes {
            write!(f, ", {} #{sizes:04x}", if self.is_sized() { "sizes" } else { "shape" })?;
        }
        write!(f, ")")
    }
}

/// Names one message: which group, which operation in its sequence, and what the sender called. The messages of one
/// operation between two ranks need no number: they arrive in order, and plans agree on it.
///
/// A receiver compares it with the one it expects, so messages can neither cross nor be taken for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The group that the operation belongs to.
    pub group: u64,
    /// The operation's number in its group, counted from 0; for point to point, in the order of that pair.
    pub sequence: u64,
    /// What the sender called.
    pub call: Call,
}

/// Absent reduction or root on the wire.
const NONE: u32 = u32::MAX;

impl Tag {
    /// Length of [`Tag::to_bytes`].
    pub const BYTES: usize = 40;

    /// The tag as bytes, little endian:
    /// `group u64 | sequence u64 | count u64 | root u32 | reduction u32 | operation u8 | dtype u8 | sizes u16 | 0 u32`.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&self.group.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.call.count as u64).to_le_bytes());
        bytes[24..28].copy_from_slice(&self.call.root.map_or(NONE, |root| root as u32).to_le_bytes());
        bytes[28..32].copy_from_slice(&self.call.reduction.map_or(NONE, |op| op as u32).to_le_bytes());
        bytes[32] = self.call.operation as u8;
        bytes[33] = self.call.dtype as u8;
        bytes[34..36].copy_from_slice(&self.call.sizes.unwrap_or(0).to_le_bytes());
        bytes
    }

    /// The inverse of [`Tag::to_bytes`]; `None` for bytes that no tag gives.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let u64_at = |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        let u32_at = |at: usize| bytes[at..at + 4].iter().rev().fold(0u32, |n, b| n << 8 | u32::from(*b));
        let reduction = match u32_at(28) {
            NONE => None,
            number => Some(*ReduceOp::ALL.get(number as usize)?),
        };
        let root = Some(u32_at(24)).filter(|root| *root != NONE).map(|root| root as usize);
        let call = Call {
            operation: *Operation::ALL.get(usize::from(bytes[32]))?,
            dtype: *DType::ALL.get(usize::from(bytes[33]))?,
            count: usize::try_from(u64_at(16)).ok()?,
            reduction,
            root,
            sizes: Some(u16::from_le_bytes([bytes[34], bytes[35]])).filter(|sizes| *sizes != 0),
        };
        let tag = Tag { group: u64_at(0), sequence: u64_at(8), call };
        (bytes[36..] == [0; 4]).then_some(tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tags_survive_the_wire(
            (group, sequence) in any::<(u64, u64)>(),
            (operation, dtype, count) in (0..Operation::ALL.len(), 0..DType::ALL.len(), any::<usize>()),
            reduction in proptest::option::of(0..ReduceOp::ALL.len()),
            root in proptest::option::of(0usize..1 << 20),
            sizes in proptest::option::of(1u16..),
        ) {
            let reduction = reduction.map(|i| ReduceOp::ALL[i]);
            let (operation, dtype) = (Operation::ALL[operation], DType::ALL[dtype]);
            let tag = Tag { group, sequence, call: Call { operation, dtype, count, reduction, root, sizes } };
            prop_assert_eq!(Tag::from_bytes(&tag.to_bytes()), Some(tag));
        }

        #[test]
        fn a_shape_changes_no_call_with_sizes_into_one_without(
            sizes in proptest::collection::vec(any::<usize>(), 0..5),
            shape in 1u16..,
        ) {
            let call = Call {
                operation: Operation::AllGather, dtype: DType::F32, count: 0, reduction: None, root: None, sizes: None,
            };
            prop_assert!(call.sized(&sizes).is_sized() && call.sized(&sizes).shaped(shape).is_sized());
            let shaped = call.shaped(shape);
            prop_assert!(!call.is_sized() && !shaped.is_sized() && shaped.sizes.is_some_and(|sizes| sizes > 0));
        }

        #[test]
        fn any_bytes_are_refused_or_read_back_the_same(bytes in any::<[u8; Tag::BYTES]>()) {
            if let Some(tag) = Tag::from_bytes(&bytes) {
                prop_assert_eq!(tag.to_bytes(), bytes);
            }
        }
    }
}
