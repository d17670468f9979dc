//! Dialling data connections to a lower rank, on the thread that calls the operation.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::link::{Link, disconnected, wait_ready};
use crate::auth::{Identity, Prologue, Purpose, Refusal, dial_blocking, open_blocking};
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
    loop {
        let limit = watch.remaining().clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
        let stream = match open_blocking(identity.secret.as_ref(), address, limit)? {
            Ok(stream) => stream,
            Err(e) if e.kind() == ErrorKind::TimedOut => {
                watch.tick_connected(peer)?;
                continue;
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
        let write = |bytes: &[u8]| {
            // Does not block: these are the first bytes in an empty buffer.
            Ok((&stream).write_all(bytes).map_err(Refusal::Io)?)
        };
        let handshake =
            dial_blocking(identity.secret.as_ref(), prologue, write, |bytes| read(&stream, bytes, peer, watch));
        match handshake {
            Ok(_) => return Ok(stream),
            Err(DialError::Fault(fault)) => return Err(fault),
            // A listener with too many unauthenticated connections closes those that have waited longest.
            Err(DialError::Refused(Refusal::Io(e))) => {
                log::debug!("connecting to rank {peer} for data again: {e}");
                watch.status().sleep(Instant::now() + RETRY, || watch.absence(peer).is_some());
                if let Some(fault) = watch.absence(peer) {
                    return Err(fault);
                }
                watch.tick_connected(peer)?;
            }
            Err(DialError::Refused(refusal)) => {
                return Err(disconnected(peer, &cannot_connect(&refusal), watch));
            }
        }
    }
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

/// Fills `bytes`, unless an event of `watch` ends the wait.
fn read(mut stream: &TcpStream, bytes: &mut [u8], peer: usize, watch: &mut Watch<'_>) -> Result<(), DialError> {
    let mut filled = 0;
    while filled < bytes.len() {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => {
                return Err(Refusal::Io(io::Error::new(ErrorKind::UnexpectedEof, "its connection was closed")).into());
            }
            Ok(count) => filled += count,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                if !wait_ready([(stream, PollFlags::IN)].into_iter(), watch) {
                    watch.tick_connected(peer).map_err(DialError::Fault)?;
                }
            }
            Err(e) => return Err(Refusal::Io(e).into()),
        }
    }
    Ok(())
}
