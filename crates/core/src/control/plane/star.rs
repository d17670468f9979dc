//! What a star does besides: passing on, and becoming a mesh. See `control`.

use tokio::net::TcpStream;

use super::Control;
use crate::control::hub::Hub;
use crate::control::line::{Event, Frame, Line};
use crate::control::meet::dial;
use crate::control::message::{Message, hear};
use crate::control::word::News;

/// In beats: how long the others do without rank 0 before they connect to each other. Where a job ends, all leave meanwhile.
const MOMENT: u32 = 2;

/// In beats without a new connection: when a rank knocks at the higher ones that have not dialled, to find out whether they
/// are there and to have them dial. The least [`Silence`] leaves them another beat.
const KNOCK: u64 = 2;

impl Control {
    /// Says farewell to those that are connected, and to those that will be. Rank 0 of a star hears first what it is yet to
    /// pass on.
    pub(super) fn leave(&mut self, farewell: &Message) {
        if self.is_hub() {
            return self.spread(&Frame::Leaves, None);
        }
        self.spread(&Frame::Own(farewell.clone()), None);
        self.star.iter_mut().for_each(|star| star.said.push(farewell.clone()));
    }

    /// Says what this rank called, or asks: to all, in a star.
    pub(super) fn announce(&mut self, sequence: u64, message: Message) {
        if let Some(star) = &mut self.star {
            star.announced = Some(sequence);
            star.question = Some(message.clone());
            if star.hub != Hub::Serves {
                self.meet();
            }
        }
        self.tell(message);
    }

    /// This rank has failed.
    pub(super) fn fail(&mut self, message: Message) {
        let is_hub = self.is_hub();
        let Some(star) = &mut self.star else { return self.tell(message) };
        let known = star.known;
        // Those who are told by rank 0 hear it in order with all else.
        star.known |= is_hub;
        let alone = !is_hub && !known && star.hub != Hub::Serves;
        if !is_hub && !known {
            star.said.push(message.clone());
        }
        let own = Frame::Own(message.clone());
        match self.hub() {
            // On every connection it comes before this rank's farewell.
            Some(hub) => {
                self.spread(&own, Some(0));
                if !known {
                    hub.send(Frame::Relay { to: None, message });
                }
            }
            None => self.spread(&own, None),
        }
        if alone {
            self.meet();
        }
    }

    /// Whether this rank must not end yet: as rank 0, because it may still be given something to pass on, else because ranks
    /// that are about to connect cannot know yet that it has failed.
    pub(super) fn owes(&self) -> bool {
        let Some(star) = &self.star else { return false };
        let (is_hub, alone) = (self.is_hub(), star.hub != Hub::Serves && !star.known && star.failed());
        self.lines.iter().zip(&star.through).any(|(line, through)| match line {
            Line::Open(_) => is_hub && !through,
            Line::Coming(_) => alone,
            _ => false,
        })
    }

    /// A connection to `peer` is there that was not from the start: serves it, and says there what the peer missed.
    pub(super) fn joins(&mut self, peer: usize, stream: TcpStream) {
        if self.star.is_none() || peer >= self.lines.len() || self.board.has_left(peer) {
            return;
        }
        let before = std::mem::replace(&mut self.lines[peer], Line::Absent);
        self.open(peer, stream);
        self.pulse.begin(peer);
        let (Some(star), Line::Open(writer)) = (&mut self.star, &self.lines[peer]) else { return };
        star.quiet = 0;
        let first = if let Line::Coming(first) = before { first } else { Vec::new() };
        let said = star.question.iter().chain(&star.said).cloned();
        for message in [Message::Here].into_iter().chain(first).chain(said) {
            writer.send(Frame::Own(message));
        }
    }

    /// Has all ranks connect to each other.
    pub(super) fn meet(&mut self) {
        let rank = self.rank();
        let Some(star) = self.star.as_mut().filter(|star| !star.met) else { return };
        (star.met, star.quiet) = (true, 0);
        if rank == 0 {
            return self.spread(&Frame::Meet, None);
        }
        // Who left with rank 0 is missed at once.
        let knocks = matches!(star.hub, Hub::Left(_));
        let mut dialled = Vec::new();
        for (peer, line) in self.lines.iter_mut().enumerate() {
            if peer == rank || !matches!(line, Line::Absent) {
                continue;
            }
            *line = Line::Coming(Vec::new());
            // The higher rank dials.
            if peer < rank || knocks {
                dialled.push(peer);
            }
        }
        dialled.into_iter().for_each(|peer| self.dial(peer));
    }

