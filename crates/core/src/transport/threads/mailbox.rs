//! Messages between two threads: the sender lends its bytes and waits, the receiver copies them.

use std::time::Instant;

use super::ThreadEndpoint;
use crate::sync::{Bell, Deadline, Mutex, SlowWaitWarning, lock, spin};
use crate::transport::Transport;
use crate::types::{Error, Fault, Site};

/// The mailbox from one rank to another. Holds one transfer at a time.
#[derive(Default)]
pub(super) struct Mailbox {
    transfer: Mutex<Transfer>,
    bell: Bell,
}

#[derive(Default)]
enum Transfer {
    #[default]
    None,
    /// The sender waits until the receiver takes these bytes.
    Offered(Site, SenderBytes),
    /// The receiver has copied the bytes.
    Taken,
    /// The receiver expected another tag or length.
    Refused(Fault),
}

/// The address and length of the bytes of a sender that waits in `send` or `exchange`.
struct SenderBytes(*const u8, usize);

// SAFETY: the sender does not return before the transfer is taken, refused or withdrawn, each under the mutex. So the
// bytes stay borrowed while any thread can find them here.
unsafe impl Send for SenderBytes {}

impl Mailbox {
    pub(super) fn ring(&self) {
        self.bell.ring();
    }

    fn with<T>(&self, f: impl FnOnce(&mut Transfer) -> T) -> T {
        f(&mut lock(&self.transfer))
    }
}

impl ThreadEndpoint {
    fn mailbox(&self, from: usize, to: usize) -> &Mailbox {
        let to_all = || (0..self.shared.ranks.len()).map(|_| Mailbox::default()).collect();
        &self.shared.mailboxes[from].get_or_init(to_all)[to]
    }

    fn offer_letter(&self, tag: &Site, to: usize, bytes: &[u8]) {
        let mailbox = self.mailbox(self.rank, to);
        mailbox.with(|transfer| *transfer = Transfer::Offered(*tag, SenderBytes(bytes.as_ptr(), bytes.len())));
        mailbox.ring();
    }

    /// Waits until the transfer to `to` is taken or refused. Withdraws it after a failure or at the deadline.
    fn await_receipt(&self, tag: &Site, to: usize, deadline: &Deadline) -> Result<(), Fault> {
        let mailbox = self.mailbox(self.rank, to);
        let waited = self.wait(mailbox, (tag, to), deadline, |transfer| !matches!(transfer, Transfer::Offered(..)));
        match (mailbox.with(std::mem::take), waited) {
            (Transfer::Taken, _) => Ok(()),
            (Transfer::Refused(fault), _) => Err(fault),
            (_, waited) => waited.and(Err(Fault::Timeout { missing: vec![to] })),
        }
    }

    fn take_letter(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        let mailbox = self.mailbox(from, self.rank);
        self.wait(mailbox, (tag, from), deadline, |transfer| matches!(transfer, Transfer::Offered(..)))?;
        let result = mailbox.with(|transfer| {
            let Transfer::Offered(theirs, SenderBytes(source, len)) = &*transfer else {
                return Err(Fault::Timeout { missing: vec![from] });
            };
            if theirs != tag || *len != bytes.len() {
                let fault = Fault::Unexpected { peer: from, site: *theirs };
                *transfer = Transfer::Refused(Fault::Unexpected { peer: self.rank, site: *tag });
                return Err(fault);
            }
            // SAFETY: the sender waits, so its bytes are borrowed (`Send for SenderBytes`). The lengths are equal, and
            // the receiver's exclusive buffer cannot overlap the sender's bytes.
            unsafe { std::ptr::copy_nonoverlapping(*source, bytes.as_mut_ptr(), *len) };
            *transfer = Transfer::Taken;
            Ok(())
        });
        mailbox.ring();
        result
    }

    /// Waits until `done` holds for the transfer, the peer is gone, the group has failed, or the deadline has passed.
    fn wait(
        &self,
        mailbox: &Mailbox,
        (tag, peer): (&Site, usize),
        deadline: &Deadline,
        done: impl Fn(&Transfer) -> bool,
    ) -> Result<(), Fault> {
        let done = || mailbox.with(|transfer| done(transfer));
        if spin(self.shared.oversubscribed, done) {
            return Ok(());
        }
        let gone = || self.shared.absence(peer).is_some() || self.shared.failed();
        let mut slow_wait = SlowWaitWarning::until(deadline);
        loop {
            if mailbox.bell.sleep(Instant::now() + slow_wait.pause(), || done() || gone()) {
                // A transfer that was offered before its sender left is still delivered. A rank that fails leaves after
                // that: the failure is the cause.
                return match (done(), self.shared.absence(peer)) {
                    (true, _) => Ok(()),
                    (false, Some(fault)) if !self.shared.failed() => Err(fault),
                    (false, _) => Err(self.shared.cause()),
                };
            }
            if deadline.passed() {
                return Err(Fault::Timeout { missing: vec![peer] });
            }
            slow_wait.warn(self.rank, || (format!("in {tag} for rank {peer}"), self.places(&[peer])));
        }
    }
}

impl Transport for ThreadEndpoint {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared.ranks.len()
    }

    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault> {
        self.offer_letter(tag, to, bytes);
        self.await_receipt(tag, to, deadline)
    }

    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        self.take_letter(tag, from, bytes, deadline)
    }

    fn exchange(
        &self,
        tag: &Site,
        (to, outgoing): (usize, &[u8]),
        (from, incoming): (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        self.offer_letter(tag, to, outgoing);
        let received = self.take_letter(tag, from, incoming, deadline);
        // The transfer must be taken or withdrawn before its bytes are released, even if receiving failed. The peer may
        // still want it, but the group has failed anyway.
        let sent = match &received {
            Ok(()) => self.await_receipt(tag, to, deadline),
            Err(_) => self.await_receipt(tag, to, &Deadline::after(std::time::Duration::ZERO)),
        };
        received.and(sent)
    }

    fn begin(&self, _site: &Site) -> Result<(), Fault> {
        if self.shared.failed() { Err(self.shared.cause()) } else { Ok(()) }
    }

    fn known_failure(&self) -> Option<Fault> {
        self.shared.failed().then(|| self.shared.cause())
    }

    fn fail(&self, error: &Error, _completed: u64) {
        self.shared.fail(error);
    }

    fn leave(&self) {
        self.shared.leave(self.rank);
    }
}
