//! Means of metrics over the ranks.

use super::step_header::no_samples;
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, ReduceOp};

/// Averages values over all ranks, weighted by the ranks' numbers of samples. The values of ranks without samples are
/// ignored.
#[track_caller]
pub(super) fn mean<const N: usize>(group: &Group, values: &[f64; N], samples: usize) -> Result<[f64; N], Error> {
    let weighted = values.iter().map(|value| if samples == 0 { 0.0 } else { value * samples as f64 });
    let mut sums: Vec<f64> = weighted.chain([samples as f64]).collect();
    let request = Request::new(Operation::AllReduce, DType::F64).reduction(ReduceOp::Sum).part_of("mean");
    group.operate(request, None, bytemuck::cast_slice_mut(&mut sums))?;
    if sums[N] == 0.0 {
        return Err(no_samples("mean"));
    }
    Ok(std::array::from_fn(|i| sums[i] / sums[N]))
}
