//! Messages between two ranks.
//!
//! A message is `site 32 bytes | length of payload u64 little endian | payload`, as over TCP. A short message is sent
//! eagerly, as one MPI message. A long one has a handshake: the sender sends the head (site and length), the receiver
//! checks it and replies that the sender is clear to send, and then the payload moves straight between the callers'
//! memory, which cannot be taken back from MPI. Until then either rank may give up. A sender that gives up sends empty
//! messages in place of the payload, because the receiver may have replied just before. MPI can cancel receives; sends
//! that are pending at that time are short, and are abandoned with their memory. Blocking groups exchange messages in
//! the same way.

use bonfire_core::error::Site;
use bonfire_core::{Deadline, Error, Fault};

use super::Mpi;
use super::comm::{Comm, Request, mpi_tag};
use super::lent::LentMemory;
use super::library::{Held, hold};

/// Bytes of the head, which precedes the payload.
const HEAD_LEN: usize = Site::BYTES + 8;

/// The longest message that is sent eagerly. Every MPI library buffers this much before the receiver posts its receive.
const EAGER_LIMIT: usize = 2 << 10;

/// The most payload bytes in one MPI message, because MPI counts in 31 bits.
const MAX_PAYLOAD: usize = 1 << 30;

/// The memory of heads and short messages, reused for every message.
pub(super) struct HeadBuffers {
    outgoing: Box<[u8; EAGER_LIMIT]>,
    incoming: Box<[u8; EAGER_LIMIT]>,
}

impl Default for HeadBuffers {
    fn default() -> HeadBuffers {
        HeadBuffers { outgoing: Box::new([0; EAGER_LIMIT]), incoming: Box::new([0; EAGER_LIMIT]) }
    }
}

/// One outgoing message, one incoming message, or both at once.
pub(super) struct Exchange<'a> {
    context: (&'a Mpi, &'a Site, &'a Deadline),
    comm: Comm,
    tag: Site,
    outgoing: Option<Outbound<'a>>,
    incoming: Option<Inbound<'a>>,
    heads: &'a mut HeadBuffers,
    /// `Some` while MPI has the callers' memory.
    lent: Option<LentMemory<'a>>,
}

struct Outbound<'a> {
    to: usize,
    bytes: &'a [u8],
    /// The requests of the head, of the reply to it, and of the payload, while they are pending.
    head: Option<Request>,
    cts: Option<Request>,
    payload: Vec<Request>,
}

struct Inbound<'a> {
    from: usize,
    bytes: &'a mut [u8],
    head: Option<Request>,
    cts: Option<Request>,
    payload: Vec<Request>,
    /// Bytes of the payload that have arrived.
    received: usize,
    /// The sender has given up.
    withdrawn: bool,
}

