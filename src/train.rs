//! Training on many ranks.

pub mod batch_norm;
