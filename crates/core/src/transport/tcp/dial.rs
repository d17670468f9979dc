//! Dialling data connections to a lower rank, on the thread that calls the operation.

use std::cell::RefCell;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::link::{Link, disconnected, wait_ready};
use super::stalled::Attempts;
use crate::auth::{
    Identity, LostPackets, PACKETS_TIMEOUT, Prologue, Purpose, Refusal, confirmed_blocking, dial_blocking,
    exchange_packets_blocking, largest_packet, open_blocking, unacknowledged,
};
use crate::control::{CONNECT_TIMEOUT, RETRY, Watch, is_own};
use crate::descriptors;
use crate::types::{Error, Fault};

/// Opens `connections` connections to `peer` and waits until it confirms that it has taken them over. From then on this
/// rank's goodbye message cannot overtake what is sent on them.
pub(super) fn dial(
    identity: &Identity,
    (peer, address): (usize, &SocketAddr),
    (connections, heartbeat_timeout): (usize, Duration),
    watch: &mut Watch<'_>,
) -> Result<Link, Fault> {
    let mut streams = Vec::new();
    for number in 0..connections {
        let prologue = identity.prologue(Purpose::Data, peer, (number, connections));
        streams.push(connect(identity, (peer, address), prologue, watch)?);
    }
    Link::new(streams, heartbeat_timeout).map_err(|e| disconnected(peer, &e.to_string(), watch))
}

/// Opens one connection and completes the handshake.
fn connect(
    identity: &Identity,
    (peer, address): (usize, &SocketAddr),
    prologue: Prologue,
    watch: &mut Watch<'_>,
) -> Result<TcpStream, Fault> {
    let mut attempts = Attempts::default();
    loop {
        match attempt(identity, (peer, address), prologue, &mut attempts, watch) {
            Ok(Some(stream)) => return Ok(stream),
            Ok(None) => {}
            Err(fault) => return Err(attempts.explained(fault, peer, address, watch)),
        }
    }
}

/// Tries once. Returns `None` if the peer may be reached the next time.
fn attempt(
    identity: &Identity,
    (peer, address): (usize, &SocketAddr),
    prologue: Prologue,
    attempts: &mut Attempts,
    watch: &mut Watch<'_>,
) -> Result<Option<TcpStream>, Fault> {
    let limit = watch.remaining().clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
    let stream = match open_blocking(identity.secret.as_ref(), address, limit)? {
        Ok(stream) => stream,
        Err(e) if e.kind() == ErrorKind::TimedOut => {
            attempts.error = Some(e.to_string());
            watch.tick_connected(peer)?;
            return Ok(None);
        }
        // This process or machine lacks a resource. The peer is not at fault, and is not reported as lost.
        Err(e) if is_own(&e) => {
            let operation = format!("connecting to rank {peer} for data");
            let e = if descriptors::is_shortage(&e) { descriptors::explained(e) } else { e };
            return Err(Fault::Failed(Error::io(operation, e)));
        }
        // A peer that has left, or that failed and closed, no longer listens.
        Err(e) => return Err(disconnected(peer, &cannot_connect(&e), watch)),
    };
    stream.set_nonblocking(true).map_err(|e| disconnected(peer, &cannot_connect(&e), watch))?;
    let error = match handshake(&stream, identity, (peer, address), prologue, attempts, watch) {
        Ok(()) => return Ok(Some(stream)),
        Err(error) => error,
    };
    match error {
        DialError::Fault(fault) => Err(fault),
        // A listener with too many unauthenticated connections closes those that have waited longest.
        DialError::Refused(Refusal::Io(e)) => {
            log::debug!("connecting to rank {peer} for data again: {e}");
            attempts.error = Some(e.to_string());
            watch.status().sleep(Instant::now() + RETRY, || watch.absence(peer).is_some());
            if let Some(fault) = watch.absence(peer) {
                return Err(fault);
            }
            if attempts.lost.is_certain() {
                return Err(watch.packets_lost(peer, address, attempts.lost));
            }
            watch.tick_connected(peer)?;
            Ok(None)
        }
        DialError::Refused(refusal) => Err(disconnected(peer, &cannot_connect(&refusal), watch)),
    }
}

