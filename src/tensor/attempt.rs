//! Errors of collectives inside forward and backward passes, which return no `Result`.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use bonfire_core::Error;

thread_local! {
    /// Whether this thread is inside [`attempt`].
    static IN_ATTEMPT: Cell<bool> = const { Cell::new(false) };
}

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
    let before = IN_ATTEMPT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(pass));
    IN_ATTEMPT.set(before);
    result.or_else(|panic| match panic.downcast::<Error>() {
        Ok(error) => Err(*error),
        Err(panic) => resume_unwind(panic),
    })
}

/// Ends a pass with a panic. Inside [`attempt`] the panic hook does not run, because `attempt` returns the error.
#[track_caller]
pub(crate) fn fail(error: Error) -> ! {
    if IN_ATTEMPT.get() {
        resume_unwind(Box::new(error));
    }
    panic!("{error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempt_returns_errors_and_propagates_other_panics() {
        let error = Error::argument("test", "on purpose");
        assert_eq!(attempt(|| 5), Ok(5));
        assert_eq!(attempt(|| attempt(|| -> u8 { fail(error.clone()) })), Ok(Err(error.clone())));
        assert_eq!(attempt(|| -> u8 { fail(error.clone()) }), Err(error.clone()));
        let panic = catch_unwind(|| attempt(|| -> u8 { panic!("other") })).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"other"));
        let panic = catch_unwind(|| -> u8 { fail(Error::argument("test", "on purpose")) }).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&error.to_string()));
    }
}
