//! Registration of ranks with rank 0: the messages, and rank 0's table of registered ranks.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Settings, TransportKind};
use crate::auth::{Identity, Prologue, Purpose, Refusal, accept_handshake, confirm};
use crate::control::frame;

/// How long sending the list of missing ranks to one rank may take.
const SEND_TIMEOUT: Duration = Duration::from_millis(100);

/// From a rank to rank 0, which knows the rank and its world size from the connection's prologue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Where the rank listens.
    pub address: SocketAddr,
    /// The transport that it asks for.
    pub kind: TransportKind,
    /// Its algorithm table.
    pub algorithms: String,
    /// The name of its machine.
    pub machine: String,
    /// Why it has too few descriptors for the group, if it has too few.
    pub shortage: Option<String>,
}

/// Returns the name of this rank's machine. It is only a hint: ranks are on one host if they can map the same memory.
pub(super) fn machine(settings: &Settings) -> String {
    settings.machine.clone().unwrap_or_else(this_machine)
}

/// Returns a name for all that processes must have in common to pass memory to each other: the running system, the
/// network namespace, in which unix sockets have their names, and the user. What the system does not reveal is left
/// out. Ranks on two machines may then have the same name, and find out when they try to share memory.
fn this_machine() -> String {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let (boot, name) = (read("/proc/sys/kernel/random/boot_id"), read("/proc/sys/kernel/hostname"));
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {} {} {}", boot.trim(), name.trim(), network.display(), rustix::process::geteuid().as_raw())
}

/// Rank 0's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome {
        addresses: Vec<SocketAddr>,
        /// The transport that follows from the requests of all ranks.
        kind: TransportKind,
        /// By rank; see [`Joined`](super::join::Joined).
        hosts: Vec<usize>,
        /// The largest group in which all ranks are connected from the start.
        full_mesh_limit: usize,
    },
    Refused(String),
    /// These ranks have not registered yet, and rank 0 keeps waiting.
    Waiting(Vec<usize>),
}

/// An authenticated connection to rank 0 with its prologue and its hello.
pub(super) type Registration = (TcpStream, Prologue, Hello);

/// A rank that has registered with rank 0.
pub(super) struct RegisteredRank {
    pub stream: TcpStream,
    pub address: SocketAddr,
    pub kind: TransportKind,
    pub machine: String,
}

/// Runs the handshake on a new connection.
pub(super) async fn authenticate(mut stream: TcpStream, identity: Identity) -> Result<(TcpStream, Prologue), Refusal> {
    // A rank with another world size passes: it is no stranger, and the error goes to it and to all other ranks.
    let fits = |prologue: &Prologue| match (prologue.purpose, prologue.to) {
        (Purpose::Rendezvous, 0) => Ok(()),
        (purpose, to) => {
            Err(format!("it is a connection for {purpose:?} to rank {to}, and this is rank 0's rendezvous"))
        }
    };
    let prologue = accept_handshake(&mut stream, identity.secret.as_ref(), identity.session, fits).await?;
    Ok((stream, prologue))
}

/// Reads a rank's hello. The caller limits the time.
pub(super) async fn read_hello(mut stream: TcpStream, prologue: Prologue) -> Result<Registration, Refusal> {
    confirm(&mut stream).await?;
    let hello = frame::expect(&mut stream, Duration::MAX).await?;
    Ok((stream, prologue, hello))
}

/// Enters a rank into the table. The error is the reason to report to all ranks, and a connection outside the table.
pub(super) fn register(
    ranks: &mut [Option<RegisteredRank>],
    algorithms: &str,
    (stream, prologue, hello): Registration,
) -> Result<(), (String, Option<TcpStream>)> {
    let (rank, n) = (prologue.from as usize, ranks.len());
    if prologue.world_size as usize != n {
        let reason = format!(
            "rank {rank} was started with a world size of {}, rank 0 with {n}: give all the same",
            prologue.world_size
        );
        return Err((reason, Some(stream)));
    }
    // Ranks that run different plans would wait for each other.
    if hello.algorithms != algorithms {
        let reason = format!(
            "rank {rank} has the algorithms '{}', rank 0 '{algorithms}': give all the same BONFIRE_ALGORITHMS or \
             Builder::algorithms",
            hello.algorithms
        );
        return Err((reason, Some(stream)));
    }
    if let Some(reason) = hello.shortage {
        return Err((reason, Some(stream)));
    }
    match ranks.get_mut(rank) {
        Some(slot @ None) if rank != 0 => {
            *slot = Some(RegisteredRank { stream, address: hello.address, kind: hello.kind, machine: hello.machine });
            Ok(())
        }
        _ => Err((format!("two processes were started as rank {rank}: give each its own"), Some(stream))),
    }
}

