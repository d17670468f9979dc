//! Element types and reductions, mapped to MPI's.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use bonfire_core::internal::kernel;
use bonfire_core::{DType, Error, ReduceOp};
use mpi_sys as mpi;

use super::library::{check, hold};

/// The element type that MPI reduces in place of the caller's. The kernel converts to it and from it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Accumulator {
    /// The caller's element type.
    Same,
    /// f32 for f16 and bf16, i64 for means of integers of up to 32 bits. The result is rounded once.
    Wide(DType),
}

/// The accumulator for a reduction. `None` where MPI has no exact enough type: means of 64-bit integers.
pub(super) fn accumulator(dtype: DType, op: ReduceOp) -> Option<Accumulator> {
    match dtype {
        DType::F32 | DType::F64 => Some(Accumulator::Same),
        DType::F16 | DType::BF16 => Some(Accumulator::Wide(DType::F32)),
        _ if op != ReduceOp::Mean => Some(Accumulator::Same),
        DType::I64 | DType::U64 => None,
        _ => Some(Accumulator::Wide(DType::I64)),
    }
}

/// MPI's type for elements that are reduced by `op`.
pub(super) fn reduced(dtype: DType, op: ReduceOp) -> mpi::MPI_Datatype {
    let ordered = matches!(op, ReduceOp::Max | ReduceOp::Min);
    // SAFETY: constants of the library, valid as long as it is loaded.
    unsafe {
        match dtype {
            DType::F32 => mpi::RSMPI_FLOAT,
            DType::F64 => mpi::RSMPI_DOUBLE,
            DType::I8 if ordered => mpi::RSMPI_INT8_T,
            DType::I16 if ordered => mpi::RSMPI_INT16_T,
            DType::I32 if ordered => mpi::RSMPI_INT32_T,
            DType::I64 if ordered => mpi::RSMPI_INT64_T,
            // Signed and unsigned sums and products have the same bits, but in C only unsigned ones may overflow.
            _ => moved(dtype.size()),
        }
    }
}

/// MPI's type for elements of `size` bytes that are only moved.
pub(super) fn moved(size: usize) -> mpi::MPI_Datatype {
    // SAFETY: as in `reduced`.
    unsafe {
        match size {
            1 => mpi::RSMPI_UINT8_T,
            2 => mpi::RSMPI_UINT16_T,
            4 => mpi::RSMPI_UINT32_T,
            _ => mpi::RSMPI_UINT64_T,
        }
    }
}

/// MPI's reduction of elements of `dtype`.
pub(super) fn operation(dtype: DType, op: ReduceOp) -> Result<mpi::MPI_Op, Error> {
    let float = matches!(dtype, DType::F32 | DType::F64);
    // SAFETY: as in `reduced`.
    unsafe {
        Ok(match op {
            ReduceOp::Sum | ReduceOp::Mean => mpi::RSMPI_SUM,
            ReduceOp::Product => mpi::RSMPI_PROD,
            ReduceOp::Max | ReduceOp::Min if float => Extremes::get()?.of(dtype, op),
            ReduceOp::Max => mpi::RSMPI_MAX,
            ReduceOp::Min => mpi::RSMPI_MIN,
            _ => return Err(Error::argument(op, "MPI has no such reduction")),
        })
    }
}

/// Creates the operators that [`operation`] needs: a failure in the middle of an operation would leave peers waiting.
pub(super) fn prepare() -> Result<(), Error> {
    Extremes::get().map(drop)
}

/// Operators for the maximum and minimum of floats: a NaN on any rank gives NaN. MPI's own compare, and lose a NaN.
struct Extremes([[mpi::MPI_Op; 2]; 2]);

// SAFETY: handles of objects that MPI keeps, used only by threads that hold the MPI lock.
unsafe impl Send for Extremes {}
// SAFETY: as above.
unsafe impl Sync for Extremes {}

impl Extremes {
    fn get() -> Result<&'static Extremes, Error> {
        static EXTREMES: OnceLock<Extremes> = OnceLock::new();
        if let Some(extremes) = EXTREMES.get() {
            return Ok(extremes);
        }
        let _held = hold();
        let make = |function: Fold| {
            let mut op = std::mem::MaybeUninit::uninit();
            // SAFETY: MPI may call the function for as long as the process lives. It is commutative, as the 1 declares.
            // On success MPI has stored the operator.
            unsafe {
                check("MPI_Op_create", mpi::MPI_Op_create(Some(function), 1, op.as_mut_ptr()))?;
                Ok::<_, Error>(op.assume_init())
            }
        };
        let of = |max: Fold, min: Fold| Ok::<_, Error>([make(max)?, make(min)?]);
        let f32s = of(fold::<{ DType::F32 as u8 }, true>, fold::<{ DType::F32 as u8 }, false>)?;
        let f64s = of(fold::<{ DType::F64 as u8 }, true>, fold::<{ DType::F64 as u8 }, false>)?;
        Ok(EXTREMES.get_or_init(|| Extremes([f32s, f64s])))
    }

    fn of(&self, dtype: DType, op: ReduceOp) -> mpi::MPI_Op {
        self.0[usize::from(dtype == DType::F64)][usize::from(op == ReduceOp::Min)]
    }
}

type Fold = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut mpi::MPI_Datatype);

/// `both = input + both`, where `+` stands for the reduction. MPI calls it with vectors of `len` elements.
unsafe extern "C" fn fold<const DTYPE: u8, const MAX: bool>(
    input: *mut c_void,
    both: *mut c_void,
    len: *mut c_int,
    _dtype: *mut mpi::MPI_Datatype,
) {
    let dtype = DType::ALL[usize::from(DTYPE)];
    let kernel = kernel(dtype, if MAX { ReduceOp::Max } else { ReduceOp::Min });
    // SAFETY: MPI passes the address of an integer.
    if unsafe { *len } <= 0 {
        return;
    }
    // SAFETY: MPI passes two vectors of `len` elements of the type that the reduction is called with. They are aligned
    // for the type, and only the second is written.
    unsafe {
        let bytes = usize::try_from(*len).unwrap_or(0) * dtype.size();
        let input = std::slice::from_raw_parts(input.cast::<u8>(), bytes);
        let both = std::slice::from_raw_parts_mut(both.cast::<u8>(), bytes);
        (kernel.fold)(both, input);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accumulators_match_those_of_the_kernels() {
        for dtype in DType::ALL.iter().copied() {
            for op in ReduceOp::ALL.iter().copied() {
                // The accumulator of the kernels.
                let kernel = kernel(dtype, op);
                let want = match (kernel.wide, kernel.accumulator) {
                    (false, _) => Some(Accumulator::Same),
                    (true, 4) => Some(Accumulator::Wide(DType::F32)),
                    (true, 8) => Some(Accumulator::Wide(DType::I64)),
                    (true, _) => None,
                };
                assert_eq!(accumulator(dtype, op), want, "{dtype} {op}");
            }
        }
    }
}
