//! How ranks find out whether they can share memory, and come to it.
//!
//! Rank 0 makes the segment and listens on a unix socket without a file, under a random name. It tells the others the
//! name, over the connections that the rendezvous made; they ask there for the segment's descriptor and tell rank 0
//! whether they have it. Only if all have, all use it: rank 0 says so. A rank on another host, or in another network
//! namespace, finds nobody under that name. Nothing that would outlive the ranks has a name anywhere.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::{Medium, Settings, zero_is_gone};
use crate::error::Error;
use crate::transport::Collectives;
use crate::transport::frame;
use crate::transport::shm::{Segment, Shm};
use crate::transport::tcp::Mesh;

/// How long a process that asks for the segment may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(5);

/// When to try again where the system could not accept a connection.
const RETRY: Duration = Duration::from_millis(100);

/// From rank 0: under which name the segment is to be had, if there is one.
type Offer = Option<String>;

/// A rank's answer.
#[derive(Debug, Serialize, Deserialize)]
enum Attached {
    Yes,
    /// Nobody has that name here.
    Elsewhere,
    Failed(String),
}

/// Rank 0's last word.
#[derive(Debug, Serialize, Deserialize)]
enum Verdict {
    Shared,
    /// All use TCP.
    Apart,
    /// Some rank insisted on shared memory.
    Failed(String),
}

/// The engine of this rank where all ranks can share memory. `medium` is what the ranks agreed to want.
pub(super) async fn agree(
    settings: &Settings,
    start: Instant,
    mesh: &mut Mesh,
    medium: Medium,
) -> Result<Option<Arc<dyn Collectives>>, Error> {
    if medium == Medium::Tcp {
        return Ok(None);
    }
    let n = settings.world_size;
    let (session, left) = (mesh.session, settings.timeout.saturating_sub(start.elapsed()));
    let agreed = async {
        match &mut mesh.connections[..] {
            // Rank 0 has no connection to itself.
            [None, guests @ ..] => {
                let mut guests: Vec<&mut TcpStream> = guests.iter_mut().flatten().collect();
                host(&mut guests, session, medium, Segment::create(n)).await
            }
            [Some(zero), ..] => attend(zero, session, n).await,
            [] => Ok(None),
        }
    };
    let late = |_| Err("the ranks did not find out in time whether they can share memory; allow more time".to_owned());
    let segment = timeout(left, agreed).await.unwrap_or_else(late).map_err(|reason| settings.failed(start, reason))?;
    let board = mesh.board.clone();
    Ok(segment.map(|segment| Arc::new(Shm::new(segment, settings.rank, board)) as Arc<dyn Collectives>))
}

/// Rank 0, with the connections to the others, by rank from 1 on.
async fn host(
    guests: &mut [&mut TcpStream],
    session: u64,
    medium: Medium,
    made: io::Result<(Segment, OwnedFd)>,
) -> Result<Option<Segment>, String> {
    let made = made.and_then(|(segment, file)| Ok((segment, file, listen()?)));
    let name: Offer = made.as_ref().ok().map(|(_, _, (name, _))| name.clone());
    tell(guests, &name).await?;
    let (segment, problem) = match made {
        Ok((segment, file, (_, listener))) => {
            let problem = tokio::select! {
                answers = hear(guests) => answers?,
                never = serve(&listener, Arc::new(file), session) => match never {},
            };
            (Some(segment), problem)
        }
        Err(e) => (None, Some((format!("rank 0 cannot make shared memory: {e}"), true))),
    };
    let verdict = match (&problem, medium) {
        (None, _) => Verdict::Shared,
        (Some((reason, _)), Medium::Shm) => Verdict::Failed(format!(
            "the ranks cannot share memory, which some rank asked for: {reason}; start all ranks on one host, in one \
             network namespace and as one user, with memory to spare, or set BONFIRE_TRANSPORT to auto or tcp"
        )),
        (Some((reason, unexpected)), _) => {
            let level = if *unexpected { log::Level::Warn } else { log::Level::Info };
            log::log!(level, "the ranks use TCP, because they cannot share memory: {reason}");
            Verdict::Apart
        }
    };
    tell(guests, &verdict).await?;
    match verdict {
        Verdict::Shared => Ok(segment),
        Verdict::Apart => Ok(None),
        Verdict::Failed(reason) => Err(reason),
    }
}