impl<'a> Exchange<'a> {
    /// Begins to send and to receive.
    pub fn begin(
        context: (&'a Mpi, &'a Site, &'a Deadline),
        outgoing: Option<(usize, &'a [u8])>,
        incoming: Option<(usize, &'a mut [u8])>,
        heads: &'a mut HeadBuffers,
        held: &Held,
    ) -> Result<Exchange<'a>, Error> {
        let (comm, tag) = (context.0.comm, context.1);
        let outbound = |to, bytes| Outbound { to, bytes, head: None, cts: None, payload: Vec::new() };
        let outgoing = outgoing.map(|(to, bytes)| outbound(to, bytes));
        let inbound = |from, bytes| Inbound {
            from,
            bytes,
            head: None,
            cts: None,
            payload: Vec::new(),
            received: 0,
            withdrawn: false,
        };
        let incoming = incoming.map(|(from, bytes)| inbound(from, bytes));
        let mut exchange = Exchange { context, comm, tag: *tag, outgoing, incoming, heads, lent: None };
        if let Some(incoming) = &mut exchange.incoming {
            // SAFETY: the buffer is in a box that outlives the request, or is leaked with it.
            incoming.head =
                Some(unsafe { comm.receive(&mut exchange.heads.incoming[..], incoming.from, mpi_tag::HEAD, held)? });
        }
        if let Some(outgoing) = &mut exchange.outgoing {
            let length = outgoing.bytes.len();
            let place = &mut exchange.heads.outgoing;
            place[..Site::BYTES].copy_from_slice(&tag.to_bytes());
            place[Site::BYTES..HEAD_LEN].copy_from_slice(&(length as u64).to_le_bytes());
            let eager = is_eager(length);
            let end = if eager { HEAD_LEN + length } else { HEAD_LEN };
            if eager {
                place[HEAD_LEN..end].copy_from_slice(outgoing.bytes);
            } else {
                // SAFETY: an empty buffer is never written.
                outgoing.cts = Some(unsafe { comm.receive(&mut [], outgoing.to, mpi_tag::CTS, held)? });
            }
            // SAFETY: as for the incoming head.
            outgoing.head = Some(unsafe { comm.send(&place[..end], outgoing.to, mpi_tag::HEAD, held)? });
        }
        Ok(exchange)
    }

    /// Advances as far as possible without blocking. Returns whether the exchange is complete.
    pub fn advance(&mut self, held: &Held) -> Result<bool, Fault> {
        let done = self.step(held);
        self.update_lent();
        done
    }

    fn step(&mut self, held: &Held) -> Result<bool, Fault> {
        let out = match &mut self.outgoing {
            Some(outgoing) => outgoing.advance(self.comm, held)?,
            None => true,
        };
        let into = match &mut self.incoming {
            Some(incoming) => incoming.advance(self.comm, &self.tag, &self.heads.incoming, held)?,
            None => true,
        };
        Ok(out && into)
    }

    /// Updates `lent`: whether MPI has the callers' memory.
    fn update_lent(&mut self) {
        let out = self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.payload.is_empty());
        let lends = out || self.incoming.as_ref().is_some_and(|incoming| !incoming.payload.is_empty());
        match self.lent.take() {
            Some(lent) if lends => self.lent = Some(lent),
            Some(lent) => drop(lent.finish(Ok(()))),
            None if lends => self.lent = Some(LentMemory::begin(self.context.0, self.context.1, self.context.2)),
            None => {}
        }
    }

    /// After a failure: lets MPI complete the requests that have the callers' memory. Returns whether it has.
    pub fn settle(&mut self, held: &Held) -> Result<bool, Fault> {
        if let Some(outgoing) = &mut self.outgoing {
            settle_all(&mut outgoing.payload, held)?;
        }
        if let Some(incoming) = &mut self.incoming {
            incoming.receive_payload(held)?;
        }
        self.update_lent();
        Ok(self.lent.is_none())
    }

    /// The rank for which this exchange waits.
    pub fn peer(&self) -> usize {
        let waits =
            |incoming: &&Inbound<'_>| incoming.head.is_some() || !incoming.payload.is_empty() || incoming.withdrawn;
        let from = self.incoming.as_ref().filter(waits).map(|incoming| incoming.from);
        from.or(self.outgoing.as_ref().map(|outgoing| outgoing.to)).unwrap_or(self.comm.rank)
    }

    /// `Some` while MPI has the callers' memory.
    pub fn lent(&self) -> Option<&LentMemory<'a>> {
        self.lent.as_ref()
    }
}

impl Outbound<'_> {
    fn advance(&mut self, comm: Comm, held: &Held) -> Result<bool, Error> {
        settle(&mut self.head, held)?;
        if self.cts.is_some() && settle(&mut self.cts, held)? {
            for chunk in self.bytes.chunks(MAX_PAYLOAD) {
                // SAFETY: the bytes stay borrowed until the requests are done: see `lent`.
                self.payload.push(unsafe { comm.send(chunk, self.to, mpi_tag::PAYLOAD, held)? });
            }
        }
        settle_all(&mut self.payload, held)?;
        Ok(self.head.is_none() && self.cts.is_none() && self.payload.is_empty())
    }
}

