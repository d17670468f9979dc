//! Element types and reductions.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr, VariantArray};

/// The type of the elements that an operation moves. Its text is in lower case: `f32`, `bf16`, `u8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr, VariantArray)]
#[repr(u8)]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum DType {
    F32 = 0,
    F64,
    F16,
    BF16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
}

impl DType {
    /// Every element type, in the order of its number on the wire.
    pub const ALL: &[DType] = DType::VARIANTS;

    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }
}

/// How a reduction combines the ranks' elements. burn-collective called it `ReduceOperation`. Its text is in lower
/// case: `sum`, `mean`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr, VariantArray)]
#[repr(u8)]
#[strum(serialize_all = "lowercase")]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum. Integers wrap; f16 and bf16 are accumulated in f32 and rounded once.
    Sum = 0,
    /// The sum divided by the number of ranks. Integers: the exact mean, rounded toward zero; f16 and bf16 as for
    /// [`Sum`](Self::Sum).
    Mean,
    /// The largest. A NaN on any rank gives NaN.
    Max,
    /// The smallest. A NaN on any rank gives NaN.
    Min,
    /// The product. Integers wrap; f16 and bf16 are accumulated in f32 and rounded once.
    Product,
}

impl ReduceOp {
    /// Every reduction, in the order of its number on the wire.
    pub const ALL: &[ReduceOp] = ReduceOp::VARIANTS;
}

/// A Rust type that operations can move: the floats, f16, bf16 and the integers of 8 to 64 bits.
pub trait Element: Pod + Send + Sync + PartialEq + fmt::Debug + sealed::Sealed {
    /// The element's type as a value.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => BF16,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
}
