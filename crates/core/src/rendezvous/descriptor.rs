//! Passes the descriptor of shared memory over a unix socket.
//!
//! The socket's name is random, but every process in the network namespace can look it up, including processes of other
//! containers that share the namespace. The peer must therefore run as the same user and prove, as on every
//! connection, that it is a rank of this job. Comparing users is not enough: in another container the same number may
//! be another user.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use crate::auth::{self, AcceptQueue, Identity, Prologue, Purpose, Refusal};
use crate::control::invitation::random;
use crate::transport::shm::Segment;

/// How long the descriptor may take once both ends have authenticated, and how long a rank asks again.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Pause before a rank asks again.
const AGAIN: Duration = Duration::from_millis(10);

/// Listens on a socket in the abstract namespace, where names are not files. Also returns its name.
pub(super) fn listen() -> io::Result<(String, UnixListener)> {
    let name =
        format!("bonfire-{:016x}{:016x}", random().map_err(io::Error::other)?, random().map_err(io::Error::other)?);
    let listener = std::os::unix::net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;
    Ok((name, UnixListener::from_std(listener)?))
}

/// Sends the descriptor to every process that may have it, until dropped or out of descriptors.
pub(super) async fn serve(listener: &UnixListener, file: Arc<OwnedFd>, identity: &Identity) -> io::Error {
    let accept_queue = AcceptQueue::new(identity.world_size);
    loop {
        match accept_queue.accept(|| listener.accept()).await {
            Ok((stream, _)) => {
                let (file, identity) = (file.clone(), identity.clone());
                let send = |stream| async move { send_descriptor(stream, &file).await };
                accept_queue.receive("a process that asks for shared memory", authenticate(stream, identity), send);
                // Its first bytes have most likely arrived: the handshake reads them before the next connection is
                // accepted, for which there may be no descriptor.
                yield_now().await;
            }
            Err(e) => return e,
        }
    }
}

async fn authenticate(mut stream: UnixStream, identity: Identity) -> Result<UnixStream, Refusal> {
    same_user(&stream)?;
    let fits = |prologue: &Prologue| match prologue.purpose {
        Purpose::Memory => identity.check(prologue),
        purpose => Err(format!("a connection for {purpose:?} does not belong here")),
    };
    auth::accept_handshake(&mut stream, identity.secret.as_ref(), identity.session, fits).await?;
    Ok(stream)
}

async fn send_descriptor(mut stream: UnixStream, file: &OwnedFd) -> Result<(), Refusal> {
    auth::confirm(&mut stream).await?;
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        Ok(retry_on_intr(|| rustix::net::sendmsg(&stream, &[IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL))?)
    };
    Ok(stream.async_io(Interest::WRITABLE, send).await.map(drop)?)
}

/// Attaches to the segment of `ranks` ranks that rank `creator` serves under `name`. Asks again if the connection was
/// dropped in favour of another one, as the creator does for lack of descriptors: if the lack lasts, the creator no
/// longer listens, and its verdict says why.
pub(super) async fn attach(name: &str, creator: usize, identity: &Identity, ranks: usize) -> io::Result<Segment> {
    let (name, start) = (SocketAddr::from_abstract_name(name)?, Instant::now());
    loop {
        match ask(&name, creator, identity, ranks).await {
            Err(e) if was_ended(&e) && start.elapsed() < TIMEOUT => sleep(AGAIN).await,
            attached => return attached,
        }
    }
}

/// Whether the other end has closed the connection without an answer.
fn was_ended(error: &io::Error) -> bool {
    error.kind() == ErrorKind::UnexpectedEof || auth::was_dropped(error)
}

async fn ask(name: &SocketAddr, creator: usize, identity: &Identity, ranks: usize) -> io::Result<Segment> {
    let stream = auth::uninterrupted(|| std::os::unix::net::UnixStream::connect_addr(name))?;
    stream.set_nonblocking(true)?;
    let mut stream = UnixStream::from_std(stream)?;
    same_user(&stream)?;
    let prologue = identity.prologue(Purpose::Memory, creator, (0, 1));
    let dialled = auth::dial(&mut stream, identity.secret.as_ref(), prologue).await;
    dialled.map_err(|refusal| match refusal {
        Refusal::Io(e) => e,
        refusal => io::Error::other(refusal),
    })?;
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (mut byte, flags) = ([0], RecvFlags::CMSG_CLOEXEC);
        let mut byte = [IoSliceMut::new(&mut byte)];
        retry_on_intr(|| rustix::net::recvmsg(&stream, &mut byte, &mut control, flags))?;
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        descriptor.ok_or_else(|| io::Error::new(ErrorKind::PermissionDenied, "the peer sent no descriptor"))
    };
    let file = timeout(TIMEOUT, stream.async_io(Interest::READABLE, receive)).await??;
    Segment::open(&file, ranks)
}

/// Refuses a peer that runs as another user.
fn same_user(stream: &UnixStream) -> io::Result<()> {
    let (theirs, mine) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if theirs == mine {
        return Ok(());
    }
    let reason = format!("the peer runs as user {theirs}, this rank as user {mine}");
    Err(io::Error::new(ErrorKind::PermissionDenied, reason))
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[test]
    fn a_rank_whose_connection_is_dropped_asks_again_while_there_is_a_listener() {
        let identity = |rank| Identity { secret: None, session: 7, rank, world_size: 2 };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (_segment, file) = Segment::create(2).unwrap();
            let (own, (name, listener)) = (identity(1), listen().unwrap());
            let drops_two = async {
                // With unread bytes, which resets the connection, and without any.
                listener.accept().await.unwrap().0.readable().await.unwrap();
                let (mut second, _) = listener.accept().await.unwrap();
                second.read_exact(&mut [0; Prologue::BYTES]).await.unwrap();
                drop(second);
                serve(&listener, Arc::new(file), &identity(0)).await
            };
            tokio::select! {
                attached = attach(&name, 0, &own, 2) => drop(attached.unwrap()),
                error = drops_two => panic!("{error}"),
            }
            let (name, listener) = listen().unwrap();
            let ends = async {
                let (stream, _) = listener.accept().await.unwrap();
                drop(listener);
                drop(stream);
            };
            let (attached, ()) = tokio::join!(attach(&name, 0, &own, 2), ends);
            assert_eq!(attached.err().unwrap().kind(), ErrorKind::ConnectionRefused);
        });
    }
}
