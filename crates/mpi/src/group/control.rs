//! The control plane over MPI: failures, goodbye messages, and what ranks called.
//!
//! The messages are those of the control connections between processes. Here they are MPI messages, which a rank reads
//! while it is in an operation or begins one. A rank that computes reads none, so there are no heartbeats. MPI's
//! launcher detects a process that dies, and ends the job.

use bonfire_core::Error;
use bonfire_core::internal::{ControlMessage, ControlMessages, PolledControl};

use super::comm::{Comm, Request, mpi_tag};
use super::library::Held;

/// The control plane of one group on one rank.
pub(super) struct ControlPlane {
    comm: Comm,
    messages: ControlMessages,
    /// Messages in flight, with the bytes that MPI reads.
    sending: Vec<(Request, Vec<u8>)>,
    /// The message that is being received, and its sender. A long message arrives only when the sender calls MPI again.
    receiving: Option<(Request, usize, Vec<u8>)>,
}

impl ControlPlane {
    pub fn new(comm: Comm, messages: ControlMessages) -> ControlPlane {
        ControlPlane { comm, messages, sending: Vec::new(), receiving: None }
    }

    /// Sends all outgoing messages, and handles those that have arrived.
    pub fn pump(&mut self, control: &PolledControl, held: &Held) -> Result<(), Error> {
        while let Some(ControlMessage { to, bytes }) = self.messages.next_message()? {
            let Comm { rank, size, .. } = self.comm;
            for peer in (0..size).filter(|peer| *peer != rank && to.is_none_or(|to| to == *peer)) {
                self.send(peer, bytes.clone(), held)?;
            }
        }
        while let Some((peer, bytes)) = self.receive(held)? {
            if let Some(answer) = self.messages.receive(control, peer, &bytes)? {
                self.send(peer, answer, held)?;
            }
        }
        self.flush(held)?;
        Ok(())
    }

    /// Returns a message that has arrived completely, and its sender.
    fn receive(&mut self, held: &Held) -> Result<Option<(usize, Vec<u8>)>, Error> {
        if self.receiving.is_none() {
            let Some((peer, length)) = self.comm.probe(mpi_tag::CONTROL, held)? else { return Ok(None) };
            let mut bytes = vec![0; length];
            // SAFETY: the bytes are kept at their address until the request is done: see `receiving` and `drop`. Only
            // this function receives messages with this tag, so the message is the one that was probed.
            let request = unsafe { self.comm.receive(&mut bytes, peer, mpi_tag::CONTROL, held)? };
            self.receiving = Some((request, peer, bytes));
        }
        let done = match &mut self.receiving {
            Some((request, ..)) => request.done(held)?.is_some(),
            None => false,
        };
        Ok(self.receiving.take_if(|_| done).map(|(_, peer, bytes)| (peer, bytes)))
    }

    /// Drops messages that MPI has sent. Returns whether none is pending.
    pub fn flush(&mut self, held: &Held) -> Result<bool, Error> {
        for i in (0..self.sending.len()).rev() {
            if self.sending[i].0.done(held)?.is_some() {
                self.sending.swap_remove(i);
            }
        }
        Ok(self.sending.is_empty())
    }

    /// Once all peers have sent their goodbye messages: the most collectives that any of them has begun.
    pub fn all_left(&self) -> Option<u64> {
        self.messages.all_left()
    }

    fn send(&mut self, peer: usize, bytes: Vec<u8>, held: &Held) -> Result<(), Error> {
        // SAFETY: the bytes are kept at their address until the request is done: see `sending` and `drop`.
        let request = unsafe { self.comm.send(&bytes, peer, mpi_tag::CONTROL, held)? };
        self.sending.push((request, bytes));
        Ok(())
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.sending.drain(..).for_each(|(request, bytes)| request.abandon(bytes));
        self.receiving.take().into_iter().for_each(|(request, _, bytes)| request.abandon(bytes));
    }
}
