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

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, channel, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::beat::{Pulse, Silence, beats};
use super::board::Board;
use super::line::{Event, Frame, Line, Writer, read, write};
use super::meet::{accept, dial};
use super::word::{News, Word};
use crate::auth::{Lobby, Member};
use crate::error::{Error, Site};
use crate::transport::Fault;
use crate::transport::invitation::Invitation;

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

/// From the threads that run operations to the control thread.
pub(crate) enum Outgoing {
    /// This rank stalls at this call and asks all peers for theirs.
    Calling(Site),
    /// This rank's call, to a peer that asked before it was made.
    Called(usize, Site),
    /// This rank failed, having completed so many collectives.
    Failed(Error, u64),
    /// To a member of a subgroup to be.
    Invites(usize, Invitation),
    /// To all peers, of going on without those that are lost.
    Word(Word),
    /// This rank leaves, in order or because its thread panics; the control thread ends.
    Farewell { panicked: bool },
}

/// What a rank tells others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Nothing but a word: this rank is there.
    Here,
    Calling(Site),
    Called(Site),
    Failed(Error, u64),
    Word(Word),
    Invites(Invitation),
    Farewell {
        panicked: bool,
    },
}

/// Takes what `peer` said; gives what to answer, if anything.
pub(crate) fn hear(board: &Board, peer: usize, message: Message) -> Option<Message> {
    match message {
        Message::Here => {}
        Message::Calling(site) => return board.hear(peer, site, true).map(Message::Called),
        Message::Called(site) => drop(board.hear(peer, site, false)),
        Message::Failed(error, completed) => board.fail(Fault::Failed(error), completed),
        Message::Word(_) => board.moves(peer),
        Message::Invites(invitation) => board.invited(peer, invitation),
        Message::Farewell { panicked: true } => drop(board.lost(peer, "its thread panicked".into())),
        Message::Farewell { panicked: false } => board.left(peer),
    }
    None
}

/// Who a word of going on is from, or of whom the news are.
pub(crate) type Heard = (usize, News);

/// How long a leaving rank may take to get its farewell out.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a leaving rank that failed waits for those that cannot know of it yet: they come within [`MOMENT`].
const LINGER: Duration = Duration::from_secs(3);

/// In beats: how long the others do without rank 0 before they connect to each other. Where a job ends, all leave meanwhile.
const MOMENT: u32 = 2;

/// What was heard and waits: a rank that says more waits itself.
const QUEUE: usize = 64;

/// Serves until the farewell.
pub(super) async fn run(
    mesh: Mesh,
    silence: Silence,
    mut outgoing: UnboundedReceiver<Outgoing>,
    news: UnboundedSender<Heard>,
) {
    let (events, mut happening) = channel(QUEUE);
    let (controls, mut come) = unbounded_channel();
    tokio::spawn(accept(mesh.listener, mesh.lobby, mesh.member.clone(), mesh.board.clone(), controls.clone()));
    let n = mesh.member.world_size;
    let mut control = Control {
        member: mesh.member,
        addresses: mesh.addresses,
        board: mesh.board,
        lines: (0..n).map(|_| Line::Absent).collect(),
        pulse: Pulse::new(n, silence),
        events,
        controls,
        writing: JoinSet::new(),
        connections: 0,
        news,
        spoke: vec![false; n],
        star: mesh.star.then(|| Star { moved: vec![false; n], ..Star::default() }),
    };
    for (peer, stream) in mesh.connections.into_iter().enumerate() {
        if let Some(stream) = stream {
            control.open(peer, stream);
        }
    }
    control.board.hears_through_hub(mesh.star && control.rank() != 0);
    let mut beats = beats();
    let mut leaves = None;
    let serving = async {
        while leaves.is_none() || control.owes() {
            tokio::select! {
                said = outgoing.recv(), if leaves.is_none() => {
                    let Some(said) = said else { return };
                    leaves = matches!(said, Outgoing::Farewell { .. }).then(|| tokio::time::Instant::now() + LINGER);
                    control.say(said);
                }
                Some((peer, stream)) = come.recv() => control.joins(peer, stream),
                Some((peer, event)) = happening.recv() => control.happens(peer, event),
                _ = beats.tick() => control.beat(),
                () = past(leaves) => return,
            }
        }
    };
    serving.await;
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
    controls: UnboundedSender<(usize, TcpStream)>,
    writing: JoinSet<()>,
    /// So far.
    connections: usize,
    news: UnboundedSender<Heard>,
    /// By rank: whether it has said a word on a connection to this one.
    spoke: Vec<bool>,
    star: Option<Star>,
}

