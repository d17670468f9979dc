//! Layers of a model that communicate, such as a batch normalisation over all ranks: what they and the pass that runs
//! them tell each other.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::usable;
use bonfire_core::Error;

thread_local! {
    /// Whether this thread is inside [`attempt`].
    static IN_ATTEMPT: Cell<bool> = const { Cell::new(false) };
    /// The collectives that layers of this thread have begun in forward passes.
    static COLLECTIVES: Cell<u64> = const { Cell::new(0) };
}

/// Runs a forward or a backward pass, and returns the error with which a layer in it has [failed](fail). Other panics
/// propagate unchanged.
///
/// # Errors
/// That of the collective that failed.
pub fn attempt<T>(pass: impl FnOnce() -> T) -> Result<T, Error> {
    let before = IN_ATTEMPT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(pass));
    IN_ATTEMPT.set(before);
    result.or_else(|panic| match panic.downcast::<Error>() {
        Ok(error) => Err(*error),
        Err(panic) => resume_unwind(panic),
    })
}

/// Ends a pass with a panic, because forward and backward passes return no `Result`. Inside [`attempt`] the panic hook
/// does not run, because `attempt` returns the error.
#[track_caller]
pub fn fail(error: Error) -> ! {
    if IN_ATTEMPT.get() {
        resume_unwind(Box::new(error));
    }
    panic!("{error}")
}

/// Says that a layer begins a collective in a forward pass.
pub fn begin_collective() {
    COLLECTIVES.set(COLLECTIVES.get() + 1);
}

/// What the loss of a pass is a mean over. A layer needs it in the backward pass, and the pass may learn it after the
/// forward pass. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Weight(Arc<OnceLock<f64>>);

impl Weight {
    /// A weight that is known.
    pub fn new(weight: f64) -> Weight {
        Weight(Arc::new(weight.into()))
    }

    /// Sets the weight, once. One that is negative or not finite counts nothing, and is an error of the step.
    pub fn set(&self, weight: f64) {
        self.0.get_or_init(|| usable(weight).unwrap_or(0.0));
    }

    /// Returns the weight; 0 as long as it is not known.
    pub fn get(&self) -> f64 {
        self.0.get().copied().unwrap_or(0.0)
    }
}

/// Whether layers of a model communicate, as far as its passes have shown it.
pub struct Layers {
    communicate: Arc<AtomicBool>,
    /// The thread's collectives before the pass.
    before: u64,
}

impl Layers {
    /// For a pass that begins now. `communicate` is kept for all passes of the model.
    pub fn new(communicate: &Arc<AtomicBool>) -> Layers {
        Layers { communicate: communicate.clone(), before: COLLECTIVES.get() }
    }

    /// Whether they communicate. Called on the thread of the pass, after its forward pass.
    pub fn communicate(&self) -> bool {
        // Relaxed: it is the same in all passes of a model, whichever sets it.
        if COLLECTIVES.get() > self.before {
            self.communicate.store(true, Ordering::Relaxed);
        }
        self.communicate.load(Ordering::Relaxed)
    }
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
