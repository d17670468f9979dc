//! Ranks as processes, over TCP.
//!
//! Two kinds of connections. *Control* connections, to every peer or, in larger groups, to rank 0 (`control`), on a thread
//! of their own, carry heartbeats, farewells, failures, words of going on without the lost, and the questions that ranks ask
//! each other when they stall. A *data* connection to a peer is opened when a plan first needs it and carries one operation's messages at a time, moved by the thread that called the operation: both
//! directions at once, straight from and into its buffers. There may be several to a peer, which share large messages:
//! one flow does not always fill a network.
//!
//! A message on a data connection is `site 32 bytes | length of payload u64 little endian | payload`. The receiver knows
//! the tag and the length that it wants and takes nothing else, so no length from the wire is ever allocated.

mod dial;
mod link;

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::link::Link;
use super::Transport;
use crate::auth::Member;
use crate::control::invitation::{Door, Invitation};
use crate::control::{self, Board, Heard, Mesh, Outgoing, Silence, Watch, Word};
use crate::sync::{Deadline, Mutex, lock};
use crate::types::{Error, Fault, Site};

/// One rank's end of a group of processes.
pub(crate) struct Tcp {
    member: Member,
    addresses: Vec<SocketAddr>,
    board: Arc<Board>,
    /// The data connections, by rank; opened when a plan first needs them.
    links: Mutex<Vec<Option<Arc<Link>>>>,
    /// To each lower rank; higher ranks decide for themselves.
    connections: usize,
    control: UnboundedSender<Outgoing>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// What keeps the port: see [`port`](Tcp::port).
    listener: OwnedFd,
    /// What peers say of going on, and which of them are gone, since the group was made.
    news: Mutex<Option<UnboundedReceiver<Heard>>>,
}

/// How long a rank that leaves waits for its last bytes to reach the peers.
const LINGER: Duration = Duration::from_secs(1);

impl Tcp {
    /// Takes over the connections that the rendezvous made.
    pub fn start(runtime: Runtime, mut mesh: Mesh, connections: usize, silence: Silence) -> Result<Tcp, Error> {
        // Before this rank can be in any operation: who has met it in one has a word of it.
        runtime.block_on(control::greet(&mut mesh.connections));
        let listener = mesh.listener.as_fd().try_clone_to_owned();
        let listener = listener.map_err(|e| Error::io("keeping the listener", e))?;
        let (control, outgoing) = unbounded_channel();
        let (told, news) = unbounded_channel();
        let (member, addresses, board) = (mesh.member.clone(), mesh.addresses.clone(), mesh.board.clone());
        let thread = std::thread::Builder::new()
            .name(format!("bonfire-control-{}", member.rank))
            .spawn(move || runtime.block_on(control::run(mesh, silence, outgoing, told)))
            .map_err(|e| Error::io("starting the control thread", e))?;
        let (thread, news) = (Mutex::new(Some(thread)), Mutex::new(Some(news)));
        let links = Mutex::new(vec![None; addresses.len()]);
        Ok(Tcp { member, addresses, board, links, connections, control, thread, listener, news })
    }

    /// An end that has no connections: for it to hear something, a test writes it on the board.
    #[cfg(all(test, feature = "shm", target_os = "linux"))]
    pub fn unconnected(rank: usize, board: Arc<Board>, world_size: usize) -> Tcp {
        let listener = board.wake().try_clone_to_owned().unwrap();
        Tcp {
            member: Member { secret: None, session: 0, rank, world_size },
            addresses: vec![SocketAddr::from(([127, 0, 0, 1], 0)); world_size],
            board,
            links: Mutex::default(),
            connections: 1,
            control: unbounded_channel().0,
            thread: Mutex::default(),
            listener,
            news: Mutex::default(),
        }
    }

    /// The number that all ranks of this group have, and no other group.
    pub fn session(&self) -> u64 {
        self.member.session
    }

    /// Where a rank of this group listens, by rank.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// As long as this is held, this rank's machine does not say that nobody listens there: the sign of a rank that ended.
    pub fn port(&self) -> std::io::Result<OwnedFd> {
        self.listener.try_clone()
    }

    /// What peers say of going on without the lost: taken once.
    pub fn news(&self) -> Option<UnboundedReceiver<Heard>> {
        lock(&self.news).take()
    }

    /// Says `word` to all peers.
    pub fn say(&self, word: Word) {
        let _ = self.control.send(Outgoing::Word(word));
    }

