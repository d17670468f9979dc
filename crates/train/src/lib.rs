//! Distributed training without a tensor library: what an adapter for one needs to train models on the ranks of a
//! group.
//!
//! It knows parameters by position, with their paths, shapes and element types, and tensors as handles that only the
//! adapter can open ([`lane::Tensors`]). `bonfire-burn` is such an adapter; `tests/floats` has one over `Vec<f32>`.
//!
//! | to | use |
//! |---|---|
//! | train replicas, or shard the optimizer state (ZeRO-1) | [`step::Steps`] |
//! | shard parameters and gradients too (ZeRO-2, ZeRO-3) | [`gather::GatherSteps`] |
//! | send gradients in fewer bytes | [`compression`] |
//! | distribute samples over ranks | [`ShardedSampler`] |
//! | load their batches on worker threads, in order | [`data::Loader`] |
//! | keep the ranks of a training loop in lockstep | [`step::iteration`] |
//! | draw the same weights on all ranks | [`agree::seeded`] |
//! | arrange ranks along dimensions | [`DeviceMesh`] |
//! | save and load sets that any number of ranks can load | [`checkpoint`] |
//!
//! The interface is for adapters, and may change in any version.

#![warn(missing_docs)]

pub mod agree;
mod bucket;
pub mod checkpoint;
pub mod compression;
pub mod data;
pub mod gather;
pub mod lane;
mod mesh;
pub mod parameters;
pub mod protocol;
pub mod shards;
pub mod step;

pub use self::data::{Epoch, ShardedSampler, Tail};
pub use self::mesh::{DeviceMesh, Sharding};
