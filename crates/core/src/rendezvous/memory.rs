//! Finds out which ranks can share memory, and sets the memory up.
//!
//! Among the ranks that may be on one host, judging by the names of their machines, the lowest creates the segment and
//! listens on a unix socket without a file, under a random name. It sends the name to the other ranks over the
//! connections of the rendezvous. They ask there for the segment's descriptor and report whether they have attached it.
//! The segment is used only if all of them have: the lowest rank sends them its verdict, and reports to rank 0, which
//! sends the list of hosts that share memory to all ranks. A rank on another host, or in another network namespace,
//! finds no socket of that name. Nothing that would outlive the ranks has a name anywhere.
//!
//! This runs once all connections of the rendezvous are made and before they are served. If the segment of a host
//! cannot be created, or one rank cannot attach it, all ranks of the host use TCP between each other, and the log has
//! the reason. If some rank insists on shared memory, that is an error on all ranks instead; machines are not compared
//! in that case, so that the error says what is wrong. Containers on one host count as several hosts unless they share
//! a network namespace.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::descriptor::{attach, listen, serve};
use super::join::Joined;
use super::{Settings, TransportKind, connection_ended};
use crate::auth::Identity;
use crate::control::{ControlSetup, frame};
use crate::transport::Engines;
use crate::transport::hosts::Hosts;
use crate::transport::shm::{Segment, Shm};
use crate::transport::tcp::Tcp;
use crate::types::{Error, RankList};

/// From the lowest rank of a host: the socket's name, if there is a segment.
type SocketName = Option<String>;

/// A rank's answer to [`SocketName`].
#[derive(Debug, Serialize, Deserialize)]
enum Attached {
    Yes,
    /// No socket here has that name.
    Elsewhere,
    Failed(String),
}

/// The lowest rank's decision for its host.
#[derive(Debug, Serialize, Deserialize)]
enum Verdict {
    Shared,
    /// The ranks use TCP between each other.
    NotShared,
    /// Some rank insists on shared memory.
    Failed(String),
}

/// The hosts of a group, and this rank's segment.
pub(super) struct Shared {
    /// The ranks of each host: each set that shares memory, and each other rank on its own.
    hosts: Vec<Vec<usize>>,
    /// This rank's segment and the rank's index among those that share it.
    segment: Option<(Segment, usize)>,
    /// The index of this rank's host.
    host: usize,
}

impl Shared {
    /// Returns the shared-memory engine. The connections are served already.
    pub fn engine(self, tcp: &Arc<Tcp>) -> Engines {
        let Shared { hosts, segment, host } = self;
        let index = segment.as_ref().map_or(0, |(_, index)| *index);
        let shm = segment.map(|(segment, index)| Shm::new(segment, index, hosts[host].clone(), tcp.clone()));
        match shm {
            Some(shm) if hosts.len() == 1 => Engines::AllRanks(Arc::new(shm)),
            shm => Engines::PerHost(Hosts::new(hosts, host, index, shm)),
        }
    }
}

/// Finds out which ranks can share memory, and sets it up. `None` if no ranks share any.
pub(super) async fn agree(settings: &Settings, start: Instant, joined: &mut Joined) -> Result<Option<Shared>, Error> {
    let Joined { setup, kind, hosts } = joined;
    // If some rank insists, all ranks are tried, so that the error says why they cannot share memory.
    let candidates = if *kind == TransportKind::Shm { vec![(0..hosts.len()).collect()] } else { group_by_host(hosts) };
    if *kind == TransportKind::Tcp || candidates.iter().all(|members| members.len() == 1) {
        return Ok(None);
    }
    let (rank, left) = (settings.rank, settings.timeout.saturating_sub(start.elapsed()));
    let agreed = async {
        let segment = set_up(rank, setup, *kind, &candidates).await?;
        agree_on_hosts(rank, setup, candidates, segment).await
    };
    let late = |_| Err("timed out while finding out whether the ranks can share memory; allow more time".to_owned());
    timeout(left, agreed).await.unwrap_or_else(late).map_err(|reason| settings.failed(start, reason))
}

/// Groups the ranks with the same number. Groups are ordered by their lowest rank.
fn group_by_host(numbers: &[usize]) -> Vec<Vec<usize>> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for (rank, number) in numbers.iter().enumerate() {
        match hosts.iter_mut().find(|members| numbers[members[0]] == *number) {
            Some(members) => members.push(rank),
            None => hosts.push(vec![rank]),
        }
    }
    hosts
}

