//! Errors of collectives inside forward and backward passes, which return no `Result`.

use bonfire_core::Error;
use bonfire_train::step::layers;

/// Runs a forward and backward pass and returns the [`Error`] of a collective that fails inside it.
///
/// Outside of `attempt`, a collective that fails inside a pass panics, because burn's passes return no `Result`. Such
/// collectives are the backward passes of [`autodiff`](super::autodiff) and both passes of
/// [`SyncBatchNorm`](crate::SyncBatchNorm). With the error, a program can continue without a lost rank
/// ([`DataParallel::shrink`](crate::DataParallel::shrink)). Other panics propagate unchanged. `attempt` catches panics
/// of the calling thread, so the program must not be built with `panic = "abort"`.
///
/// ```
/// # use bonfire::tensor::autodiff::{all_reduce_sum, attempt};
/// # use burn::backend::{Autodiff, Flex};
/// # use burn::tensor::Tensor;
/// # let group = bonfire::Group::threads(1)?.remove(0);
/// # let x = Tensor::<Autodiff<Flex>, 1>::ones([2], &Default::default()).require_grad();
/// let gradients = attempt(|| all_reduce_sum(x.clone(), &group).map(|sum| sum.powf_scalar(2.0).sum().backward()))??;
/// # assert!(x.grad(&gradients).is_some());
/// # Ok::<(), bonfire::Error>(())
/// ```
///
/// # Errors
/// The error of the collective that failed. [`operation`](super::operation#errors) says which errors poison the group.
pub fn attempt<T>(pass: impl FnOnce() -> T) -> Result<T, Error> {
    layers::attempt(pass)
}
