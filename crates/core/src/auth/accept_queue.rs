//! The accept queue: connections that have not completed the handshake yet.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::connect::TIMEOUT;
use super::prologue::Refusal;
use super::socket::was_dropped;
use super::tally::{Seen, Tally};
use crate::descriptors;
use crate::sync::{Mutex, lock};

/// Connections that may wait in addition to those of the ranks.
const STRANGERS: usize = 64;

/// Pause before the next attempt when the system could not accept a connection.
pub const RETRY: Duration = Duration::from_millis(100);

/// The accept queue of one listener. It bounds the number of connections that have not completed the handshake, and the
/// time that each of them has. When the queue is full, the connection that has waited longest is dropped: a rank
/// completes the handshake within a moment, and dials again if it was dropped. So is the one that has waited longest at
/// any listener when those of the process together hold as many descriptors as strangers may.
pub struct AcceptQueue {
    state: Mutex<QueueState>,
    /// Distinguishes the queues of a process.
    number: u64,
    capacity: usize,
    timeout: Duration,
    /// The connections of all queues, in the order in which they came.
    waiting: AllWaiting,
}

/// The connections of several queues that may not have completed their handshakes.
type AllWaiting = Arc<Mutex<VecDeque<Waiting>>>;

/// One of them.
struct Waiting {
    /// The number of its queue.
    queue: u64,
    /// Distinguishes the connections of a process.
    number: u64,
    task: AbortHandle,
}

/// The place of a connection among those that wait. Dropping it gives the place up: a handle of a task keeps its
/// runtime's descriptors, so none may stay behind.
struct Place {
    number: u64,
    waiting: AllWaiting,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.waiting).retain(|other| other.number != self.number);
    }
}

#[derive(Default)]
struct QueueState {
    /// What was refused, by where it came from.
    refused: Tally,
    /// Since when there is no descriptor for the next connection.
    short: Option<Instant>,
}

impl AcceptQueue {
    /// Creates the queue of a listener that at most `ranks` connections of ranks reach at the same time.
    pub fn new(ranks: usize) -> Arc<AcceptQueue> {
        static WAITING: LazyLock<AllWaiting> = LazyLock::new(AllWaiting::default);
        AcceptQueue::with(STRANGERS.saturating_add(ranks), TIMEOUT, WAITING.clone())
    }

    fn with(capacity: usize, timeout: Duration, waiting: AllWaiting) -> Arc<AcceptQueue> {
        Arc::new(AcceptQueue { state: Mutex::default(), number: next_number(), capacity, timeout, waiting })
    }

    /// Accepts the next connection by `accept`. Cancel safe, if `accept` is.
    ///
    /// # Errors
    /// If there is no descriptor for it, nor one a moment later, when the connection that has waited longest was
    /// dropped. Other errors are about one connection, or pass: then the next one is accepted.
    pub async fn accept<T, F: Future<Output = io::Result<T>>>(&self, mut accept: impl FnMut() -> F) -> io::Result<T> {
        let mut again = false;
        loop {
            let error = match accept().await {
                Ok(accepted) => {
                    lock(&self.state).short = None;
                    return Ok(accepted);
                }
                Err(error) => error,
            };
            if descriptors::is_shortage(&error) {
                let since = *lock(&self.state).short.get_or_insert_with(Instant::now);
                if since.elapsed() >= RETRY {
                    return Err(descriptors::explained(error));
                }
                self.drop_oldest();
            }
            // A stranger can connect and abort at any rate.
            let level = if again || was_dropped(&error) { log::Level::Debug } else { log::Level::Warn };
            log::log!(level, "cannot accept a connection, and will retry: {error}");
            again = true;
            sleep(RETRY).await;
        }
    }

    fn drop_oldest(&self) {
        if let Some(oldest) = lock(&self.waiting).pop_front() {
            oldest.task.abort();
        }
    }

    /// Spawns the handshake `proof` of a connection from `source`, then passes its result to `taken`. One timeout
    /// covers both. `source` is what the connections of a peer have in common, such as its IP address: the log has each
    /// reason for which it is refused once.
    ///
    /// After the handshake the connection is no longer dropped in favour of others, because its peer relies on it.
    pub fn receive<T: Send + 'static, F: Future<Output = Result<(), Refusal>> + Send>(
        self: &Arc<Self>,
        source: impl Display + Send + 'static,
        proof: impl Future<Output = Result<T, Refusal>> + Send + 'static,
        taken: impl FnOnce(T) -> F + Send + 'static,
    ) {
        let accept_queue = self.clone();
        let place = Place { number: next_number(), waiting: self.waiting.clone() };
        let number = place.number;
        // Held until the place is taken: the task may end before, on another thread.
        let mut waiting = lock(&self.waiting);
        let task = tokio::spawn(async move {
            let late = |_| Err(Refusal::Io(io::ErrorKind::TimedOut.into()));
            let both = async move {
                let proof = proof.await?;
                // Another listener's thread may just have dropped the connection. The peer then finds no confirmation,
                // or no answer to its hello, and dials again.
                drop(place);
                taken(proof).await
            };
            if let Err(refusal) = timeout(accept_queue.timeout, both).await.unwrap_or_else(late) {
                accept_queue.refused(&source, &refusal);
            }
        });
        let own = waiting.iter().filter(|other| other.queue == self.number).count();
        let of_this_queue = waiting.iter().position(|other| own >= self.capacity && other.queue == self.number);
        let is_full = of_this_queue.is_some() || waiting.len() >= descriptors::strangers();
        if is_full && let Some(oldest) = waiting.remove(of_this_queue.unwrap_or(0)) {
            oldest.task.abort();
        }
        waiting.push_back(Waiting { queue: self.number, number, task: task.abort_handle() });
    }

    /// Returns what was refused, and how often, in parentheses, for the error of a rank that waited in vain. Empty if
    /// nothing was.
    pub fn refusals(&self) -> String {
        let state = lock(&self.state);
        if state.refused.is_empty() { String::new() } else { format!(" (refused connections from {})", state.refused) }
    }

    fn refused(&self, source: &impl Display, refusal: &Refusal) {
        match lock(&self.state).refused.add(source, refusal, refusal.is_ours()) {
            Seen::First => log::warn!("refused a connection from {source}: {refusal}"),
            // Powers of two.
            Seen::Uncounted(n) if n & (n - 1) == 0 => {
                log::warn!("refused {n} connections so far, the last from {source}: {refusal}")
            }
            Seen::Again | Seen::Uncounted(_) => {}
        }
    }
}