/// Sets up the segment with the ranks that may be on this rank's host. Returns it if all of them have attached it.
async fn set_up(
    rank: usize,
    setup: &mut ControlSetup,
    kind: TransportKind,
    candidates: &[Vec<usize>],
) -> Result<Option<Segment>, String> {
    let Some(members) = candidates.iter().find(|members| members.contains(&rank)) else { return Ok(None) };
    let (identity, n) = (&setup.identity, members.len());
    if n == 1 {
        return Ok(None);
    }
    let connections = setup.connections.iter_mut().enumerate();
    let mut others = connections.filter(|(peer, _)| members.contains(peer)).filter_map(|(p, c)| Some((p, c.as_mut()?)));
    if members[0] == rank {
        return share_as_creator(rank, &mut others.collect::<Vec<_>>(), identity, kind, Segment::create(n)).await;
    }
    match others.next() {
        Some(creator) => share_as_peer(creator, identity, n).await,
        None => Ok(None),
    }
}

/// Agrees with all ranks on which of the hosts share memory.
async fn agree_on_hosts(
    rank: usize,
    setup: &mut ControlSetup,
    candidates: Vec<Vec<usize>>,
    segment: Option<Segment>,
) -> Result<Option<Shared>, String> {
    let mut sharing = Vec::new();
    if let [None, others @ ..] = &mut setup.connections[..] {
        // The lowest rank of each host reports.
        for members in &candidates {
            sharing.push(match others.get_mut(members[0].wrapping_sub(1)) {
                Some(Some(creator)) if members.len() > 1 => {
                    frame::expect(creator, Duration::MAX).await.map_err(|e| connection_ended(members[0], e))?
                }
                _ => members[0] == 0 && segment.is_some(),
            });
        }
        let mut others: Vec<_> = (1..).zip(others.iter_mut().flatten()).collect();
        send_to_all(&mut others, &sharing).await?;
    } else if let Some(Some(zero)) = setup.connections.first_mut() {
        if candidates.iter().any(|members| members.len() > 1 && members[0] == rank) {
            frame::write(zero, &segment.is_some()).await.map_err(|e| connection_ended(0, e))?;
        }
        sharing = frame::expect(zero, Duration::MAX).await.map_err(|e| connection_ended(0, e))?;
        if sharing.len() != candidates.len() {
            return Err("rank 0 and this rank disagree about the number of hosts".into());
        }
    }
    resolve_hosts(rank, &candidates, &sharing, segment)
}

/// Returns the hosts, given for each candidate whether its ranks share memory.
fn resolve_hosts(
    rank: usize,
    candidates: &[Vec<usize>],
    sharing: &[bool],
    segment: Option<Segment>,
) -> Result<Option<Shared>, String> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for (members, sharing) in candidates.iter().zip(sharing) {
        if *sharing {
            hosts.push(members.clone());
        } else {
            hosts.extend(members.iter().map(|rank| vec![*rank]));
        }
    }
    hosts.sort();
    if hosts.iter().all(|members| members.len() == 1) {
        return Ok(None);
    }
    let find = |(host, members): (usize, &Vec<usize>)| Some((host, members.iter().position(|member| *member == rank)?));
    let Some((host, index)) = hosts.iter().enumerate().find_map(find) else {
        return Err(format!("no host has rank {rank}"));
    };
    if segment.is_some() != (hosts[host].len() > 1) {
        return Err("rank 0 and this rank disagree about whether this rank shares memory".into());
    }
    log::debug!("rank {rank} shares memory with ranks {:?}; the hosts have {hosts:?}", hosts[host]);
    Ok(Some(Shared { hosts, segment: segment.map(|segment| (segment, index)), host }))
}

/// Runs the lowest rank of a host, with the connections to the host's other ranks.
async fn share_as_creator(
    creator: usize,
    peers: &mut [(usize, &mut TcpStream)],
    identity: &Identity,
    kind: TransportKind,
    made: io::Result<(Segment, OwnedFd)>,
) -> Result<Option<Segment>, String> {
    let made = made.and_then(|(segment, file)| Ok((segment, file, listen()?)));
    let name: SocketName = made.as_ref().ok().map(|(_, _, (name, _))| name.clone());
    send_to_all(peers, &name).await?;
    let (segment, problem) = match made {
        Ok((segment, file, (_, listener))) => {
            let problem = tokio::select! {
                answers = read_answers(creator, peers) => answers?,
                e = serve(&listener, Arc::new(file), identity) => {
                    Some((format!("rank {creator} cannot accept a connection: {e}"), true))
                }
            };
            (Some(segment), problem)
        }
        Err(e) => (None, Some((format!("rank {creator} cannot create shared memory: {e}"), true))),
    };
    let verdict = match (&problem, kind) {
        (None, _) => Verdict::Shared,
        (Some((reason, _)), TransportKind::Shm) => Verdict::Failed(format!(
            "the ranks cannot share memory, on which some rank insists: {reason}; start all ranks on one host, in one \
             network namespace and as one user, with memory to spare, or set BONFIRE_TRANSPORT to auto or tcp"
        )),
        (Some((reason, unexpected)), _) => {
            let level = if *unexpected { log::Level::Warn } else { log::Level::Info };
            let ranks: Vec<usize> = [creator].into_iter().chain(peers.iter().map(|(rank, _)| *rank)).collect();
            log::log!(level, "{} use TCP, because they cannot share memory: {reason}", RankList(&ranks));
            Verdict::NotShared
        }
    };
    send_to_all(peers, &verdict).await?;
    match verdict {
        Verdict::Shared => Ok(segment),
        Verdict::NotShared => Ok(None),
        Verdict::Failed(reason) => Err(reason),
    }
}

