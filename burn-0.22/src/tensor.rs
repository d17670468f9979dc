//! Tensors on a device of any backend.
//!
//! [`operation`] has every operation of a group for tensors of any kind, without gradients. [`autodiff`] has the
//! differentiable ones.

pub mod autodiff;
pub(crate) mod communicator;
pub(crate) mod hook;
pub(crate) mod host;
pub mod operation;
