//! The control thread: the messages that ranks exchange beside the data, and the listener for further connections.
//!
//! A small group begins as a *mesh*, with a connection between any two ranks. A larger group begins as a *star*: every
//! rank is connected to rank 0, the hub. The hub relays messages between the other ranks, reports ranks that left or
//! are lost, and alone monitors how long each rank is silent. A star becomes a mesh when rank 0 is lost and when a
//! rank shrinks the group. Messages from the hub arrive in order, so all ranks know of a failure that the hub has
//! reported.
//!
//! Once rank 0 has left in order, most likely the job ends. So a rank connects to the others only when it exchanges
//! messages with one of them, waits for longer than a moment in a collective that rank 0 has begun, fails, or invites
//! others to a subgroup. Then it dials the lower ranks and knocks at the higher ones, which dial it. Ranks that do none
//! of this keep the few connections that they have: 200 ranks would otherwise open 20,000 connections in their last
//! second.
//!
//! A goodbye says how many collectives its sender has begun. A rank in a later one, or that calls one, fails at once,
//! as do all others by the same goodbye: it need not tell them, nor connect to them for it.
//!
//! Shrink messages are never relayed: sender and receiver are connected, and the sender's goodbye follows on the same
//! connection. A rank's shrink messages and its end therefore arrive in order.
//!
//! The hub relays failures, invitations and goodbyes. It collects the ranks' calls for those that ask (`calls`).
//! Heartbeats stay between connected ranks.
//!
//! # Which ranks have certainly ended
//! In a star, a rank may first try to connect to a peer when the peer no longer listens. It counts the peer as ended
//! only if all ranks are known to have begun the group (`Begun`, or this rank is past its first collective), every
//! attempt to connect was answered, rank 0 was never silent, and this rank was never suspended for more than half of
//! the heartbeat timeout. Otherwise the peer counts as silent. `shrink` needs the difference.
//!
//! # Limits
//! * A rank that dies after rank 0 has left, and before another rank connects to it, counts as having left.
//! * If the machine of a rank sleeps through the death of rank 0 and the whole further life of the other ranks, or if
//!   its network is down from the time when rank 0 has left through their whole further life, the rank counts them as
//!   ended, though they may have gone on without it.

mod star;
#[cfg(all(test, not(bonfire_loom)))]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, channel, unbounded_channel};
use tokio::task::JoinSet;

use super::accept::accept;
use super::connection::{Connection, Event, Frame, Writer, read, write};
use super::heartbeat::{FailureDetector, HeartbeatTimeout, ticks, ticks_in, within};
use super::hub::{Hub, Star};
use super::message::{ControlRequest, Message, RankEvent, apply_message};
use super::shrink::PeerEvent;
use super::status::GroupStatus;
use crate::auth::{AcceptQueue, Identity, Listener};
use crate::types::Site;

/// The connections and other state that the rendezvous hands over to the control thread.
pub(crate) struct ControlSetup {
    pub identity: Identity,
    pub addresses: Vec<SocketAddr>,
    pub listener: Listener,
    /// Connections that have not completed the handshake yet.
    pub accept_queue: Arc<AcceptQueue>,
    /// By rank. `None` for this rank itself, and in a star for most ranks.
    pub connections: Vec<Option<TcpStream>>,
    /// Whether the group begins as a star.
    pub star: bool,
    /// How long one turn of this host's processors may take: see [`turn`](super::heartbeat::turn).
    pub turn: Duration,
    pub status: Arc<GroupStatus>,
}

/// How long a leaving rank may take to send its goodbye, where processors are free.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a leaving rank that failed waits for ranks that cannot know of it yet, and connect.
const LINGER: Duration = Duration::from_secs(3);

/// Maximum number of events that wait for the control thread. Beyond it, readers apply backpressure to their peers.
const EVENT_QUEUE: usize = 64;

