//! Tensors of any burn backend.
//!
//! The functions and types of burn-collective are at the root of the crate: start at [`register`](crate::register).
//! [`autodiff`] has sums over ranks that gradients flow through.

pub(crate) mod attempt;
pub mod autodiff;
#[cfg(unix)]
pub(crate) mod collective;
pub(crate) mod device;
#[cfg(all(unix, feature = "flex"))]
mod flex;
#[cfg(all(unix, feature = "flex"))]
mod pool;
