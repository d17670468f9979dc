//! Failures within forward and backward passes, which return no `Result`.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use bonfire_core::Error;

thread_local! {
    /// Whether this thread is in an [`attempt`].
    static ATTEMPTING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a forward and backward pass whose layers call collectives: [`all_reduce_sum`](super::autodiff::all_reduce_sum), or
/// [`SyncBatchNorm`](crate::SyncBatchNorm). Where one fails in it, which elsewhere is a panic, this gives the error, so that
/// a program can go on without a rank that was lost ([`DataParallel::shrink`](crate::DataParallel::shrink)). Other panics
/// stay panics.
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
/// That of the collective that failed.
pub fn attempt<T>(pass: impl FnOnce() -> T) -> Result<T, Error> {
    let before = ATTEMPTING.replace(true);
    let result = catch_unwind(AssertUnwindSafe(pass));
    ATTEMPTING.set(before);
    result.or_else(|panic| match panic.downcast::<Error>() {
        Ok(error) => Err(*error),
        Err(panic) => resume_unwind(panic),
    })
}

/// Ends a pass: in an [`attempt`] without a word, as that gives the error.
#[track_caller]
pub(crate) fn fail(error: Error) -> ! {
    if ATTEMPTING.get() {
        resume_unwind(Box::new(error));
    }
    panic!("{error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_out_of_attempts_and_other_panics_go_through_them() {
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
