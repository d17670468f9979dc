//! Connections made after the rendezvous: accepting connections, and dialling control connections.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc::Sender;
use tokio::time::{sleep, timeout};

use super::attempt::{Attempt, attempt};
use super::connection::Event;
use super::status::GroupStatus;
use crate::auth::{self, AcceptQueue, Identity, Listener, Prologue, Purpose, Refusal};
use crate::descriptors;
use crate::types::Error;

/// Maximum number of data connections to a peer.
pub(crate) const MAX_DATA_CONNECTIONS: usize = 8;

/// Pause before dialling again after a connection that ended during the handshake.
pub const RETRY: Duration = Duration::from_millis(20);

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
    let has_secret = identity.secret.is_some();
    let proof = async move {
        let fits = |prologue: &Prologue| {
            identity.check(prologue)?;
            match prologue.purpose {
                Purpose::Control | Purpose::Probe => Ok(()),
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
            // The time limit of strangers is too short for packets that have to be repeated.
            match has_secret {
                true => drop(tokio::spawn(accept_over_network(stream, prologue, status))),
                false => accept_data(stream, prologue, &status).await?,
            }
            return Ok(());
        }
        if prologue.purpose == Purpose::Probe {
            // It asks only whether this rank lives.
            return Ok(auth::confirm(&mut stream).await?);
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

/// Takes a data connection over, once the largest packets pass in both directions.
async fn accept_over_network(mut stream: TcpStream, prologue: Prologue, status: Arc<GroupStatus>) {
    let rank = prologue.from as usize;
    let largest = stream.peer_addr().map_or(0, |peer| auth::largest_packet(&stream, peer.ip()));
    status.begin_packets(rank, largest, stream.local_addr().ok().map(|own| own.ip()));
    let exchanged = timeout(auth::PACKETS_TIMEOUT, auth::exchange_packets(&mut stream, largest)).await;
    let late = |_| Err(Refusal::Io(ErrorKind::TimedOut.into()));
    let exchanged = exchanged.unwrap_or_else(late);
    status.end_packets(rank, exchanged.is_err() && auth::unacknowledged(&stream) > 0);
    let accepted = match exchanged {
        Ok(()) => accept_data(stream, prologue, &status).await,
        Err(refusal) => Err(refusal),
    };
    if let Err(refusal) = accepted {
        log::debug!("a data connection from rank {rank} was not completed: {refusal}");
    }
}

/// Confirms a data connection, and passes it to the threads that run operations.
async fn accept_data(mut stream: TcpStream, prologue: Prologue, status: &GroupStatus) -> Result<(), Refusal> {
    // The dialler waits for this, and sends a goodbye only later: by then the status has the connection.
    auth::confirm(&mut stream).await?;
    let (number, of) = (prologue.number.into(), prologue.of.into());
    status.add_data_stream(prologue.from as usize, number, of, stream.into_std()?);
    Ok(())
}

/// Connects to a rank that is already listening, unless it has ended.
pub(super) async fn dial(
    identity: &Identity,
    (peer, address): (usize, SocketAddr),
    status: &GroupStatus,
) -> Result<TcpStream, Event> {
    // Whether every attempt so far was answered.
    let (mut answered, mut pause) = (true, RETRY);
    let mut lacked = false;
    loop {
        let met = attempt(identity, (peer, address), Purpose::Control).await;
        if lacked && !matches!(met, Attempt::Lacking(_)) {
            status.set_shortage(None);
        }
        match met {
            Attempt::Connected(stream) => return Ok(stream),
            Attempt::Ended(reason) => return Err(Event::Unreachable { reason, ended: answered }),
            Attempt::Forbidden(error) => {
                return Err(Event::Unreachable { reason: error.to_string(), ended: false });
            }
            Attempt::Dropped => {}
            Attempt::Unanswered => answered = false,
            Attempt::Lacking(e) => {
                if !lacked {
                    log::warn!("rank {} cannot connect to rank {peer}: {e}; it will retry", identity.rank);
                }
                lacked = true;
                if descriptors::is_shortage(&e) {
                    let operation = format!("connecting to rank {peer}");
                    status.set_shortage(Some(Error::io(operation, descriptors::explained(e))));
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}
