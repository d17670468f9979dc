//! What ranks tell rank 0, and what it makes of them.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Medium;
use crate::auth::{Member, Opening, Purpose, Refusal, answer, confirm};
use crate::control::frame;

/// How long a guest may take to be told who is missing.
const PATIENCE: Duration = Duration::from_millis(100);

/// From a rank to rank 0, which knows its number and world size from the connection's opening.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Where the rank listens.
    pub address: SocketAddr,
    /// What it wants to carry the operations.
    pub medium: Medium,
    /// Which algorithms it will choose.
    pub algorithms: String,
    /// Which machine it is on.
    pub machine: String,
}

/// Rank 0's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome {
        addresses: Vec<SocketAddr>,
        /// What all ranks together want.
        medium: Medium,
        /// By rank; see [`Joined`](super::join::Joined).
        hosts: Vec<usize>,
        /// The most ranks of which all are connected from the start.
        mesh: usize,
    },
    Refused(String),
    /// These ranks have not come yet, and rank 0 goes on waiting.
    Waiting(Vec<usize>),
}

/// Who stands before rank 0.
pub(super) type Arrival = (TcpStream, Opening, Hello);

/// A rank that has come to rank 0.
pub(super) struct Guest {
    pub stream: TcpStream,
    pub address: SocketAddr,
    pub medium: Medium,
    pub machine: String,
}

/// Lets a connection prove who it is.
pub(super) async fn proof(mut stream: TcpStream, member: Member) -> Result<(TcpStream, Opening), Refusal> {
    // Who says another number of ranks is told so, and the others too: that is no stranger.
    let fits = |opening: &Opening| match (opening.purpose, opening.to) {
        (Purpose::Rendezvous, 0) => Ok(()),
        (purpose, to) => {
            Err(format!("it is a connection for {purpose:?} to rank {to}, and this is rank 0's rendezvous"))
        }
    };
    let opening = answer(&mut stream, member.secret.as_ref(), member.session, fits).await?;
    Ok((stream, opening))
}

/// Lets a rank say what it wants. The caller limits the time.
pub(super) async fn introduction(mut stream: TcpStream, opening: Opening) -> Result<Arrival, Refusal> {
    confirm(&mut stream).await?;
    let hello = frame::expect(&mut stream, Duration::MAX).await?;
    Ok((stream, opening, hello))
}

/// Gives a guest its seat, or says why the whole rendezvous fails, and to whom else that must be told.
pub(super) fn seat(
    guests: &mut [Option<Guest>],
    algorithms: &str,
    (stream, opening, hello): Arrival,
) -> Result<(), (String, Option<TcpStream>)> {
    let (rank, n) = (opening.from as usize, guests.len());
    if opening.world_size as usize != n {
        let reason = format!(
            "rank {rank} was started with a world size of {}, rank 0 with {n}: give all the same",
            opening.world_size
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
    match guests.get_mut(rank) {
        Some(seat @ None) if rank != 0 => {
            *seat = Some(Guest { stream, address: hello.address, medium: hello.medium, machine: hello.machine });
            Ok(())
        }
        _ => Err((format!("two processes were started as rank {rank}: give each its own"), Some(stream))),
    }
}

/// Tells all guests who is missing.
pub(super) async fn name(missing: &[usize], guests: &mut [Option<Guest>]) {
    let waiting = Answer::Waiting(missing.to_vec());
    for seat in guests {
        let Some(guest) = seat else { continue };
        // That it is gone is noticed elsewhere. One that does not take a few bytes would hold up all others.
        if timeout(PATIENCE, frame::write(&mut guest.stream, &waiting)).await.is_err() {
            *seat = None;
        }
    }
}

/// The first guest that closes its connection.
pub(super) async fn departure(guests: &[Option<Guest>]) -> usize {
    poll_fn(|context| {
        for (rank, guest) in guests.iter().enumerate() {
            let Some(Guest { stream, .. }) = guest else { continue };
            // A guest sends nothing after its hello, so anything to read is an end or an error.
            if stream.poll_peek(context, &mut ReadBuf::new(&mut [0])).is_ready() {
                return Poll::Ready(rank);
            }
        }
        Poll::Pending
    })
    .await
}

/// Tells these why the rendezvous fails.
pub(super) async fn refuse(guests: impl IntoIterator<Item = TcpStream>, reason: &str) {
    for mut guest in guests {
        let _ = frame::write(&mut guest, &Answer::Refused(reason.to_owned())).await;
    }
}

/// What all ranks together want, from what each wants: TCP if any does, shared memory only if some insist.
pub(super) fn together(mediums: &[Medium]) -> Result<Medium, String> {
    let first = |medium| mediums.iter().position(|other| *other == medium);
    match (first(Medium::Tcp), first(Medium::Shm)) {
        (Some(tcp), Some(shm)) => Err(format!(
            "rank {shm} insists on shared memory and rank {tcp} on TCP: give all the same BONFIRE_TRANSPORT or \
             Builder::transport (a rank without the feature `shm` uses TCP)"
        )),
        (Some(_), None) => Ok(Medium::Tcp),
        (None, Some(_)) => Ok(Medium::Shm),
        (None, None) => Ok(Medium::Auto),
    }
}

/// Numbers the machines by the first rank on each.
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
        let hello = Hello { address, medium: Medium::Auto, algorithms: "ring:0-".into(), machine };
        let other = Hello { address: "[::1]:1".parse().unwrap(), medium: Medium::Tcp, ..hello.clone() };
        bonfire_testing::fuzz::fuzz_frames("hello", &[hello, other]);
    }

    #[test]
    fn fuzz_directories() {
        let addresses =
            ["10.0.0.1:29500", "[fe80::1]:7", "10.0.0.2:80"].map(|address| address.parse().unwrap()).to_vec();
        let welcome = Answer::Welcome { addresses, medium: Medium::Auto, hosts: vec![0, 0, 2], mesh: 16 };
        let refused = Answer::Refused("two processes were started as rank 1".into());
        bonfire_testing::fuzz::fuzz_frames("directory", &[welcome, refused, Answer::Waiting(vec![1, 300])]);
    }
}