async fn send_to_all(peers: &mut [(usize, &mut TcpStream)], message: &impl Serialize) -> Result<(), String> {
    for (rank, peer) in peers {
        frame::write(*peer, message).await.map_err(|e| format!("the connection to rank {rank} ended: {e}"))?;
    }
    Ok(())
}

/// Reads all answers. Returns why the ranks cannot share memory, if they cannot, and whether that is unexpected.
async fn read_answers(creator: usize, peers: &mut [(usize, &mut TcpStream)]) -> Result<Option<(String, bool)>, String> {
    let mut problem = None;
    for (rank, peer) in peers {
        let lost = |e| format!("the connection to rank {rank} ended: {e}");
        // The caller limits the time.
        let answer = frame::expect(*peer, Duration::MAX).await.map_err(lost)?;
        let (reason, unexpected) = match answer {
            Attached::Yes => continue,
            Attached::Elsewhere => (format!("rank {rank} is on another host or in another network namespace"), false),
            Attached::Failed(reason) => (format!("rank {rank} cannot attach rank {creator}'s memory: {reason}"), true),
        };
        problem.get_or_insert((reason, unexpected));
    }
    Ok(problem)
}

/// Runs any other rank of a host, with the connection to the host's lowest rank.
async fn share_as_peer(
    (creator, stream): (usize, &mut TcpStream),
    identity: &Identity,
    ranks: usize,
) -> Result<Option<Segment>, String> {
    // The caller limits the time.
    let name = frame::expect::<SocketName>(stream, Duration::MAX).await.map_err(|e| connection_ended(creator, e))?;
    if let Some(name) = name {
        report_attached((creator, stream), attach(&name, creator, identity, ranks).await).await
    } else {
        await_verdict((creator, stream), None).await
    }
}

/// Reports whether the segment was attached, and waits for the verdict.
async fn report_attached(
    (creator, stream): (usize, &mut TcpStream),
    attached: io::Result<Segment>,
) -> Result<Option<Segment>, String> {
    let answer = match &attached {
        Ok(_) => Attached::Yes,
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => Attached::Elsewhere,
        Err(e) => Attached::Failed(e.to_string()),
    };
    frame::write(stream, &answer).await.map_err(|e| connection_ended(creator, e))?;
    await_verdict((creator, stream), attached.ok()).await
}