/// What there is to know of a star, besides.
#[derive(Default)]
struct Star {
    hub: Hub,
    /// All ranks have begun this group.
    begun: bool,
    /// Rank 0 was silent, or this rank was away: others may have gone on and ended unnoticed, and who listens no more is
    /// not known to have ended before that.
    doubts: bool,
    /// The last collective of which this rank has told all what it called there.
    announced: Option<u64>,
    /// All ranks know of a failure, or will have heard of it when they hear that rank 0 is gone.
    known: bool,
    /// By rank: it goes on without the lost.
    moved: Vec<bool>,
    /// The star has become a mesh, or is about to.
    met: bool,
    /// Beats since it was to become one, or since the last connection was made.
    quiet: u64,
    /// What all must hear and rank 0 may not pass on, in its order: this rank's failure, and its words of going on.
    said: Vec<Message>,
}

/// Rank 0, as it looks to the others.
#[derive(Default, PartialEq)]
enum Hub {
    #[default]
    Serves,
    /// It left in order; the others connect after so many beats.
    Left(u32),
    Lost,
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
                if let Some(star) = &mut self.star {
                    star.announced = Some(site.sequence);
                }
                self.tell(Message::Calling(site));
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
            // To those that will be connected, too.
            Outgoing::Farewell { panicked } => {
                let message = Message::Farewell { panicked };
                self.spread(&Frame::Own(message.clone()), None);
                self.star.iter_mut().for_each(|star| star.said.push(message.clone()));
            }
        }
    }

    /// Says what this rank called. In a star all hear it, once: where one rank asks, most do.
    fn answer(&mut self, peer: usize, site: Site) {
        let Some(star) = &mut self.star else { return self.send(peer, Message::Called(site)) };
        if star.announced != Some(site.sequence) {
            star.announced = Some(site.sequence);
            self.tell(Message::Called(site));
        }
    }

    /// This rank has failed.
    fn fail(&mut self, message: Message) {
        let is_hub = self.is_hub();
        let Some(star) = &mut self.star else { return self.tell(message) };
        if star.known {
            return;
        }
        // Those who are told by rank 0 hear it in order with all else.
        star.known = is_hub;
        if !is_hub {
            star.said.push(message.clone());
        }
        let alone = star.hub != Hub::Serves;
        self.tell(message);
        if alone {
            self.meet();
        }
    }

    /// Whether ranks that are about to connect cannot know yet that this one has failed.
    fn owes(&self) -> bool {
        let failed = |star: &Star| star.said.iter().any(|message| matches!(message, Message::Failed(..)));
        let owes = |star: &Star| star.hub != Hub::Serves && !star.known && failed(star);
        self.star.as_ref().is_some_and(owes) && self.lines.iter().any(|line| matches!(line, Line::Coming(_)))
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

    /// A connection to `peer` is there that was not from the start: serves it, and says there what the peer missed.
    fn joins(&mut self, peer: usize, stream: TcpStream) {
        if self.star.is_none() || peer >= self.lines.len() || self.board.has_left(peer) {
            return;
        }
        let before = std::mem::replace(&mut self.lines[peer], Line::Absent);
        self.open(peer, stream);
        self.pulse.begin(peer);
        let (Some(star), Line::Open(writer)) = (&mut self.star, &self.lines[peer]) else { return };
        star.quiet = 0;
        let first = if let Line::Coming(first) = before { first } else { Vec::new() };
        for message in [Message::Here].into_iter().chain(first).chain(star.said.iter().cloned()) {
            writer.send(Frame::Own(message));
        }
    }

    /// Has all ranks connect to each other.
    fn meet(&mut self) {
        let rank = self.rank();
        let Some(star) = self.star.as_mut().filter(|star| !star.met) else { return };
        (star.met, star.quiet) = (true, 0);
        if rank == 0 {
            return self.spread(&Frame::Meet, None);
        }
        for (peer, line) in self.lines.iter_mut().enumerate() {
            if peer == rank || !matches!(line, Line::Absent) {
                continue;
            }
            *line = Line::Coming(Vec::new());
            // The higher rank dials.
            if peer < rank {
                let (member, address) = (self.member.clone(), self.addresses[peer]);
                let (controls, events) = (self.controls.clone(), self.events.clone());
                tokio::spawn(async move {
                    // Nobody hears of it where this rank is about to leave.
                    match dial(&member, peer, address).await {
                        Ok(stream) => drop(controls.send((peer, stream))),
                        Err(event) => drop(events.send((peer, event)).await),
                    }
                });
            }
        }
    }

    fn happens(&mut self, peer: usize, event: Event) {
        let is = |number| matches!(&self.lines[peer], Line::Open(writer) if writer.number == number);
        match event {
            Event::Heard(number, frame) if is(number) => self.heard(peer, frame),
            Event::Over(number, reason) if is(number) => {
                let ended = self.spoke[peer] || self.begun();
                self.loses(peer, reason, ended);
            }
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

    /// Whether all ranks have certainly begun this group.
    fn begun(&self) -> bool {
        self.star.as_ref().is_some_and(|star| star.begun) || self.board.all_began()
    }

    /// The way to `peer` has ended, or there is none; `ended` says that the peer has, most likely.
    fn loses(&mut self, peer: usize, reason: String, ended: bool) {
        self.lines[peer] = Line::Over;
        let fresh = self.board.lost(peer, reason.clone());
        // Nobody hears it any more where the rank is about to leave; so everywhere.
        let _ = self.news.send((peer, if ended { News::Closed } else { News::Silent }));
        self.lost(peer, reason, ended, fresh);
    }

    /// `peer` is lost, which may be news to others, or leave this rank without rank 0.
    fn lost(&mut self, peer: usize, reason: String, ended: bool, fresh: bool) {
        let is_hub = self.is_hub();
        let Some(star) = &mut self.star else { return };
        if is_hub && fresh {
            star.known = true;
            self.spread(&Frame::Lost { peer: peer as u32, reason, ended }, Some(peer));
        } else if peer == 0 {
            star.hub = Hub::Lost;
            // Everybody sees it.
            star.known = true;
            self.meet();
        }
    }

    fn heard(&mut self, peer: usize, frame: Frame) {
        self.begins(peer);
        let (n, rank, is_hub) = (self.lines.len(), self.rank(), self.is_hub());
        let from_hub = self.star.is_some() && peer == 0;
        match frame {
            Frame::Own(message) => self.hears(peer, message),
            Frame::Relay { to, message } if is_hub && relays(&message) => match to.map(|to| to as usize) {
                None => self.pass(peer, message),
                Some(to) => {
                    if let Some(Line::Open(writer)) = self.lines.get(to).filter(|_| to != peer) {
                        writer.send(Frame::Relayed { from: peer as u32, message });
                    }
                }
            },
            Frame::Relayed { from, message } if from_hub && (from as usize) < n && from as usize != rank => {
                self.hears_of(from as usize, message);
            }
            // This rank's own failure comes back: all have heard of it.
            Frame::Relayed { from, message: Message::Failed(..) } if from_hub && from as usize == rank => {
                self.star.iter_mut().for_each(|star| star.known = true);
            }
            Frame::Lost { peer: lost, reason, ended } if from_hub && (lost as usize) < n => {
                let lost = lost as usize;
                self.star.iter_mut().for_each(|star| star.known = true);
                // Where this rank is taken for lost itself, others may go on without it, and then it will be told.
                if lost != rank {
                    self.board.lost(lost, reason);
                    self.is_gone(lost, if ended { News::Closed } else { News::Silent });
                }
            }
            Frame::Begun if from_hub => self.star.iter_mut().for_each(|star| star.begun = true),
            Frame::Meet if from_hub => self.meet(),
            Frame::Relay { .. } | Frame::Relayed { .. } | Frame::Lost { .. } | Frame::Begun | Frame::Meet => {
                self.loses(peer, "it said what only another rank may say".into(), false);
            }
        }
    }

    /// `peer` has said a word on its connection to this rank.
    fn begins(&mut self, peer: usize) {
        let first = !std::mem::replace(&mut self.spoke[peer], true);
        if first && self.is_hub() && self.spoke.iter().skip(1).all(|spoke| *spoke) {
            self.star.iter_mut().for_each(|star| star.begun = true);
            self.spread(&Frame::Begun, None);
        }
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

    /// Rank 0 passes on what `from` has said.
    fn hears_of(&mut self, from: usize, message: Message) {
        match &message {
            Message::Failed(..) => self.star.iter_mut().for_each(|star| star.known = true),
            // As from itself: it had not called `shrink`, so it has said nothing that could come later.
            Message::Farewell { .. } => self.is_gone(from, News::Left),
            _ => {}
        }
        if let Some(Message::Called(mine)) = hear(&self.board, from, message) {
            self.answer(from, mine);
        }
    }

    /// Rank 0 says that `peer` left or is lost. Where the two are connected, the connection says it too.
    fn is_gone(&mut self, peer: usize, news: News) {
        if !matches!(self.lines[peer], Line::Open(_)) {
            self.lines[peer] = Line::Over;
            let _ = self.news.send((peer, news));
        }
    }

    /// Rank 0 has left, in order or not.
    fn is_left(&mut self, panicked: bool) {
        let Some(star) = &mut self.star else { return };
        star.hub = if panicked { Hub::Lost } else { Hub::Left(MOMENT) };
        let failed = star.said.iter().any(|message| matches!(message, Message::Failed(..)));
        if panicked || failed && !star.known {
            self.meet();
        }
    }

    /// As rank 0: passes on what `from` says to all, and hears it. Only the first failure counts, and who told of it hears
    /// that all know.
    fn pass(&mut self, from: usize, message: Message) {
        let failed = matches!(message, Message::Failed(..));
        let Some(star) = &mut self.star else { return };
        if !(failed && std::mem::replace(&mut star.known, true)) {
            let frame = Frame::Relayed { from: from as u32, message: message.clone() };
            self.spread(&frame, (!failed).then_some(from));
        }
        if let Some(Message::Called(mine)) = hear(&self.board, from, message) {
            self.answer(from, mine);
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
        let Some(star) = &mut self.star else { return };
        star.doubts |= away;
        star.quiet += 1;
        if let Hub::Left(beats) = &mut star.hub {
            *beats = beats.saturating_sub(1);
            if *beats == 0 {
                self.meet();
            }
        }
        let given_up = self.star.as_ref().is_some_and(|star| star.met && star.quiet > self.pulse.limit());
        for peer in (0..self.lines.len()).filter(|_| given_up) {
            if matches!(self.lines[peer], Line::Coming(_)) {
                self.loses(peer, format!("no connection to it at {} could be made", self.addresses[peer]), false);
            }
        }
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

/// What rank 0 passes on.
fn relays(message: &Message) -> bool {
    matches!(message, Message::Calling(_) | Message::Called(_) | Message::Failed(..) | Message::Invites(_))
}

#[cfg(test)]
mod tests;
