//! The parts of the control thread that only a star needs: relaying, and the change to a mesh. See `plane`.

use tokio::net::TcpStream;
use tokio::time::Instant;

use super::Control;
use crate::control::accept::dial;
use crate::control::connection::{Connection, Event, Frame};
use crate::control::hub::Hub;
use crate::control::message::{Message, apply_message};
use crate::control::shrink::PeerEvent;
use crate::control::status::GroupStatus;
use crate::types::{Error, Site};

/// Heartbeats without a new connection after which a rank knocks at the higher ranks that have not dialled, to find out
/// whether they are alive and to make them dial. The shortest [`HeartbeatTimeout`] leaves them one more heartbeat.
const KNOCK: u64 = 2;

/// Whether other ranks have to hear of this failure, if it is one. A goodbye of rank 0 reaches all ranks, and so does
/// one that ends the operation on all.
fn is_news(message: &Message, status: &GroupStatus) -> bool {
    match message {
        Message::Failed(Error::Left { rank, site, .. }, _) => *rank != 0 && !status.has_missed(*rank, site),
        message => matches!(message, Message::Failed(..)),
    }
}

impl Control {
    /// Sends the goodbye to connected ranks, and to ranks that connect later. Rank 0 of a star first waits for the
    /// messages that it is still to relay.
    pub(super) fn leave(&mut self, goodbye: &Message) {
        if self.is_hub() {
            return self.fan_out(&Frame::Leaves, None);
        }
        self.fan_out(&Frame::Own(goodbye.clone()), None);
        self.star.iter_mut().for_each(|star| star.replay.push(goodbye.clone()));
    }

    /// Asks all ranks for their calls, because this rank makes no progress in this one. In a star it asks rank 0, and
    /// only once: rank 0 answers as long as it learns more.
    pub(super) fn ask(&mut self, site: Site) {
        if self.is_hub() {
            return self.pass_on_question(0, site);
        }
        let question = Frame::Own(Message::Calling(site));
        let Some(star) = &mut self.star else { return self.fan_out(&question, None) };
        let again = star.question.replace(site) == Some(site);
        match self.hub() {
            Some(hub) if !again => hub.send(question),
            Some(_) => {}
            // Ranks that are not connected yet are asked when they are.
            None => self.fan_out(&question, None),
        }
    }

    /// On rank 0: `from` asks for the calls of all ranks. Passes on the first question about an operation.
    pub(super) fn pass_on_question(&mut self, from: usize, site: Site) {
        let Some(star) = &mut self.star else { return };
        let message = Message::Calling(site);
        if star.calls.ask(from, site, Instant::now()) {
            self.fan_out(&Frame::Relayed { from: from as u32, message: message.clone() }, Some(from));
        }
        if from != self.rank()
            && let Some(Message::Called(mine)) = apply_message(&self.status, from, message)
        {
            self.answer(from, mine);
        }
    }

    /// On rank 0: records the call of a rank that was asked.
    pub(super) fn record_answer(&mut self, from: usize, site: Site) {
        self.star.iter_mut().for_each(|star| star.calls.report(from, site, Instant::now()));
    }

    /// When rank 0 is to call [`send_updates`](Self::send_updates).
    pub(super) fn updates_due(&self) -> Option<Instant> {
        self.star.as_ref().and_then(|star| star.calls.due())
    }

    /// On rank 0: sends the calls that it has learned of to the ranks that asked.
    pub(super) fn send_updates(&mut self) {
        let Some(star) = &mut self.star else { return };
        for (peer, calls) in star.calls.updates() {
            if let Connection::Open(writer) = &self.connections[peer] {
                writer.send(Frame::Calls(calls));
            }
        }
    }

    /// Reports the failure of this rank to all ranks.
    pub(super) fn fail(&mut self, message: Message) {
        let is_hub = self.is_hub();
        let Some(star) = &mut self.star else { return self.fan_out(&Frame::Own(message), None) };
        let is_news = is_news(&message, &self.status);
        let known = star.failure_known;
        // The failure of rank 0 reaches the other ranks in order with all other messages of rank 0.
        star.failure_known |= is_hub;
        let alone = is_news && !is_hub && !known && star.hub != Hub::Serves;
        if !is_hub && !known {
            star.replay.push(message.clone());
        }
        let own = Frame::Own(message.clone());
        match self.hub() {
            // On every connection it precedes this rank's goodbye.
            Some(hub) => {
                self.fan_out(&own, Some(0));
                if !known {
                    hub.send(Frame::Relay { to: None, message });
                }
            }
            None => self.fan_out(&own, None),
        }
        if alone {
            self.form_mesh();
        }
    }

    /// Whether this rank must not end yet. Rank 0: because it may still receive messages to relay. Another rank:
    /// because ranks that are about to connect cannot know of its failure yet.
    pub(super) fn must_linger(&self) -> bool {
        let Some(star) = &self.star else { return false };
        let (is_hub, alone) = (self.is_hub(), star.hub != Hub::Serves && !star.failure_known && star.has_failed());
        self.connections.iter().zip(&star.drained).any(|(connection, drained)| match connection {
            Connection::Open(_) => is_hub && !drained,
            Connection::Pending(_) => alone,
            _ => false,
        })
    }

