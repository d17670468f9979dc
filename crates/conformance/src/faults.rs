//! A wrapper around a transport that delays messages and lets them fail.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bonfire_core::error::Site;
use bonfire_core::{Builder, Deadline, Error, Fault, Group, Transport};

/// Time limit for every operation in a test, so that tests end.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// How many messages a rank has begun to send and to receive.
#[derive(Debug, Default)]
pub struct Seen {
    /// To send.
    pub sent: AtomicUsize,
    /// To receive.
    pub received: AtomicUsize,
}

/// The faults of one rank.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Counts this rank's messages.
    pub seen: Arc<Seen>,
    /// Seed of a generator that delays some messages by some microseconds.
    pub delays: Option<u64>,
    /// Message number `k`, counted from 0, and all later ones are not sent.
    pub fail_at: Option<usize>,
    /// The same for received messages.
    pub fail_to_receive_at: Option<usize>,
    /// Whether the transport tells the other ranks that this rank has failed.
    pub told: bool,
}

/// Injects [`Faults`] before each message that a rank sends or receives.
pub struct Faulty<T> {
    inner: T,
    faults: Faults,
    random: Mutex<Random>,
}

impl<T: Transport> Faulty<T> {
    /// Wraps one rank's end of a transport.
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
            delay(self.random.lock().expect("no thread panics while it holds the lock").next());
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
            // The send half of the exchange still takes place.
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

/// The xorshift generator: the same seed, which must not be zero, yields the same numbers.
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    #[expect(clippy::should_implement_trait, reason = "numbers without an end need no `Option`")]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Does nothing, yields, spins or sleeps briefly. This is the injected fault, not a way to wait for something.
pub fn delay(number: u64) {
    let size = number >> 8 & 63;
    match number % 16 {
        0..=7 => {}
        8..=11 => thread::yield_now(),
        12..=14 => (0..size * 32).for_each(|_| std::hint::spin_loop()),
        _ => thread::sleep(Duration::from_micros(size)),
    }
}

/// Runs `f` on the ranks of a transport, whose ends are in the order of ranks. Each has a thread, and the faults that
/// `faults` returns for it. Returns the results by rank.
///
/// # Panics
/// If a rank panics.
pub fn run<E: Transport + 'static, T: Send + 'static>(
    ends: Vec<E>,
    settings: impl Fn(Builder) -> Builder,
    faults: impl Fn(usize) -> Faults,
    f: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let ranks: Vec<_> = ends
        .into_iter()
        .enumerate()
        .map(|(rank, end)| {
            let transport = Arc::new(Faulty::new(end, faults(rank)));
            let group = settings(Group::builder().deadline(DEADLINE)).on(transport);
            let f = f.clone();
            thread::spawn(move || f(group))
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
}
