//! Tensors of any burn backend.

pub mod autodiff;
