//! What a rank learns of its peers while it shrinks the group, and which of them have certainly ended.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::agreement::Agreement;
use crate::auth::{self, Secret};
use crate::control::{PeerEvent, RankEvent};

/// Time limit for probing a rank whose connection ended.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for each attempt of a probe: longer than a round trip, shorter than the time after which the system
/// repeats an unanswered packet.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(250);

/// Events about the other ranks.
pub(super) struct PeerEvents {
    events: UnboundedReceiver<RankEvent>,
    /// Probes of ranks whose connections closed. Each returns the rank and whether it has ended.
    probes: JoinSet<(usize, bool)>,
    /// By rank: where it listens.
    addresses: Vec<SocketAddr>,
    secret: Option<Secret>,
    silent: Vec<usize>,
}

impl PeerEvents {
    /// `addresses`: where the ranks listen, by rank.
    pub fn new(events: UnboundedReceiver<RankEvent>, addresses: Vec<SocketAddr>, secret: Option<Secret>) -> PeerEvents {
        PeerEvents { events, probes: JoinSet::new(), addresses, secret, silent: Vec::new() }
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
                let (address, secret) = (self.addresses[peer], self.secret.clone());
                self.probes.spawn(async move { (peer, has_ended(secret.as_ref(), address).await) });
            }
        }
    }
}

/// Whether the process that listened here has certainly ended: its machine refuses the connection. A process that is
/// just ending may still accept a connection, and drops it before or after this rank has seen that it was accepted. Or
/// its port takes this rank's first or last packet with it, and no answer comes: the next attempt has one.
async fn has_ended(secret: Option<&Secret>, address: SocketAddr) -> bool {
    let attempt = || async {
        let mut stream = auth::open(secret, &[address]).await.unwrap_or_else(|e| Err(io::Error::other(e)))?;
        drop::<io::Result<u8>>(stream.read_u8().await);
        Ok::<_, io::Error>(())
    };
    let probe = async {
        loop {
            match timeout(ATTEMPT_TIMEOUT, attempt()).await {
                Ok(Err(e)) if e.kind() == ErrorKind::ConnectionRefused => return true,
                Ok(Err(e)) if !auth::was_dropped(&e) => return false,
                _ => {}
            }
        }
    };
    timeout(PROBE_TIMEOUT, probe).await.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// A process that is killed closes its connection to this rank, and at another moment the port at which it listens.
    #[test]
    fn a_port_that_closes_while_it_is_probed_belongs_to_a_process_that_has_ended() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
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
            assert!(runtime.block_on(has_ended(None, address)), "in round {round}");
            closes.join().unwrap();
        }
    }
}
