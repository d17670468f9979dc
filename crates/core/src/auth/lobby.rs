//! Where connections wait until they have proved who they are.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::connect::PATIENCE;
use super::opening::Refusal;
use crate::sync::{Mutex, lock};

/// Strangers that may wait beside the ranks.
const STRANGERS: usize = 64;

/// How many refusals go to the log in full: a flood of strangers must not fill a disk.
const LOUD: u64 = 64;

/// When to try again where the system could not accept a connection: out of descriptors, most likely.
pub const RETRY: Duration = Duration::from_millis(100);

/// The connections of one listener that have not proved yet who they are: so many, each for so long. Where there are too
/// many, the one that has waited longest goes: a rank needs a moment, and dials again if it had none.
pub struct Lobby {
    state: Mutex<State>,
    most: usize,
    patience: Duration,
}

#[derive(Default)]
struct State {
    /// Each with whether it has proved itself meanwhile.
    waiting: VecDeque<(AbortHandle, Arc<AtomicBool>)>,
    refused: u64,
    /// The last that was Bonfire, and why it was turned away.
    last: Option<String>,
}

impl Lobby {
    /// For a listener that so many connections of ranks can come to at once.
    pub fn new(ranks: usize) -> Arc<Lobby> {
        Arc::new(Lobby { state: Mutex::default(), most: STRANGERS.saturating_add(ranks), patience: PATIENCE })
    }

    /// Lets a connection from `address` prove who it is.
    ///
    /// One that has is `taken`: it must not go for others, because it will believe that it is in.
    pub fn receive<T: Send + 'static, F: Future<Output = Result<(), Refusal>> + Send>(
        self: &Arc<Self>,
        address: impl Display + Send + 'static,
        proof: impl Future<Output = Result<T, Refusal>> + Send + 'static,
        taken: impl FnOnce(T) -> F + Send + 'static,
    ) {
        let lobby = self.clone();
        let proved = Arc::new(AtomicBool::new(false));
        let mark = proved.clone();
        let waiting = tokio::spawn(async move {
            let late = |_| Err(Refusal::Io(std::io::ErrorKind::TimedOut.into()));
            let both = async move {
                let proof = proof.await?;
                // All is on one thread, so nothing comes between this and what follows it.
                mark.store(true, Ordering::Relaxed);
                taken(proof).await
            };
            if let Err(refusal) = timeout(lobby.patience, both).await.unwrap_or_else(late) {
                lobby.refused(&address, &refusal);
            }
        });
        let mut state = lock(&self.state);
        state.waiting.retain(|(other, proved)| !other.is_finished() && !proved.load(Ordering::Relaxed));
        if state.waiting.len() >= self.most
            && let Some((oldest, _)) = state.waiting.pop_front()
        {
            oldest.abort();
        }
        state.waiting.push_back((waiting.abort_handle(), proved));
    }

    /// What to add to an error of a rank that waits in vain: who was turned away.
    pub fn turned_away(&self) -> String {
        lock(&self.state).last.as_ref().map_or(String::new(), |last| format!(" ({last})"))
    }

    fn refused(&self, address: &impl Display, refusal: &Refusal) {
        let mut state = lock(&self.state);
        state.refused += 1;
        if refusal.is_ours() {
            state.last = Some(format!("turned away a connection from {address}: {refusal}"));
        }
        match state.refused {
            ..=LOUD => log::warn!("turned away a connection from {address}: {refusal}"),
            // Powers of two.
            n if n & (n - 1) == 0 => {
                log::warn!("turned away {n} connections so far, the last from {address}: {refusal}")
            }
            _ => {}
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

    /// A connection that proves nothing; what it gives ends with it.
    fn silent(lobby: &Arc<Lobby>, number: usize) -> oneshot::Receiver<()> {
        let (held, hears) = oneshot::channel();
        lobby.receive(
            number,
            async move {
                let _held = held;
                std::future::pending::<Result<(), Refusal>>().await
            },
            |()| async { Ok(()) },
        );
        hears
    }

    #[test]
    fn who_has_waited_longest_goes_where_there_are_too_many() {
        block_on(async {
            let lobby = Lobby::new(2);
            let mut all: Vec<_> = (0..lobby.most + 3).map(|number| silent(&lobby, number)).collect();
            for first in &mut all[..3] {
                first.await.unwrap_err();
            }
            let waiting =
                |hears: &mut oneshot::Receiver<()>| hears.try_recv() == Err(oneshot::error::TryRecvError::Empty);
            assert!(all[3..].iter_mut().all(waiting));
        });
    }

    #[test]
    fn nobody_waits_for_ever() {
        block_on(async {
            let patience = Duration::from_millis(1);
            let lobby = Arc::new(Lobby { state: Mutex::default(), most: 1, patience });
            silent(&lobby, 0).await.unwrap_err();
        });
    }

    #[test]
    fn the_last_that_was_bonfire_is_remembered() {
        block_on(async {
            let lobby = Lobby::new(2);
            assert_eq!(lobby.turned_away(), "");
            for (address, refusal) in [("one", Refusal::OtherSecret), ("two", Refusal::Stranger)] {
                lobby.receive(address, async { Err::<(), _>(refusal) }, |()| async { Ok(()) });
            }
            while lock(&lobby.state).refused < 2 {
                tokio::task::yield_now().await;
            }
            let said = lobby.turned_away();
            assert!(said.contains("from one: it has another secret"), "{said}");
        });
    }
}
