//! The control thread: what ranks tell each other beside the data, and the listener for further connections.
//!
//! A group of a few ranks begins with a connection between any two (a *mesh*), a larger one as a *star*: every rank has one
//! to rank 0, which passes on what the others tell each other, tells of ranks that left or are lost, and is the only one that
//! knows how long each was silent. A star becomes a mesh once it must do without rank 0, or is to: where rank 0 is lost, or
//! has left and others are still there a moment later, and where a rank goes on without the lost. What comes from rank 0 is
//! in order, so a failure of which it told is known to all.
//!
//! Words of going on are never passed on: who says them is connected to who hears them, and its farewell comes after them
//! on the same connection. That keeps what a rank says of its end in order with its end.

mod star;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, channel, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::beat::{Pulse, Silence, beats};
use super::board::Board;
use super::hub::{Hub, Star};
use super::line::{Event, Frame, Line, Writer, read, write};
use super::meet::accept;
use super::message::{Heard, Message, Outgoing, hear};
use super::word::News;
use crate::auth::{Lobby, Member};
use crate::types::Site;

/// What the rendezvous hands over.
pub(crate) struct Mesh {
    pub member: Member,
    pub addresses: Vec<SocketAddr>,
    pub listener: TcpListener,
    /// Who has not proved yet who it is.
    pub lobby: Arc<Lobby>,
    /// By rank; none to oneself, and in a star none to most.
    pub connections: Vec<Option<TcpStream>>,
    /// Whether ranks hear of each other through rank 0.
    pub star: bool,
    pub board: Arc<Board>,
}

/// How long a leaving rank may take to get its farewell out.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a leaving rank that failed waits for those that cannot know of it yet: they come within [`MOMENT`].
const LINGER: Duration = Duration::from_secs(3);

/// What was heard and waits: a rank that says more waits itself.
const QUEUE: usize = 64;

/// Serves until the farewell.
pub(crate) async fn run(
    mesh: Mesh,
    silence: Silence,
    mut outgoing: UnboundedReceiver<Outgoing>,
    news: UnboundedSender<Heard>,
) {
    let (events, mut happening) = channel(QUEUE);
    let (controls, mut come) = unbounded_channel();
    tokio::spawn(accept(mesh.listener, mesh.lobby, mesh.member.clone(), mesh.board.clone(), controls));
    let n = mesh.member.world_size;
    let mut control = Control {
        member: mesh.member,
        addresses: mesh.addresses,
        board: mesh.board,
        lines: (0..n).map(|_| Line::Absent).collect(),
        pulse: Pulse::new(n, silence),
        events,
        writing: JoinSet::new(),
        connections: 0,
        news,
        spoke: vec![false; n],
        star: mesh.star.then(|| Star { moved: vec![false; n], through: vec![false; n], ..Star::default() }),
    };
    for (peer, stream) in mesh.connections.into_iter().enumerate() {
        if let Some(stream) = stream {
            control.open(peer, stream);
        }
    }
    let mut beats = beats();
    // This rank's farewell, and when it ends at the latest.
    let mut leaves = None;
    let serving = async {
        while leaves.is_none() || control.owes() {
            tokio::select! {
                said = outgoing.recv(), if leaves.is_none() => match said {
                    Some(Outgoing::Farewell { panicked }) => {
                        let farewell = Message::Farewell { panicked };
                        control.leave(&farewell);
                        let limit = if control.is_hub() { PATIENCE } else { LINGER };
                        leaves = Some((farewell, tokio::time::Instant::now() + limit));
                    }
                    Some(said) => control.say(said),
                    None => return,
                },
                // The higher rank of a pair dials; a lower one knocks, to be dialled.
                Some((peer, stream)) = come.recv() => match peer > control.rank() {
                    true => control.joins(peer, stream),
                    false => control.meet(),
                },
                Some((peer, event)) = happening.recv() => control.happens(peer, event),
                _ = beats.tick() => control.beat(),
                () = past(leaves.as_ref().map(|(_, end)| *end)) => return,
            }
        }
    };
    serving.await;
    // Who has been let in meanwhile is told what all others are.
    come.close();
    while let Ok((peer, stream)) = come.try_recv() {
        if peer > control.rank() {
            control.joins(peer, stream);
        }
    }
    if let Some((farewell, _)) = leaves.filter(|_| control.is_hub()) {
        control.spread(&Frame::Own(farewell), None);
    }
    control.lines.clear();
    // Writers end with the farewell; one whose peer does not read is given up.
    let _ = timeout(PATIENCE, async { while control.writing.join_next().await.is_some() {} }).await;
}

