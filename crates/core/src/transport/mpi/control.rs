//! What ranks tell each other besides data: failures, farewells, and what they called.
//!
//! The words are those of the control connections between processes. Here they are messages of MPI, which a rank reads when
//! it is in an operation, or begins one.

use std::ffi::c_int;

use tokio::sync::mpsc::UnboundedReceiver;

use super::comm::{Comm, Request};
use super::library::Held;
use crate::control::{Message, Outgoing, frame};
use crate::types::Error;

/// MPI's tag of these messages.
const TAG: c_int = 4;

/// One group's.
pub(super) struct Plane {
    comm: Comm,
    /// What this rank's operations have to say.
    outgoing: UnboundedReceiver<Outgoing>,
    /// On their way, with what MPI reads.
    sending: Vec<(Request, Vec<u8>)>,
    /// What is coming, with its sender: a long word comes only when the sender calls MPI again.
    coming: Option<(Request, usize, Vec<u8>)>,
    /// Who has said farewell: nothing more comes from there.
    farewells: Vec<bool>,
    /// The most collectives that a rank has begun, by what they say.
    begun: u64,
}

impl Plane {
    pub fn new(comm: Comm, outgoing: UnboundedReceiver<Outgoing>) -> Plane {
        let farewells = (0..comm.size).map(|rank| rank == comm.rank).collect();
        Plane { comm, outgoing, sending: Vec::new(), coming: None, farewells, begun: 0 }
    }

    /// Says what there is to say, and hears what has come: `hear` gives an answer, if there is one.
    pub fn pump(&mut self, held: &Held, hear: impl Fn(usize, Message) -> Option<Message>) -> Result<(), Error> {
        while let Ok(outgoing) = self.outgoing.try_recv() {
            let (message, only) = words(outgoing);
            let Comm { rank, size, .. } = self.comm;
            for peer in (0..size).filter(|peer| *peer != rank && only.is_none_or(|only| only == *peer)) {
                self.say(peer, &message, held)?;
            }
        }
        while let Some((peer, bytes)) = self.next(held)? {
            let message = frame::decode(bytes.get(4..).unwrap_or_default());
            let message = message.map_err(|e| Error::io(format!("reading a word of rank {peer}"), e))?;
            match &message {
                Message::Farewell { .. } => self.farewells[peer] = true,
                Message::Called(site) => self.begun = self.begun.max(site.sequence + 1),
                _ => {}
            }
            if let Some(answer) = hear(peer, message) {
                self.say(peer, &answer, held)?;
            }
        }
        self.sent(held)?;
        Ok(())
    }

    /// A word that has come, with its sender.
    fn next(&mut self, held: &Held) -> Result<Option<(usize, Vec<u8>)>, Error> {
        if self.coming.is_none() {
            let Some((peer, length)) = self.comm.next(TAG, held)? else { return Ok(None) };
            let mut bytes = vec![0; length];
            // SAFETY: the bytes are kept, where they are, until the request is done: see `coming` and `drop`. Nobody else
            // takes messages under this tag, so it is the one that was seen.
            let request = unsafe { self.comm.receive(&mut bytes, peer, TAG, held)? };
            self.coming = Some((request, peer, bytes));
        }
        let done = match &mut self.coming {
            Some((request, ..)) => request.done(held)?.is_some(),
            None => false,
        };
        Ok(self.coming.take_if(|_| done).map(|(_, peer, bytes)| (peer, bytes)))
    }

    /// Whether all that was said is on its way.
    pub fn sent(&mut self, held: &Held) -> Result<bool, Error> {
        for place in (0..self.sending.len()).rev() {
            if self.sending[place].0.done(held)?.is_some() {
                self.sending.swap_remove(place);
            }
        }
        Ok(self.sending.is_empty())
    }

    /// Once all ranks have said farewell, the most collectives that any of them has begun.
    pub fn over(&self) -> Option<u64> {
        self.farewells.iter().all(|left| *left).then_some(self.begun)
    }

    fn say(&mut self, peer: usize, message: &Message, held: &Held) -> Result<(), Error> {
        let bytes = frame::encode(message).map_err(|e| Error::io("writing a word", e))?;
        // SAFETY: the bytes are kept, where they are, until the request is done: see `sending` and `drop`.
        let request = unsafe { self.comm.send(&bytes, peer, TAG, held)? };
        self.sending.push((request, bytes));
        Ok(())
    }
}

/// What is said, and to whom if not to all.
fn words(outgoing: Outgoing) -> (Message, Option<usize>) {
    match outgoing {
        Outgoing::Calling(site) => (Message::Calling(site), None),
        Outgoing::Called(peer, site) => (Message::Called(site), Some(peer)),
        Outgoing::Failed(error, completed) => (Message::Failed(error, completed), None),
        Outgoing::Invites(peer, invitation) => (Message::Invites(invitation), Some(peer)),
        Outgoing::Word(word) => (Message::Word(word), None),
        Outgoing::Farewell { panicked } => (Message::Farewell { panicked }, None),
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.sending.drain(..).for_each(|(request, bytes)| request.abandon(bytes));
        self.coming.take().into_iter().for_each(|(request, _, bytes)| request.abandon(bytes));
    }
}
