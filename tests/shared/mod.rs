//! Tests of the packages for burn 0.21 and 0.22, over the `burn_version` and the `checkpoint_version` of each.

mod chaos;
pub mod checkpoint_versions;
pub mod checkpoints;
mod compression;
#[cfg(feature = "dataset")]
mod data_loader;
mod data_parallel;
mod elsewhere;
pub mod fully_sharded;
mod mesh;
mod mismatch;
mod programs;
mod quantised;
mod races;
mod randomness;
pub mod scan;
pub mod sharded;
pub mod step;
mod sync_batch_norm;
mod training_state;
mod unclear;
mod verify;

use burn::tensor::DType;

use crate::burn_version::Model;
use crate::model_data::map_floats;

/// Converts parameters and states to f64, in which sums of different order agree to 1e-12.
pub fn in_f64<M: Model>(model: M) -> M {
    map_floats(model, |data, _| data.convert_dtype(DType::F64))
}