/// Returns a number that no other call returns.
fn next_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    // Relaxed: only the number counts.
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use rustix::io::Errno;
    use tokio::sync::oneshot;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    /// A queue of a process of its own.
    fn queue(capacity: usize, timeout: Duration) -> Arc<AcceptQueue> {
        AcceptQueue::with(capacity, timeout, AllWaiting::default())
    }

    /// Adds a connection that never completes its handshake. The receiver fails when the connection is dropped.
    fn silent(accept_queue: &Arc<AcceptQueue>, number: usize) -> oneshot::Receiver<()> {
        let (held, dropped) = oneshot::channel();
        accept_queue.receive(
            number,
            async move {
                let _held = held;
                std::future::pending::<Result<(), Refusal>>().await
            },
            |()| async { Ok(()) },
        );
        dropped
    }

    #[test]
    fn a_full_queue_drops_its_oldest_connection() {
        block_on(async {
            let accept_queue = queue(5, TIMEOUT);
            let mut all: Vec<_> = (0..8).map(|number| silent(&accept_queue, number)).collect();
            for first in &mut all[..3] {
                first.await.unwrap_err();
            }
            assert!(all[3..].iter_mut().all(is_waiting));
        });
    }

    fn is_waiting(dropped: &mut oneshot::Receiver<()>) -> bool {
        dropped.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }

    #[test]
    fn strangers_at_many_listeners_have_one_bound() {
        block_on(async {
            let most = descriptors::strangers();
            let first = queue(usize::MAX, TIMEOUT);
            let second = AcceptQueue::with(usize::MAX, TIMEOUT, first.waiting.clone());
            let mut all: Vec<_> = (0..most + 3).map(|number| silent([&first, &second][number % 2], number)).collect();
            for first in &mut all[..3] {
                first.await.unwrap_err();
            }
            assert!(all[3..].iter_mut().all(is_waiting));
        });
    }

    #[test]
    fn a_lack_of_descriptors_is_an_error_if_it_lasts() {
        block_on(async {
            let accept_queue = queue(5, TIMEOUT);
            let mut waiting = silent(&accept_queue, 0);
            for code in [Errno::MFILE, Errno::NFILE] {
                let mut failures = 1;
                let accepted = accept_queue.accept(|| {
                    failures -= 1;
                    ready(if failures >= 0 { Err(code.into()) } else { Ok("accepted") })
                });
                assert_eq!(accepted.await.unwrap(), "accepted", "after one failure");
                let error = accept_queue.accept(|| ready(Err::<(), _>(code.into()))).await.unwrap_err();
                assert!(error.to_string().contains("open files"), "{error}");
                assert_eq!(accept_queue.accept(|| ready(Ok("accepted"))).await.unwrap(), "accepted", "there are again");
            }
            // It made room.
            waiting.try_recv().unwrap_err();
            let mut failures = 5;
            let accepted = accept_queue.accept(|| {
                failures -= 1;
                ready(if failures >= 0 { Err(Errno::CONNABORTED.into()) } else { Ok("accepted") })
            });
            assert_eq!(accepted.await.unwrap(), "accepted", "other errors pass");
        });
    }

    #[test]
    fn a_silent_connection_times_out() {
        block_on(async {
            let accept_queue = queue(1, Duration::from_millis(1));
            silent(&accept_queue, 0).await.unwrap_err();
        });
    }

    #[test]
    fn refusals_are_counted_by_source_and_reason() {
        block_on(async {
            let accept_queue = AcceptQueue::new(2);
            assert_eq!(accept_queue.refusals(), "");
            for (source, refusal) in
                [("one", Refusal::OtherSecret), ("two", Refusal::Stranger), ("one", Refusal::OtherSecret)]
            {
                let (refused, ends) = oneshot::channel::<()>();
                let proof = async move {
                    let _refused = refused;
                    Err::<(), _>(refusal)
                };
                accept_queue.receive(source, proof, |()| async { Ok(()) });
                // The connection has ended; its refusal is counted before the next one runs.
                ends.await.unwrap_err();
                tokio::task::yield_now().await;
            }
            let said = accept_queue.refusals();
            assert!(said.contains("from one (2 times: it has another secret"), "{said}");
            assert!(said.contains("two (once: it does not speak Bonfire's protocol)"), "{said}");
        });
    }
}
