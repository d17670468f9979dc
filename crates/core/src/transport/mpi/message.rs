//! Messages between two ranks.
//!
//! A message is `site 32 bytes | length of payload u64 little endian | payload`, as over TCP. A short one is one message of
//! MPI. Of a long one the head goes first, and the payload only once the receiver has found it to be the one that it
//! expects, and has said so: it goes straight from and to the callers' memory, which cannot be taken back from MPI. Until
//! then a rank may give up. A sender that does sends nothing in the payload's place, for a receiver that has just said so.

use std::ffi::c_int;

use super::Mpi;
use super::comm::{Comm, Request};
use super::lent::Lent;
use super::library::{Held, hold};
use crate::sync::Deadline;
use crate::types::{Error, Fault, Site};

/// MPI's tags.
const HEAD: c_int = 1;
const GO: c_int = 2;
const PAYLOAD: c_int = 3;

/// Bytes before the payload.
const PREFIX: usize = Site::BYTES + 8;

/// The longest message that goes at once. Every library of MPI takes so much that nobody receives yet.
const SHORT: usize = 2 << 10;

/// A payload goes in pieces of so many bytes, since MPI counts in 31 bits.
const PIECE: usize = 1 << 30;

/// The memory of heads and short messages, kept from message to message.
pub(super) struct Post {
    outgoing: Box<[u8; SHORT]>,
    incoming: Box<[u8; SHORT]>,
}

impl Default for Post {
    fn default() -> Post {
        Post { outgoing: Box::new([0; SHORT]), incoming: Box::new([0; SHORT]) }
    }
}

/// One message out, one in, or both at once.
pub(super) struct Exchange<'a> {
    of: (&'a Mpi, &'a Site, &'a Deadline),
    comm: Comm,
    tag: Site,
    outgoing: Option<Outgoing<'a>>,
    incoming: Option<Incoming<'a>>,
    post: &'a mut Post,
    /// MPI has the callers' memory.
    lent: Option<Lent<'a>>,
}

struct Outgoing<'a> {
    to: usize,
    bytes: &'a [u8],
    /// Of the head, of the word to go on, of the payload's pieces.
    head: Option<Request>,
    go: Option<Request>,
    payload: Vec<Request>,
}

struct Incoming<'a> {
    from: usize,
    bytes: &'a mut [u8],
    head: Option<Request>,
    go: Option<Request>,
    payload: Vec<Request>,
    /// Bytes of the payload.
    received: usize,
    /// The sender has given up.
    withdrawn: bool,
}