    /// Dials a lower rank, or knocks at a higher one, which then dials.
    pub(super) fn dial(&self, peer: usize) {
        let (member, address, events) = (self.member.clone(), self.addresses[peer], self.events.clone());
        tokio::spawn(async move {
            let event = match dial(&member, peer, address).await {
                Ok(_) if peer > member.rank => return,
                Ok(stream) => Event::Dialled(stream),
                Err(event) => event,
            };
            // Nobody hears of it where this rank is about to leave.
            let _ = events.send((peer, event)).await;
        });
    }

    /// Whether all ranks have certainly begun this group.
    pub(super) fn begun(&self) -> bool {
        self.star.as_ref().is_some_and(|star| star.begun) || self.board.all_began()
    }

    /// `peer` is lost, which may be news to others, or leave this rank without rank 0.
    pub(super) fn lost(&mut self, peer: usize, reason: String, ended: bool, fresh: bool) {
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

    pub(super) fn heard(&mut self, peer: usize, frame: Frame) {
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
            Frame::Leaves if from_hub => {
                for star in self.star.iter_mut().filter(|star| star.hub == Hub::Serves) {
                    star.hub = Hub::Left(MOMENT);
                }
                if let Line::Open(hub) = &self.lines[peer] {
                    hub.send(Frame::Through);
                }
            }
            Frame::Through if is_hub => self.star.iter_mut().for_each(|star| star.through[peer] = true),
            _ => self.loses(peer, "it said what only another rank may say".into(), false),
        }
    }

    /// `peer` has said a word on its connection to this rank.
    pub(super) fn begins(&mut self, peer: usize) {
        let first = !std::mem::replace(&mut self.spoke[peer], true);
        if first && self.is_hub() && self.spoke.iter().skip(1).all(|spoke| *spoke) {
            self.star.iter_mut().for_each(|star| star.begun = true);
            self.spread(&Frame::Begun, None);
        }
    }

    /// Rank 0 passes on what `from` has said.
    pub(super) fn hears_of(&mut self, from: usize, message: Message) {
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
    pub(super) fn is_gone(&mut self, peer: usize, news: News) {
        if !matches!(self.lines[peer], Line::Open(_)) {
            self.lines[peer] = Line::Over;
            let _ = self.news.send((peer, news));
        }
    }

    /// Rank 0 has left, in order or not.
    pub(super) fn is_left(&mut self, panicked: bool) {
        let Some(star) = &mut self.star else { return };
        star.hub = if panicked { Hub::Lost } else { Hub::Left(MOMENT) };
        // Everybody sees it.
        star.known |= panicked;
        if panicked || star.failed() && !star.known {
            self.meet();
        }
    }

    /// As rank 0: passes on what `from` says to all, and hears it. Only the first failure counts, and who told of it hears
    /// that all know.
    pub(super) fn pass(&mut self, from: usize, message: Message) {
        let failed = matches!(message, Message::Failed(..));
        let Some(star) = &mut self.star else { return };
        if !(failed && std::mem::replace(&mut star.known, true)) {
            let frame = Frame::Relayed { from: from as u32, message: message.clone() };
            self.spread(&frame, (!failed).then_some(from));
        } else if failed {
            // Who was given up, and goes on, may know of none.
            for (peer, line) in self.lines.iter().enumerate() {
                if let Line::Open(writer) = line
                    && !self.pulse.watches(peer)
                {
                    writer.send(Frame::Relayed { from: from as u32, message: message.clone() });
                }
            }
        }
        if let Some(Message::Called(mine)) = hear(&self.board, from, message) {
            self.answer(from, mine);
        }
    }

    /// Counts a beat of waiting for others, before which this rank was `away` or not.
    pub(super) fn waits(&mut self, away: bool) {
        let Some(star) = &mut self.star else { return };
        star.doubts |= away;
        star.quiet += 1;
        if let Hub::Left(beats) = &mut star.hub {
            *beats = beats.saturating_sub(1);
            if *beats == 0 {
                self.meet();
            }
        }
        let quiet = self.star.as_ref().map_or(0, |star| if star.met { star.quiet } else { 0 });
        for peer in 0..self.lines.len() {
            if !matches!(self.lines[peer], Line::Coming(_)) {
                continue;
            }
            if quiet > self.pulse.limit() {
                self.loses(peer, format!("no connection to it at {} could be made", self.addresses[peer]), false);
            } else if quiet == KNOCK && peer > self.rank() {
                self.dial(peer);
            }
        }
    }
}

/// What rank 0 passes on.
fn relays(message: &Message) -> bool {
    matches!(message, Message::Calling(_) | Message::Called(_) | Message::Failed(..) | Message::Invites(_))
}
