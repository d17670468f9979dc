//! A transport from outside the crate, and one that injects delays and failures.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bonfire_core::error::Site;
use bonfire_core::{Builder, Deadline, Error, Fault, Group, Transport};

enum Message {
    Data(Site, Vec<u8>),
    /// The sender has failed; nothing follows.
    Failed(Error),
}

/// One rank's end of `n * n` channels of the standard library. A rank that drops its end disconnects its channels.
pub struct Channels {
    rank: usize,
    outgoing: Vec<Sender<Message>>,
    incoming: Vec<Mutex<Receiver<Message>>>,
}

impl Channels {
    /// The ends of all ranks, by rank.
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
        let mut senders: Vec<Vec<Option<Sender<Message>>>> =
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
        let sent = self.outgoing[to].send(Message::Data(*tag, bytes.to_vec()));
        sent.map_err(|_| {
            // It may have left because it failed, and then it has said so.
            let said = self.incoming[to].lock().expect("nobody panics with it");
            let failed = said.try_iter().find_map(|message| match message {
                Message::Data(..) => None,
                Message::Failed(error) => Some(error),
            });
            failed.map_or(Fault::Left { peer: to }, Fault::Failed)
        })
    }

    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        let receiver = self.incoming[from].lock().expect("nobody panics with it");
        let message = receiver.recv_timeout(deadline.remaining()).map_err(|e| match e {
            RecvTimeoutError::Timeout => Fault::Timeout { missing: vec![from] },
            RecvTimeoutError::Disconnected => Fault::Left { peer: from },
        })?;
        let (theirs, payload) = match message {
            Message::Data(tag, payload) => (tag, payload),
            Message::Failed(error) => return Err(Fault::Failed(error)),
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

    /// After all that was sent before it: who gets it has what this rank had for it in the operations that it completed.
    fn fail(&self, error: &Error, _completed: u64) {
        for (to, peer) in self.outgoing.iter().enumerate() {
            // One that has left needs no news.
            if to != self.rank {
                let _ = peer.send(Message::Failed(error.clone()));
            }
        }
    }
}

/// How many messages a rank has begun to send and to receive.
#[derive(Debug, Default)]
pub struct Seen {
    pub sent: AtomicUsize,
    pub received: AtomicUsize,
}

/// What goes wrong on one rank.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    pub seen: Arc<Seen>,
    /// Some sends are delayed by some microseconds, as a generator with this seed says.
    pub delays: Option<u64>,
    /// Message number `k`, counted from 0, is not sent, and neither is any after it.
    pub fail_at: Option<usize>,
    /// The same of those that it receives.
    pub fail_to_receive_at: Option<usize>,
    /// Whether the transport tells the others where this rank fails.
    pub told: bool,
}

/// Injects [`Faults`] before each message that a rank sends or receives.
pub struct Faulty<T> {
    inner: T,
    faults: Faults,
    random: Mutex<Random>,
}

impl<T: Transport> Faulty<T> {
    pub fn new(inner: T, faults: Faults) -> Self {
        // Ranks with the same seed must not have the same delays.
        let seed = faults.delays.unwrap_or(0) ^ (inner.rank() as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Faulty { inner, faults, random: Mutex::new(Random(seed | 1)) }
    }

    fn before_send(&self, to: usize) -> Result<(), Fault> {
        self.before(to, &self.faults.seen.sent, self.faults.fail_at)
    }

    fn before_receive(&self, from: usize) -> Result<(), Fault> {
        self.before(from, &self.faults.seen.received, self.faults.fail_to_receive_at)
    }

    fn before(&self, peer: usize, count: &AtomicUsize, fail_at: Option<usize>) -> Result<(), Fault> {
        let number = count.fetch_add(1, Ordering::Relaxed);
        if fail_at.is_some_and(|k| number >= k) {
            return Err(Fault::Lost { peer, reason: format!("message {number} fails on purpose") });
        }
        if self.faults.delays.is_some() {
            delay(self.random.lock().expect("nobody panics with it").next());
        }
        Ok(())
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault> {
        self.before_send(to)?;
        self.inner.send(tag, to, bytes, deadline)
    }

    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        self.before_receive(from)?;
        self.inner.recv(tag, from, bytes, deadline)
    }

    fn exchange(
        &self,
        tag: &Site,
        (to, outgoing): (usize, &[u8]),
        incoming: (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        self.before_send(to)?;
        if let Err(fault) = self.before_receive(incoming.0) {
            // What was to be sent at the same time is sent.
            self.inner.send(tag, to, outgoing, deadline)?;
            return Err(fault);
        }
        self.inner.exchange(tag, (to, outgoing), incoming, deadline)
    }

    fn fail(&self, error: &Error, completed: u64) {
        if self.faults.told {
            self.inner.fail(error, completed);
        }
    }
}

/// Xorshift: the same numbers for the same seed, which is not zero.
pub struct Random(pub u64);

impl Random {
    #[expect(clippy::should_implement_trait, reason = "numbers without an end need no `Option`")]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Nothing, a yield, a spin or a short sleep. It is the injected fault; nothing waits by it.
pub fn delay(number: u64) {
    let size = number >> 8 & 63;
    match number % 16 {
        0..=7 => {}
        8..=11 => thread::yield_now(),
        12..=14 => (0..size * 32).for_each(|_| std::hint::spin_loop()),
        _ => thread::sleep(Duration::from_micros(size)),
    }
}

/// Runs `f` on `n` ranks over channels, each rank with the faults that `faults` gives it; results by rank.
pub fn run_on_channels<T: Send + 'static>(
    n: usize,
    settings: impl Fn(Builder) -> Builder,
    faults: impl Fn(usize) -> Faults,
    f: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let ranks: Vec<_> = Channels::group(n)
        .into_iter()
        .enumerate()
        .map(|(rank, end)| {
            let transport = Arc::new(Faulty::new(end, faults(rank)));
            let group = settings(Group::builder().deadline(super::DEADLINE)).on(transport);
            let f = f.clone();
            thread::spawn(move || f(group))
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
}