    /// Serves a connection to `peer` that was made after the start, and sends on it what the peer has missed.
    pub(super) fn attach(&mut self, peer: usize, stream: TcpStream) {
        if self.star.is_none() || peer >= self.connections.len() || self.status.has_left(peer) {
            return;
        }
        let before = std::mem::replace(&mut self.connections[peer], Connection::Absent);
        self.open(peer, stream);
        self.detector.reset(peer);
        let (Some(star), Connection::Open(writer)) = (&mut self.star, &self.connections[peer]) else { return };
        star.idle_ticks = 0;
        let first = if let Connection::Pending(first) = before { first } else { Vec::new() };
        let replayed = star.question.map(Message::Calling).into_iter().chain(star.replay.iter().cloned());
        for message in [Message::Heartbeat].into_iter().chain(first).chain(replayed) {
            writer.send(Frame::Own(message));
        }
    }

    /// Makes all ranks connect to each other.
    pub(super) fn form_mesh(&mut self) {
        let rank = self.rank();
        let Some(star) = self.star.as_mut().filter(|star| !star.is_mesh) else { return };
        (star.is_mesh, star.idle_ticks) = (true, 0);
        if rank == 0 {
            return self.fan_out(&Frame::Meet, None);
        }
        // Ranks that left with rank 0 are then noticed at once.
        let knock_now = star.hub == Hub::Left;
        let mut to_dial = Vec::new();
        for (peer, connection) in self.connections.iter_mut().enumerate() {
            if peer == rank || !matches!(connection, Connection::Absent) {
                continue;
            }
            *connection = Connection::Pending(Vec::new());
            // The higher rank dials.
            if peer < rank || knock_now {
                to_dial.push(peer);
            }
        }
        to_dial.into_iter().for_each(|peer| self.dial(peer));
    }

    /// A lower rank knocks, to be dialled. It dials or knocks at all others itself, so it needs no more than this.
    pub(super) fn knocked(&mut self, peer: usize) {
        let Some(star) = &mut self.star else { return };
        if matches!(self.connections[peer], Connection::Absent) {
            star.idle_ticks = 0;
            self.connections[peer] = Connection::Pending(Vec::new());
            self.dial(peer);
        }
    }

    /// Dials a lower rank. A higher rank is only knocked at, and then dials.
    pub(super) fn dial(&mut self, peer: usize) {
        let (identity, address, events) = (self.identity.clone(), self.addresses[peer], self.events.clone());
        let status = self.status.clone();
        self.dials.spawn(async move {
            let event = match dial(&identity, (peer, address), &status).await {
                Ok(_) if peer > identity.rank => return,
                Ok(stream) => Event::Dialled(stream),
                Err(event) => event,
            };
            // The receiver is gone if this rank is about to leave.
            let _ = events.send((peer, event)).await;
        });
    }

    /// Whether all ranks are known to have begun this group.
    pub(super) fn all_begun(&self) -> bool {
        self.star.as_ref().is_some_and(|star| star.begun) || self.status.all_began()
    }

    /// Reacts to the loss of `peer`: rank 0 reports a new loss to all ranks; a rank that loses rank 0 forms a mesh.
    pub(super) fn report_loss(&mut self, peer: usize, reason: String, ended: bool, fresh: bool) {
        let is_hub = self.is_hub();
        let Some(star) = &mut self.star else { return };
        if is_hub && fresh {
            star.failure_known = true;
            self.fan_out(&Frame::Lost { peer: peer as u32, reason, ended }, Some(peer));
        } else if peer == 0 {
            star.hub = Hub::Lost;
            // All ranks see the loss of rank 0.
            star.failure_known = true;
            self.form_mesh();
        }
    }