    /// The data connection to `peer`. The higher rank of a pair dials, the lower one waits for the call: both are at the
    /// same operation, and its plan has this edge on both sides.
    fn link(&self, peer: usize, tag: &Site, watch: &mut Watch<'_>) -> Result<Arc<Link>, Fault> {
        if peer < self.member.rank && lock(&self.links)[peer].is_none() {
            let link = dial::dial(&self.member, (peer, &self.addresses[peer]), self.connections, watch)?;
            lock(&self.links)[peer] = Some(Arc::new(link));
        }
        loop {
            if let Some(link) = self.opened(peer)? {
                return Ok(link);
            }
            self.board.sleep(Instant::now() + watch.pause(), || {
                self.board.has_gathered(peer) || self.board.absence_in(peer, tag).is_some()
            });
            if !self.board.has_gathered(peer)
                && let Some(fault) = self.board.absence_in(peer, tag)
            {
                return Err(fault);
            }
            watch.tick(peer)?;
        }
    }

    /// The data connection to `peer`, if there is one.
    fn opened(&self, peer: usize) -> Result<Option<Arc<Link>>, Fault> {
        if let Some(streams) = self.board.gathered(peer) {
            let link = Link::new(streams).map_err(|e| link::departure(peer, &e.to_string(), &self.board))?;
            lock(&self.links)[peer] = Some(Arc::new(link));
        }
        Ok(lock(&self.links)[peer].clone())
    }

    /// Tells the other members of a subgroup to be of it, and gives where all await each other, in their order.
    pub fn invite(&self, own: &Invitation, deadline: &Deadline) -> Result<Vec<Door>, Fault> {
        for member in own.members.iter().filter(|member| **member != self.member.rank) {
            let _ = self.control.send(Outgoing::Invites(*member, own.clone()));
        }
        self.board.assemble(self.member.rank, own, deadline)
    }

    /// Waits until the group fails; gives the cause.
    pub async fn failed(&self) -> std::io::Result<Fault> {
        let wake = UnixStream::from(self.board.wake().try_clone_to_owned()?);
        wake.set_nonblocking(true)?;
        let wake = tokio::net::UnixStream::from_std(wake)?;
        loop {
            // Nobody reads what is there, so it stays readable.
            wake.readable().await?;
            if let Some((fault, _)) = self.board.failure() {
                return Ok(fault);
            }
        }
    }

    /// What is known of the peers.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// What a thread that waits in this operation looks out for.
    pub fn watch<'a>(&'a self, tag: &'a Site, deadline: &'a Deadline) -> Watch<'a> {
        Watch::new(self.member.rank, &self.board, &self.control, tag, deadline)
    }
}

impl Transport for Tcp {
    fn rank(&self) -> usize {
        self.member.rank
    }

    fn world_size(&self) -> usize {
        self.addresses.len()
    }

    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault> {
        // What the socket would still take, nobody would read.
        if let Some(fault) = self.board.absence_in(to, tag) {
            return Err(fault);
        }
        let mut watch = self.watch(tag, deadline);
        let link = self.link(to, tag, &mut watch)?;
        link::drive(tag, Some((to, &link, bytes)), None, &mut watch)
    }

    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        let mut watch = self.watch(tag, deadline);
        let link = self.link(from, tag, &mut watch)?;
        link::drive(tag, None, Some((from, &link, bytes)), &mut watch)
    }

    fn exchange(
        &self,
        tag: &Site,
        (to, outgoing): (usize, &[u8]),
        (from, incoming): (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        let mut watch = self.watch(tag, deadline);
        let (sends, receives) = (self.link(to, tag, &mut watch)?, self.link(from, tag, &mut watch)?);
        link::drive(tag, Some((to, &sends, outgoing)), Some((from, &receives, incoming)), &mut watch)
    }

    fn begin(&self, site: &Site) -> Result<(), Fault> {
        for peer in self.board.begin(site)? {
            let _ = self.control.send(Outgoing::Called(peer, *site));
        }
        Ok(())
    }

    fn trouble(&self) -> Option<Fault> {
        self.board.trouble()
    }

    fn fail(&self, error: &Error, completed: u64) {
        self.board.fail(Fault::Failed(error.clone()), completed);
        // Also where the cause came from a peer: this rank may leave before the peer's own word reaches the others, and
        // they must not take its farewell for the cause.
        let _ = self.control.send(Outgoing::Failed(error.clone(), completed));
    }

    fn leave(&self) {
        let Some(thread) = lock(&self.thread).take() else { return };
        // As in `fail`, for a cause that came between two operations.
        if let Some((Fault::Failed(error), completed)) = self.board.failure() {
            let _ = self.control.send(Outgoing::Failed(error, completed));
        }
        let _ = self.control.send(Outgoing::Farewell { panicked: std::thread::panicking() });
        // The control thread ends by itself soon after a farewell, whatever the peers do.
        if thread.join().is_err() {
            log::error!("rank {}: the control thread panicked", self.member.rank);
        }
        let links: Vec<_> = lock(&self.links).iter_mut().filter_map(Option::take).collect();
        link::close(&links, LINGER);
    }

    fn address(&self, peer: usize) -> Option<String> {
        self.addresses.get(peer).map(ToString::to_string)
    }
}
