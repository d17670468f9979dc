//! Ranks as threads and processes: operations on tensors, and training.
//!
//! One program, because each of these files alone takes a minute to compile: burn's backends are generic, and the compiler
//! would generate them again for every program.

#[path = "../../examples/digits/data.rs"]
mod digits;

mod communicator;
mod data_parallel;
mod gradients;
mod sharded;
mod sync_batch_norm;
mod tensors;
