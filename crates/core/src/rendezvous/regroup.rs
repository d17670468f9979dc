//! Forms another group out of a group of processes: a subgroup, or the survivors of a failure.
//!
//! The ranks talk over the old group's control connections, which outlive its failure. The members of a subgroup invite
//! each other; survivors agree on which ranks go on (`agreement`), in which rank 0 has no special role: a star becomes
//! a mesh first. Then they connect as in a first rendezvous, each on a port that it has announced to the others.
//!
//! # Which ranks have certainly ended
//! A rank has certainly ended if it sent a goodbye and had not announced before that it goes on in another group. It
//! also has if its connection closed after a first message in this group and before the rank was ever silent for too
//! long, and its machine refuses connections to the port at which it listened. All others are only silent.
//!
//! # Limits
//! * A firewall that refuses connections on behalf of a live machine deceives this test. Two sides may then go on.
//! * If links break so that not every rank reaches every other one, more ranks than necessary may be left out: the
//!   first proposal that arrives wins.

mod agreement;

use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::timeout;

use self::agreement::{Agreement, Next};
use super::dial::bind;
use super::join::{self, Joined};
use super::{Connected, Medium, Settings, start_group};
use crate::auth::{self, AcceptQueue, Member, Secret};
use crate::control::invitation::{Endpoint, Invitation, random, session};
use crate::control::{HeartbeatTimeout, MOST, Membership, PeerEvent, RankEvent, ShrinkMessage};
use crate::sync::{Deadline, OwnRuntime};
use crate::transport::tcp::Tcp;
use crate::transport::{Base, Regroup, hosts_of};
use crate::types::{Apart, Error, Fault, Ranks};

/// Time limit for probing a rank whose connection ended.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// A group of processes from which another group can be formed.
pub(super) struct ProcessGroup {
    pub settings: Settings,
    /// The medium that all ranks agreed on in the rendezvous.
    pub medium: Medium,
    /// The host of each rank, as in [`Joined`].
    pub hosts: Vec<usize>,
    pub tcp: Arc<Tcp>,
    /// Sockets whose closing would look to peers as if this rank had ended: the port at which it listened in the parent
    /// group, and its connections of groups that were, as far as it knows, not agreed on. If the network was
    /// partitioned meanwhile, other ranks may have agreed on one of those groups.
    #[expect(dead_code, reason = "held until this group ends, and not used")]
    pub held: Vec<HeldOpen>,
}

impl Regroup for ProcessGroup {
    fn shrink(&self, deadline: &Deadline) -> Result<Base, Error> {
        let mut agreement = Agreement::new(self.settings.rank, self.settings.world_size);
        // The group calls this only once.
        let Some(news) = self.tcp.news() else { return Err(Error::broken("shrink", "it has already been called")) };
        let runtime = OwnRuntime::new()?;
        let mut groups = Vec::new();
        let agreed = runtime.run(|| async {
            let problem = RefCell::new(String::new());
            let agreeing = self.agree(&mut agreement, news, &mut groups, &problem);
            timeout(deadline.remaining(), agreeing).await.map_err(|_| problem.take())
        })?;
        let standing = agreed.unwrap_or_else(|problem| {
            let problem = Some(problem).filter(|problem| !problem.is_empty());
            let problem = problem.map_or(String::new(), |problem| format!(" (in the new group: {problem})"));
            Err(ShrinkFailure::Apart(Apart::Missing { ranks: agreement.waits_for(), problem }))
        });
        let standing = standing.map_err(|failure| match failure {
            ShrinkFailure::Apart(why) => Error::Shrink { rank: self.settings.rank, why, elapsed: deadline.elapsed() },
            ShrinkFailure::Error(error) => error,
        })?;
        self.start(runtime, &standing, groups)
    }

    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<Base, Fault> {
        let runtime = OwnRuntime::new().map_err(Fault::Failed)?;
        let (listener, door) = runtime.run(|| self.listen("subgroup")).flatten().map_err(Fault::Failed)?;
        let doors = self.tcp.invite(&Invitation { members: members.to_vec(), door }, deadline)?;
        let doors = members.iter().copied().zip(doors).collect();
        let formed = runtime.run(|| async {
            let waiting_for = RefCell::new(String::new());
            let late = || {
                let waiting =
                    format!("{}, by their ranks in it, within {:.1?}", waiting_for.borrow(), deadline.elapsed());
                Fault::Failed(Error::broken("connecting the members of a subgroup", waiting))
            };
            tokio::select! {
                formed = self.connect(members, (listener, door), doors, &waiting_for) => {
                    formed.map_err(|error| Fault::Failed(as_error_of("subgroup", error)))
                }
                failed = self.tcp.failed() => {
                    Err(failed.unwrap_or_else(|e| Fault::Failed(Error::io("watching for failures", e))))
                }
                () = tokio::time::sleep(deadline.remaining()) => Err(late()),
            }
        });
        let formed = formed.unwrap_or_else(|error| Err(Fault::Failed(error)))?;
        // Other members may still wait for a straggler.
        let first = deadline.remaining().max(self.settings.silence);
        let silence = HeartbeatTimeout { first, later: self.settings.silence };
        start_group(runtime, formed, silence, Vec::new()).map_err(Fault::Failed)
    }

