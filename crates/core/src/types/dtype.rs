//! Element types and reductions.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of the elements that an operation moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
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
    pub const ALL: [DType; 12] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
    ];

    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
        })
    }
}

/// How the ranks' elements become one. Also exported as [`ReduceOperation`](crate::ReduceOperation), the name that
/// burn-collective gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum. Integers wrap; f16 and bf16 are accumulated in f32 and rounded once.
    Sum = 0,
    /// The sum divided by the number of ranks. Integers: the exact mean, rounded toward zero.
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
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product];
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Product => "product",
        })
    }
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
