//! How ranks find out whether they can share memory, and come to it.
//!
//! Among the ranks that may be on one host, by what they say of their machines, the lowest makes the segment and listens
//! on a unix socket without a file, under a random name. It tells the others the name, over the connections that the
//! rendezvous made; they ask there for the segment's descriptor and tell it whether they have it. Only if all have, all
//! use it: the lowest rank says so, to rank 0 too, which then tells everybody which ranks share memory. A rank on another
//! host, or in another network namespace, finds nobody under that name. Nothing that would outlive the ranks has a name
//! anywhere.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::descriptor::{attach, listen, serve};
use super::join::Joined;
use super::{Medium, Settings, gone};
use crate::auth::Member;
use crate::control::{Mesh, frame};
use crate::transport::Near;
use crate::transport::hosts::Hosts;
use crate::transport::shm::{Segment, Shm};
use crate::transport::tcp::Tcp;
use crate::types::{Error, Ranks};

/// From the lowest rank of a host: under which name the segment is to be had, if there is one.
type Offer = Option<String>;

/// A rank's answer.
#[derive(Debug, Serialize, Deserialize)]
enum Attached {
    Yes,
    /// Nobody has that name here.
    Elsewhere,
    Failed(String),
}

/// The lowest rank's last word.
#[derive(Debug, Serialize, Deserialize)]
enum Verdict {
    Shared,
    /// They use TCP among each other.
    Apart,
    /// Some rank insisted on shared memory.
    Failed(String),
}

/// What came of it.
pub(super) struct Shared {
    /// The ranks of each host: those that share memory, and those that share none by themselves.
    hosts: Vec<Vec<usize>>,
    /// This rank's memory, with its place among those that share it.
    segment: Option<(Segment, usize)>,
    /// This rank's host.
    host: usize,
}

impl Shared {
    /// What the ranks reach each other by, now that the connections are served.
    pub fn near(self, tcp: &Arc<Tcp>) -> Near {
        let Shared { hosts, segment, host } = self;
        let place = segment.as_ref().map_or(0, |(_, place)| *place);
        let shm = segment.map(|(segment, place)| Shm::new(segment, place, hosts[host].clone(), tcp.clone()));
        match shm {
            Some(shm) if hosts.len() == 1 => Near::Everybody(Arc::new(shm)),
            shm => Near::Hosts(Hosts::new(hosts, host, place, shm)),
        }
    }
}

/// Finds out which ranks can share memory, and has them share it. None where no rank shares any.
pub(super) async fn agree(settings: &Settings, start: Instant, joined: &mut Joined) -> Result<Option<Shared>, Error> {
    let Joined { mesh, medium, hosts } = joined;
    // A rank that insists wants to hear why it cannot be.
    let candidates = if *medium == Medium::Shm { vec![(0..hosts.len()).collect()] } else { together(hosts) };
    if *medium == Medium::Tcp || candidates.iter().all(|members| members.len() == 1) {
        return Ok(None);
    }
    let (rank, left) = (settings.rank, settings.timeout.saturating_sub(start.elapsed()));
    let agreed = async {
        let segment = share(rank, mesh, *medium, &candidates).await?;
        divide(rank, mesh, candidates, segment).await
    };
    let late = |_| Err("the ranks did not find out in time whether they can share memory; allow more time".to_owned());
    timeout(left, agreed).await.unwrap_or_else(late).map_err(|reason| settings.failed(start, reason))
}

/// The ranks with the same number, by their lowest.
fn together(numbers: &[usize]) -> Vec<Vec<usize>> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for (rank, number) in numbers.iter().enumerate() {
        match hosts.iter_mut().find(|members| numbers[members[0]] == *number) {
            Some(members) => members.push(rank),
            None => hosts.push(vec![rank]),
        }
    }
    hosts
}

/// Comes to share memory with the ranks that may be on this rank's host; gives it if all of them have it.
async fn share(
    rank: usize,
    mesh: &mut Mesh,
    medium: Medium,
    candidates: &[Vec<usize>],
) -> Result<Option<Segment>, String> {
    let Some(members) = candidates.iter().find(|members| members.contains(&rank)) else { return Ok(None) };
    let (member, n) = (&mesh.member, members.len());
    if n == 1 {
        return Ok(None);
    }
    let connections = mesh.connections.iter_mut().enumerate();
    let mut others = connections.filter(|(peer, _)| members.contains(peer)).filter_map(|(p, c)| Some((p, c.as_mut()?)));
    if members[0] == rank {
        return host(rank, &mut others.collect::<Vec<_>>(), member, medium, Segment::create(n)).await;
    }
    match others.next() {
        Some(maker) => attend(maker, member, n).await,
        None => Ok(None),
    }
}

