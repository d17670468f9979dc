//! Connections that come after the rendezvous: whom the listener takes, and how a control connection is dialled.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{sleep, timeout};

use super::board::Board;
use super::line::Event;
use crate::auth::{self, Lobby, Member, Opening, Purpose, Refusal};

/// The most data connections to a peer.
pub(crate) const MOST: usize = 8;

/// When to dial again after a connection that ended before both had proved who they are.
pub const RETRY: Duration = Duration::from_millis(20);

/// How long one attempt may take: the system itself would try again ever more rarely.
pub(crate) const SYN: Duration = Duration::from_secs(2);

/// The longest pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(500);

/// Takes connections from ranks of this session; everybody else is turned away.
pub(super) async fn accept(
    listener: TcpListener,
    lobby: Arc<Lobby>,
    member: Member,
    board: Arc<Board>,
    controls: UnboundedSender<(usize, TcpStream)>,
) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                admit(&lobby, (stream, address), &member, &board, &controls);
                // Its first bytes are there already, most likely: they are looked at before the next connection is.
                tokio::task::yield_now().await;
            }
            // Out of descriptors, most likely: try again when some may be free.
            Err(e) => {
                log::warn!("rank {} cannot accept a connection: {e}", member.rank);
                sleep(auth::RETRY).await;
            }
        }
    }
}

/// Lets a connection prove who it is; then hands one for data to the threads that run operations, and a control connection
/// to `controls`.
pub(crate) fn admit(
    lobby: &Arc<Lobby>,
    (mut stream, address): (TcpStream, SocketAddr),
    member: &Member,
    board: &Arc<Board>,
    controls: &UnboundedSender<(usize, TcpStream)>,
) {
    let (member, board, controls) = (member.clone(), board.clone(), controls.clone());
    let proof = async move {
        let fits = |opening: &Opening| {
            member.expects(opening)?;
            match opening.purpose {
                Purpose::Control => Ok(()),
                Purpose::Data if opening.number < opening.of && usize::from(opening.of) <= MOST => Ok(()),
                purpose => Err(format!("a connection for {purpose:?} does not belong here")),
            }
        };
        let opening = auth::answer(&mut stream, member.secret.as_ref(), member.session, fits).await?;
        Ok((stream, opening))
    };
    lobby.receive(address, proof, move |(mut stream, opening)| async move {
        // A rank that is about to leave serves nobody any more, and must not say that it does.
        if opening.purpose == Purpose::Control && controls.is_closed() {
            return Err(Refusal::Io(ErrorKind::ConnectionAborted.into()));
        }
        // Who dialled waits for this. A farewell that follows it is read after the connection is on the board.
        auth::confirm(&mut stream).await?;
        let rank = opening.from as usize;
        if opening.purpose == Purpose::Data {
            board.gather(rank, opening.number.into(), opening.of.into(), stream.into_std()?);
            return Ok(());
        }
        // The rank may be about to leave.
        let _ = controls.send((rank, stream));
        Ok(())
    });
}

/// Connects to a rank whose listener is there already, unless it has ended.
pub(super) async fn dial(member: &Member, peer: usize, address: SocketAddr) -> Result<TcpStream, Event> {
    let opening = member.opening(Purpose::Control, peer, (0, 1));
    // Whether every attempt was answered by somebody.
    let (mut answered, mut pause) = (true, RETRY);
    loop {
        match timeout(SYN, TcpStream::connect(address)).await {
            Ok(Ok(mut stream)) => match auth::dial(&mut stream, member.secret.as_ref(), opening).await {
                Ok(_) => return Ok(stream),
                // One that is just ending may still take a connection, and then drops it.
                Err(Refusal::Io(e)) => answered &= e.kind() != ErrorKind::TimedOut,
                Err(refusal) => {
                    let reason = format!("connecting to it at {address}: {refusal}");
                    return Err(Event::Unreachable { reason, ended: false });
                }
            },
            Ok(Err(e)) if e.kind() == ErrorKind::ConnectionRefused => {
                let reason = format!("nobody listens at {address} any more");
                return Err(Event::Unreachable { reason, ended: answered });
            }
            // The peer is as well as before.
            Ok(Err(e)) if is_own(&e) => {
                log::warn!("rank {} cannot connect to rank {peer}: {e}; it tries again", member.rank)
            }
            Ok(Err(_)) | Err(_) => answered = false,
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE);
    }
}

/// Whether this process, or its machine, lacks something: descriptors or memory.
pub(crate) fn is_own(error: &io::Error) -> bool {
    let own = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|error| own.contains(&error))
}