async fn await_verdict(
    (creator, stream): (usize, &mut TcpStream),
    segment: Option<Segment>,
) -> Result<Option<Segment>, String> {
    match frame::expect(stream, Duration::MAX).await.map_err(|e| connection_ended(creator, e))? {
        Verdict::Shared if segment.is_some() => Ok(segment),
        Verdict::Shared => Err(format!("rank {creator} says that this rank shares its memory, which it does not")),
        Verdict::NotShared => Ok(None),
        Verdict::Failed(reason) => Err(reason),
    }
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn identity(rank: usize, session: u64) -> Identity {
        Identity { secret: None, session, rank, world_size: 3 }
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dialled = crate::auth::open(None, &[listener.local_addr().unwrap()]).await.unwrap().unwrap();
        (listener.accept().await.unwrap().0, dialled)
    }

    /// Returns for each of three ranks whether it has the segment, or the error. Rank 1 attaches under `session`. Rank
    /// 2 fails to attach with `failure`, if any.
    fn try_three(
        kind: TransportKind,
        memory: bool,
        session: u64,
        failure: Option<ErrorKind>,
    ) -> [Result<bool, String>; 3] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let made = if memory { Segment::create(3) } else { Err(ErrorKind::StorageFull.into()) };
        let all = runtime.block_on(async {
            let ((mut one, mut zero_of_one), (mut two, mut zero_of_two)) = (pair().await, pair().await);
            let second = async {
                let Some(failure) = failure else {
                    return share_as_peer((0, &mut zero_of_two), &identity(2, 7), 3).await;
                };
                frame::expect::<SocketName>(&mut zero_of_two, TIMEOUT).await.unwrap();
                report_attached((0, &mut zero_of_two), Err(failure.into())).await
            };
            let mut peers = [(1, &mut one), (2, &mut two)];
            let (zero, one) = (identity(0, 7), identity(1, session));
            let (creator, first) =
                (share_as_creator(0, &mut peers, &zero, kind, made), share_as_peer((0, &mut zero_of_one), &one, 3));
            tokio::join!(creator, first, second)
        });
        [all.0, all.1, all.2].map(|result| result.map(|segment| segment.is_some()))
    }

    #[test]
    fn fuzz_messages() {
        bonfire_testing::fuzz::fuzz_frames::<SocketName>(
            "memory-offer",
            &[None, Some("bonfire-0123456789abcdef0123456789abcdef".into())],
        );
        bonfire_testing::fuzz::fuzz_frames(
            "memory-attached",
            &[Attached::Yes, Attached::Elsewhere, Attached::Failed("out of memory".into())],
        );
        bonfire_testing::fuzz::fuzz_frames(
            "memory-verdict",
            &[Verdict::Shared, Verdict::NotShared, Verdict::Failed("no".into())],
        );
        bonfire_testing::fuzz::fuzz_frames("memory-division", &[vec![true, false, true], vec![]]);
    }

    #[test]
    fn hosts_follow_machine_names_and_shared_segments() {
        assert_eq!(group_by_host(&[0, 1, 0, 3, 1]), [vec![0, 2], vec![1, 4], vec![3]]);
        let candidates = [vec![0, 2], vec![1, 4], vec![3]];
        let hosts = |rank, sharing: [bool; 3], has: bool| {
            let segment = has.then(|| Segment::create(2).unwrap().0);
            let shared = resolve_hosts(rank, &candidates, &sharing, segment);
            shared.map(|shared| shared.map(|Shared { hosts, segment, host }| (hosts, host, segment.map(|s| s.1))))
        };
        let all = vec![vec![0, 2], vec![1, 4], vec![3]];
        assert_eq!(hosts(4, [true, true, false], true), Ok(Some((all.clone(), 1, Some(1)))));
        assert_eq!(hosts(3, [true, true, false], false), Ok(Some((all, 2, None))));
        // Each rank of a host without shared memory is on its own.
        let apart = vec![vec![0], vec![1, 4], vec![2], vec![3]];
        assert_eq!(hosts(2, [false, true, false], false), Ok(Some((apart.clone(), 2, None))));
        assert_eq!(hosts(1, [false, true, false], true), Ok(Some((apart, 1, Some(0)))));
        assert_eq!(hosts(0, [false; 3], false), Ok(None));
        // Rank 0 is wrong about whether this rank has a segment.
        assert!(hosts(0, [true, true, false], false).is_err() && hosts(0, [false, true, false], true).is_err());
    }

    #[test]
    fn ranks_that_can_share_memory_do() {
        for kind in [TransportKind::Auto, TransportKind::Shm] {
            assert_eq!(try_three(kind, true, 7, None), [Ok(true), Ok(true), Ok(true)]);
        }
    }

    #[test]
    fn no_rank_shares_memory_if_one_cannot() {
        let elsewhere = Some(ErrorKind::ConnectionRefused);
        for (memory, session, failure) in
            [(true, 7, elsewhere), (true, 7, Some(ErrorKind::OutOfMemory)), (true, 8, None), (false, 7, None)]
        {
            let results = try_three(TransportKind::Auto, memory, session, failure);
            assert_eq!(results, [Ok(false), Ok(false), Ok(false)], "{memory}, {session}, {failure:?}");
        }
    }

    #[test]
    fn all_fail_with_the_same_reason_if_some_rank_insists() {
        for (memory, session, failure, words) in [
            (true, 7, Some(ErrorKind::ConnectionRefused), "rank 2 is on another host"),
            (true, 7, Some(ErrorKind::OutOfMemory), "rank 2 cannot attach rank 0's memory"),
            (true, 8, None, "rank 1 cannot attach rank 0's memory"),
            (false, 7, None, "rank 0 cannot create shared memory"),
        ] {
            let results = try_three(TransportKind::Shm, memory, session, failure);
            let reason = results[0].clone().unwrap_err();
            assert!(reason.contains(words) && reason.contains("BONFIRE_TRANSPORT"), "{reason}");
            assert!(results.iter().all(|result| *result == Err(reason.clone())), "{results:?}");
        }
    }
}