/// Tells everybody which of the hosts share memory.
async fn divide(
    rank: usize,
    mesh: &mut Mesh,
    candidates: Vec<Vec<usize>>,
    segment: Option<Segment>,
) -> Result<Option<Shared>, String> {
    let mut share = Vec::new();
    if let [None, others @ ..] = &mut mesh.connections[..] {
        // Of each host its lowest rank reports.
        for members in &candidates {
            share.push(match others.get_mut(members[0].wrapping_sub(1)) {
                Some(Some(maker)) if members.len() > 1 => {
                    frame::expect(maker, Duration::MAX).await.map_err(|e| gone(members[0], e))?
                }
                _ => members[0] == 0 && segment.is_some(),
            });
        }
        let mut others: Vec<_> = (1..).zip(others.iter_mut().flatten()).collect();
        tell(&mut others, &share).await?;
    } else if let Some(Some(zero)) = mesh.connections.first_mut() {
        if candidates.iter().any(|members| members.len() > 1 && members[0] == rank) {
            frame::write(zero, &segment.is_some()).await.map_err(|e| gone(0, e))?;
        }
        share = frame::expect(zero, Duration::MAX).await.map_err(|e| gone(0, e))?;
        if share.len() != candidates.len() {
            return Err("rank 0 divides the ranks into other hosts than this rank".into());
        }
    }
    divided(rank, &candidates, &share, segment)
}

