//! Operations that were started and are waited for later: a thread of the group runs them.

use std::io;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use super::turn::{Queue, Ticket};
use crate::error::Error;

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

    /// Queues `run`, which gets its place among the rank's operations and the buffer, and returns at once.
    pub fn start<B: Send + 'static>(
        &self,
        turns: &Queue,
        mut buffer: B,
        run: impl FnOnce(Ticket, &mut B) -> Result<(), Error> + Send + 'static,
    ) -> Work<B> {
        let (done, outcome) = channel();
        // One lock around both keeps jobs in the order of their tickets: a job that came before one with an earlier
        // ticket would wait for it for ever, since one thread runs them all.
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = turns.ticket();
        let job = move || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(ticket, &mut buffer)));
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
        if self.thread.join().is_err() {
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
