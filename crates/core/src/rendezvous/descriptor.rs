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
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use crate::auth::{self, AcceptQueue, Identity, Prologue, Purpose, Refusal};
use crate::control::invitation::random;
use crate::transport::shm::Segment;

/// How long the descriptor may take once both ends have authenticated.
const TIMEOUT: Duration = Duration::from_secs(5);

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

/// Attaches to the segment of `ranks` ranks that rank `creator` serves under `name`.
pub(super) async fn attach(name: &str, creator: usize, identity: &Identity, ranks: usize) -> io::Result<Segment> {
    let name = SocketAddr::from_abstract_name(name)?;
    let stream = auth::uninterrupted(|| std::os::unix::net::UnixStream::connect_addr(&name))?;
    stream.set_nonblocking(true)?;
    let mut stream = UnixStream::from_std(stream)?;
    same_user(&stream)?;
    let prologue = identity.prologue(Purpose::Memory, creator, (0, 1));
    auth::dial(&mut stream, identity.secret.as_ref(), prologue).await.map_err(io::Error::other)?;
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
