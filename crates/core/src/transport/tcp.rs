//! Ranks as processes, over TCP.
//!
//! There are two kinds of connections.
//! * *Control* connections (`control`) lead to every peer or, in larger groups, to rank 0. A control thread serves
//!   them. They carry heartbeats, goodbye messages, failures, messages of the shrink protocol, and the questions that
//!   ranks ask each other when they stall.
//! * A *data* connection to a peer is opened when a plan first needs it. It carries the messages of one operation at a
//!   time. The thread that called the operation moves them, both directions at once, straight from and into its
//!   buffers. There may be several to a peer, which share large messages, because one flow may not saturate a network.
//!
//! A message on a data connection is `site 32 bytes | length of payload u64 little endian | payload`. The receiver
//! knows the expected tag and length and accepts nothing else, so it never allocates a length from the wire.

mod dial;
mod link;
mod stalled;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::link::Link;
use super::{Neighbours, Transport};
use crate::auth::Identity;
use crate::control::invitation::{Endpoint, Invitation};
use crate::control::{
    self, ControlRequest, ControlSetup, Goodbye, GroupStatus, HeartbeatTimeout, Message, RankEvent, ShrinkMessage,
    Watch,
};
use crate::sync::{AtomicBool, Deadline, Mutex, Ordering, OwnRuntime, STALL_TIMEOUT, lock};
use crate::types::{Error, Fault, Locate, Site, Whereabouts};

/// One rank's endpoint of a group of processes.
pub(crate) struct Tcp {
    identity: Identity,
    addresses: Vec<SocketAddr>,
    status: Arc<GroupStatus>,
    /// The data connections, by rank; opened when a plan first needs them.
    links: Mutex<Vec<Option<Arc<Link>>>>,
    /// Number of data connections to each lower rank. Higher ranks choose theirs to this rank.
    connections: usize,
    /// The heartbeat timeout.
    heartbeat_timeout: Duration,
    control: UnboundedSender<ControlRequest>,
    /// Whether a message was sent or received after rank 0 had left.
    met: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Keep the port in use: see [`port`](Tcp::port).
    listener: Vec<OwnedFd>,
    /// Messages of the shrink protocol, and which peers left or were lost, since the group was made.
    peer_events: Mutex<Option<UnboundedReceiver<RankEvent>>>,
}

/// How long a leaving rank waits until its last bytes have reached the peers.
const LINGER: Duration = Duration::from_secs(1);

impl Tcp {
    /// Takes over the connections that the rendezvous made.
    pub fn start(
        runtime: OwnRuntime,
        mut setup: ControlSetup,
        connections: usize,
        heartbeat_timeout: HeartbeatTimeout,
    ) -> Result<Tcp, Error> {
        let listener = setup.listener.keep().map_err(|e| Error::io("keeping the listener", e))?;
        let (control, outgoing) = unbounded_channel();
        let (told, peer_events) = unbounded_channel();
        let (greeted, greeting) = std::sync::mpsc::channel();
        let (identity, addresses, status) = (setup.identity.clone(), setup.addresses.clone(), setup.status.clone());
        let thread = std::thread::Builder::new()
            .name(format!("bonfire-control-{}", identity.rank))
            .spawn(move || {
                runtime.run_here(async {
                    control::send_first(&mut setup.connections, Message::Heartbeat).await;
                    // The receiver waits for it.
                    let _ = greeted.send(());
                    control::run(setup, heartbeat_timeout, outgoing, told).await;
                });
            })
            .map_err(|e| Error::io("starting the control thread", e))?;
        // Before this rank can be in any operation: a peer that meets it in one has then heard from it. Fails only if
        // the thread panicked.
        let _ = greeting.recv();
        let (thread, peer_events) = (Mutex::new(Some(thread)), Mutex::new(Some(peer_events)));
        let links = Mutex::new(vec![None; addresses.len()]);
        let heartbeat_timeout = heartbeat_timeout.later;
        Ok(Tcp {
            identity,
            addresses,
            status,
            links,
            connections,
            heartbeat_timeout,
            control,
            met: AtomicBool::new(false),
            thread,
            listener,
            peer_events,
        })
    }

