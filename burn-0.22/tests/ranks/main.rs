//! Training on ranks that are threads and processes: the tests that both packages share, and those of this one alone.

#[path = "../../../examples/digits/data.rs"]
mod digits;

#[path = "../common/burn_version.rs"]
mod burn_version;
#[path = "../common/checkpoint_version.rs"]
mod checkpoint_version;
#[cfg(feature = "dataset")]
#[path = "../common/loader_version.rs"]
mod loader_version;
#[path = "../../../tests/common/model_data.rs"]
mod model_data;
#[path = "../common/scan_version.rs"]
mod scan_version;
#[path = "../../../tests/shared/mod.rs"]
mod shared;

mod backward;
mod checkpoints;
mod devices;
mod embedding;
mod optimizers;

use bonfire_testing::allocation::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
