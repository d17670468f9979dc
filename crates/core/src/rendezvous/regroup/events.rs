//! What a rank learns of its peers while it shrinks the group, and which of them have certainly ended.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::agreement::Agreement;
use crate::auth::{Identity, Purpose};
use crate::control::{Attempt, PeerEvent, RankEvent, attempt};

/// Time limit for each attempt of a probe: longer than a round trip, shorter than the time after which the system
/// repeats an unanswered packet.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(250);

/// The first and the longest pause between two attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// Events about the other ranks.
pub(super) struct PeerEvents {
    events: UnboundedReceiver<RankEvent>,
    /// Probes of ranks whose connections closed. Each returns the rank and whether it has ended.
    probes: JoinSet<(usize, bool)>,
    /// By rank: where it listens.
    addresses: Vec<SocketAddr>,
    identity: Identity,
    /// How long a rank is probed.
    limit: Duration,
    silent: Vec<usize>,
}

impl PeerEvents {
    /// `addresses`: where the ranks listen, by rank. `limit`: how long a rank is probed.
    pub fn new(
        events: UnboundedReceiver<RankEvent>,
        addresses: Vec<SocketAddr>,
        identity: Identity,
        limit: Duration,
    ) -> PeerEvents {
        PeerEvents { events, probes: JoinSet::new(), addresses, identity, limit, silent: Vec::new() }
    }

    /// Waits for events and handles them. Cancel safe.
    pub async fn wait(&mut self, agreement: &mut Agreement) {
        let event = tokio::select! {
            Some(event) = self.events.recv() => event,
            Some(Ok((peer, ended))) = self.probes.join_next() => return agreement.exclude(peer, ended),
            else => std::future::pending().await,
        };
        self.handle(event, agreement);
        self.handle_pending(agreement);
    }

    /// Handles all pending events before the rank acts: a rank that was suspended, or did not call, learns that others
    /// went on.
    pub fn handle_pending(&mut self, agreement: &mut Agreement) {
        while let Ok(event) = self.events.try_recv() {
            self.handle(event, agreement);
        }
    }

    fn handle(&mut self, (peer, event): RankEvent, agreement: &mut Agreement) {
        match event {
            PeerEvent::Message(message) => agreement.receive(peer, message),
            PeerEvent::Left => agreement.exclude(peer, true),
            PeerEvent::Silent => {
                self.silent.push(peer);
                agreement.exclude(peer, false);
            }
            // In a partition others may have gone on and closed: a rank that was silent first may be alive.
            PeerEvent::Closed if self.silent.contains(&peer) => {}
            PeerEvent::Closed => {
                let (address, identity, limit) = (self.addresses[peer], self.identity.clone(), self.limit);
                self.probes.spawn(async move { (peer, has_ended(&identity, (peer, address), limit).await) });
            }
        }
    }
}

/// Whether the process of a rank has certainly ended. A process that is just ending closes its connections one after
/// the other, the one to this rank perhaps long before the port at which it listens; and the port may take this rank's
/// packets with it. So this tries again until it knows or the limit has passed. While this process or its machine lacks
/// something, nothing can be known, and the limit begins anew.
async fn has_ended(identity: &Identity, peer: (usize, SocketAddr), limit: Duration) -> bool {
    let (mut start, mut pause) = (Instant::now(), PAUSE.0);
    loop {
        match timeout(ATTEMPT_TIMEOUT, attempt(identity, peer, Purpose::Probe)).await {
            Ok(Attempt::Ended(reason)) => {
                log::debug!("rank {} has ended: {reason}", peer.0);
                return true;
            }
            Ok(Attempt::Connected(_) | Attempt::Forbidden(_)) => return false,
            Ok(Attempt::Lacking(_)) => start = Instant::now(),
            Ok(Attempt::Dropped | Attempt::Unanswered) | Err(_) => {}
        }
        if start.elapsed() >= limit {
            return false;
        }
        sleep(pause).await;
        pause = (2 * pause).min(PAUSE.1);
    }
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::auth::{AcceptQueue, Listener};
    use crate::control::{GroupStatus, admit};

    /// A limit that no test reaches which does not mean to.
    const LONG: Duration = Duration::from_secs(600);
    /// A limit that has passed after the first attempt.
    const OVER: Duration = Duration::ZERO;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn identity(rank: usize, session: u64) -> Identity {
        Identity { secret: None, session, rank, world_size: 2 }
    }

    /// Whether rank 1, which listened there, has ended, as rank 0 of the same job finds.
    async fn probe(address: SocketAddr, limit: Duration) -> bool {
        has_ended(&identity(0, 7), (1, address), limit).await
    }

    /// A process that is killed closes its connection to this rank, and at another moment the port at which it listens.
    #[test]
    fn a_port_that_closes_while_it_is_probed_belongs_to_a_process_that_has_ended() {
        for round in 0..1000 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let (start, delay) = (Instant::now(), Duration::from_micros(round % 200));
            let closes = thread::spawn(move || {
                while start.elapsed() < delay {
                    std::hint::spin_loop();
                }
                drop(listener);
            });
            assert!(block_on(probe(address, LONG)), "in round {round}");
            closes.join().unwrap();
        }
    }

    /// On a busy machine seconds may pass between its connection and its port.
    #[test]
    fn a_process_that_takes_long_to_end_has_ended_all_the_same() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let closes = thread::spawn(move || {
            // These attempts get no answer, and the next one may be reset.
            let waiting: Vec<_> = (0..5).map(|_| listener.accept().unwrap()).collect();
            drop((waiting, listener));
        });
        assert!(block_on(probe(address, LONG)));
        closes.join().unwrap();
    }

    /// Serves a port as `serve` does with each connection, until the test ends.
    fn served(mut serve: impl FnMut(std::net::TcpStream) + Send + 'static) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || listener.incoming().for_each(|stream| serve(stream.unwrap())));
        address
    }

    #[test]
    fn a_port_at_which_another_process_answers_belongs_to_a_process_that_has_ended() {
        let web = served(|mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap());
        assert!(block_on(probe(web, LONG)));
        let after_a_request = served(|mut stream| {
            let _ = stream.read(&mut [0; 8]);
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2p1\r\n");
        });
        assert!(block_on(probe(after_a_request, LONG)));
        // Ranks of other jobs, and another rank of this one.
        for other in [identity(1, 8), Identity { world_size: 3, ..identity(1, 7) }, identity(0, 7)] {
            block_on(async {
                let address = rank(other);
                assert!(probe(address, LONG).await);
            });
        }
    }

    #[test]
    fn a_rank_that_answers_lives_and_one_that_does_not_may() {
        block_on(async {
            let address = rank(identity(1, 7));
            assert!(!probe(address, LONG).await);
        });
        // It goes on in another group, and keeps its port in use.
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!block_on(probe(held.local_addr().unwrap(), OVER)));
        // A proxy whose other end does not answer.
        assert!(!block_on(probe(served(drop), OVER)));
    }

    /// Runs the accept queue of a rank on this runtime. Returns where it listens.
    fn rank(identity: Identity) -> SocketAddr {
        let (listener, _) = Listener::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
        let address = listener.addresses().unwrap()[0];
        let (queue, status) = (AcceptQueue::new(2), Arc::new(GroupStatus::new(2).unwrap()));
        let controls = tokio::sync::mpsc::channel(1).0;
        tokio::spawn(async move {
            loop {
                let accepted = queue.accept(|| listener.accept()).await.unwrap();
                admit(&queue, accepted, &identity, &status, &controls);
            }
        });
        address
    }
}
