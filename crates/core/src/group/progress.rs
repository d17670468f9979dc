//! Operations that were started and are waited for later: a thread of the group runs them.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::core::Core;
use crate::sync::{Mutex, lock};
use crate::types::Error;

type Job = Box<dyn FnOnce() + Send>;

/// The thread that runs started operations, in the order in which they were started.
pub(crate) struct Progress {
    jobs: Mutex<Sender<Job>>,
    thread: JoinHandle<()>,
}

impl Progress {
    pub fn spawn(rank: usize) -> io::Result<Progress> {
        let (jobs, queue) = channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("bonfire-progress-{rank}"))
            .spawn(move || queue.into_iter().for_each(|job| job()))?;
        Ok(Progress { jobs: Mutex::new(jobs), thread })
    }

    /// Takes a ticket for `run`, which gets the buffer when its turn has come, and returns at once.
    pub fn start<B: Send + 'static>(
        &self,
        core: &Arc<Core>,
        mut buffer: B,
        run: impl FnOnce(&Core, &mut B) -> Result<(), Error> + Send + 'static,
    ) -> Work<B> {
        let (done, outcome) = channel();
        // Tickets must come up in the order of the jobs: this thread waits for the ticket of the first job before it
        // looks at the second.
        let jobs = lock(&self.jobs);
        let ticket = core.queue.ticket();
        let core = core.clone();
        let job = move || {
            let turn = core.queue.wait(ticket);
            let result = catch_unwind(AssertUnwindSafe(|| run(&core, &mut buffer)));
            drop(turn);
            // Where nobody waits, the outcome is dropped, and the operation has completed all the same.
            let _ = done.send(result.map(|result| (result, buffer)));
        };
        // The thread ends only in `finish`, which no handle outlives.
        let _ = jobs.send(Box::new(job));
        Work { outcome }
    }

    /// Runs what is queued and ends the thread.
    pub fn finish(self) {
        drop(self.jobs);
        // A buffer may have held the last handle, and then this is the thread itself.
        if self.thread.thread().id() != std::thread::current().id() && self.thread.join().is_err() {
            log::error!("the group's progress thread panicked");
        }
    }
}

/// An operation that was started. It completes whether or not anybody waits; works may be waited for in any order.
#[must_use = "the buffer comes back from `wait`"]
pub struct Work<B> {
    outcome: Receiver<std::thread::Result<(Result<(), Error>, B)>>,
}

impl<B> Work<B> {
    /// Waits until the operation is done and gives the buffer back, after a failure too.
    ///
    /// # Errors
    /// What the operation returned, with the buffer.
    ///
    /// # Panics
    /// If the buffer's own code panicked while the operation used it.
    pub fn wait(self) -> Result<B, (Error, B)> {
        match self.outcome.recv() {
            Ok(Ok((Ok(()), buffer))) => Ok(buffer),
            Ok(Ok((Err(error), buffer))) => Err((error, buffer)),
            Ok(Err(panic)) => resume_unwind(panic),
            // Every job sends exactly once, panics included.
            Err(_) => unreachable!("a started operation always reports"),
        }
    }
}
