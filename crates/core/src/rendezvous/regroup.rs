//! How processes of a group come together to another: some of them, or those that are left.
//!
//! They talk over the old group's control connections. Members of a subgroup invite each other; those that are left after a
//! failure agree on who goes on (`agreement`). Then they connect as in a first rendezvous, each on a port that it told
//! the others.

mod agreement;

use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::timeout;

use self::agreement::{Agreement, Next};
use super::join::{self, Joined};
use super::reach::bind;
use super::{Ends, Medium, Settings, assemble, control_runtime};
use crate::auth::{Lobby, Member};
use crate::control::invitation::{Door, Invitation, random, session};
use crate::control::{Heard, MOST, News, Silence, Standing, Word};
use crate::sync::Deadline;
use crate::transport::tcp::Tcp;
use crate::transport::{Base, Regroup, hosts_of};
use crate::types::{Apart, Error, Fault, Ranks};

/// How long a look for a rank whose connection ended may take.
const LOOK: Duration = Duration::from_secs(1);

/// A group of processes, from which another can be made.
pub(super) struct Processes {
    pub settings: Settings,
    /// What carries the operations: as all ranks agreed when they met.
    pub medium: Medium,
    /// By rank, as in [`Joined`].
    pub hosts: Vec<usize>,
    pub tcp: Arc<Tcp>,
    /// What would look like this rank's end to others were it closed: the port at which it listened in the group that this
    /// one came from, and its ends of groups that were not agreed on, as far as it knows. Where the network fell apart
    /// meanwhile, others may have agreed on one of those.
    #[expect(dead_code, reason = "held until this group ends, and not used")]
    pub kept: Vec<Kept>,
}

impl Regroup for Processes {
    fn shrink(&self, deadline: &Deadline) -> Result<Base, Error> {
        let mut agreement = Agreement::new(self.settings.rank, self.settings.world_size);
        // The group sees to it that this is called once.
        let Some(news) = self.tcp.news() else { return Err(Error::broken("shrink", "it was called before")) };
        let runtime = control_runtime()?;
        let problem = RefCell::new(String::new());
        let mut ends = Vec::new();
        let agreed = runtime.block_on(async {
            timeout(deadline.remaining(), self.agree(&mut agreement, news, &mut ends, &problem)).await
        });
        let standing = agreed.unwrap_or_else(|_| {
            let problem = Some(problem.take()).filter(|problem| !problem.is_empty());
            let problem = problem.map_or(String::new(), |problem| format!(" (in the new group: {problem})"));
            Err(Halt::Apart(Apart::Missing { ranks: agreement.waits_for(), problem }))
        });
        let standing = standing.map_err(|halt| match halt {
            Halt::Apart(why) => Error::Shrink { rank: self.settings.rank, why, elapsed: deadline.elapsed() },
            Halt::Error(error) => error,
        })?;
        self.go_on(runtime, &standing, ends)
    }

    fn subgroup(&self, members: &[usize], deadline: &Deadline) -> Result<Base, Fault> {
        let runtime = control_runtime().map_err(Fault::Failed)?;
        let (listener, door) = runtime.block_on(self.open("subgroup")).map_err(Fault::Failed)?;
        let doors = self.tcp.invite(&Invitation { members: members.to_vec(), door }, deadline)?;
        let doors = members.iter().copied().zip(doors).collect();
        let waiting_for = RefCell::new(String::new());
        let late = || {
            let waiting = format!("{}, by their ranks in it, within {:.1?}", waiting_for.borrow(), deadline.elapsed());
            Fault::Failed(Error::broken("connecting the members of a subgroup", waiting))
        };
        let formed = runtime.block_on(async {
            tokio::select! {
                formed = self.form(members, (listener, door), doors, &waiting_for) => {
                    formed.map_err(|error| Fault::Failed(plain("subgroup", error)))
                }
                failed = self.tcp.failed() => {
                    Err(failed.unwrap_or_else(|e| Fault::Failed(Error::io("watching for failures", e))))
                }
                () = tokio::time::sleep(deadline.remaining()) => Err(late()),
            }
        })?;
        // The others may still wait for a member that is slow.
        let first = deadline.remaining().max(self.settings.silence);
        let silence = Silence { first, later: self.settings.silence };
        assemble(runtime, formed, silence, Vec::new()).map_err(Fault::Failed)
    }

