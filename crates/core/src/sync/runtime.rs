//! The tokio runtime of the rendezvous and of the control plane, for callers that may use tokio themselves.

use tokio::runtime::{Builder, Runtime};

use crate::types::Error;

/// A tokio runtime of one thread. tokio panics where a thread that runs asynchronous code blocks on another runtime, or
/// drops one. So this runtime runs its work on a thread of its own, and does not wait for anything when it is dropped:
/// neither in asynchronous code nor for the name server after a failed rendezvous.
pub struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    /// Creates the runtime. No thread is started yet.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses descriptors.
    pub fn new() -> Result<OwnRuntime, Error> {
        let build = || Builder::new_current_thread().enable_all().build();
        // With its feature `signal`, which any package of the program may enable, tokio panics if it gets no sockets.
        let Ok(runtime) = std::panic::catch_unwind(build) else {
            let reason = std::io::Error::other(
                "tokio panicked for lack of sockets, most likely of open files (ulimit -n): see its message",
            );
            return Err(Error::io("starting a runtime", reason));
        };
        runtime.map(|runtime| OwnRuntime(Some(runtime))).map_err(|e| Error::io("starting a runtime", e))
    }

    /// Runs the future that `work` returns on a thread of its own, and blocks until it is done.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses a thread.
    ///
    /// # Panics
    /// If the future does.
    pub fn run<T: Send, F: Future<Output = T>>(&self, work: impl FnOnce() -> F + Send) -> Result<T, Error> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("bonfire-connect".into());
            // `work` is called on the runtime too: what it makes may belong to a runtime from the start.
            let thread = thread.spawn_scoped(scope, || self.run_here(async { work().await }));
            let thread = thread.map_err(|e| Error::io("starting a thread to connect", e))?;
            Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Runs a future on this thread, which must be one of Bonfire's own.
    pub fn run_here<T>(&self, future: impl Future<Output = T>) -> T {
        match &self.0 {
            Some(runtime) => runtime.block_on(future),
            None => unreachable!("it is taken only when it is dropped"),
        }
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
