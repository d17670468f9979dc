//! What CUDA's compute server has of its own.

#[cfg(feature = "nccl")]
pub mod nccl;
