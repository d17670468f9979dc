//! How a rank opens its data connections to a lower one, on the thread that calls the operation.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::link::{Link, departure, ready};
use crate::auth::{Member, Opening, Purpose, Refusal, prove};
use crate::control::{RETRY, SYN, Watch, is_own};
use crate::types::{Error, Fault};

/// Connects to `peer`, so many times, and waits for the bytes by which it says that it has taken the connections over. From
/// then on nothing that is sent on them can be overtaken by this rank's farewell.
pub(super) fn dial(
    member: &Member,
    (peer, address): (usize, &SocketAddr),
    connections: usize,
    watch: &mut Watch<'_>,
) -> Result<Link, Fault> {
    let mut streams = Vec::new();
    for number in 0..connections {
        let opening = member.opening(Purpose::Data, peer, (number, connections));
        streams.push(connect(member, (peer, address), opening, watch)?);
    }
    Link::new(streams).map_err(|e| departure(peer, &e.to_string(), watch.board()))
}

/// One connection, proved in both directions.
fn connect(
    member: &Member,
    (peer, address): (usize, &SocketAddr),
    opening: Opening,
    watch: &mut Watch<'_>,
) -> Result<TcpStream, Fault> {
    loop {
        // A peer that has left, or failed and closed, listens no more: its control connection says which it was.
        let lost = |e: &dyn std::fmt::Display| departure(peer, &format!("connecting for data: {e}"), watch.board());
        let limit = watch.remaining().max(Duration::from_millis(1));
        let stream = match TcpStream::connect_timeout(address, limit.min(SYN)) {
            Ok(stream) => stream,
            Err(e) if e.kind() == ErrorKind::TimedOut => {
                watch.tick(peer)?;
                continue;
            }
            // The peer is as well as before, and so must not be named as lost.
            Err(e) if is_own(&e) => {
                let operation = format!("rank {} connecting to rank {peer} for data", member.rank);
                return Err(Fault::Failed(Error::io(operation, e)));
            }
            Err(e) => return Err(lost(&e)),
        };
        stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).map_err(|e| lost(&e))?;
        let write = |bytes: &[u8]| {
            // Nothing of it waits: these are the first bytes in an empty buffer.
            Ok((&stream).write_all(bytes).map_err(Refusal::Io)?)
        };
        let proved = prove(member.secret.as_ref(), opening, write, |bytes| read(&stream, bytes, peer, watch));
        match proved {
            Ok(_) => return Ok(stream),
            Err(Problem::Fault(fault)) => return Err(fault),
            // A listener that strangers crowd closes connections that have waited longest.
            Err(Problem::Refused(Refusal::Io(e))) => {
                log::debug!("connecting to rank {peer} for data once more: {e}");
                watch.board().sleep(Instant::now() + RETRY, || watch.board().absence(peer).is_some());
                if let Some(fault) = watch.board().absence(peer) {
                    return Err(fault);
                }
                watch.tick(peer)?;
            }
            Err(Problem::Refused(refusal)) => {
                return Err(Fault::Lost { peer, reason: format!("connecting for data: {refusal}") });
            }
        }
    }
}

/// Why a connection is not proved.
enum Problem {
    Refused(Refusal),
    /// The wait for the peer has ended.
    Fault(Fault),
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        Problem::Refused(refusal)
    }
}

/// Reads all of `bytes`, and looks out for what else can end the wait.
fn read(mut stream: &TcpStream, bytes: &mut [u8], peer: usize, watch: &mut Watch<'_>) -> Result<(), Problem> {
    let mut filled = 0;
    while filled < bytes.len() {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => {
                return Err(Refusal::Io(io::Error::new(ErrorKind::UnexpectedEof, "its connection was closed")).into());
            }
            Ok(count) => filled += count,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                if !ready([(stream, PollFlags::IN)].into_iter(), watch) {
                    watch.tick(peer).map_err(Problem::Fault)?;
                }
            }
            Err(e) => return Err(Refusal::Io(e).into()),
        }
    }
    Ok(())
}
