//! Connections made after the rendezvous: accepting connections, and dialling control connections.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::sync::mpsc::Sender;
use tokio::time::{sleep, timeout};

use super::connection::Event;
use super::status::GroupStatus;
use crate::auth::{self, AcceptQueue, Identity, Listener, Prologue, Purpose, Refusal};
use crate::descriptors;
use crate::types::Error;

/// Maximum number of data connections to a peer.
pub(crate) const MAX_DATA_CONNECTIONS: usize = 8;

/// Pause before dialling again after a connection that ended during the handshake.
pub const RETRY: Duration = Duration::from_millis(20);

/// Timeout of one attempt to connect. The system by itself would retry at ever longer intervals.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest pause between two attempts to connect.
const MAX_PAUSE: Duration = Duration::from_millis(500);

/// Accepts connections from ranks of this session, and refuses all others.
pub(super) async fn accept(
    listener: Listener,
    accept_queue: Arc<AcceptQueue>,
    identity: Identity,
    status: Arc<GroupStatus>,
    controls: Sender<(usize, TcpStream)>,
) {
    loop {
        match accept_queue.accept(|| listener.accept()).await {
            Ok((stream, address)) => {
                status.set_shortage(None);
                admit(&accept_queue, (stream, address), &identity, &status, &controls);
                // Most likely its first bytes have already arrived: handle them before accepting the next connection.
                tokio::task::yield_now().await;
            }
            // Tried again: the program may close files.
            Err(e) => {
                status.set_shortage(Some(Error::io("accepting a connection from another rank", e)));
                sleep(RETRY).await;
            }
        }
    }
}

/// Runs the handshake of an accepted connection. Then passes a data connection to the threads that run operations, and
/// a control connection to `controls`.
pub(crate) fn admit(
    accept_queue: &Arc<AcceptQueue>,
    (mut stream, address): (TcpStream, SocketAddr),
    identity: &Identity,
    status: &Arc<GroupStatus>,
    controls: &Sender<(usize, TcpStream)>,
) {
    let (identity, status, controls) = (identity.clone(), status.clone(), controls.clone());
    let proof = async move {
        let fits = |prologue: &Prologue| {
            identity.check(prologue)?;
            match prologue.purpose {
                Purpose::Control => Ok(()),
                Purpose::Data if prologue.number < prologue.of && usize::from(prologue.of) <= MAX_DATA_CONNECTIONS => {
                    Ok(())
                }
                purpose => Err(format!("a connection for {purpose:?} does not belong here")),
            }
        };
        let prologue = auth::accept_handshake(&mut stream, identity.secret.as_ref(), identity.session, fits).await?;
        Ok((stream, prologue))
    };
    accept_queue.receive(address.ip().to_canonical(), proof, move |(mut stream, prologue)| async move {
        let rank = prologue.from as usize;
        if prologue.purpose == Purpose::Data {
            // The dialler waits for this, and sends a goodbye only later: by then the status has the connection.
            auth::confirm(&mut stream).await?;
            status.add_data_stream(rank, prologue.number.into(), prologue.of.into(), stream.into_std()?);
            return Ok(());
        }
        // A rank that is about to leave serves no more connections, and must not confirm this one. It waits for the
        // permits that were given before: a peer whose connection was confirmed would take this rank for lost if the
        // connection closed without a goodbye.
        let permit = controls.reserve().await.map_err(|_| Refusal::Io(ErrorKind::ConnectionAborted.into()))?;
        auth::confirm(&mut stream).await?;
        permit.send((rank, stream));
        Ok(())
    });
}

/// Connects to a rank that is already listening, unless it has ended.
pub(super) async fn dial(
    identity: &Identity,
    (peer, address): (usize, SocketAddr),
    status: &GroupStatus,
) -> Result<TcpStream, Event> {
    let prologue = identity.prologue(Purpose::Control, peer, (0, 1));
    // Whether every attempt so far was answered.
    let (mut answered, mut pause) = (true, RETRY);
    let mut lacked = false;
    loop {
        let opened = match timeout(CONNECT_TIMEOUT, auth::open(identity.secret.as_ref(), &[address])).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(forbidden)) => return Err(Event::Unreachable { reason: forbidden.to_string(), ended: false }),
            Err(_) => Err(ErrorKind::TimedOut.into()),
        };
        if lacked && opened.is_ok() {
            status.set_shortage(None);
        }
        match opened {
            Ok(mut stream) => match auth::dial(&mut stream, identity.secret.as_ref(), prologue).await {
                Ok(_) => return Ok(stream),
                // A process that is exiting may still accept a connection and then drop it.
                Err(Refusal::Io(e)) => answered &= e.kind() != ErrorKind::TimedOut,
                Err(refusal) => {
                    let reason = format!("connecting to it at {address}: {refusal}");
                    return Err(Event::Unreachable { reason, ended: false });
                }
            },
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                let reason = format!("no process listens at {address} any more");
                return Err(Event::Unreachable { reason, ended: answered });
            }
            // As above, before this rank has seen that it was accepted.
            Err(e) if auth::was_dropped(&e) => {}
            // A local shortage: it says nothing about the peer.
            Err(e) if is_own(&e) => {
                if !lacked {
                    log::warn!("rank {} cannot connect to rank {peer}: {e}; it will retry", identity.rank);
                }
                lacked = true;
                if descriptors::is_shortage(&e) {
                    let operation = format!("connecting to rank {peer}");
                    status.set_shortage(Some(Error::io(operation, descriptors::explained(e))));
                }
            }
            Err(_) => answered = false,
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Whether the cause of the error is local: this process or its machine lacks descriptors, memory, ports or a protocol,
/// or forbids connections.
pub(crate) fn is_own(error: &io::Error) -> bool {
    let lacking = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];
    let forbidden = [Errno::ACCESS, Errno::PERM, Errno::AFNOSUPPORT, Errno::PROTONOSUPPORT];
    Errno::from_io_error(error).is_some_and(|error| lacking.contains(&error) || forbidden.contains(&error))
}