/// Runs the dialler's side of the handshake, and finds out whether the largest packets pass in both directions.
fn handshake(
    stream: &TcpStream,
    identity: &Identity,
    (peer, address): (usize, &SocketAddr),
    prologue: Prologue,
    attempts: &mut Attempts,
    watch: &mut Watch<'_>,
) -> Result<(), DialError> {
    // The closures take turns.
    let ends = RefCell::new(Ends { stream, peer, until: None, watch });
    let (write, read) =
        (|bytes: &[u8]| ends.borrow_mut().write(bytes), |bytes: &mut [u8]| ends.borrow_mut().read(bytes));
    dial_blocking(identity.secret.as_ref(), prologue, write, read)?;
    if identity.secret.is_some() {
        ends.borrow_mut().until = Some(Instant::now() + PACKETS_TIMEOUT);
        let largest = largest_packet(stream, address.ip());
        attempts.lost.begin(largest, stream.local_addr().ok().map(|own| own.ip()));
        let exchanged = exchange_packets_blocking(largest, write, read);
        ends.borrow_mut().until = None;
        match exchanged {
            Ok(()) => attempts.lost = LostPackets::default(),
            // At the deadline it may still wait.
            Err(DialError::Fault(fault)) => return Err(DialError::Fault(fault)),
            Err(error) => {
                attempts.lost.end(unacknowledged(stream) > 0);
                return Err(error);
            }
        }
    }
    confirmed_blocking(read)
}

fn cannot_connect(why: &dyn std::fmt::Display) -> String {
    format!("connecting for data: {why}")
}

/// Why a handshake was not completed.
enum DialError {
    Refused(Refusal),
    /// The operation failed while it waited for the peer.
    Fault(Fault),
}

impl From<Refusal> for DialError {
    fn from(refusal: Refusal) -> Self {
        DialError::Refused(refusal)
    }
}

/// A connection that is being made, and the events that end the wait for it.
struct Ends<'a, 'w> {
    stream: &'a TcpStream,
    peer: usize,
    /// When the peer must have answered, if before the deadline.
    until: Option<Instant>,
    watch: &'a mut Watch<'w>,
}

impl Ends<'_, '_> {
    /// Sends `bytes`, unless an event ends the wait.
    fn write(&mut self, bytes: &[u8]) -> Result<(), DialError> {
        let mut sent = 0;
        self.wait_for(PollFlags::OUT, |mut stream| {
            sent += stream.write(&bytes[sent..])?;
            Ok(sent == bytes.len())
        })
    }

    /// Fills `bytes`, unless an event ends the wait.
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), DialError> {
        let mut filled = 0;
        self.wait_for(PollFlags::IN, |mut stream| {
            if filled < bytes.len() {
                filled += match stream.read(&mut bytes[filled..])? {
                    0 => return Err(io::Error::new(ErrorKind::UnexpectedEof, "its connection was closed")),
                    count => count,
                };
            }
            Ok(filled == bytes.len())
        })
    }

    /// Calls `act` when the connection is ready, until it returns true.
    fn wait_for(
        &mut self,
        flags: PollFlags,
        mut act: impl FnMut(&TcpStream) -> io::Result<bool>,
    ) -> Result<(), DialError> {
        loop {
            match act(self.stream) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if self.until.is_some_and(|until| Instant::now() >= until) {
                        return Err(Refusal::Io(ErrorKind::TimedOut.into()).into());
                    }
                    if !wait_ready([(self.stream, flags)].into_iter(), self.watch) {
                        self.watch.tick_connected(self.peer).map_err(DialError::Fault)?;
                    }
                }
                Err(e) => return Err(Refusal::Io(e).into()),
            }
        }
    }
}
