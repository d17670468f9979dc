//! Numbers in a set: tensors without dimensions, so other programs can read them too.

use super::format::Dtype;

/// A number with its type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    UInt(u64),
    /// A floating-point number.
    Float(f64),
    /// A truth value.
    Bool(bool),
}

impl Scalar {
    /// Returns its element type and its bytes in a file.
    pub(super) fn to_bytes(self) -> (Dtype, Vec<u8>) {
        match self {
            Scalar::Int(value) => (Dtype::I64, value.to_le_bytes().to_vec()),
            Scalar::UInt(value) => (Dtype::U64, value.to_le_bytes().to_vec()),
            Scalar::Float(value) => (Dtype::F64, value.to_le_bytes().to_vec()),
            Scalar::Bool(value) => (Dtype::BOOL, vec![u8::from(value)]),
        }
    }

    /// Returns what was written with this element type. `None` if it was no scalar.
    pub(super) fn from_bytes(dtype: Dtype, bytes: &[u8]) -> Option<Scalar> {
        match (dtype, bytes) {
            (Dtype::BOOL, [value]) => Some(Scalar::Bool(*value != 0)),
            (Dtype::I64, _) => Some(Scalar::Int(i64::from_le_bytes(bytes.try_into().ok()?))),
            (Dtype::U64, _) => Some(Scalar::UInt(u64::from_le_bytes(bytes.try_into().ok()?))),
            (Dtype::F64, _) => Some(Scalar::Float(f64::from_le_bytes(bytes.try_into().ok()?))),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_come_back_with_their_types() {
        let scalars = [Scalar::Int(-3), Scalar::UInt(u64::MAX), Scalar::Float(0.1), Scalar::Bool(true)];
        for scalar in scalars {
            let (dtype, bytes) = scalar.to_bytes();
            assert_eq!(Scalar::from_bytes(dtype, &bytes), Some(scalar));
            assert_eq!(Scalar::from_bytes(Dtype::F32, &bytes), None);
        }
    }
}