impl<'a> Exchange<'a> {
    /// Begins it.
    pub fn begin(
        of: (&'a Mpi, &'a Site, &'a Deadline),
        tag: &Site,
        outgoing: Option<(usize, &'a [u8])>,
        incoming: Option<(usize, &'a mut [u8])>,
        post: &'a mut Post,
        held: &Held,
    ) -> Result<Exchange<'a>, Error> {
        let comm = of.0.comm;
        let none = |to, bytes| Outgoing { to, bytes, head: None, go: None, payload: Vec::new() };
        let outgoing = outgoing.map(|(to, bytes)| none(to, bytes));
        let none = |from, bytes| Incoming {
            from,
            bytes,
            head: None,
            go: None,
            payload: Vec::new(),
            received: 0,
            withdrawn: false,
        };
        let incoming = incoming.map(|(from, bytes)| none(from, bytes));
        let mut exchange = Exchange { of, comm, tag: *tag, outgoing, incoming, post, lent: None };
        if let Some(incoming) = &mut exchange.incoming {
            // SAFETY: the place is in a box that is given up with the request, or outlives it.
            incoming.head = Some(unsafe { comm.receive(&mut exchange.post.incoming[..], incoming.from, HEAD, held)? });
        }
        if let Some(outgoing) = &mut exchange.outgoing {
            let length = outgoing.bytes.len();
            let place = &mut exchange.post.outgoing;
            place[..Site::BYTES].copy_from_slice(&tag.to_bytes());
            place[Site::BYTES..PREFIX].copy_from_slice(&(length as u64).to_le_bytes());
            let short = is_short(length);
            let end = if short { PREFIX + length } else { PREFIX };
            if short {
                place[PREFIX..end].copy_from_slice(outgoing.bytes);
            } else {
                // SAFETY: nothing is received into no bytes.
                outgoing.go = Some(unsafe { comm.receive(&mut [], outgoing.to, GO, held)? });
            }
            // SAFETY: as for the incoming head.
            outgoing.head = Some(unsafe { comm.send(&place[..end], outgoing.to, HEAD, held)? });
        }
        Ok(exchange)
    }

    /// Goes on as far as it can; whether it is done.
    pub fn advance(&mut self, held: &Held) -> Result<bool, Fault> {
        let done = self.step(held);
        self.lend();
        done
    }

    fn step(&mut self, held: &Held) -> Result<bool, Fault> {
        let out = match &mut self.outgoing {
            Some(outgoing) => outgoing.advance(self.comm, held).map_err(Fault::Failed)?,
            None => true,
        };
        let into = match &mut self.incoming {
            Some(incoming) => incoming.advance(self.comm, &self.tag, &self.post.incoming, held)?,
            None => true,
        };
        Ok(out && into)
    }

    /// Notes whether MPI has the callers' memory.
    fn lend(&mut self) {
        let out = self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.payload.is_empty());
        let lends = out || self.incoming.as_ref().is_some_and(|incoming| !incoming.payload.is_empty());
        match self.lent.take() {
            Some(lent) if lends => self.lent = Some(lent),
            Some(lent) => drop(lent.end(Ok(()))),
            None if lends => self.lent = Some(Lent::begin(self.of.0, self.of.1, self.of.2)),
            None => {}
        }
    }

    /// Lets MPI give the callers' memory back, after a failure; whether it has.
    pub fn settle(&mut self, held: &Held) -> Result<bool, Fault> {
        if let Some(outgoing) = &mut self.outgoing {
            settle_all(&mut outgoing.payload, held).map_err(Fault::Failed)?;
        }
        if let Some(incoming) = &mut self.incoming {
            incoming.take(held).map_err(Fault::Failed)?;
        }
        self.lend();
        Ok(self.lent.is_none())
    }

    /// Who is waited for.
    pub fn peer(&self) -> usize {
        let waits =
            |incoming: &&Incoming<'_>| incoming.head.is_some() || !incoming.payload.is_empty() || incoming.withdrawn;
        let from = self.incoming.as_ref().filter(waits).map(|incoming| incoming.from);
        from.or(self.outgoing.as_ref().map(|outgoing| outgoing.to)).unwrap_or(self.comm.rank)
    }

    /// Where MPI has the callers' memory.
    pub fn lent(&self) -> Option<&Lent<'a>> {
        self.lent.as_ref()
    }
}

impl Outgoing<'_> {
    fn advance(&mut self, comm: Comm, held: &Held) -> Result<bool, Error> {
        settle(&mut self.head, held)?;
        if self.go.is_some() && settle(&mut self.go, held)? {
            for piece in self.bytes.chunks(PIECE) {
                // SAFETY: the bytes are borrowed, and who waits does not return before the requests are done: see `lent`.
                self.payload.push(unsafe { comm.send(piece, self.to, PAYLOAD, held)? });
            }
        }
        settle_all(&mut self.payload, held)?;
        Ok(self.head.is_none() && self.go.is_none() && self.payload.is_empty())
    }
}