impl Inbound<'_> {
    fn advance(&mut self, comm: Comm, tag: &Site, place: &[u8; EAGER_LIMIT], held: &Held) -> Result<bool, Fault> {
        if let Some(head) = &mut self.head {
            let Some(length) = head.done(held)? else { return Ok(false) };
            self.head = None;
            self.check_head(comm, tag, &place[..length.min(EAGER_LIMIT)], held)?;
        }
        let settled = settle(&mut self.cts, held).and_then(|cts| Ok(cts & self.receive_payload(held)?));
        // A sender that has given up reports why on the control plane.
        Ok(settled? && !self.withdrawn)
    }

    /// Completes payload requests that are done. Returns whether none is pending.
    fn receive_payload(&mut self, held: &Held) -> Result<bool, Error> {
        let waits = !self.payload.is_empty();
        self.received += settle_all(&mut self.payload, held)?;
        if waits && self.payload.is_empty() {
            self.withdrawn = self.received < self.bytes.len();
        }
        Ok(self.payload.is_empty())
    }

    /// Checks what has arrived: a whole short message, or the head of a long one.
    fn check_head(&mut self, comm: Comm, tag: &Site, message: &[u8], held: &Held) -> Result<(), Fault> {
        let theirs = message.first_chunk().and_then(Site::from_bytes);
        let length = message.get(Site::BYTES..HEAD_LEN).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
        if theirs != Some(*tag) || length != Some(self.bytes.len() as u64) {
            // A tag that no call encodes is reported as the expected one.
            return Err(Fault::Unexpected { peer: self.from, site: theirs.unwrap_or(*tag) });
        }
        if is_eager(self.bytes.len()) {
            let truncated = || Fault::Failed(Error::broken("recv", "a message is shorter than its head says"));
            let payload = message.get(HEAD_LEN..HEAD_LEN + self.bytes.len()).ok_or_else(truncated)?;
            self.bytes.copy_from_slice(payload);
            return Ok(());
        }
        let mut begin = || {
            for chunk in self.bytes.chunks_mut(MAX_PAYLOAD) {
                // SAFETY: as for the outgoing payload, and the borrow is exclusive.
                self.payload.push(unsafe { comm.receive(chunk, self.from, mpi_tag::PAYLOAD, held)? });
            }
            // SAFETY: the buffer is empty.
            self.cts = Some(unsafe { comm.send(&[], self.from, mpi_tag::CTS, held)? });
            Ok(())
        };
        begin().map_err(Fault::Failed)
    }
}

impl Drop for Exchange<'_> {
    /// Cancels or abandons all requests that are pending.
    fn drop(&mut self) {
        let held = hold();
        if let Some(outgoing) = &mut self.outgoing {
            if let Some(mut head) = outgoing.head.take()
                && matches!(head.done(&held), Ok(None))
            {
                head.abandon(std::mem::replace(&mut self.heads.outgoing, Box::new([0; EAGER_LIMIT])));
            }
            if let Some(cts) = outgoing.cts.take() {
                cts.cancel(&held);
                for _ in outgoing.bytes.chunks(MAX_PAYLOAD) {
                    // SAFETY: the buffer is empty.
                    let empty = unsafe { self.comm.send(&[], outgoing.to, mpi_tag::PAYLOAD, &held) };
                    let sent = |mut empty: Request| matches!(empty.done(&held), Ok(None)).then_some(empty);
                    empty.ok().and_then(sent).into_iter().for_each(|empty| empty.abandon(()));
                }
            }
        }
        if let Some(incoming) = &mut self.incoming {
            incoming.head.take().into_iter().for_each(|head| head.cancel(&held));
            let pending = |cts: &mut Request| matches!(cts.done(&held), Ok(None));
            incoming.cts.take_if(|cts| pending(cts)).into_iter().for_each(|cts| cts.abandon(()));
        }
    }
}

fn is_eager(payload: usize) -> bool {
    HEAD_LEN + payload <= EAGER_LIMIT
}

/// Drops the request if it is done. Returns whether there is none any more.
fn settle(request: &mut Option<Request>, held: &Held) -> Result<bool, Error> {
    if let Some(pending) = request
        && pending.done(held)?.is_some()
    {
        *request = None;
    }
    Ok(request.is_none())
}

/// Drops the requests that are done. Returns the number of bytes that they received.
fn settle_all(requests: &mut Vec<Request>, held: &Held) -> Result<usize, Error> {
    let mut received = 0;
    for i in (0..requests.len()).rev() {
        if let Some(bytes) = requests[i].done(held)? {
            received += bytes;
            requests.swap_remove(i);
        }
    }
    Ok(received)
}