    /// An endpoint without connections, for tests. They write to the status what it would receive.
    #[cfg(all(test, feature = "shm", target_os = "linux"))]
    pub fn unconnected(rank: usize, status: Arc<GroupStatus>, world_size: usize) -> Tcp {
        Tcp {
            identity: Identity { secret: None, session: 0, rank, world_size },
            addresses: vec![SocketAddr::from(([127, 0, 0, 1], 0)); world_size],
            status,
            links: Mutex::default(),
            connections: 1,
            heartbeat_timeout: Duration::ZERO,
            control: unbounded_channel().0,
            met: AtomicBool::new(false),
            thread: Mutex::default(),
            listener: Vec::new(),
            peer_events: Mutex::default(),
        }
    }

    /// The number of this group's session: the same on all its ranks, different in other groups.
    pub fn session(&self) -> u64 {
        self.identity.session
    }

    /// How this rank identifies itself to the others.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The addresses at which the ranks listen, by rank.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns handles that keep this rank's port in use. Once the port is closed the machine refuses connections to
    /// it, and peers conclude that this rank has ended.
    pub fn port(&self) -> io::Result<Vec<OwnedFd>> {
        self.listener.iter().map(OwnedFd::try_clone).collect()
    }

    /// Returns the addresses at which this rank listens: those of a name, or all of its machine.
    pub fn listens_at(&self) -> io::Result<Vec<SocketAddr>> {
        let address = |socket| SocketAddr::try_from(rustix::net::getsockname(socket)?).map_err(io::Error::from);
        self.listener.iter().map(address).collect()
    }

    /// Takes the receiver for messages of the shrink protocol. `Some` once.
    pub fn peer_events(&self) -> Option<UnboundedReceiver<RankEvent>> {
        lock(&self.peer_events).take()
    }

    /// Sends `word` to all peers.
    pub fn send_to_all(&self, message: ShrinkMessage) {
        let _ = self.control.send(ControlRequest::ShrinkMessage(message));
    }

    /// The link to `peer`. The higher rank of a pair dials and the lower one waits: both are in the same operation, and
    /// the plans of both have this message.
    fn link(&self, peer: usize, tag: &Site, watch: &mut Watch<'_>) -> Result<Arc<Link>, Fault> {
        if peer < self.identity.rank && lock(&self.links)[peer].is_none() {
            let settings = (self.connections, self.heartbeat_timeout);
            let link = dial::dial(&self.identity, (peer, &self.addresses[peer]), settings, watch)?;
            lock(&self.links)[peer] = Some(Arc::new(link));
        }
        loop {
            if let Some(link) = self.existing_link(peer, watch)? {
                return Ok(link);
            }
            self.status.sleep(Instant::now() + watch.pause(), || {
                self.status.has_data_streams(peer)
                    || self.status.absence_in(peer, tag).is_some()
                    || self.status.shortage().is_some()
                    || self.status.lost_packets(peer).is_certain()
            });
            if !self.status.has_data_streams(peer)
                && let Some(fault) = self.status.absence_in(peer, tag)
            {
                return Err(fault);
            }
            if !self.status.has_data_streams(peer) {
                let (address, lost) = (&self.addresses[peer], self.status.lost_packets(peer));
                if lost.is_certain() {
                    return Err(watch.packets_lost(peer, address, lost));
                }
                if let Err(fault) = watch.tick_connected(peer) {
                    return Err(stalled::not_connected(fault, (peer, address), lost, watch));
                }
            }
        }
    }

    /// The link to `peer`, if its connections are open.
    fn existing_link(&self, peer: usize, watch: &Watch<'_>) -> Result<Option<Arc<Link>>, Fault> {
        if let Some(streams) = self.status.take_data_streams(peer) {
            let link = Link::new(streams, self.heartbeat_timeout);
            let link = link.map_err(|e| link::disconnected(peer, &e.to_string(), watch))?;
            lock(&self.links)[peer] = Some(Arc::new(link));
        }
        Ok(lock(&self.links)[peer].clone())
    }

