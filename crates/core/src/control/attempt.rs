//! One attempt to connect to a rank that was listening, and what it proves about that rank.
//!
//! A rank keeps the port at which it listens until its process ends, also while it goes on in another group. And no
//! other process can listen at a port that one has. So the port tells whether the rank has ended:
//!
//! | what the attempt meets | what it proves |
//! |---|---|
//! | a refused connection, or one from a socket to itself | no process listens there: the rank has ended |
//! | an answer that is not the rank's | another process listens there: the rank has ended |
//! | the rank's own answer | it lives |
//! | a connection that is accepted, and closed or reset without an answer | nothing: a process that is just ending leaves such connections, and so do a full accept queue and a proxy |
//! | no answer in time, or an unreachable host or network | nothing: the rank may be stopped, cut off, or go on in another group, in which case it accepts no connections here |
//! | a lack of descriptors, memory or ports on this side | nothing |

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::auth::{self, Identity, Purpose, Refusal};
use crate::types::Error;

/// Timeout of one attempt to connect. The system by itself would retry at ever longer intervals.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// What an attempt met.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// The rank, which has proved that it is the one.
    Connected(TcpStream),
    /// The rank has ended. The reason is for errors.
    Ended(String),
    /// The connection was accepted and dropped.
    Dropped,
    /// No answer came in time, or the way to the host is broken.
    Unanswered,
    /// This process or its machine lacks something.
    Lacking(io::Error),
    /// The address needs a secret, and this rank has none.
    Forbidden(Error),
}

/// Tries once to connect to a rank of this group.
pub(crate) async fn attempt(identity: &Identity, (peer, address): (usize, SocketAddr), purpose: Purpose) -> Attempt {
    let secret = identity.secret.as_ref();
    let mut stream = match timeout(CONNECT_TIMEOUT, auth::open(secret, &[address])).await {
        Ok(Ok(Ok(stream))) => stream,
        Ok(Ok(Err(e))) if e.kind() == ErrorKind::ConnectionRefused => {
            return Attempt::Ended(format!("no process listens at {address} any more"));
        }
        Ok(Ok(Err(e))) if is_own(&e) => return Attempt::Lacking(e),
        // Before this rank has seen that it was accepted.
        Ok(Ok(Err(e))) if auth::was_dropped(&e) => return Attempt::Dropped,
        Ok(Ok(Err(_))) | Err(_) => return Attempt::Unanswered,
        Ok(Err(forbidden)) => return Attempt::Forbidden(forbidden),
    };
    match auth::dial(&mut stream, secret, identity.prologue(purpose, peer, (0, 1))).await {
        Ok(_) => Attempt::Connected(stream),
        Err(Refusal::Io(e)) if e.kind() == ErrorKind::TimedOut => Attempt::Unanswered,
        Err(Refusal::Io(_)) => Attempt::Dropped,
        Err(refusal) => Attempt::Ended(format!("another process listens at {address} ({refusal})")),
    }
}

/// Whether the cause of the error is local: this process or its machine lacks descriptors, memory, ports or a protocol,
/// or forbids connections.
pub(crate) fn is_own(error: &io::Error) -> bool {
    let lacking = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];
    let forbidden = [Errno::ACCESS, Errno::PERM, Errno::AFNOSUPPORT, Errno::PROTONOSUPPORT];
    Errno::from_io_error(error).is_some_and(|error| lacking.contains(&error) || forbidden.contains(&error))
}
