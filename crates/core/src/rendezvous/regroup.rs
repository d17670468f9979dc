//! Forms another group out of a group of processes: a subgroup, or the survivors of a failure.
//!
//! The ranks talk over the old group's control connections, which outlive its failure. The members of a subgroup invite
//! each other; survivors agree on which ranks go on (`agreement`), in which rank 0 has no special role: a star becomes
//! a mesh first. Then they connect as in a first rendezvous, each on a port that it has announced to the others.
//!
//! A shrink that fails is kept with all its connections, and the next call continues it.
//!
//! # Which ranks have certainly ended
//! A rank has certainly ended if it sent a goodbye and had not announced before that it goes on in another group. It
//! also has if its connection closed before the rank was ever silent for too long and without word that it may be
//! elsewhere, and the port at which it listened is closed or another process has it (`control/attempt`). All others are
//! only silent.
//!
//! A rank may be killed after a group was agreed on and before its first message there. Or it has narrowed its
//! membership meanwhile, goes on in another group, and has perhaps ended there. So a rank whose end of another group is
//! ready says on all connections that it made for groups before that it may be elsewhere (`Message::Elsewhere`), and
//! only then tells the members of that group. Its first message in one of the earlier groups takes that back. A rank
//! holds these connections, and its ports, in all groups that follow, so peers see the end of none that lives.
//!
//! # Limits
//! * A firewall that refuses connections on behalf of a live machine, or answers them, deceives this test. Two sides
//!   may then go on.
//! * If the network between a rank and all ranks that go on elsewhere fails just then, and is repaired within the
//!   heartbeat timeout (or the rank's machine slept meanwhile), and all the others have ended by then, the rank has
//!   missed their word. It takes them for killed, and goes on after them; never beside them.
//! * If links break so that not every rank reaches every other one, more ranks than necessary may be left out: the
//!   first proposal that arrives wins.

mod agreement;
mod events;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use self::agreement::{Agreement, Next};
use self::events::PeerEvents;
use super::join::{self, Joined};
use super::listen::{bind_to, first_address};
use super::{Connected, Settings, TransportKind, start_group, turn_on_host};
use crate::auth::{AcceptQueue, Identity, Listener};
use crate::control::hang::HangTimeout;
use crate::control::invitation::{Endpoint, Invitation, random, session};
use crate::control::{self, ControlSetup, HeartbeatTimeout, MAX_DATA_CONNECTIONS, Membership, Message, ShrinkMessage};
use crate::sync::{Deadline, Mutex, OwnRuntime, lock};
use crate::transport::tcp::Tcp;
use crate::transport::{GroupEndpoint, Regroup, hosts_of};
use crate::types::{Error, Fault, RankList, ShrinkError};

/// How long a rank that could not connect waits for the news that a member has ended.
const NEWS: Duration = Duration::from_secs(2);

/// A group of processes from which another group can be formed.
pub(super) struct ProcessGroup {
    pub settings: Settings,
    /// The transport that all ranks agreed on in the rendezvous.
    pub kind: TransportKind,
    /// The host of each rank, as in [`Joined`].
    pub hosts: Vec<usize>,
    pub tcp: Arc<Tcp>,
    /// Sockets whose closing would look to peers as if this rank had ended: the port at which it listened in the parent
    /// group, and its connections of groups that were, as far as it knows, not agreed on. If the network was
    /// partitioned meanwhile, other ranks may have agreed on one of those groups. What the parent group held is here,
    /// too.
    pub held: Vec<Arc<HeldOpen>>,
    /// The shrink that a call has begun and none has completed.
    pub unfinished: Mutex<Option<Shrink>>,
}

/// A shrink in progress, over all calls.
pub(super) struct Shrink {
    /// Drives all sockets below. The new group continues with it.
    runtime: OwnRuntime,
    state: ShrinkState,
}

struct ShrinkState {
    /// The time of the first call.
    start: Instant,
    /// The time of this rank's last proposal.
    proposed: Instant,
    /// How many other ranks have proposed, and since when.
    came: (usize, Instant),
    agreement: Agreement,
    events: PeerEvents,
    /// Where the other members connect to this rank in the group that it proposes. Taken to connect.
    own: Option<(Listener, Endpoint)>,
    /// This rank's ends of the groups to which it was connected.
    groups: Vec<(Membership, Connected)>,
}