async fn tell(guests: &mut [&mut TcpStream], message: &impl Serialize) -> Result<(), String> {
    for (guest, rank) in guests.iter_mut().zip(1..) {
        frame::write(*guest, message).await.map_err(|e| format!("rank {rank} went away: {e}"))?;
    }
    Ok(())
}

/// Hears all answers. Gives why the memory cannot be shared, if it can't, and whether that is surprising.
async fn hear(guests: &mut [&mut TcpStream]) -> Result<Option<(String, bool)>, String> {
    let mut problem = None;
    for (guest, rank) in guests.iter_mut().zip(1..) {
        let lost = |e| format!("rank {rank} went away: {e}");
        // The caller's limit ends this.
        let answer = frame::expect(*guest, Duration::MAX).await.map_err(lost)?;
        let (reason, unexpected) = match answer {
            Attached::Yes => continue,
            Attached::Elsewhere => (format!("rank {rank} is on another host or in another network namespace"), false),
            Attached::Failed(reason) => (format!("rank {rank} cannot have rank 0's memory: {reason}"), true),
        };
        problem.get_or_insert((reason, unexpected));
    }
    Ok(problem)
}

/// Any other rank, with the connection to rank 0.
async fn attend(zero: &mut TcpStream, session: u64, world_size: usize) -> Result<Option<Segment>, String> {
    // The caller's limit ends these waits.
    if let Some(name) = frame::expect::<Offer>(zero, Duration::MAX).await.map_err(zero_is_gone)? {
        attend_to(zero, attach(&name, session, world_size).await).await
    } else {
        verdict(zero, None).await
    }
}

/// Reports what came of the attempt to attach, and hears what comes of it.
async fn attend_to(zero: &mut TcpStream, attached: io::Result<Segment>) -> Result<Option<Segment>, String> {
    let answer = match &attached {
        Ok(_) => Attached::Yes,
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => Attached::Elsewhere,
        Err(e) => Attached::Failed(e.to_string()),
    };
    frame::write(zero, &answer).await.map_err(zero_is_gone)?;
    verdict(zero, attached.ok()).await
}

async fn verdict(zero: &mut TcpStream, segment: Option<Segment>) -> Result<Option<Segment>, String> {
    match frame::expect(zero, Duration::MAX).await.map_err(zero_is_gone)? {
        Verdict::Shared if segment.is_some() => Ok(segment),
        Verdict::Shared => Err("rank 0 takes this rank's memory for shared, which it is not".into()),
        Verdict::Apart => Ok(None),
        Verdict::Failed(reason) => Err(reason),
    }
}

/// A socket in the abstract namespace, which has names but no files.
fn listen() -> io::Result<(String, UnixListener)> {
    // The standard library seeds these hashers from the system's random numbers.
    let random = || RandomState::new().build_hasher().finish();
    let name = format!("bonfire-{:016x}{:016x}", random(), random());
    let listener = std::os::unix::net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;
    Ok((name, UnixListener::from_std(listener)?))
}

/// Gives the descriptor to everybody who may have it, until dropped.
async fn serve(listener: &UnixListener, file: Arc<OwnedFd>, session: u64) -> std::convert::Infallible {
    let mut asking = JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let file = file.clone();
                asking.spawn(async move {
                    let given = timeout(PATIENCE, give(stream, &file, session)).await;
                    if let Err(e) = given.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())) {
                        log::warn!("turned away a process that asked for shared memory: {e}");
                    }
                });
            }
            Err(_) => sleep(RETRY).await,
        }
    }
}

