//! A transport implemented outside the core: channels of the standard library.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use bonfire_conformance::faults::run;
pub use bonfire_conformance::faults::{Faults, Random, delay};
use bonfire_core::error::Site;
use bonfire_core::{Builder, Deadline, Error, Fault, Group, Transport};

enum Packet {
    Data(Site, Vec<u8>),
    /// The sender has failed. No message follows.
    Failed(Error),
}

/// One rank's end of `n * n` channels of the standard library. A rank that drops its end disconnects its channels.
pub struct Channels {
    rank: usize,
    outgoing: Vec<Sender<Packet>>,
    incoming: Vec<Mutex<Receiver<Packet>>>,
}

impl Channels {
    /// Returns the ends of all ranks, by rank.
    pub fn group(n: usize) -> Vec<Channels> {
        let mut ends: Vec<Channels> =
            (0..n).map(|rank| Channels { rank, outgoing: Vec::new(), incoming: Vec::new() }).collect();
        for from in 0..n {
            for end in &mut ends {
                let (sender, receiver) = channel();
                end.incoming.push(Mutex::new(receiver));
                // For now `end` keeps the sender of the channel that it receives from.
                end.outgoing.push(sender);
                assert_eq!(end.incoming.len(), from + 1);
            }
        }
        let mut senders: Vec<Vec<Option<Sender<Packet>>>> =
            ends.iter_mut().map(|end| std::mem::take(&mut end.outgoing).into_iter().map(Some).collect()).collect();
        for end in &mut ends {
            let rank = end.rank;
            end.outgoing = senders.iter_mut().map(|to| to[rank].take().expect("one sender for each pair")).collect();
        }
        ends
    }
}

impl Transport for Channels {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.incoming.len()
    }

    fn send(&self, tag: &Site, to: usize, bytes: &[u8], _deadline: &Deadline) -> Result<(), Fault> {
        let sent = self.outgoing[to].send(Packet::Data(*tag, bytes.to_vec()));
        sent.map_err(|_| {
            // The peer may have left because it failed, and then it has sent its error.
            let said = self.incoming[to].lock().expect("no thread panics while it holds the lock");
            let failed = said.try_iter().find_map(|message| match message {
                Packet::Data(..) => None,
                Packet::Failed(error) => Some(error),
            });
            failed.map_or(Fault::Left { peer: to }, Fault::Failed)
        })
    }

    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        let receiver = self.incoming[from].lock().expect("no thread panics while it holds the lock");
        let message = receiver.recv_timeout(deadline.remaining()).map_err(|e| match e {
            RecvTimeoutError::Timeout => Fault::Timeout { missing: vec![from] },
            RecvTimeoutError::Disconnected => Fault::Left { peer: from },
        })?;
        let (theirs, payload) = match message {
            Packet::Data(tag, payload) => (tag, payload),
            Packet::Failed(error) => return Err(Fault::Failed(error)),
        };
        if theirs != *tag || payload.len() != bytes.len() {
            return Err(Fault::Unexpected { peer: from, site: theirs });
        }
        bytes.copy_from_slice(&payload);
        Ok(())
    }

    fn exchange(
        &self,
        tag: &Site,
        (to, outgoing): (usize, &[u8]),
        (from, incoming): (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        self.send(tag, to, outgoing, deadline)?;
        self.recv(tag, from, incoming, deadline)
    }

    /// The error follows this rank's earlier messages, so a peer that receives it has those of all completed
    /// operations.
    fn fail(&self, error: &Error, _completed: u64) {
        for (to, peer) in self.outgoing.iter().enumerate() {
            // A peer that has left does not need the error.
            if to != self.rank {
                let _ = peer.send(Packet::Failed(error.clone()));
            }
        }
    }
}

/// Runs `f` on `n` ranks over channels, each with the faults that `faults` returns for it. Returns the results by rank.
pub fn run_on_channels<T: Send + 'static>(
    n: usize,
    settings: impl Fn(Builder) -> Builder,
    faults: impl Fn(usize) -> Faults,
    f: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    run(Channels::group(n), settings, faults, f)
}
