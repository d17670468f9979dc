//! Collectives that move or sum elements, for the gradients of tensors.
//!
//! Each is a linear map on the concatenation of all ranks' elements, so its backward pass is the collective of the
//! transposed matrix.

/// A linear collective and its arguments. Sizes are lengths along `dim`, one per rank.
#[derive(Clone, Debug)]
pub enum Linear {
    /// Returns the root's elements.
    Broadcast {
        /// The rank that has them.
        root: usize,
    },
    /// Returns the sum on the root, zeros elsewhere.
    Reduce {
        /// The rank that gets the sum.
        root: usize,
    },
    /// Returns the parts of all ranks.
    AllGather {
        /// The dimension of the parts.
        dim: isize,
        /// Their lengths.
        sizes: Vec<usize>,
    },
    /// Returns this rank's part of the sum.
    ReduceScatter {
        /// The dimension of the parts.
        dim: isize,
        /// Their lengths.
        sizes: Vec<usize>,
    },
    /// Returns this rank's part of each rank's elements.
    AllToAll {
        /// The dimension of the parts.
        dim: isize,
        /// `None` for equal parts, otherwise the sizes to send and to receive.
        sizes: Option<[Vec<usize>; 2]>,
    },
}

impl Linear {
    /// The collective of the backward pass: that of the transposed matrix.
    pub fn transposed(self) -> Linear {
        match self {
            Linear::Broadcast { root } => Linear::Reduce { root },
            Linear::Reduce { root } => Linear::Broadcast { root },
            Linear::AllGather { dim, sizes } => Linear::ReduceScatter { dim, sizes },
            Linear::ReduceScatter { dim, sizes } => Linear::AllGather { dim, sizes },
            Linear::AllToAll { dim, sizes } => Linear::AllToAll { dim, sizes: sizes.map(|[send, recv]| [recv, send]) },
        }
    }
}
