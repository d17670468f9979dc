//! A ticket lock that runs a rank's operations in call order.
//!
//! The order does not depend on which results the program waits for. An operation gets its sequence number when its
//! turn comes, not when it is called. Its deadline starts when it is called, so a wait for the turn can end without it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::sync::{Bell, Deadline, Mutex, lock, spin};

/// A ticket lock: first come, first served.
#[derive(Default)]
pub(crate) struct TicketLock {
    next: AtomicU64,
    serving: AtomicU64,
    bell: Bell,
    /// Whether a ticket was ever abandoned.
    any_abandoned: AtomicBool,
    /// Tickets whose owners no longer wait for them.
    abandoned: Mutex<BTreeSet<u64>>,
}

/// A position in the queue.
pub(crate) struct Ticket(u64);

/// The lock, held. Dropping it admits the next ticket.
pub(crate) struct Turn<'a> {
    queue: &'a TicketLock,
    /// Whether its owner had to wait for it. Not the time at which it came: an `Option<Instant>` in here costs 6 ns,
    /// because it is written and read in words of different sizes.
    waited: bool,
}

impl TicketLock {
    /// Takes a ticket and waits for its turn. Returns `None` if the deadline passes first.
    #[inline]
    pub fn turn(&self, deadline: &Deadline) -> Option<Turn<'_>> {
        let ticket = self.ticket();
        self.wait(ticket, deadline)
    }

    /// Takes a ticket. The caller must wait for it, or the queue stalls.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        Ticket(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Waits until the ticket comes up. Returns `None` if the deadline passes first; the ticket is skipped then.
    #[inline]
    pub fn wait(&self, ticket: Ticket, deadline: &Deadline) -> Option<Turn<'_>> {
        // Acquire pairs with the release in `drop`: this operation sees what the previous one did.
        if self.serving.load(Ordering::Acquire) == ticket.0 {
            return Some(Turn { queue: self, waited: false });
        }
        let ready = || self.serving.load(Ordering::Acquire) == ticket.0;
        let came = spin(true, ready) || self.bell.sleep(Instant::now() + deadline.remaining(), ready);
        (came || !self.abandon(ticket)).then(|| Turn { queue: self, waited: true })
    }

    /// Gives up a ticket. Returns false if it has just come up: then the caller has the turn.
    #[cold]
    fn abandon(&self, ticket: Ticket) -> bool {
        let mut abandoned = lock(&self.abandoned);
        // SeqCst, with the same order in `drop`: either this thread sees that the ticket came up, or the thread that
        // admits the ticket sees the flag, and then, under the lock, the ticket.
        self.any_abandoned.store(true, Ordering::SeqCst);
        let waits = self.serving.load(Ordering::SeqCst) != ticket.0;
        if waits {
            abandoned.insert(ticket.0);
        }
        waits
    }

    /// Admits the first ticket that is not abandoned, starting with the one that has just come up.
    #[cold]
    fn skip_abandoned(&self) {
        let mut abandoned = lock(&self.abandoned);
        while abandoned.remove(&self.serving.load(Ordering::Relaxed)) {
            self.serving.fetch_add(1, Ordering::Release);
        }
    }
}

impl Turn<'_> {
    /// When the operation begins, for its record: at its call, or now, if it had to wait for its turn until now.
    #[inline]
    pub fn begin(&self, deadline: &Deadline) -> Instant {
        if self.waited { Instant::now() } else { deadline.start() }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let queue = self.queue;
        queue.serving.fetch_add(1, Ordering::SeqCst);
        if queue.any_abandoned.load(Ordering::SeqCst) {
            queue.skip_abandoned();
        }
        queue.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_abandoned_ticket_is_skipped() {
        let queue = TicketLock::default();
        let first = queue.turn(&Deadline::after(LONG));
        let [second, third, fourth] = [queue.ticket(), queue.ticket(), queue.ticket()];
        assert!(queue.wait(third, &Deadline::after(Duration::ZERO)).is_none());
        assert!(queue.wait(second, &Deadline::after(Duration::ZERO)).is_none());
        drop(first);
        assert!(queue.wait(fourth, &Deadline::after(Duration::ZERO)).is_some());
        assert!(queue.turn(&Deadline::after(Duration::ZERO)).is_some());
    }

    #[test]
    fn every_ticket_is_served_or_abandoned_whatever_the_moment_of_its_deadline() {
        let queue = TicketLock::default();
        let (served, gave_up) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for thread in 0..4u64 {
                let (queue, served, gave_up) = (&queue, &served, &gave_up);
                scope.spawn(move || {
                    for round in 0..5000 {
                        let limit = Duration::from_nanos((thread + 1) * round % 7000);
                        if let Some(turn) = queue.turn(&Deadline::after(limit)) {
                            // Two owners at a time would lose a count.
                            let before = served.load(Ordering::Relaxed);
                            served.store(before + 1, Ordering::Relaxed);
                            drop(turn);
                        } else {
                            gave_up.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(served.into_inner() + gave_up.into_inner(), 4 * 5000);
        assert!(queue.turn(&Deadline::after(LONG)).is_some());
        assert!(lock(&queue.abandoned).is_empty());
    }
}
