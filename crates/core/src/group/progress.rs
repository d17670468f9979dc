//! The progress thread of a group, which runs started operations.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::core::Core;
use crate::sync::{Mutex, lock};
use crate::types::Error;

type StartedOperation = Box<dyn FnOnce() + Send>;

/// Runs started operations on a thread, in the order in which they were started.
pub(crate) struct Progress {
    queue: Mutex<Sender<StartedOperation>>,
    thread: JoinHandle<()>,
}

impl Progress {
    pub fn spawn(rank: usize) -> io::Result<Progress> {
        let (queue, operations) = channel::<StartedOperation>();
        let thread = std::thread::Builder::new()
            .name(format!("bonfire-progress-{rank}"))
            .spawn(move || operations.into_iter().for_each(|operation| operation()))?;
        Ok(Progress { queue: Mutex::new(queue), thread })
    }

    /// Takes a ticket for `run`, which gets the buffer when its turn comes. Returns at once.
    pub fn start<B: Send + 'static>(
        &self,
        core: &Arc<Core>,
        mut buffer: B,
        run: impl FnOnce(&Core, &mut B) -> Result<(), Error> + Send + 'static,
    ) -> Work<B> {
        let (done, outcome) = channel();
        // Tickets must come up in queue order, hence both are taken under the lock: the progress thread waits for the
        // ticket of the first operation before it looks at the second.
        let queue = lock(&self.queue);
        let ticket = core.queue.ticket();
        let core = core.clone();
        let operation = move || {
            let turn = core.queue.wait(ticket);
            let result = catch_unwind(AssertUnwindSafe(|| run(&core, &mut buffer)));
            drop(turn);
            // If the `Work` was dropped, the outcome is dropped too. The operation has completed anyway.
            let _ = done.send(result.map(|result| (result, buffer)));
        };
        // The thread ends only in `finish`, which no handle outlives.
        let _ = queue.send(Box::new(operation));
        Work { outcome }
    }

    /// Runs what is queued, then ends the thread.
    pub fn finish(self) {
        drop(self.queue);
        // A buffer may have held the last handle. Then this is the progress thread, which cannot join itself.
        if self.thread.thread().id() != std::thread::current().id() && self.thread.join().is_err() {
            log::error!("the group's progress thread panicked");
        }
    }
}

/// A started operation, returned by the `start_` forms. It completes even if nothing waits for it. Several may be
/// waited for in any order.
#[must_use = "the buffer comes back from `wait`"]
pub struct Work<B> {
    outcome: Receiver<std::thread::Result<(Result<(), Error>, B)>>,
}

impl<B> Work<B> {
    /// Waits until the operation has ended and returns the buffer, after a failure too. The operation ends by its
    /// deadline, which starts when all operations called before it have ended.
    ///
    /// # Errors
    /// The error of the operation, with the buffer, whose contents are then unspecified.
    ///
    /// # Panics
    /// If the buffer's own code panicked during the operation.
    pub fn wait(self) -> Result<B, (Error, B)> {
        match self.outcome.recv() {
            Ok(Ok((Ok(()), buffer))) => Ok(buffer),
            Ok(Ok((Err(error), buffer))) => Err((error, buffer)),
            Ok(Err(panic)) => resume_unwind(panic),
            // Every operation reports exactly once, panics included.
            Err(_) => unreachable!("a started operation always reports"),
        }
    }
}