    fn hosts(&self) -> Vec<usize> {
        self.hosts.clone()
    }
}

/// What is held and not used.
pub(super) enum Kept {
    Port(#[expect(dead_code, reason = "held only")] OwnedFd),
    Ends(#[expect(dead_code, reason = "held only")] Box<Ends>),
}

/// Why this rank does not go on.
enum Halt {
    Apart(Apart),
    Error(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Halt::Error(error)
    }
}

impl Processes {
    /// Comes to a group whose ends are ready on all its ranks; this rank's end is among `ends` then.
    async fn agree(
        &self,
        agreement: &mut Agreement,
        news: UnboundedReceiver<Heard>,
        ends: &mut Vec<(Standing, Ends)>,
        problem: &RefCell<String>,
    ) -> Result<Standing, Halt> {
        let mut ears = Ears { news, looks: JoinSet::new(), addresses: self.tcp.addresses(), silent: Vec::new() };
        let mut own: Option<(TcpListener, Door)> = None;
        let mut forming: Option<Pin<Box<_>>> = None;
        // Why this rank could not connect, and when it gives up.
        let mut failed: Option<(Error, tokio::time::Instant)> = None;
        loop {
            match agreement.next() {
                Next::Propose(standing) => {
                    (forming, failed) = (None, None);
                    problem.take();
                    let (listener, door) = self.open("shrink").await?;
                    self.tcp.say(Word::Proposes(standing, door));
                    own = Some((listener, door));
                }
                Next::Form(doors) => {
                    if let Some(own) = own.take() {
                        let members: Vec<usize> = agreement.standing().members.iter().copied().collect();
                        forming = Some(Box::pin(async move { self.form(&members, own, doors, problem).await }));
                    }
                }
                Next::Agree(standing) => {
                    self.tcp.say(Word::Agreed(standing.clone()));
                    return Ok(standing);
                }
                Next::Excluded { by } => return Err(Halt::Apart(Apart::Excluded { by })),
                Next::Minority { silent } => return Err(Halt::Apart(Apart::Minority { silent })),
                Next::Wait => {
                    let formed = async {
                        match &mut forming {
                            Some(forming) => forming.await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        () = ears.listen(agreement) => {}
                        formed = formed => {
                            forming = None;
                            match formed {
                                Ok(formed) => {
                                    ends.push((agreement.standing().clone(), formed));
                                    agreement.formed();
                                    self.tcp.say(Word::Formed(agreement.standing().clone()));
                                }
                                // Most likely a member is gone, or has been told that one is; this rank will hear of it.
                                Err(error) => failed = Some((plain("shrink", error), tokio::time::Instant::now() + 2 * LOOK)),
                            }
                        }
                        error = given_up(&failed) => return Err(Halt::Error(error)),
                    }
                }
            }
        }
    }

    /// Listens where the members of a group to be will find this rank.
    async fn open(&self, operation: &str) -> Result<(TcpListener, Door), Error> {
        let mut address = self.tcp.addresses()[self.settings.rank];
        address.set_port(0);
        let listener = bind(&self.settings, Instant::now(), &address.to_string()).await;
        let listener = listener.map_err(|error| plain(operation, error))?;
        let port = listener.local_addr().map_err(|e| Error::io(operation, e))?.port();
        Ok((listener, Door { port, key: random()? }))
    }

    /// Connects to the members of a group to be, in whose order they have ranks there, behind these doors.
    async fn form(
        &self,
        members: &[usize],
        (listener, own): (TcpListener, Door),
        doors: Vec<(usize, Door)>,
        waiting_for: &RefCell<String>,
    ) -> Result<Ends, Error> {
        let start = Instant::now();
        let place = |rank| members.iter().position(|member| *member == rank).unwrap_or(0);
        let (rank, n) = (place(self.settings.rank), members.len());
        let mut addresses: Vec<SocketAddr> = members.iter().map(|member| self.tcp.addresses()[*member]).collect();
        addresses[rank].set_port(own.port);
        let others = || doors.iter().filter(|(member, _)| *member != self.settings.rank);
        for (member, door) in others() {
            addresses[place(*member)].set_port(door.port);
        }
        let session = session(others().map(|(_, door)| *door).chain([own]));
        let address = addresses[0].to_string();
        let settings = Settings { rank, world_size: n, address, ..self.settings.clone() };
        let member = Member { secret: settings.secret.clone(), session, rank, world_size: n };
        let lobby = Lobby::new(n.saturating_mul(MOST));
        let hosts = hosts_of(members, &self.hosts);
        let door = (member, listener, &lobby);
        let mesh = join::connect((&settings, start), door, addresses, &hosts, None, waiting_for).await?;
        let joined = Joined { mesh, medium: self.medium, hosts };
        Ends::share(settings, start, joined).await
    }

    /// In a group that was agreed on: all are there, and none is to connect to others still.
    fn silence(&self) -> Silence {
        Silence { first: self.settings.silence, later: self.settings.silence }
    }

    /// The group that was agreed on.
    fn go_on(&self, runtime: Runtime, standing: &Standing, ends: Vec<(Standing, Ends)>) -> Result<Base, Error> {
        let members: Vec<usize> = standing.members.iter().copied().collect();
        log::info!("rank {} goes on with those that were {}", self.settings.rank, Ranks(&members));
        let (mut agreed, abandoned): (Vec<_>, Vec<_>) = ends.into_iter().partition(|(formed, _)| formed == standing);
        let Some((_, agreed)) = agreed.pop() else {
            return Err(Error::broken("shrink", "no end of the group that was agreed on"));
        };
        let port = self.tcp.port().map_err(|e| Error::io("shrink", e))?;
        let abandoned = abandoned.into_iter().map(|(_, ends)| Kept::Ends(Box::new(ends)));
        assemble(runtime, agreed, self.silence(), abandoned.chain([Kept::Port(port)]).collect())
    }
}

/// What went wrong is no rendezvous, to the caller.
fn plain(operation: &str, error: Error) -> Error {
    match error {
        Error::Rendezvous { reason, .. } => Error::broken(operation, reason),
        error => error,
    }
}

/// The error of an attempt, once nobody is known to have ended it.
async fn given_up(failed: &Option<(Error, tokio::time::Instant)>) -> Error {
    match failed {
        Some((error, at)) => {
            tokio::time::sleep_until(*at).await;
            error.clone()
        }
        None => std::future::pending().await,
    }
}

/// What this rank hears of the others.
struct Ears<'a> {
    news: UnboundedReceiver<Heard>,
    /// Who is being looked for, and then whether it is gone.
    looks: JoinSet<(usize, bool)>,
    addresses: &'a [SocketAddr],
    silent: Vec<usize>,
}

impl Ears<'_> {
    /// Waits for news. May be dropped while it waits.
    async fn listen(&mut self, agreement: &mut Agreement) {
        let news = tokio::select! {
            Some(news) = self.news.recv() => news,
            Some(Ok((peer, gone))) = self.looks.join_next() => return agreement.exclude(peer, gone),
            else => std::future::pending().await,
        };
        self.heard(news, agreement);
        // What has come is heard before anything is done: a rank that was stopped finds that the others have gone on.
        while let Ok(news) = self.news.try_recv() {
            self.heard(news, agreement);
        }
    }

    fn heard(&mut self, (peer, news): Heard, agreement: &mut Agreement) {
        match news {
            News::Said(word) => agreement.hear(peer, word),
            News::Left => agreement.exclude(peer, true),
            News::Silent => {
                self.silent.push(peer);
                agreement.exclude(peer, false);
            }
            // Where the network was cut, others may have gone on and closed: who was silent first is not known to be gone.
            News::Closed if self.silent.contains(&peer) => {}
            News::Closed => {
                let address = self.addresses[peer];
                self.looks.spawn(async move { (peer, is_gone(address).await) });
            }
        }
    }
}

/// Whether the process that listened here has ended, for certain: its machine says that nobody listens. One that is just
/// ending may still take a connection, and then drops it.
async fn is_gone(address: SocketAddr) -> bool {
    let look = async {
        loop {
            match TcpStream::connect(address).await {
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return true,
                Err(_) => return false,
                Ok(mut stream) => drop::<io::Result<u8>>(stream.read_u8().await),
            }
        }
    };
    timeout(LOOK, look).await.unwrap_or(false)
}