impl Incoming<'_> {
    fn advance(&mut self, comm: Comm, tag: &Site, place: &[u8; SHORT], held: &Held) -> Result<bool, Fault> {
        if let Some(head) = &mut self.head {
            let Some(length) = head.done(held).map_err(Fault::Failed)? else { return Ok(false) };
            self.head = None;
            self.open(comm, tag, &place[..length.min(SHORT)], held)?;
        }
        let settled = settle(&mut self.go, held).and_then(|go| Ok(go & self.take(held)?));
        // Who has given up says why by other means.
        Ok(settled.map_err(Fault::Failed)? && !self.withdrawn)
    }

    /// Takes what has come of the payload; whether all has.
    fn take(&mut self, held: &Held) -> Result<bool, Error> {
        let waits = !self.payload.is_empty();
        self.received += settle_all(&mut self.payload, held)?;
        if waits && self.payload.is_empty() {
            self.withdrawn = self.received < self.bytes.len();
        }
        Ok(self.payload.is_empty())
    }

    /// Looks at what has come: all of a short message, or the head of a long one.
    fn open(&mut self, comm: Comm, tag: &Site, message: &[u8], held: &Held) -> Result<(), Fault> {
        let theirs = message.first_chunk().and_then(Site::from_bytes);
        let length = message.get(Site::BYTES..PREFIX).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
        if theirs != Some(*tag) || length != Some(self.bytes.len() as u64) {
            // What nobody can have called is shown as what was expected.
            return Err(Fault::Unexpected { peer: self.from, site: theirs.unwrap_or(*tag) });
        }
        if is_short(self.bytes.len()) {
            let cut = || Fault::Failed(Error::broken("recv", "a message that is shorter than it says"));
            let payload = message.get(PREFIX..PREFIX + self.bytes.len()).ok_or_else(cut)?;
            self.bytes.copy_from_slice(payload);
            return Ok(());
        }
        let mut begin = || {
            for piece in self.bytes.chunks_mut(PIECE) {
                // SAFETY: as for the outgoing payload; and the borrow is exclusive.
                self.payload.push(unsafe { comm.receive(piece, self.from, PAYLOAD, held)? });
            }
            // SAFETY: there are no bytes.
            self.go = Some(unsafe { comm.send(&[], self.from, GO, held)? });
            Ok(())
        };
        begin().map_err(Fault::Failed)
    }
}

impl Drop for Exchange<'_> {
    /// Gives up what is not done.
    fn drop(&mut self) {
        let held = hold();
        if let Some(outgoing) = &mut self.outgoing {
            if let Some(mut head) = outgoing.head.take()
                && matches!(head.done(&held), Ok(None))
            {
                head.abandon(std::mem::replace(&mut self.post.outgoing, Box::new([0; SHORT])));
            }
            if let Some(go) = outgoing.go.take() {
                go.cancel(&held);
                for _ in outgoing.bytes.chunks(PIECE) {
                    // SAFETY: there are no bytes.
                    let nothing = unsafe { self.comm.send(&[], outgoing.to, PAYLOAD, &held) };
                    let sent = |mut nothing: Request| matches!(nothing.done(&held), Ok(None)).then_some(nothing);
                    nothing.ok().and_then(sent).into_iter().for_each(|nothing| nothing.abandon(()));
                }
            }
        }
        if let Some(incoming) = &mut self.incoming {
            incoming.head.take().into_iter().for_each(|head| head.cancel(&held));
            let pending = |go: &mut Request| matches!(go.done(&held), Ok(None));
            incoming.go.take_if(|go| pending(go)).into_iter().for_each(|go| go.abandon(()));
        }
    }
}

fn is_short(payload: usize) -> bool {
    PREFIX + payload <= SHORT
}

/// Whether there is no request any more.
fn settle(request: &mut Option<Request>, held: &Held) -> Result<bool, Error> {
    if let Some(pending) = request
        && pending.done(held)?.is_some()
    {
        *request = None;
    }
    Ok(request.is_none())
}

/// Drops the requests that are done; gives the number of bytes that they received.
fn settle_all(requests: &mut Vec<Request>, held: &Held) -> Result<usize, Error> {
    let mut received = 0;
    for place in (0..requests.len()).rev() {
        if let Some(bytes) = requests[place].done(held)? {
            received += bytes;
            requests.swap_remove(place);
        }
    }
    Ok(received)
}
