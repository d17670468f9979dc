//! The control plane over MPI: failures, goodbye messages, and what ranks called.
//!
//! The messages are those of the control connections between processes. Here they are MPI messages, which a rank reads
//! while it is in an operation or begins one. A rank that computes reads none, so there are no heartbeats. MPI's
//! launcher detects a process that dies, and ends the job.

use tokio::sync::mpsc::UnboundedReceiver;

use super::comm::{Comm, Request, mpi_tag};
use super::library::Held;
use crate::control::{ControlRequest, Message, frame};
use crate::types::Error;

/// The control plane of one group on one rank.
pub(super) struct ControlPlane {
    comm: Comm,
    /// Messages from this rank's operations.
    outgoing: UnboundedReceiver<ControlRequest>,
    /// Messages in flight, with the bytes that MPI reads.
    sending: Vec<(Request, Vec<u8>)>,
    /// The message that is being received, and its sender. A long message arrives only when the sender calls MPI again.
    receiving: Option<(Request, usize, Vec<u8>)>,
    /// By rank, whether it has sent its goodbye message. Then nothing arrives from it any more.
    left: Vec<bool>,
    /// The most collectives that any of these has begun.
    begun: u64,
}

impl ControlPlane {
    pub fn new(comm: Comm, outgoing: UnboundedReceiver<ControlRequest>) -> ControlPlane {
        let left = (0..comm.size).map(|rank| rank == comm.rank).collect();
        ControlPlane { comm, outgoing, sending: Vec::new(), receiving: None, left, begun: 0 }
    }

    /// Sends all outgoing messages, and passes those that have arrived to `hear`, which returns the answer, if any.
    pub fn pump(
        &mut self,
        held: &Held,
        apply_message: impl Fn(usize, Message) -> Option<Message>,
    ) -> Result<(), Error> {
        while let Ok(outgoing) = self.outgoing.try_recv() {
            let Some((message, only)) = message_of(outgoing) else { continue };
            let Comm { rank, size, .. } = self.comm;
            for peer in (0..size).filter(|peer| *peer != rank && only.is_none_or(|only| only == *peer)) {
                self.send(peer, &message, held)?;
            }
        }
        while let Some((peer, bytes)) = self.receive(held)? {
            let message = frame::decode(bytes.get(4..).unwrap_or_default());
            let message = message.map_err(|e| Error::io(format!("reading a control message from rank {peer}"), e))?;
            if let Message::Goodbye(goodbye) = &message {
                (self.left[peer], self.begun) = (true, self.begun.max(goodbye.begun));
            }
            if let Some(answer) = apply_message(peer, message) {
                self.send(peer, &answer, held)?;
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
        self.left.iter().all(|left| *left).then_some(self.begun)
    }

    fn send(&mut self, peer: usize, message: &Message, held: &Held) -> Result<(), Error> {
        let bytes = frame::encode(message).map_err(|e| Error::io("encoding a control message", e))?;
        // SAFETY: the bytes are kept at their address until the request is done: see `sending` and `drop`.
        let request = unsafe { self.comm.send(&bytes, peer, mpi_tag::CONTROL, held)? };
        self.sending.push((request, bytes));
        Ok(())
    }
}

/// The message to send, if there is one, and its receiver if it is not for all peers.
fn message_of(outgoing: ControlRequest) -> Option<(Message, Option<usize>)> {
    Some(match outgoing {
        ControlRequest::Calling(site) => (Message::Calling(site), None),
        ControlRequest::Called(peer, site) => (Message::Called(site), Some(peer)),
        ControlRequest::Locate(peer) => (Message::Locate, Some(peer)),
        ControlRequest::Failed(error, completed) => (Message::Failed(error.for_peers(), completed), None),
        ControlRequest::Invites(peer, invitation) => (Message::Invites(invitation), Some(peer)),
        ControlRequest::ShrinkMessage(word) => (Message::ShrinkMessage(word), None),
        ControlRequest::Goodbye(goodbye) => (Message::Goodbye(goodbye), None),
        // MPI connects all ranks to each other.
        ControlRequest::Meet => return None,
    })
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.sending.drain(..).for_each(|(request, bytes)| request.abandon(bytes));
        self.receiving.take().into_iter().for_each(|(request, _, bytes)| request.abandon(bytes));
    }
}
