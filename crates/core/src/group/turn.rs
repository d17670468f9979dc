//! The order of a rank's operations: each takes a ticket when it is called and runs when the ticket comes up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::{Bell, spin};

/// Tickets, first come, first served.
#[derive(Default)]
pub(crate) struct Queue {
    next: AtomicU64,
    serving: AtomicU64,
    bell: Bell,
}

/// A place in the queue. The next one's turn comes when this is dropped.
pub(crate) struct Ticket(u64);

/// The turn to run. Ends when dropped.
pub(crate) struct Turn<'a>(&'a Queue);

impl Queue {
    /// Takes a ticket and waits for it to come up.
    #[inline]
    pub fn turn(&self) -> Turn<'_> {
        let ticket = self.ticket();
        self.wait(ticket)
    }

    /// Takes a ticket. It must be waited for, or the queue stands still.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        Ticket(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until the ticket comes up. Every operation before it ends by its own deadline, so this ends too.
    #[inline]
    pub fn wait(&self, ticket: Ticket) -> Turn<'_> {
        // Acquire pairs with the release in `drop`: what the operation before did is seen by this one.
        let ready = || self.serving.load(Ordering::Acquire) == ticket.0;
        if !spin(true, ready) {
            while !self.bell.sleep(Instant::now() + Duration::from_secs(3600), ready) {}
        }
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.serving.fetch_add(1, Ordering::Release);
        self.0.bell.ring();
    }
}
