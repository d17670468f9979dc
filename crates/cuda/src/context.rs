//! The context that is current on a thread.

use std::cell::Cell;
use std::marker::PhantomData;

use cudarc::driver::{DriverError, sys};

thread_local! {
    /// The GPU of the newest guard on this thread, whose context is then current: while a guard lives, only this crate
    /// calls the driver here, or NCCL in a context that was pushed for it (`Stream::with_raw`).
    static ENTERED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Keeps a GPU's context current on this thread until it is dropped.
pub(crate) struct ContextGuard {
    /// The GPU of the guard before, if this one has pushed its context.
    pushed: Option<Option<usize>>,
    /// It stays on its thread.
    _thread: PhantomData<*const ()>,
}

impl ContextGuard {
    /// Makes the context of the GPU with this ordinal current, which lives as long as the process. Within an entered
    /// context that calls no driver.
    pub fn enter(gpu: usize, context: sys::CUcontext) -> Result<ContextGuard, DriverError> {
        match ENTERED.get() == Some(gpu) {
            true => Ok(ContextGuard { pushed: None, _thread: PhantomData }),
            false => ContextGuard::push(gpu, context),
        }
    }

    /// The same, also within an entered context: what is called there may replace it.
    pub fn push(gpu: usize, context: sys::CUcontext) -> Result<ContextGuard, DriverError> {
        // SAFETY: the driver has returned the context to `Gpu::of`, and it is never released.
        unsafe { sys::cuCtxPushCurrent_v2(context) }.result()?;
        Ok(ContextGuard { pushed: Some(ENTERED.replace(Some(gpu))), _thread: PhantomData })
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(before) = self.pushed {
            let mut left = std::ptr::null_mut();
            // SAFETY: pops the context that `push` has pushed on this thread.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut left) };
            ENTERED.set(before);
        }
    }
}
