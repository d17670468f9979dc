//! The accept queue: connections that have not completed the handshake yet.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::connect::TIMEOUT;
use super::prologue::Refusal;
use super::tally::{Seen, Tally};
use crate::sync::{Mutex, lock};

/// Connections that may wait in addition to those of the ranks.
const STRANGERS: usize = 64;

/// Pause before the next attempt when the system could not accept a connection, most likely for lack of descriptors.
pub const RETRY: Duration = Duration::from_millis(100);

/// The accept queue of one listener. It bounds the number of connections that have not completed the handshake, and the
/// time that each of them has. When the queue is full, the connection that has waited longest is dropped: a rank
/// completes the handshake within a moment, and dials again if it was dropped.
pub struct AcceptQueue {
    state: Mutex<QueueState>,
    capacity: usize,
    timeout: Duration,
}

#[derive(Default)]
struct QueueState {
    /// Each with a flag that is set once its handshake is complete.
    waiting: VecDeque<(AbortHandle, Arc<AtomicBool>)>,
    /// What was refused, by where it came from.
    refused: Tally,
}

impl AcceptQueue {
    /// Creates the queue of a listener that at most `ranks` connections of ranks reach at the same time.
    pub fn new(ranks: usize) -> Arc<AcceptQueue> {
        Arc::new(AcceptQueue { state: Mutex::default(), capacity: STRANGERS.saturating_add(ranks), timeout: TIMEOUT })
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
        let proved = Arc::new(AtomicBool::new(false));
        let mark = proved.clone();
        let waiting = tokio::spawn(async move {
            let late = |_| Err(Refusal::Io(std::io::ErrorKind::TimedOut.into()));
            let both = async move {
                let proof = proof.await?;
                // The runtime has one thread, so nothing runs between this store and what follows it.
                mark.store(true, Ordering::Relaxed);
                taken(proof).await
            };
            if let Err(refusal) = timeout(accept_queue.timeout, both).await.unwrap_or_else(late) {
                accept_queue.refused(&source, &refusal);
            }
        });
        let mut state = lock(&self.state);
        state.waiting.retain(|(other, proved)| !other.is_finished() && !proved.load(Ordering::Relaxed));
        if state.waiting.len() >= self.capacity
            && let Some((oldest, _)) = state.waiting.pop_front()
        {
            oldest.abort();
        }
        state.waiting.push_back((waiting.abort_handle(), proved));
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

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
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
            let accept_queue = AcceptQueue::new(2);
            let mut all: Vec<_> = (0..accept_queue.capacity + 3).map(|number| silent(&accept_queue, number)).collect();
            for first in &mut all[..3] {
                first.await.unwrap_err();
            }
            let waiting =
                |dropped: &mut oneshot::Receiver<()>| dropped.try_recv() == Err(oneshot::error::TryRecvError::Empty);
            assert!(all[3..].iter_mut().all(waiting));
        });
    }

    #[test]
    fn a_silent_connection_times_out() {
        block_on(async {
            let timeout = Duration::from_millis(1);
            let accept_queue = Arc::new(AcceptQueue { state: Mutex::default(), capacity: 1, timeout });
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
