//! Tensors of any burn backend.
//!
//! [`operation`] has every operation of a group for tensors of any kind, without gradients. [`autodiff`] has the
//! differentiable ones.

pub(crate) mod attempt;
pub mod autodiff;
pub(crate) mod communicator;
#[doc(hidden)]
pub(crate) mod device;
#[cfg(feature = "flex")]
pub(crate) mod flex;
pub(crate) mod host;
pub mod operation;

#[cfg(feature = "flex")]
use crate::pool;
