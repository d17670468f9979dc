//! A ticket lock that runs a rank's operations in call order.
//!
//! The order does not depend on which results the program waits for. An operation gets its sequence number, and its
//! deadline starts, when its turn comes, not when it is called.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::{Bell, spin};

/// A ticket lock: first come, first served.
#[derive(Default)]
pub(crate) struct TicketLock {
    next: AtomicU64,
    serving: AtomicU64,
    bell: Bell,
}

/// A position in the queue.
pub(crate) struct Ticket(u64);

/// The lock, held. Dropping it admits the next ticket.
pub(crate) struct Turn<'a>(&'a TicketLock);

impl TicketLock {
    /// Takes a ticket and waits for its turn.
    #[inline]
    pub fn turn(&self) -> Turn<'_> {
        let ticket = self.ticket();
        self.wait(ticket)
    }

    /// Takes a ticket. The caller must wait for it, or the queue stalls.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        Ticket(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until the ticket comes up. It does, because every operation before it ends by its own deadline.
    #[inline]
    pub fn wait(&self, ticket: Ticket) -> Turn<'_> {
        // Acquire pairs with the release in `drop`: this operation sees what the previous one did.
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