    /// Invites the other members of a subgroup and waits for their invitations. Returns the endpoints of all, in order.
    pub fn invite(&self, own: &Invitation, deadline: &Deadline) -> Result<Vec<Endpoint>, Fault> {
        for member in own.members.iter().filter(|member| **member != self.identity.rank) {
            let _ = self.control.send(ControlRequest::Invites(*member, own.clone()));
        }
        self.status.await_invitations(self.identity.rank, own, deadline)
    }

    /// Waits until the group fails. Returns the cause.
    pub async fn failed(&self) -> std::io::Result<Fault> {
        let wake = UnixStream::from(self.status.wake().try_clone_to_owned()?);
        wake.set_nonblocking(true)?;
        let wake = tokio::net::UnixStream::from_std(wake)?;
        loop {
            // Never read, so it stays readable.
            wake.readable().await?;
            if let Some((fault, _)) = self.status.failure() {
                return Ok(fault);
            }
        }
    }

    /// Waits until the control thread lacks descriptors for the connections that ranks make to each other. Returns the
    /// error.
    pub async fn lacks_descriptors(&self) -> Error {
        loop {
            if let Some(error) = self.status.shortage() {
                return error;
            }
            tokio::time::sleep(STALL_TIMEOUT).await;
        }
    }

    /// The state shared with the control thread.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub fn status(&self) -> &GroupStatus {
        &self.status
    }

    /// The events that interrupt a thread that waits in this operation.
    pub fn watch<'a>(&'a self, tag: &'a Site, deadline: &'a Deadline) -> Watch<'a> {
        let watch = Watch::new(self.identity.rank, &self.status, &self.control, tag, deadline);
        // A collective that is in flight when rank 0 leaves is most likely the last one, and complete in a moment.
        // Messages may go on. Relaxed: the request publishes nothing, and a second one does no harm.
        if !tag.call.operation.is_collective()
            && !self.met.load(Ordering::Relaxed)
            && self.status.has_left(0)
            && !self.met.swap(true, Ordering::Relaxed)
        {
            watch.meet();
        }
        watch
    }
}

impl Neighbours for Tcp {
    fn locate_by(&self, own: Arc<dyn Locate>) {
        self.status.locate_by(own);
    }

    fn whereabouts(&self, ranks: &[usize]) -> Vec<(usize, Whereabouts)> {
        self.status.whereabouts(ranks)
    }
}

impl Transport for Tcp {
    fn rank(&self) -> usize {
        self.identity.rank
    }

    fn world_size(&self) -> usize {
        self.addresses.len()
    }

    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault> {
        // The socket may still accept bytes that no process will read.
        if let Some(fault) = self.status.absence_in(to, tag) {
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
        for peer in self.status.begin(site)? {
            let _ = self.control.send(ControlRequest::Called(peer, *site));
        }
        Ok(())
    }

    fn known_failure(&self) -> Option<Fault> {
        self.status.known_failure()
    }

    fn fail(&self, error: &Error, completed: u64) {
        self.status.fail(Fault::Failed(error.clone()), completed);
        // Also if the cause came from a peer: this rank may leave before the peer's own message reaches the others, and
        // they must not report its leaving as the cause.
        let _ = self.control.send(ControlRequest::Failed(error.clone(), completed));
    }

    fn leave(&self) {
        let Some(thread) = lock(&self.thread).take() else { return };
        // For a cause that arrived between two operations, for the reason in `fail`.
        if let Some((Fault::Failed(error), completed)) = self.status.failure() {
            let _ = self.control.send(ControlRequest::Failed(error, completed));
        }
        let goodbye = Goodbye { panicked: std::thread::panicking(), begun: self.status.begun() };
        let _ = self.control.send(ControlRequest::Goodbye(goodbye));
        // The control thread ends soon after its goodbye message, whatever the peers do.
        if thread.join().is_err() {
            log::error!("rank {}: the control thread panicked", self.identity.rank);
        }
        let links: Vec<_> = lock(&self.links).iter_mut().filter_map(Option::take).collect();
        link::close(&links, LINGER);
    }

    fn address(&self, peer: usize) -> Option<String> {
        self.addresses.get(peer).map(ToString::to_string)
    }
}
