//! Tensors of any burn backend.
//!
//! [`operation`] has every operation of a group on tensors of any kind, [`autodiff`] those that gradients flow through.

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
