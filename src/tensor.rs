//! Tensors of any burn backend.
//!
//! The functions and types of burn-collective are at the root of the crate: start at [`register`](crate::register).
//! [`operation`] has every operation of a group on tensors of any kind, [`autodiff`] those that gradients flow through.

pub(crate) mod attempt;
pub mod autodiff;
#[cfg(unix)]
pub(crate) mod collective;
pub(crate) mod communicator;
pub(crate) mod device;
#[cfg(feature = "flex")]
mod flex;
pub(crate) mod host;
pub mod operation;
#[cfg(feature = "flex")]
mod pool;