    pub(super) fn handle_frame(&mut self, peer: usize, frame: Frame) {
        if matches!(frame, Frame::Own(Message::Elsewhere)) {
            self.elsewhere[peer] = true;
            return;
        }
        self.mark_greeted(peer);
        let (n, rank, is_hub) = (self.connections.len(), self.rank(), self.is_hub());
        let from_hub = self.star.is_some() && peer == 0;
        match frame {
            Frame::Own(message) => self.handle_message(peer, message),
            Frame::Relay { to: None, message: message @ Message::Failed(..) } if is_hub => self.relay(peer, message),
            Frame::Relay {
                to: Some(to),
                message: message @ (Message::Invites(_) | Message::Locate | Message::Located(_)),
            } if is_hub => {
                if let Some(Connection::Open(writer)) =
                    self.connections.get(to as usize).filter(|_| to as usize != peer)
                {
                    writer.send(Frame::Relayed { from: peer as u32, message });
                }
            }
            Frame::Relayed { from, message } if from_hub && (from as usize) < n && from as usize != rank => {
                self.handle_relayed(from as usize, message);
            }
            // This rank's own failure comes back: all ranks know of it.
            Frame::Relayed { from, message: Message::Failed(..) } if from_hub && from as usize == rank => {
                self.star.iter_mut().for_each(|star| star.failure_known = true);
            }
            Frame::Lost { peer: lost, reason, ended } if from_hub && (lost as usize) < n => {
                let lost = lost as usize;
                self.star.iter_mut().for_each(|star| star.failure_known = true);
                // If this rank itself was declared lost, the others may continue without it, and will tell it then.
                if lost != rank {
                    self.status.mark_lost(lost, reason);
                    self.peer_gone(lost, if ended { PeerEvent::Closed } else { PeerEvent::Silent });
                }
            }
            Frame::Calls(calls) if from_hub => self.status.record_calls(&calls),
            Frame::Begun if from_hub => self.star.iter_mut().for_each(|star| star.begun = true),
            Frame::Meet if from_hub => self.form_mesh(),
            Frame::Leaves if from_hub => {
                for star in self.star.iter_mut().filter(|star| star.hub == Hub::Serves) {
                    star.hub = Hub::Left;
                }
                if let Connection::Open(hub) = &self.connections[peer] {
                    hub.send(Frame::Through);
                }
            }
            Frame::Through if is_hub => self.star.iter_mut().for_each(|star| star.drained[peer] = true),
            _ => self.disconnected(peer, "it sent a frame that only another rank may send".into(), false),
        }
    }

    /// Records that a message of a rank that is in this group arrived on its connection to this rank.
    pub(super) fn mark_greeted(&mut self, peer: usize) {
        let first = !std::mem::replace(&mut self.greeted[peer], true);
        self.elsewhere[peer] = false;
        if first && self.is_hub() && self.greeted.iter().skip(1).all(|greeted| *greeted) {
            self.star.iter_mut().for_each(|star| star.begun = true);
            self.fan_out(&Frame::Begun, None);
        }
    }

    /// Handles a message of rank `from` that rank 0 relayed.
    pub(super) fn handle_relayed(&mut self, from: usize, message: Message) {
        match &message {
            Message::Failed(..) => self.star.iter_mut().for_each(|star| star.failure_known = true),
            // As from the rank itself: rank 0 relays only the goodbye of a rank that has not called `shrink`, so no
            // shrink message of it can arrive later.
            Message::Goodbye(_) => self.peer_gone(from, PeerEvent::Left),
            _ => {}
        }
        match apply_message(&self.status, from, message) {
            Some(Message::Called(mine)) => self.answer(from, mine),
            Some(answer) => drop(self.tell(from, answer)),
            None => {}
        }
    }

    /// Rank 0 reports that `peer` left or is lost. If this rank has a connection to it, the connection shows that too.
    pub(super) fn peer_gone(&mut self, peer: usize, event: PeerEvent) {
        if !matches!(self.connections[peer], Connection::Open(_)) {
            self.connections[peer] = Connection::Closed;
            let _ = self.peer_events.send((peer, event));
        }
    }

    /// Rank 0 has sent its goodbye, in order or because it panicked.
    pub(super) fn hub_left(&mut self, panicked: bool) {
        let Some(star) = &mut self.star else { return };
        star.hub = if panicked { Hub::Lost } else { Hub::Left };
        // All ranks see the panic of rank 0.
        star.failure_known |= panicked;
        let has_news = star.replay.iter().any(|message| is_news(message, &self.status));
        if panicked || has_news && !star.failure_known {
            self.form_mesh();
        }
    }

    /// On rank 0: handles a failure of `from`. Relays the first one to all ranks, and back to its sender, which thereby
    /// learns that all ranks know of it.
    pub(super) fn relay(&mut self, from: usize, message: Message) {
        let Some(star) = &mut self.star else { return };
        let known = std::mem::replace(&mut star.failure_known, true);
        let frame = Frame::Relayed { from: from as u32, message: message.clone() };
        for (peer, connection) in self.connections.iter().enumerate() {
            // A rank that was declared lost but is alive may know of no failure.
            if let Connection::Open(writer) = connection
                && !(known && self.detector.is_monitored(peer))
            {
                writer.send(frame.clone());
            }
        }
        // A failure has no answer.
        let _ = apply_message(&self.status, from, message);
    }

    /// Updates the star at a heartbeat of this rank. `suspended`: the rank was suspended before it.
    pub(super) fn tick_star(&mut self, suspended: bool) {
        let Some(star) = &mut self.star else { return };
        star.uncertain |= suspended;
        star.idle_ticks += 1;
        let idle_ticks = star.idle_ticks;
        for peer in 0..self.connections.len() {
            if !matches!(self.connections[peer], Connection::Pending(_)) {
                continue;
            }
            if idle_ticks > self.detector.heartbeats() {
                self.disconnected(peer, format!("cannot connect to it at {}", self.addresses[peer]), false);
            } else if idle_ticks == KNOCK && peer > self.rank() {
                self.dial(peer);
            }
        }
    }
}
