//! NCCL's element types and reductions.

use std::ffi::c_int;
use std::fmt;

use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};

use super::library::{Version, version};
use bonfire_core::{DType, Error, ReduceOp};

/// An element type of NCCL operations: Bonfire's, and floats of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// One of Bonfire's element types.
    Of(DType),
    /// A float with 4 exponent bits and 3 mantissa bits.
    E4M3,
    /// A float with 5 exponent bits and 2 mantissa bits.
    E5M2,
}

impl Scalar {
    /// Returns the size of an element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Scalar::Of(dtype) => dtype.size(),
            Scalar::E4M3 | Scalar::E5M2 => 1,
        }
    }

    const fn is_float(self) -> bool {
        match self {
            Scalar::Of(dtype) => matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16),
            Scalar::E4M3 | Scalar::E5M2 => true,
        }
    }

    /// NCCL's type, if it can reduce it, and the first version that has it.
    fn element(self) -> Option<(ncclDataType_t, c_int)> {
        Some(match self {
            Scalar::Of(dtype) => {
                let element = match dtype {
                    DType::F32 => ncclDataType_t::ncclFloat32,
                    DType::F64 => ncclDataType_t::ncclFloat64,
                    DType::F16 => ncclDataType_t::ncclFloat16,
                    DType::BF16 => ncclDataType_t::ncclBfloat16,
                    DType::I8 => ncclDataType_t::ncclInt8,
                    DType::I32 => ncclDataType_t::ncclInt32,
                    DType::I64 => ncclDataType_t::ncclInt64,
                    DType::U8 => ncclDataType_t::ncclUint8,
                    DType::U32 => ncclDataType_t::ncclUint32,
                    DType::U64 => ncclDataType_t::ncclUint64,
                    _ => return None,
                };
                (element, 0)
            }
            Scalar::E4M3 => (ncclDataType_t::ncclFloat8e4m3, 2_24_00),
            Scalar::E5M2 => (ncclDataType_t::ncclFloat8e5m2, 2_24_00),
        })
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Of(dtype) => dtype.fmt(f),
            Scalar::E4M3 => f.write_str("e4m3"),
            Scalar::E5M2 => f.write_str("e5m2"),
        }
    }
}

/// Checks that the NCCL that is found at run time reduces elements of this type as [`ReduceOp`] says, except for
/// rounding.
///
/// # Errors
/// [`Error::InvalidArgument`] if no version does, [`Error::Library`] if NCCL is missing or a newer version is needed.
pub fn reduction(scalar: Scalar, op: ReduceOp) -> Result<(), Error> {
    reduced(scalar, op, version()?).map(drop)
}

/// Whether every NCCL version that Bonfire supports does.
pub(crate) fn reduces(dtype: DType, op: ReduceOp) -> bool {
    reduced(Scalar::Of(dtype), op, 0).is_ok()
}

/// NCCL's element and reduction for version `version`.
pub(super) fn reduced(scalar: Scalar, op: ReduceOp, version: c_int) -> Result<(ncclDataType_t, ncclRedOp_t), Error> {
    let refuse = |why: &str| Error::argument(format!("{op} of {scalar} with NCCL"), why);
    let (element, first) = scalar.element().ok_or_else(|| {
        refuse("NCCL cannot reduce integers of 16 bits: convert to 32 bits, or reduce in host memory or with kernels")
    })?;
    match op {
        ReduceOp::Mean if !scalar.is_float() => {
            return Err(refuse("its sum of integers wraps before it is divided: take the sum of wider ones"));
        }
        ReduceOp::Max | ReduceOp::Min if scalar.is_float() => {
            return Err(refuse("it loses a NaN: reduce in host memory or with kernels"));
        }
        _ if version < first => {
            let reason =
                format!("reductions of {scalar} need version {} or newer, not {}", Version(first), Version(version));
            return Err(Error::Library { library: "NCCL".into(), reason });
        }
        _ => {}
    }
    let op = match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Mean => ncclRedOp_t::ncclAvg,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Product => ncclRedOp_t::ncclProd,
        _ => return Err(refuse("it has no such reduction: reduce in host memory")),
    };
    Ok((element, op))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The types are from NCCL's header, the semantics from the functions of its kernels.
    #[test]
    fn reductions_map_to_nccls_or_are_refused() {
        use ncclDataType_t as Type;
        let rows = [
            (Scalar::Of(DType::F32), Some(Type::ncclFloat32), "sum mean product"),
            (Scalar::Of(DType::F64), Some(Type::ncclFloat64), "sum mean product"),
            (Scalar::Of(DType::F16), Some(Type::ncclFloat16), "sum mean product"),
            (Scalar::Of(DType::BF16), Some(Type::ncclBfloat16), "sum mean product"),
            (Scalar::Of(DType::I8), Some(Type::ncclInt8), "sum max min product"),
            (Scalar::Of(DType::I16), None, ""),
            (Scalar::Of(DType::I32), Some(Type::ncclInt32), "sum max min product"),
            (Scalar::Of(DType::I64), Some(Type::ncclInt64), "sum max min product"),
            (Scalar::Of(DType::U8), Some(Type::ncclUint8), "sum max min product"),
            (Scalar::Of(DType::U16), None, ""),
            (Scalar::Of(DType::U32), Some(Type::ncclUint32), "sum max min product"),
            (Scalar::Of(DType::U64), Some(Type::ncclUint64), "sum max min product"),
            (Scalar::E4M3, Some(Type::ncclFloat8e4m3), "sum mean product"),
            (Scalar::E5M2, Some(Type::ncclFloat8e5m2), "sum mean product"),
        ];
        assert_eq!(rows.len(), DType::ALL.len() + 2);
        for (scalar, element, ops) in rows {
            for op in ReduceOp::ALL.iter().copied() {
                let found = reduced(scalar, op, 2_30_07);
                match element.filter(|_| ops.split(' ').any(|name| name == op.to_string())) {
                    Some(element) => assert_eq!(found.map(|(element, _)| element), Ok(element), "{op} of {scalar}"),
                    None => assert!(matches!(found, Err(Error::InvalidArgument { .. })), "{op} of {scalar}: {found:?}"),
                }
            }
        }
        let ops =
            ReduceOp::ALL.iter().map(|op| reduced(Scalar::Of(DType::I32), *op, 2_30_07).map(|(_, op)| op as u32).ok());
        assert_eq!(ops.collect::<Vec<_>>(), [Some(0), None, Some(2), Some(3), Some(1)]);
        assert_eq!(reduced(Scalar::E4M3, ReduceOp::Mean, 2_24_00).map(|(_, op)| op as u32), Ok(4));
    }

    #[test]
    fn floats_of_8_bits_need_a_version_that_has_them() {
        for scalar in [Scalar::E4M3, Scalar::E5M2] {
            let error = reduced(scalar, ReduceOp::Sum, 2_23_04).unwrap_err();
            assert!(matches!(error, Error::Library { .. }), "{error:?}");
            assert!(error.to_string().contains("need version 2.24.0 or newer, not 2.23.4"), "{error}");
            assert!(reduced(scalar, ReduceOp::Sum, 2_24_00).is_ok());
        }
    }
}
