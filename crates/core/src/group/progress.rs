//! The progress thread of a group, which runs started operations.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use super::core::Core;
use super::journal::Waiting;
use super::turn::Turn;
use crate::sync::{Deadline, Mutex, lock};
use crate::types::{Call, Error};

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
        call: Call,
        deadline: Deadline,
        mut buffer: B,
        run: impl FnOnce(&Core, &Turn<'_>, &mut B) -> Result<(), Error> + Send + 'static,
    ) -> Work<B> {
        let (done, outcome) = channel();
        let stage = Arc::new(AtomicU8::new(QUEUED));
        let queued = Queued { core: Arc::downgrade(core), call, deadline, stage: stage.clone() };
        // Tickets must come up in queue order, hence both are taken under the lock: the progress thread waits for the
        // ticket of the first operation before it looks at the second.
        let queue = lock(&self.queue);
        let ticket = core.queue.ticket();
        let core = core.clone();
        let operation = move || {
            let turn = core.queue.wait(ticket, &deadline);
            stage.store(BEGUN, Ordering::Release);
            core.operations.started.store(true, Ordering::Relaxed);
            let result = catch_unwind(AssertUnwindSafe(|| match &turn {
                Some(turn) => run(&core, turn, &mut buffer),
                None => Err(core.miss_turn(call, &deadline)),
            }));
            if result.is_err() {
                // The peers make this call, and this rank may not have numbered it.
                core.panicked(&call);
            }
            core.operations.started.store(false, Ordering::Relaxed);
            drop(turn);
            // If the `Work` was dropped, the outcome is dropped too. The operation has completed anyway.
            let _ = done.send(result.map(|result| (result, buffer)));
            // After the outcome was sent, so that `wait` does not block once `is_finished` has returned true.
            stage.store(ENDED, Ordering::Release);
        };
        // The thread ends only in `finish`, which no handle outlives.
        let _ = queue.send(Box::new(operation));
        Work { outcome, queued }
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
    queued: Queued,
}

/// What ends the wait for an operation that does not begin by its deadline.
struct Queued {
    /// Weak: the group may be dropped before its works.
    core: Weak<Core>,
    call: Call,
    deadline: Deadline,
    /// [`QUEUED`], [`BEGUN`] or [`ENDED`].
    stage: Arc<AtomicU8>,
}

/// The operation waits for its turn.
const QUEUED: u8 = 0;
/// Its turn has come.
const BEGUN: u8 = 1;
/// Its outcome was sent.
const ENDED: u8 = 2;

impl<B> Work<B> {
    /// Returns whether the operation has ended, with a result or an error: [`wait`](Self::wait) returns at once then.
    pub fn is_finished(&self) -> bool {
        self.queued.stage.load(Ordering::Acquire) == ENDED
    }

    /// Waits until the operation has ended and returns the buffer, after a failure too. The operation's deadline began
    /// when it was started. If the operations before it take longer, it fails, and with it the group.
    ///
    /// # Errors
    /// The error of the operation, with the buffer, whose contents are then unspecified.
    ///
    /// # Panics
    /// If the buffer's own code panicked during the operation.
    pub fn wait(self) -> Result<B, (Error, B)> {
        let Queued { core, call, deadline, stage } = self.queued;
        let waiting = core.upgrade().map(|core| Waiting::begin(&core.operations));
        let outcome = self.outcome.recv_timeout(deadline.remaining()).or_else(|error| {
            // Once begun, the operation ends by its deadline on its own.
            if error == RecvTimeoutError::Timeout
                && stage.load(Ordering::Acquire) == QUEUED
                && let Some(core) = core.upgrade()
            {
                core.miss_turn(call, &deadline);
            }
            self.outcome.recv()
        });
        drop(waiting);
        match outcome {
            Ok(Ok((Ok(()), buffer))) => Ok(buffer),
            Ok(Ok((Err(error), buffer))) => Err((error, buffer)),
            Ok(Err(panic)) => resume_unwind(panic),
            // Every operation reports exactly once, panics included.
            Err(_) => unreachable!("a started operation always reports"),
        }
    }
}
