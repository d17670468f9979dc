//! Ranks as threads and processes: operations on tensors, and training.
//!
//! One program instead of six: burn's backends are generic, so the compiler would generate them again for each, which
//! takes about a minute.

#[path = "../../examples/digits/data.rs"]
mod digits;

mod chaos;
mod communicator;
mod compression;
mod data_parallel;
mod gradients;
mod mismatch;
mod randomness;
mod sharded;
mod step;
mod sync_batch_norm;
mod tensors;
mod training_state;
mod verify;