/// Sends the list of missing ranks to all registered ranks.
pub(super) async fn report_missing(missing: &[usize], ranks: &mut [Option<RegisteredRank>]) {
    let waiting = Answer::Waiting(missing.to_vec());
    for slot in ranks {
        let Some(registered) = slot else { continue };
        // `first_disconnect` notices closed connections. A rank that does not accept a few bytes would delay all
        // others.
        if timeout(SEND_TIMEOUT, frame::write(&mut registered.stream, &waiting)).await.is_err() {
            *slot = None;
        }
    }
}

/// Waits for a registered rank to close its connection, and returns the rank.
pub(super) async fn first_disconnect(ranks: &[Option<RegisteredRank>]) -> usize {
    poll_fn(|context| {
        for (rank, registered) in ranks.iter().enumerate() {
            let Some(RegisteredRank { stream, .. }) = registered else { continue };
            // A rank sends nothing after its hello, so anything to read is an end or an error.
            if stream.poll_peek(context, &mut ReadBuf::new(&mut [0])).is_ready() {
                return Poll::Ready(rank);
            }
        }
        Poll::Pending
    })
    .await
}

/// Reports on these connections why the rendezvous fails.
pub(super) async fn refuse(connections: impl IntoIterator<Item = TcpStream>, reason: &str) {
    for mut connection in connections {
        let _ = frame::write(&mut connection, &Answer::Refused(reason.to_owned())).await;
    }
}

/// Returns the transport for the group: TCP if any rank asks for it, shared memory only if some rank insists.
pub(super) fn common_transport(kinds: &[TransportKind]) -> Result<TransportKind, String> {
    let first = |kind| kinds.iter().position(|other| *other == kind);
    match (first(TransportKind::Tcp), first(TransportKind::Shm)) {
        (Some(tcp), Some(shm)) => Err(format!(
            "rank {shm} insists on shared memory and rank {tcp} on TCP: give all the same BONFIRE_TRANSPORT or \
             Builder::transport (a rank without the feature `shm` uses TCP)"
        )),
        (Some(_), None) => Ok(TransportKind::Tcp),
        (None, Some(_)) => Ok(TransportKind::Shm),
        (None, None) => Ok(TransportKind::Auto),
    }
}

/// Returns the host of each rank, where a host's number is the first rank on it.
pub(super) fn hosts(machines: &[&String]) -> Vec<usize> {
    let first = |rank: usize| machines.iter().position(|other| *other == machines[rank]).unwrap_or(rank);
    (0..machines.len()).map(first).collect()
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;

    #[test]
    fn fuzz_hellos() {
        let (address, machine) = ("10.0.0.1:29500".parse().unwrap(), "boot name net:[1] 0".to_owned());
        let (kind, shortage) = (TransportKind::Auto, Some("rank 1 may have 32 open files".into()));
        let hello = Hello { address, kind, algorithms: "ring:0-".into(), machine, shortage };
        let (address, kind) = ("[::1]:1".parse().unwrap(), TransportKind::Tcp);
        let other = Hello { address, kind, shortage: None, ..hello.clone() };
        bonfire_testing::fuzz::fuzz_frames("hello", &[hello, other]);
    }

    #[test]
    fn fuzz_directories() {
        let addresses =
            ["10.0.0.1:29500", "[fe80::1]:7", "10.0.0.2:80"].map(|address| address.parse().unwrap()).to_vec();
        let welcome =
            Answer::Welcome { addresses, kind: TransportKind::Auto, hosts: vec![0, 0, 2], full_mesh_limit: 16 };
        let refused = Answer::Refused("two processes were started as rank 1".into());
        bonfire_testing::fuzz::fuzz_frames("directory", &[welcome, refused, Answer::Waiting(vec![1, 300])]);
    }
}