    fn hosts(&self) -> Vec<usize> {
        self.hosts.clone()
    }
}

/// A resource that is held and not used.
pub(super) enum HeldOpen {
    Port(#[expect(dead_code, reason = "held only")] OwnedFd),
    Connected(#[expect(dead_code, reason = "held only")] Box<Connected>),
}

/// Why this rank does not continue.
enum ShrinkFailure {
    Apart(Apart),
    Error(Error),
}

impl From<Error> for ShrinkFailure {
    fn from(error: Error) -> Self {
        ShrinkFailure::Error(error)
    }
}

impl ProcessGroup {
    /// Agrees on a group to which all its ranks are connected. This rank's connections to it are then among `groups`.
    async fn agree(
        &self,
        agreement: &mut Agreement,
        news: UnboundedReceiver<RankEvent>,
        groups: &mut Vec<(Membership, Connected)>,
        problem: &RefCell<String>,
    ) -> Result<Membership, ShrinkFailure> {
        let (addresses, secret) = (self.tcp.addresses(), self.settings.secret.clone());
        let mut events = PeerEvents { news, probes: JoinSet::new(), addresses, secret, silent: Vec::new() };
        let mut own: Option<(TcpListener, Endpoint)> = None;
        let mut forming: Option<Pin<Box<_>>> = None;
        // Why this rank could not connect, and when it returns that error.
        let mut failed: Option<(Error, tokio::time::Instant)> = None;
        loop {
            match agreement.next() {
                Next::Propose(standing) => {
                    (forming, failed) = (None, None);
                    problem.take();
                    let (listener, door) = self.listen("shrink").await?;
                    self.tcp.say(ShrinkMessage::Proposes(standing, door));
                    own = Some((listener, door));
                }
                Next::Form(doors) => {
                    if let Some(own) = own.take() {
                        let members: Vec<usize> = agreement.standing().members.iter().copied().collect();
                        forming = Some(Box::pin(async move { self.connect(&members, own, doors, problem).await }));
                    }
                }
                Next::Agree(standing) => {
                    self.tcp.say(ShrinkMessage::Agreed(standing.clone()));
                    return Ok(standing);
                }
                Next::Excluded { by } => return Err(ShrinkFailure::Apart(Apart::Excluded { by })),
                Next::Minority { silent } => return Err(ShrinkFailure::Apart(Apart::Minority { silent })),
                Next::Wait => {
                    let formed = async {
                        match &mut forming {
                            Some(forming) => forming.await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        () = events.wait(agreement) => {}
                        formed = formed => {
                            forming = None;
                            match formed {
                                Ok(formed) => {
                                    groups.push((agreement.standing().clone(), formed));
                                    agreement.formed();
                                    self.tcp.say(ShrinkMessage::Formed(agreement.standing().clone()));
                                }
                                // Most likely a member has ended, or knows of one that has. This rank will learn of it.
                                Err(error) => failed = Some((
                                    as_error_of("shrink", error),
                                    tokio::time::Instant::now() + 2 * PROBE_TIMEOUT,
                                )),
                            }
                        }
                        error = final_error(&failed) => return Err(ShrinkFailure::Error(error)),
                    }
                }
            }
        }
    }

    /// Listens for the members of a new group, on a port of its own.
    async fn listen(&self, operation: &str) -> Result<(TcpListener, Endpoint), Error> {
        let mut address = self.tcp.addresses()[self.settings.rank];
        address.set_port(0);
        let listener = bind(&self.settings, Instant::now(), &address.to_string()).await;
        let listener = listener.map_err(|error| as_error_of(operation, error))?;
        let port = listener.local_addr().map_err(|e| Error::io(operation, e))?.port();
        Ok((listener, Endpoint { port, key: random()? }))
    }

    /// Connects to the members of a new group through their doors. `members` is in the order of the new ranks.
    async fn connect(
        &self,
        members: &[usize],
        (listener, own): (TcpListener, Endpoint),
        doors: Vec<(usize, Endpoint)>,
        waiting_for: &RefCell<String>,
    ) -> Result<Connected, Error> {
        let start = Instant::now();
        let new_rank = |rank| members.iter().position(|member| *member == rank).unwrap_or(0);
        let (rank, n) = (new_rank(self.settings.rank), members.len());
        let mut addresses: Vec<SocketAddr> = members.iter().map(|member| self.tcp.addresses()[*member]).collect();
        addresses[rank].set_port(own.port);
        let others = || doors.iter().filter(|(member, _)| *member != self.settings.rank);
        for (member, door) in others() {
            addresses[new_rank(*member)].set_port(door.port);
        }
        let session = session(others().map(|(_, door)| *door).chain([own]));
        let address = addresses[0].to_string();
        let settings = Settings { rank, world_size: n, address, ..self.settings.clone() };
        let member = Member { secret: settings.secret.clone(), session, rank, world_size: n };
        let lobby = AcceptQueue::new(n.saturating_mul(MOST));
        let hosts = hosts_of(members, &self.hosts);
        let door = (member, listener, &lobby);
        let mesh = join::connect((&settings, start), door, addresses, &hosts, None, waiting_for).await?;
        let joined = Joined { mesh, medium: self.medium, hosts };
        Connected::share(settings, start, joined).await
    }

    /// Returns the heartbeat timeout of a group that was agreed on: no rank in it is still busy connecting.
    fn silence(&self) -> HeartbeatTimeout {
        HeartbeatTimeout { first: self.settings.silence, later: self.settings.silence }
    }

    /// Starts the group that was agreed on.
    fn start(
        &self,
        runtime: OwnRuntime,
        standing: &Membership,
        groups: Vec<(Membership, Connected)>,
    ) -> Result<Base, Error> {
        let members: Vec<usize> = standing.members.iter().copied().collect();
        log::info!("rank {} continues in a group of the former {}", self.settings.rank, Ranks(&members));
        let (mut agreed, abandoned): (Vec<_>, Vec<_>) = groups.into_iter().partition(|(formed, _)| formed == standing);
        let Some((_, agreed)) = agreed.pop() else {
            return Err(Error::broken("shrink", "this rank is not connected to the group that was agreed on"));
        };
        let port = self.tcp.port().map_err(|e| Error::io("shrink", e))?;
        let abandoned = abandoned.into_iter().map(|(_, connected)| HeldOpen::Connected(Box::new(connected)));
        start_group(runtime, agreed, self.silence(), abandoned.chain([HeldOpen::Port(port)]).collect())
    }
}

/// Turns a rendezvous error into an error of `operation`, which is what the caller called.
fn as_error_of(operation: &str, error: Error) -> Error {
    match error {
        Error::Rendezvous { reason, .. } => Error::broken(operation, reason),
        error => error,
    }
}

/// Returns the error of a failed attempt, once enough time has passed to notice a rank whose end would explain it.
async fn final_error(failed: &Option<(Error, tokio::time::Instant)>) -> Error {
    match failed {
        Some((error, at)) => {
            tokio::time::sleep_until(*at).await;
            error.clone()
        }
        None => std::future::pending().await,
    }
}

/// Events about the other ranks.
struct PeerEvents<'a> {
    news: UnboundedReceiver<RankEvent>,
    /// Probes of ranks whose connections closed. Each returns the rank and whether it has ended.
    probes: JoinSet<(usize, bool)>,
    addresses: &'a [SocketAddr],
    secret: Option<Secret>,
    silent: Vec<usize>,
}

impl PeerEvents<'_> {
    /// Waits for events and handles them. Cancel safe.
    async fn wait(&mut self, agreement: &mut Agreement) {
        let news = tokio::select! {
            Some(news) = self.news.recv() => news,
            Some(Ok((peer, ended))) = self.probes.join_next() => return agreement.exclude(peer, ended),
            else => std::future::pending().await,
        };
        self.handle(news, agreement);
        // Handles all pending events before the rank acts: a rank that was suspended learns that others went on.
        while let Ok(news) = self.news.try_recv() {
            self.handle(news, agreement);
        }
    }

    fn handle(&mut self, (peer, news): RankEvent, agreement: &mut Agreement) {
        match news {
            PeerEvent::Said(word) => agreement.receive(peer, word),
            PeerEvent::Left => agreement.exclude(peer, true),
            PeerEvent::Silent => {
                self.silent.push(peer);
                agreement.exclude(peer, false);
            }
            // In a partition others may have gone on and closed: a rank that was silent first may be alive.
            PeerEvent::Closed if self.silent.contains(&peer) => {}
            PeerEvent::Closed => {
                let address = self.addresses[peer];
                let secret = self.secret.clone();
                self.probes.spawn(async move { (peer, has_ended(secret.as_ref(), address).await) });
            }
        }
    }
}

/// Whether the process that listened here has certainly ended: its machine refuses the connection. A process that is
/// just ending may still accept a connection, and then drops it.
async fn has_ended(secret: Option<&Secret>, address: SocketAddr) -> bool {
    let probe = async {
        loop {
            match auth::open(secret, &[address]).await.unwrap_or_else(|e| Err(io::Error::other(e))) {
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return true,
                Err(_) => return false,
                Ok(mut stream) => drop::<io::Result<u8>>(stream.read_u8().await),
            }
        }
    };
    timeout(PROBE_TIMEOUT, probe).await.unwrap_or(false)
}