impl Regroup for ProcessGroup {
    fn shrink(&self, hang: &HangTimeout, deadline: &Deadline) -> Result<GroupEndpoint, Error> {
        let mut unfinished = lock(&self.unfinished);
        let mut shrink = match unfinished.take() {
            Some(mut shrink) => {
                shrink.state.resume();
                shrink
            }
            None => self.begin_shrink()?,
        };
        let Shrink { runtime, state } = &mut shrink;
        let agreed = runtime.run(|| async {
            let problem = RefCell::new(String::new());
            let agreeing = self.agree(state, hang, &problem);
            timeout(deadline.remaining(), agreeing).await.map_err(|_| problem.take())
        });
        let agreed = agreed.map_err(ShrinkFailure::Error).and_then(|agreed| {
            agreed.unwrap_or_else(|problem| {
                let problem = Some(problem).filter(|problem| !problem.is_empty());
                let problem = problem.map_or(String::new(), |problem| format!(" (in the new group: {problem})"));
                Err(ShrinkFailure::CannotContinue(ShrinkError::Missing {
                    ranks: shrink.state.agreement.missing(),
                    problem,
                }))
            })
        });
        match agreed {
            Ok(membership) => self.start(shrink, &membership),
            Err(failure) => {
                *unfinished = Some(shrink);
                Err(match failure {
                    ShrinkFailure::CannotContinue(why) => {
                        Error::Shrink { rank: self.settings.rank, why, elapsed: deadline.elapsed() }
                    }
                    ShrinkFailure::Error(error) => error,
                })
            }
        }
    }

    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<GroupEndpoint, Fault> {
        let runtime = OwnRuntime::new()?;
        let (listener, endpoint) = runtime.run(|| async { self.listen("subgroup") }).flatten()?;
        let endpoints = self.tcp.invite(&Invitation { members: members.to_vec(), endpoint }, deadline)?;
        let endpoints = members.iter().copied().zip(endpoints).collect();
        let formed = runtime.run(|| async {
            let waiting_for = RefCell::new(String::new());
            let late = || {
                let waiting =
                    format!("{}, by their ranks in it, within {:.1?}", waiting_for.borrow(), deadline.elapsed());
                Fault::Failed(Error::broken("connecting the members of a subgroup", waiting))
            };
            tokio::select! {
                formed = async {
                    match self.connect(members, (listener, endpoint), endpoints, &waiting_for).await {
                        Ok(formed) => Ok(formed),
                        // Most likely a member has ended. This rank will learn of it, and then it is the cause.
                        Err(error) => {
                            tokio::time::sleep(NEWS).await;
                            Err(Fault::Failed(as_error_of("subgroup", error)))
                        }
                    }
                } => formed,
                failed = self.tcp.failed() => {
                    Err(failed.unwrap_or_else(|e| Fault::Failed(Error::io("watching for failures", e))))
                }
                () = tokio::time::sleep(deadline.remaining()) => Err(late()),
            }
        });
        let formed = formed.unwrap_or_else(|error| Err(Fault::Failed(error)))?;
        // Other members may still wait for a straggler.
        let first = deadline.remaining().max(self.settings.heartbeat_timeout);
        let heartbeat_timeout = HeartbeatTimeout { first, later: self.settings.heartbeat_timeout };
        start_group(runtime, formed, heartbeat_timeout, Vec::new()).map_err(Fault::Failed)
    }

    fn hosts(&self) -> Vec<usize> {
        self.hosts.clone()
    }

    fn number(&self, rank: usize) -> Option<usize> {
        self.settings.source.numbers.of(rank)
    }
}