async fn give(mut stream: UnixStream, file: &OwnedFd, session: u64) -> io::Result<()> {
    same_user(&stream)?;
    if stream.read_u64_le().await? != session {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "it belongs to another job"));
    }
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        Ok(rustix::net::sendmsg(&stream, &[IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL)?)
    };
    stream.async_io(Interest::WRITABLE, send).await.map(drop)
}

/// Takes part in the memory that is to be had under `name`.
async fn attach(name: &str, session: u64, world_size: usize) -> io::Result<Segment> {
    let stream = std::os::unix::net::UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    stream.set_nonblocking(true)?;
    let mut stream = UnixStream::from_std(stream)?;
    same_user(&stream)?;
    stream.write_u64_le(session).await?;
    let receive = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        rustix::net::recvmsg(&stream, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        descriptor.ok_or_else(|| io::Error::new(ErrorKind::PermissionDenied, "rank 0 does not give it"))
    };
    let file = timeout(PATIENCE, stream.async_io(Interest::READABLE, receive)).await??;
    Segment::open(&file, world_size)
}

/// Refuses a peer that runs as another user.
fn same_user(stream: &UnixStream) -> io::Result<()> {
    let (theirs, mine) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if theirs == mine {
        return Ok(());
    }
    let reason = format!("its other end runs as user {theirs}, this rank as user {mine}");
    Err(io::Error::new(ErrorKind::PermissionDenied, reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (listener.accept().await.unwrap().0, dialled)
    }

    /// Whether each of three ranks has the memory, or why there is none. Rank 1 takes part under `session`, rank 2
    /// fails to attach by `failure`, if any.
    fn meet(medium: Medium, memory: bool, session: u64, failure: Option<ErrorKind>) -> [Result<bool, String>; 3] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let made = if memory { Segment::create(3) } else { Err(ErrorKind::StorageFull.into()) };
        let all = runtime.block_on(async {
            let ((mut one, mut zero_of_one), (mut two, mut zero_of_two)) = (pair().await, pair().await);
            let second = async {
                let Some(failure) = failure else { return attend(&mut zero_of_two, 7, 3).await };
                frame::expect::<Offer>(&mut zero_of_two, PATIENCE).await.unwrap();
                attend_to(&mut zero_of_two, Err(failure.into())).await
            };
            let mut guests = [&mut one, &mut two];
            tokio::join!(host(&mut guests, 7, medium, made), attend(&mut zero_of_one, session, 3), second)
        });
        [all.0, all.1, all.2].map(|result| result.map(|segment| segment.is_some()))
    }

    #[test]
    fn ranks_that_can_share_memory_do() {
        for medium in [Medium::Auto, Medium::Shm] {
            assert_eq!(meet(medium, true, 7, None), [Ok(true), Ok(true), Ok(true)]);
        }
    }

    #[test]
    fn nobody_shares_memory_where_one_rank_cannot() {
        let elsewhere = Some(ErrorKind::ConnectionRefused);
        for (memory, session, failure) in
            [(true, 7, elsewhere), (true, 7, Some(ErrorKind::OutOfMemory)), (true, 8, None), (false, 7, None)]
        {
            let results = meet(Medium::Auto, memory, session, failure);
            assert_eq!(results, [Ok(false), Ok(false), Ok(false)], "{memory}, {session}, {failure:?}");
        }
    }

    #[test]
    fn all_fail_with_the_same_words_where_some_rank_insists() {
        for (memory, session, failure, words) in [
            (true, 7, Some(ErrorKind::ConnectionRefused), "rank 2 is on another host"),
            (true, 7, Some(ErrorKind::OutOfMemory), "rank 2 cannot have rank 0's memory"),
            (true, 8, None, "rank 1 cannot have rank 0's memory"),
            (false, 7, None, "rank 0 cannot make shared memory"),
        ] {
            let results = meet(Medium::Shm, memory, session, failure);
            let reason = results[0].clone().unwrap_err();
            assert!(reason.contains(words) && reason.contains("BONFIRE_TRANSPORT"), "{reason}");
            assert!(results.iter().all(|result| *result == Err(reason.clone())), "{results:?}");
        }
    }
}