/// The division where those candidates share memory that `share` says.
fn divided(
    rank: usize,
    candidates: &[Vec<usize>],
    share: &[bool],
    segment: Option<Segment>,
) -> Result<Option<Shared>, String> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for (members, share) in candidates.iter().zip(share) {
        if *share {
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
    let Some((host, place)) = hosts.iter().enumerate().find_map(find) else {
        return Err(format!("rank {rank} is on no host"));
    };
    if segment.is_some() != (hosts[host].len() > 1) {
        return Err("rank 0 does not know who shares memory with this rank".into());
    }
    log::debug!("rank {rank} shares memory with ranks {:?}; the hosts have {hosts:?}", hosts[host]);
    Ok(Some(Shared { hosts, segment: segment.map(|segment| (segment, place)), host }))
}

/// The lowest rank of a host, with the connections to the others.
async fn host(
    maker: usize,
    guests: &mut [(usize, &mut TcpStream)],
    member: &Member,
    medium: Medium,
    made: io::Result<(Segment, OwnedFd)>,
) -> Result<Option<Segment>, String> {
    let made = made.and_then(|(segment, file)| Ok((segment, file, listen()?)));
    let name: Offer = made.as_ref().ok().map(|(_, _, (name, _))| name.clone());
    tell(guests, &name).await?;
    let (segment, problem) = match made {
        Ok((segment, file, (_, listener))) => {
            let problem = tokio::select! {
                answers = hear(maker, guests) => answers?,
                never = serve(&listener, Arc::new(file), member) => match never {},
            };
            (Some(segment), problem)
        }
        Err(e) => (None, Some((format!("rank {maker} cannot make shared memory: {e}"), true))),
    };
    let verdict = match (&problem, medium) {
        (None, _) => Verdict::Shared,
        (Some((reason, _)), Medium::Shm) => Verdict::Failed(format!(
            "the ranks cannot share memory, which some rank asked for: {reason}; start all ranks on one host, in one \
             network namespace and as one user, with memory to spare, or set BONFIRE_TRANSPORT to auto or tcp"
        )),
        (Some((reason, unexpected)), _) => {
            let level = if *unexpected { log::Level::Warn } else { log::Level::Info };
            let ranks: Vec<usize> = [maker].into_iter().chain(guests.iter().map(|(rank, _)| *rank)).collect();
            log::log!(level, "{} use TCP, because they cannot share memory: {reason}", Ranks(&ranks));
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

async fn tell(guests: &mut [(usize, &mut TcpStream)], message: &impl Serialize) -> Result<(), String> {
    for (rank, guest) in guests {
        frame::write(*guest, message).await.map_err(|e| format!("rank {rank} went away: {e}"))?;
    }
    Ok(())
}

/// Hears all answers. Gives why the memory cannot be shared, if it can't, and whether that is surprising.
async fn hear(maker: usize, guests: &mut [(usize, &mut TcpStream)]) -> Result<Option<(String, bool)>, String> {
    let mut problem = None;
    for (rank, guest) in guests {
        let lost = |e| format!("rank {rank} went away: {e}");
        // The caller's limit ends this.
        let answer = frame::expect(*guest, Duration::MAX).await.map_err(lost)?;
        let (reason, unexpected) = match answer {
            Attached::Yes => continue,
            Attached::Elsewhere => (format!("rank {rank} is on another host or in another network namespace"), false),
            Attached::Failed(reason) => (format!("rank {rank} cannot have rank {maker}'s memory: {reason}"), true),
        };
        problem.get_or_insert((reason, unexpected));
    }
    Ok(problem)
}

/// Any other rank of a host, with the connection to its lowest.
async fn attend(
    (maker, stream): (usize, &mut TcpStream),
    member: &Member,
    ranks: usize,
) -> Result<Option<Segment>, String> {
    // The caller's limit ends these waits.
    let name = frame::expect::<Offer>(stream, Duration::MAX).await.map_err(|e| gone(maker, e))?;
    if let Some(name) = name {
        attend_to((maker, stream), attach(&name, maker, member, ranks).await).await
    } else {
        verdict((maker, stream), None).await
    }
}

/// Reports what came of the attempt to attach, and hears what comes of it.
async fn attend_to(
    (maker, stream): (usize, &mut TcpStream),
    attached: io::Result<Segment>,
) -> Result<Option<Segment>, String> {
    let answer = match &attached {
        Ok(_) => Attached::Yes,
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => Attached::Elsewhere,
        Err(e) => Attached::Failed(e.to_string()),
    };
    frame::write(stream, &answer).await.map_err(|e| gone(maker, e))?;
    verdict((maker, stream), attached.ok()).await
}

async fn verdict(
    (maker, stream): (usize, &mut TcpStream),
    segment: Option<Segment>,
) -> Result<Option<Segment>, String> {
    match frame::expect(stream, Duration::MAX).await.map_err(|e| gone(maker, e))? {
        Verdict::Shared if segment.is_some() => Ok(segment),
        Verdict::Shared => Err(format!("rank {maker} takes this rank's memory for shared, which it is not")),
        Verdict::Apart => Ok(None),
        Verdict::Failed(reason) => Err(reason),
    }
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn member(rank: usize, session: u64) -> Member {
        Member { secret: None, session, rank, world_size: 3 }
    }

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
                let Some(failure) = failure else { return attend((0, &mut zero_of_two), &member(2, 7), 3).await };
                frame::expect::<Offer>(&mut zero_of_two, PATIENCE).await.unwrap();
                attend_to((0, &mut zero_of_two), Err(failure.into())).await
            };
            let mut guests = [(1, &mut one), (2, &mut two)];
            let (zero, one) = (member(0, 7), member(1, session));
            let (host, first) = (host(0, &mut guests, &zero, medium, made), attend((0, &mut zero_of_one), &one, 3));
            tokio::join!(host, first, second)
        });
        [all.0, all.1, all.2].map(|result| result.map(|segment| segment.is_some()))
    }

    #[test]
    fn fuzz_messages() {
        bonfire_testing::fuzz::fuzz_frames::<Offer>(
            "memory-offer",
            &[None, Some("bonfire-0123456789abcdef0123456789abcdef".into())],
        );
        bonfire_testing::fuzz::fuzz_frames(
            "memory-attached",
            &[Attached::Yes, Attached::Elsewhere, Attached::Failed("out of memory".into())],
        );
        bonfire_testing::fuzz::fuzz_frames(
            "memory-verdict",
            &[Verdict::Shared, Verdict::Apart, Verdict::Failed("no".into())],
        );
        bonfire_testing::fuzz::fuzz_frames("memory-division", &[vec![true, false, true], vec![]]);
    }

    #[test]
    fn ranks_are_divided_by_their_machines_and_by_who_has_memory() {
        assert_eq!(together(&[0, 1, 0, 3, 1]), [vec![0, 2], vec![1, 4], vec![3]]);
        let candidates = [vec![0, 2], vec![1, 4], vec![3]];
        let hosts = |rank, share: [bool; 3], has: bool| {
            let segment = has.then(|| Segment::create(2).unwrap().0);
            let shared = divided(rank, &candidates, &share, segment);
            shared.map(|shared| shared.map(|Shared { hosts, segment, host }| (hosts, host, segment.map(|s| s.1))))
        };
        let all = vec![vec![0, 2], vec![1, 4], vec![3]];
        assert_eq!(hosts(4, [true, true, false], true), Ok(Some((all.clone(), 1, Some(1)))));
        assert_eq!(hosts(3, [true, true, false], false), Ok(Some((all, 2, None))));
        // The ranks of a host without memory fall apart.
        let apart = vec![vec![0], vec![1, 4], vec![2], vec![3]];
        assert_eq!(hosts(2, [false, true, false], false), Ok(Some((apart.clone(), 2, None))));
        assert_eq!(hosts(1, [false, true, false], true), Ok(Some((apart, 1, Some(0)))));
        assert_eq!(hosts(0, [false; 3], false), Ok(None));
        // Rank 0 is wrong about this rank.
        assert!(hosts(0, [true, true, false], false).is_err() && hosts(0, [false, true, false], true).is_err());
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