/// A resource that is held and not used.
pub(super) enum HeldOpen {
    Port(#[expect(dead_code, reason = "held only")] Vec<OwnedFd>),
    Connected(#[expect(dead_code, reason = "held only")] Box<ControlSetup>),
}

/// Why this rank does not continue.
enum ShrinkFailure {
    CannotContinue(ShrinkError),
    Error(Error),
}

impl From<Error> for ShrinkFailure {
    fn from(error: Error) -> Self {
        ShrinkFailure::Error(error)
    }
}

impl ShrinkState {
    /// Continues after a call that failed. What that call was connecting is lost.
    fn resume(&mut self) {
        if self.own.is_none() {
            self.agreement.renew();
        }
    }

    /// Leaves out the ranks that have not proposed for too long, if the others can go on. Returns whether it did, and
    /// when to look again.
    fn leave_out_hung(&mut self, hang: &HangTimeout) -> (bool, Option<Instant>) {
        if self.agreement.proposers() > self.came.0 {
            self.came = (self.agreement.proposers(), Instant::now());
        }
        let soonest = self.came.1 + hang.grace();
        let (mut hung, mut next) = (Vec::new(), None);
        for (rank, called) in self.agreement.stragglers() {
            let limit = if called { self.proposed + hang.limit } else { self.start + hang.of(rank) }.max(soonest);
            if limit <= Instant::now() {
                hung.push(rank);
            } else {
                next = Some(next.map_or(limit, |next: Instant| next.min(limit)));
            }
        }
        let left_out = !hung.is_empty() && self.agreement.leave_out(&hung);
        if left_out {
            log::warn!(
                "shrink leaves out {}: alive, and did not call it in time (BONFIRE_HANG_TIMEOUT)",
                RankList(&hung)
            );
        }
        (left_out, next)
    }
}

impl ProcessGroup {
    fn begin_shrink(&self) -> Result<Shrink, Error> {
        let runtime = OwnRuntime::new()?;
        let Some(events) = self.tcp.peer_events() else {
            let reason = "an earlier call failed after the ranks had agreed: the others go on without this rank";
            return Err(Error::broken("shrink", reason));
        };
        let (addresses, identity) = (self.tcp.addresses().to_vec(), self.tcp.identity().clone());
        let state = ShrinkState {
            start: Instant::now(),
            proposed: Instant::now(),
            came: (0, Instant::now()),
            agreement: Agreement::new(self.settings.rank, self.settings.world_size),
            events: PeerEvents::new(events, addresses, identity, self.probe_timeout()),
            own: None,
            groups: Vec::new(),
        };
        Ok(Shrink { runtime, state })
    }

    /// Agrees on a group to which all its ranks are connected. This rank's connections to it are then in the state.
    /// Cancel safe, except that [`ShrinkState::resume`] must follow.
    async fn agree(
        &self,
        state: &mut ShrinkState,
        hang: &HangTimeout,
        problem: &RefCell<String>,
    ) -> Result<Membership, ShrinkFailure> {
        let mut forming: Option<Pin<Box<_>>> = None;
        // Why this rank could not connect, and when it returns that error.
        let mut failed: Option<(Error, tokio::time::Instant)> = None;
        state.events.handle_pending(&mut state.agreement);
        loop {
            match state.agreement.next() {
                Next::Propose(membership) => {
                    (forming, failed, state.own) = (None, None, None);
                    problem.take();
                    let (listener, endpoint) = self.listen("shrink")?;
                    self.tcp.send_to_all(ShrinkMessage::Proposes(membership, endpoint));
                    (state.own, state.proposed) = (Some((listener, endpoint)), Instant::now());
                }
                Next::Form(endpoints) => {
                    if let Some(own) = state.own.take() {
                        let members: Vec<usize> = state.agreement.membership().members.iter().copied().collect();
                        forming = Some(Box::pin(async move { self.connect(&members, own, endpoints, problem).await }));
                    }
                }
                Next::Agree(membership) => {
                    self.tcp.send_to_all(ShrinkMessage::Agreed(membership.clone()));
                    return Ok(membership);
                }
                Next::Excluded { by } => return Err(ShrinkFailure::CannotContinue(ShrinkError::Excluded { by })),
                Next::Minority { silent } => {
                    return Err(ShrinkFailure::CannotContinue(ShrinkError::Minority { silent }));
                }
                Next::Wait => {
                    let (left_out, look_again) = state.leave_out_hung(hang);
                    if left_out {
                        continue;
                    }
                    let formed = async {
                        match &mut forming {
                            Some(forming) => forming.await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        () = state.events.wait(&mut state.agreement) => {}
                        formed = formed => {
                            forming = None;
                            match formed {
                                Ok(formed) => {
                                    // Before any member can agree on this one.
                                    for (_, former) in &mut state.groups {
                                        let connections = &mut former.joined.setup.connections;
                                        control::send_first(connections, Message::Elsewhere).await;
                                    }
                                    state.groups.push((state.agreement.membership().clone(), formed));
                                    state.agreement.formed();
                                    self.tcp.send_to_all(ShrinkMessage::Formed(state.agreement.membership().clone()));
                                }
                                // Most likely a member has ended, or knows of one that has. This rank will learn of it.
                                Err(error) => failed = Some((
                                    as_error_of("shrink", error),
                                    tokio::time::Instant::now() + NEWS,
                                )),
                            }
                        }
                        error = final_error(&failed) => return Err(ShrinkFailure::Error(error)),
                        error = self.tcp.lacks_descriptors() => return Err(ShrinkFailure::Error(error)),
                        () = sleep_until(look_again) => {}
                    }
                }
            }
        }
    }

    /// Listens for the members of a new group, on a port of its own, at all addresses at which this rank listens.
    fn listen(&self, operation: &str) -> Result<(Listener, Endpoint), Error> {
        let mut addresses = self.tcp.listens_at().map_err(|e| Error::io(operation, e))?;
        addresses.iter_mut().for_each(|address| address.set_port(0));
        let listener = bind_to(&self.settings, &addresses)?.map_err(|e| Error::io(operation, e))?;
        let port = first_address(&self.settings, Instant::now(), &listener);
        let port = port.map_err(|error| as_error_of(operation, error))?.port();
        Ok((listener, Endpoint { port, key: random()? }))
    }

    /// Connects to the members of a new group through their endpoints. `members` is in the order of the new ranks.
    async fn connect(
        &self,
        members: &[usize],
        (listener, own): (Listener, Endpoint),
        endpoints: Vec<(usize, Endpoint)>,
        waiting_for: &RefCell<String>,
    ) -> Result<Connected, Error> {
        let start = Instant::now();
        let new_rank = |rank| members.iter().position(|member| *member == rank).unwrap_or(0);
        let (rank, n) = (new_rank(self.settings.rank), members.len());
        let mut addresses: Vec<SocketAddr> = members.iter().map(|member| self.tcp.addresses()[*member]).collect();
        addresses[rank].set_port(own.port);
        let others = || endpoints.iter().filter(|(member, _)| *member != self.settings.rank);
        for (member, endpoint) in others() {
            addresses[new_rank(*member)].set_port(endpoint.port);
        }
        let session = session(others().map(|(_, endpoint)| *endpoint).chain([own]));
        let address = addresses[0].to_string();
        let mut settings = Settings { rank, world_size: n, address, ..self.settings.clone() };
        settings.source.numbers = settings.source.numbers.of_members(members);
        let identity = Identity { secret: settings.secret.clone(), session, rank, world_size: n };
        let accept_queue = AcceptQueue::new(n.saturating_mul(MAX_DATA_CONNECTIONS));
        let hosts = hosts_of(members, &self.hosts);
        let endpoint = (identity, listener, &accept_queue);
        let setup = join::connect((&settings, start), endpoint, addresses, &hosts, None, waiting_for).await?;
        let joined = Joined { setup, kind: self.kind, hosts };
        Connected::share(settings, start, joined).await
    }

    /// Returns for how long a rank whose connection has ended is probed. On a busy machine its process may close one of
    /// its sockets only a turn of the processors for each rank after another.
    fn probe_timeout(&self) -> Duration {
        let turns = turn_on_host(&self.hosts, self.settings.rank).saturating_mul(self.hosts.len() as u32);
        self.settings.heartbeat_timeout.saturating_add(turns)
    }

    /// Returns the heartbeat timeout of a group that was agreed on: no rank in it is still busy connecting.
    fn heartbeat_timeout(&self) -> HeartbeatTimeout {
        HeartbeatTimeout { first: self.settings.heartbeat_timeout, later: self.settings.heartbeat_timeout }
    }

    /// Starts the group that was agreed on.
    fn start(&self, shrink: Shrink, membership: &Membership) -> Result<GroupEndpoint, Error> {
        let members: Vec<usize> = membership.members.iter().copied().collect();
        log::info!("rank {} continues in a group of the former {}", self.settings.rank, RankList(&members));
        let Shrink { runtime, state } = shrink;
        let (mut agreed, abandoned): (Vec<_>, Vec<_>) =
            state.groups.into_iter().partition(|(formed, _)| formed == membership);
        let Some((_, agreed)) = agreed.pop() else {
            return Err(Error::broken("shrink", "this rank is not connected to the group that was agreed on"));
        };
        let port = self.tcp.port().map_err(|e| Error::io("shrink", e))?;
        let abandoned =
            abandoned.into_iter().map(|(_, connected)| HeldOpen::Connected(Box::new(connected.joined.setup)));
        let new = abandoned.chain([HeldOpen::Port(port)]).map(Arc::new);
        start_group(runtime, agreed, self.heartbeat_timeout(), new.chain(self.held.iter().cloned()).collect())
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

/// Sleeps until `instant`, or forever if there is none.
async fn sleep_until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant.into()).await,
        None => std::future::pending().await,
    }
}