/// Runs the control plane of a rank until its goodbye.
pub(crate) async fn run(
    setup: ControlSetup,
    heartbeat_timeout: HeartbeatTimeout,
    mut outgoing: UnboundedReceiver<ControlRequest>,
    peer_events: UnboundedSender<RankEvent>,
) {
    let (events, mut event_queue) = channel(EVENT_QUEUE);
    let (controls, mut accepted) = channel(EVENT_QUEUE);
    tokio::spawn(accept(setup.listener, setup.accept_queue, setup.identity.clone(), setup.status.clone(), controls));
    let n = setup.identity.world_size;
    let mut control = Control {
        identity: setup.identity,
        addresses: setup.addresses,
        status: setup.status,
        connections: (0..n).map(|_| Connection::Absent).collect(),
        detector: FailureDetector::new(n, heartbeat_timeout, setup.turn),
        events,
        writing: JoinSet::new(),
        dials: JoinSet::new(),
        opened: 0,
        peer_events,
        greeted: vec![false; n],
        elsewhere: vec![false; n],
        star: setup.star.then(|| Star::new(n)),
    };
    for (peer, stream) in setup.connections.into_iter().enumerate() {
        if let Some(stream) = stream {
            control.open(peer, stream);
        }
    }
    let mut ticks = ticks();
    // This rank's goodbye, and the number of ticks after which the loop ends.
    let mut leaving = None;
    let serving = async {
        while leaving.is_none() || control.must_linger() {
            tokio::select! {
                message = outgoing.recv(), if leaving.is_none() => match message {
                    Some(ControlRequest::Goodbye(goodbye)) => {
                        let goodbye = Message::Goodbye(goodbye);
                        control.leave(&goodbye);
                        let limit = if control.is_hub() { GOODBYE_TIMEOUT } else { LINGER };
                        leaving = Some((goodbye, ticks_in(limit.saturating_add(control.detector.turns()))));
                    }
                    Some(message) => control.handle_outgoing(message),
                    None => return,
                },
                // The higher rank of a pair dials. A lower rank knocks in order to be dialled.
                Some((peer, stream)) = accepted.recv() => match peer > control.rank() {
                    true => control.attach(peer, stream),
                    false => control.knocked(peer),
                },
                Some((peer, event)) = event_queue.recv() => control.handle_event(peer, event),
                _ = ticks.tick() => {
                    control.tick();
                    if let Some((_, left)) = &mut leaving {
                        *left -= 1;
                        if *left == 0 {
                            return;
                        }
                    }
                }
                () = wait_until(control.updates_due()) => control.send_updates(),
            }
        }
    };
    serving.await;
    // Connections that are made meanwhile get the same messages as all others. A peer would take this rank for lost if
    // its connection closed without a goodbye.
    accepted.close();
    let limit = GOODBYE_TIMEOUT.saturating_add(control.detector.turns());
    let last_connections = async {
        let mut none_accepted = false;
        while !(none_accepted && control.dials.is_empty() && event_queue.is_empty()) {
            tokio::select! {
                next = accepted.recv(), if !none_accepted => match next {
                    Some((peer, stream)) if peer > control.rank() => control.attach(peer, stream),
                    Some(_) => {}
                    None => none_accepted = true,
                },
                Some((peer, event)) = event_queue.recv() => {
                    if let Event::Dialled(stream) = event {
                        control.attach(peer, stream);
                    }
                }
                Some(_) = control.dials.join_next() => {}
            }
        }
    };
    let _ = within(limit, last_connections).await;
    if let Some((goodbye, _)) = leaving.filter(|_| control.is_hub()) {
        control.send_updates();
        control.fan_out(&Frame::Own(goodbye), None);
    }
    control.connections.clear();
    // Write tasks end with the goodbye. One whose peer does not read is abandoned at the timeout.
    let _ = within(limit, async { while control.writing.join_next().await.is_some() {} }).await;
}