/// Waits until then, or for ever.
async fn past(instant: Option<tokio::time::Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// What the control thread knows, besides the board.
struct Control {
    member: Member,
    addresses: Vec<SocketAddr>,
    board: Arc<Board>,
    /// By rank.
    lines: Vec<Line>,
    pulse: Pulse,
    events: Sender<(usize, Event)>,
    writing: JoinSet<()>,
    /// So far.
    connections: usize,
    news: UnboundedSender<Heard>,
    /// By rank: whether it has said a word on a connection to this one.
    spoke: Vec<bool>,
    star: Option<Star>,
}

impl Control {
    fn rank(&self) -> usize {
        self.member.rank
    }

    /// Whether this rank passes on what the others say.
    fn is_hub(&self) -> bool {
        self.star.is_some() && self.rank() == 0
    }

    /// The connection to rank 0, where that passes on what this rank says.
    fn hub(&self) -> Option<&Writer> {
        let serves = self.star.as_ref().is_some_and(|star| star.hub == Hub::Serves);
        match self.lines.first() {
            Some(Line::Open(writer)) if serves && self.rank() != 0 => Some(writer),
            _ => None,
        }
    }

    /// Says it to those that are connected, but for `other`.
    fn spread(&self, frame: &Frame, other: Option<usize>) {
        for (peer, line) in self.lines.iter().enumerate() {
            if let Line::Open(writer) = line
                && other != Some(peer)
            {
                writer.send(frame.clone());
            }
        }
    }

    /// Says it to all, as far as there is a way.
    fn tell(&self, message: Message) {
        match self.hub() {
            Some(hub) => hub.send(Frame::Relay { to: None, message }),
            None => self.spread(&Frame::Own(message), None),
        }
    }

    /// Says it to one.
    fn send(&mut self, peer: usize, message: Message) {
        if let Line::Open(writer) = &self.lines[peer] {
            return writer.send(Frame::Own(message));
        }
        if let Some(hub) = self.hub() {
            return hub.send(Frame::Relay { to: Some(peer as u32), message });
        }
        self.meet();
        if let Line::Coming(first) = &mut self.lines[peer] {
            first.push(message);
        }
    }

    /// Says what the threads that run operations want said.
    fn say(&mut self, outgoing: Outgoing) {
        match outgoing {
            Outgoing::Calling(site) => {
                self.announce(site.sequence, Message::Calling(site));
            }
            Outgoing::Called(peer, site) => self.answer(peer, site),
            Outgoing::Failed(error, completed) => self.fail(Message::Failed(error, completed)),
            Outgoing::Invites(peer, invitation) => self.send(peer, Message::Invites(invitation)),
            Outgoing::Word(word) => {
                self.meet();
                let message = Message::Word(word);
                self.spread(&Frame::Own(message.clone()), None);
                self.star.iter_mut().for_each(|star| star.said.push(message.clone()));
            }
            // See `run`.
            Outgoing::Farewell { .. } => {}
        }
    }

    /// Says what this rank called. In a star all hear it, once: where one rank asks, most do.
    fn answer(&mut self, peer: usize, site: Site) {
        let Some(star) = &self.star else { return self.send(peer, Message::Called(site)) };
        if star.announced != Some(site.sequence) {
            self.announce(site.sequence, Message::Called(site));
        }
    }

    /// Serves a connection to `peer`.
    fn open(&mut self, peer: usize, stream: TcpStream) {
        // What this end says must not wait for more of it. If it does, it is slower and no less right.
        let _ = stream.set_nodelay(true);
        let (reader, writer) = stream.into_split();
        let (frames, queue) = unbounded_channel();
        self.connections += 1;
        tokio::spawn(read((peer, self.connections), reader, self.board.clone(), self.events.clone()));
        self.writing.spawn(write(writer, queue));
        self.lines[peer] = Line::Open(Writer::new(frames, self.connections));
    }

    fn happens(&mut self, peer: usize, event: Event) {
        let is = |number| matches!(&self.lines[peer], Line::Open(writer) if writer.number == number);
        match event {
            Event::Heard(number, frame) if is(number) => self.heard(peer, frame),
            Event::Over(number, reason) if is(number) => {
                let ended = self.spoke[peer] || self.begun();
                self.loses(peer, reason, ended);
            }
            Event::Dialled(stream) => self.joins(peer, stream),
            Event::Unreachable { reason, ended } if matches!(self.lines[peer], Line::Coming(_)) => {
                let star = self.star.as_ref();
                if ended && star.is_some_and(|star| matches!(star.hub, Hub::Left(_))) {
                    // It left after rank 0, which could not tell of it, or died then.
                    self.board.left(peer);
                }
                let doubts = star.is_some_and(|star| star.doubts);
                self.loses(peer, reason, ended && self.begun() && !doubts);
            }
            // Of a connection that another one has replaced.
            _ => {}
        }
    }

    /// The way to `peer` has ended, or there is none; `ended` says that the peer has, most likely.
    fn loses(&mut self, peer: usize, reason: String, ended: bool) {
        self.lines[peer] = Line::Over;
        let fresh = self.board.lost(peer, reason.clone());
        // Nobody hears it any more where the rank is about to leave; so everywhere.
        let _ = self.news.send((peer, if ended { News::Closed } else { News::Silent }));
        self.lost(peer, reason, ended, fresh);
    }

    /// `peer` has said this to this rank itself.
    fn hears(&mut self, peer: usize, message: Message) {
        match &message {
            Message::Word(word) => {
                let _ = self.news.send((peer, News::Said(word.clone())));
                self.star.iter_mut().for_each(|star| star.moved[peer] = true);
                // The others must hear it too.
                self.meet();
            }
            Message::Failed(..) if self.is_hub() => return self.pass(peer, message),
            // It tells all.
            Message::Failed(..) if peer == 0 => self.star.iter_mut().for_each(|star| star.known = true),
            Message::Farewell { panicked } => {
                let panicked = *panicked;
                self.lines[peer] = Line::Over;
                let _ = self.news.send((peer, News::Left));
                if self.is_hub() && !self.star.as_ref().is_some_and(|star| star.moved[peer]) {
                    let from = peer as u32;
                    self.spread(&Frame::Relayed { from, message: message.clone() }, Some(peer));
                } else if peer == 0 && !self.is_hub() {
                    self.is_left(panicked);
                }
            }
            _ => {}
        }
        if let Some(Message::Called(mine)) = hear(&self.board, peer, message) {
            self.answer(peer, mine);
        }
    }

    /// Says a word to those that are connected, and gives those up that have been silent for too long.
    fn beat(&mut self) {
        let away = self.pulse.was_away(Instant::now());
        for peer in 0..self.lines.len() {
            let Line::Open(writer) = &self.lines[peer] else { continue };
            if !self.pulse.watches(peer) {
                continue;
            }
            writer.send(Frame::Own(Message::Here));
            if self.pulse.misses(peer, &self.board) {
                self.silent(peer);
            }
        }
        self.waits(away);
    }

    /// Nothing was heard of `peer` for too long. Its connection stays: it may still hear that others go on without it.
    fn silent(&mut self, peer: usize) {
        let reason = "nothing was heard of it for too long, though its connection is open: it is stopped, or the network \
                      between is down; BONFIRE_SILENCE sets how long";
        if peer == 0 {
            self.star.iter_mut().for_each(|star| star.doubts = true);
        }
        // Who is known to have gone is not silent.
        if self.board.lost(peer, reason.into()) {
            let _ = self.news.send((peer, News::Silent));
            self.lost(peer, reason.into(), false, true);
        }
    }
}