/// Waits until `instant`, or forever if there is none.
async fn wait_until(instant: Option<tokio::time::Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// The state of the control thread, besides the status.
struct Control {
    identity: Identity,
    addresses: Vec<SocketAddr>,
    status: Arc<GroupStatus>,
    /// The connection to each peer, by rank.
    connections: Vec<Connection>,
    detector: FailureDetector,
    events: Sender<(usize, Event)>,
    writing: JoinSet<()>,
    /// Attempts to connect to other ranks.
    dials: JoinSet<()>,
    /// Number of connections opened so far.
    opened: usize,
    peer_events: UnboundedSender<RankEvent>,
    /// By rank: whether a message has arrived on a connection to this rank.
    greeted: Vec<bool>,
    /// By rank: whether it has said that it may go on in another group, and nothing since.
    elsewhere: Vec<bool>,
    star: Option<Star>,
}

impl Control {
    fn rank(&self) -> usize {
        self.identity.rank
    }

    /// Whether this rank relays the messages of the others.
    fn is_hub(&self) -> bool {
        self.star.is_some() && self.rank() == 0
    }

    /// Returns the connection to rank 0, if rank 0 relays this rank's messages.
    fn hub(&self) -> Option<&Writer> {
        let serves = self.star.as_ref().is_some_and(|star| star.hub == Hub::Serves);
        match self.connections.first() {
            Some(Connection::Open(writer)) if serves && self.rank() != 0 => Some(writer),
            _ => None,
        }
    }

    /// Sends a frame on every open connection except that to `except`.
    fn fan_out(&self, frame: &Frame, except: Option<usize>) {
        for (peer, connection) in self.connections.iter().enumerate() {
            if let Connection::Open(writer) = connection
                && except != Some(peer)
            {
                writer.send(frame.clone());
            }
        }
    }

    /// Sends a message to one rank. If there is no path to it, forms a mesh first.
    fn send(&mut self, peer: usize, message: Message) {
        let Some(message) = self.tell(peer, message) else { return };
        self.form_mesh();
        if let Connection::Pending(first) = &mut self.connections[peer] {
            first.push(message);
        }
    }

    /// Sends a message to one rank. Gives it back if there is no path to the rank.
    fn tell(&self, peer: usize, message: Message) -> Option<Message> {
        match (&self.connections[peer], self.hub()) {
            (Connection::Open(writer), _) => writer.send(Frame::Own(message)),
            (_, Some(hub)) => hub.send(Frame::Relay { to: Some(peer as u32), message }),
            (_, None) => return Some(message),
        }
        None
    }

    /// Handles a request from the threads that run operations.
    fn handle_outgoing(&mut self, outgoing: ControlRequest) {
        match outgoing {
            ControlRequest::Calling(site) => self.ask(site),
            ControlRequest::Called(peer, site) => self.answer(peer, site),
            ControlRequest::Locate(peer) => drop(self.tell(peer, Message::Locate)),
            ControlRequest::Meet => {
                if self.star.as_ref().is_some_and(|star| star.hub == Hub::Left) {
                    self.form_mesh();
                }
            }
            ControlRequest::Failed(error, completed) => self.fail(Message::Failed(error.for_peers(), completed)),
            ControlRequest::Invites(peer, invitation) => self.send(peer, Message::Invites(invitation)),
            ControlRequest::ShrinkMessage(message) => {
                self.form_mesh();
                let message = Message::ShrinkMessage(message);
                self.fan_out(&Frame::Own(message.clone()), None);
                self.star.iter_mut().for_each(|star| star.replay.push(message.clone()));
            }
            // `run` handles it.
            ControlRequest::Goodbye(_) => {}
        }
    }

    /// Answers `peer` with this rank's call. In a star, rank 0 collects the answers.
    fn answer(&mut self, peer: usize, site: Site) {
        if self.is_hub() {
            return self.record_answer(0, site);
        }
        match self.hub() {
            Some(hub) => hub.send(Frame::Own(Message::Called(site))),
            None => match &mut self.connections[peer] {
                Connection::Open(writer) => writer.send(Frame::Own(Message::Called(site))),
                Connection::Pending(first) => first.push(Message::Called(site)),
                // Rank 0, which passed on the question, has left. A rank that still waits connects, and asks again.
                Connection::Absent | Connection::Closed => {}
            },
        }
    }

    /// Starts to serve a connection to `peer`.
    fn open(&mut self, peer: usize, stream: TcpStream) {
        // Small frames must not wait for more data. If this fails, the connection is slower but still correct.
        let _ = stream.set_nodelay(true);
        let (reader, writer) = stream.into_split();
        let (frames, queue) = unbounded_channel();
        self.opened += 1;
        tokio::spawn(read((peer, self.opened), reader, self.status.clone(), self.events.clone()));
        self.writing.spawn(write(writer, queue));
        self.connections[peer] = Connection::Open(Writer::new(frames, self.opened));
    }

    fn handle_event(&mut self, peer: usize, event: Event) {
        let is = |number| matches!(&self.connections[peer], Connection::Open(writer) if writer.number == number);
        match event {
            Event::Received(number, frame) if is(number) => self.handle_frame(peer, frame),
            Event::Closed(number, reason) if is(number) => {
                self.disconnected(peer, reason, !self.elsewhere[peer]);
            }
            Event::Dialled(stream) => self.attach(peer, stream),
            Event::Unreachable { reason, ended } if matches!(self.connections[peer], Connection::Pending(_)) => {
                let star = self.star.as_ref();
                if ended && star.is_some_and(|star| star.hub == Hub::Left) {
                    // It left or died after rank 0, which could not report it. What it has begun is not known.
                    self.status.mark_left(peer, u64::MAX);
                }
                let uncertain = star.is_some_and(|star| star.uncertain);
                self.disconnected(peer, reason, ended && self.all_begun() && !uncertain);
            }
            // An event of a connection that another one has replaced.
            _ => {}
        }
    }

    /// The connection to `peer` has ended, or none could be made. `ended`: most likely the peer has ended too.
    fn disconnected(&mut self, peer: usize, reason: String, ended: bool) {
        self.connections[peer] = Connection::Closed;
        let fresh = self.status.mark_lost(peer, reason.clone());
        // The receiver is gone if this rank is about to leave. The same holds wherever `peer_events` is sent.
        let _ = self.peer_events.send((peer, if ended { PeerEvent::Closed } else { PeerEvent::Silent }));
        self.report_loss(peer, reason, ended, fresh);
    }

    /// Handles a message that `peer` sent on its own connection to this rank.
    fn handle_message(&mut self, peer: usize, message: Message) {
        match &message {
            Message::ShrinkMessage(message) => {
                let _ = self.peer_events.send((peer, PeerEvent::Message(message.clone())));
                self.star.iter_mut().for_each(|star| star.shrinking[peer] = true);
                // The other ranks must receive it too, and it is not relayed.
                self.form_mesh();
            }
            Message::Failed(..) if self.is_hub() => return self.relay(peer, message),
            Message::Calling(site) if self.is_hub() => return self.pass_on_question(peer, *site),
            Message::Called(site) if self.is_hub() => self.record_answer(peer, *site),
            // Rank 0 reports it to all ranks.
            Message::Failed(..) if peer == 0 => self.star.iter_mut().for_each(|star| star.failure_known = true),
            Message::Goodbye(goodbye) => {
                let panicked = goodbye.panicked;
                self.connections[peer] = Connection::Closed;
                let _ = self.peer_events.send((peer, PeerEvent::Left));
                if self.is_hub() && !self.star.as_ref().is_some_and(|star| star.shrinking[peer]) {
                    let from = peer as u32;
                    self.fan_out(&Frame::Relayed { from, message: message.clone() }, Some(peer));
                } else if peer == 0 && !self.is_hub() {
                    self.hub_left(panicked);
                }
            }
            _ => {}
        }
        if let Some(answer) = apply_message(&self.status, peer, message)
            && let Connection::Open(writer) = &self.connections[peer]
        {
            writer.send(Frame::Own(answer));
        }
    }

    /// Sends a heartbeat on every open connection, when it is time, and declares peers lost that have been silent for
    /// too long.
    fn tick(&mut self) {
        let tick = self.detector.tick(Instant::now());
        let begun = self.star.is_none() || self.all_begun();
        for peer in 0..self.connections.len() {
            let Connection::Open(writer) = &self.connections[peer] else { continue };
            if !self.detector.is_monitored(peer) {
                continue;
            }
            if tick.beats {
                writer.send(Frame::Own(Message::Heartbeat));
            }
            if self.detector.check(peer, &self.status, begun) {
                self.declare_lost(peer);
            }
        }
        if tick.beats {
            self.tick_star(tick.suspended);
        }
    }

    /// `peer` was silent for too long. Its connection stays: the peer may still learn that the others continue without
    /// it.
    fn declare_lost(&mut self, peer: usize) {
        let reason = "nothing arrived from it for too long (BONFIRE_HEARTBEAT_TIMEOUT), though its connection is \
                      open: it is stopped, or the network between is down";
        if peer == 0 {
            self.star.iter_mut().for_each(|star| star.uncertain = true);
        }
        // A peer that is known to be gone is not reported as silent.
        if self.status.mark_lost(peer, reason.into()) {
            let _ = self.peer_events.send((peer, PeerEvent::Silent));
            self.report_loss(peer, reason.into(), false, true);
        }
    }
}
