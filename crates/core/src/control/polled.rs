//! A control plane without a thread and without connections, for a transport of another package that carries its
//! messages: those of the control connections between processes, as bytes.
//!
//! A rank sends and receives them while it is in an operation, or begins one. So there are no heartbeats.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::frame;
use super::invitation::{Endpoint, Invitation, random, session};
use super::message::{ControlRequest, Goodbye, Message, apply_message};
use super::status::{GroupStatus, find_mismatch};
use super::watch::Watch;
use crate::sync::Deadline;
use crate::types::{Call, Error, Fault, Locate, Site, Whereabouts};

/// What a rank knows of its group: failures, its peers and their calls, invitations. Shared by all threads of the rank.
pub struct PolledControl {
    rank: usize,
    status: GroupStatus,
    requests: UnboundedSender<ControlRequest>,
}

/// The control messages of a rank, to send and received. One thread at a time uses them.
pub struct ControlMessages {
    requests: UnboundedReceiver<ControlRequest>,
    /// By rank, whether it has sent its goodbye message. Then nothing arrives from it any more.
    left: Vec<bool>,
    /// The most collectives that any of these has begun.
    begun: u64,
}

/// A control message to send.
pub struct ControlMessage {
    /// The receiver, or `None` if all peers receive it.
    pub to: Option<usize>,
    /// The message, of at most 256 KiB and 4 bytes.
    pub bytes: Vec<u8>,
}

/// This rank's invitation to a subgroup.
pub struct Invited(Invitation);

impl PolledControl {
    /// Creates the control plane of `rank`, one of `world_size`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses a socket pair.
    pub fn new(rank: usize, world_size: usize) -> Result<(PolledControl, ControlMessages), Error> {
        let status = GroupStatus::new(world_size).map_err(|e| Error::io("creating a socket pair", e))?;
        let (sender, requests) = unbounded_channel();
        let left = (0..world_size).map(|other| other == rank).collect();
        Ok((PolledControl { rank, status, requests: sender }, ControlMessages { requests, left, begun: 0 }))
    }

    /// Records that this rank begins a collective, and answers the peers that asked what it called. Returns the failure
    /// of the group, or a peer that has left before it began this collective.
    pub fn begin(&self, site: &Site) -> Result<(), Fault> {
        for peer in self.status.begin(site)? {
            self.request(ControlRequest::Called(peer, *site));
        }
        Ok(())
    }

    /// Returns the failure of the group.
    pub fn failure(&self) -> Option<Fault> {
        self.status.failure().map(|(fault, _)| fault)
    }

    /// Returns the failure of the group if it also ends the operation `tag`: not if the rank that failed had completed
    /// this one.
    pub fn failure_in(&self, tag: &Site) -> Option<Fault> {
        self.status.failure_in(tag)
    }

    /// Returns why `peer` will not answer in the operation `tag`, if that is known.
    pub fn absence_in(&self, peer: usize, tag: &Site) -> Option<Fault> {
        self.status.absence_in(peer, tag)
    }

    /// See [`Transport::known_failure`](crate::Transport::known_failure).
    pub fn known_failure(&self) -> Option<Fault> {
        self.status.known_failure()
    }

    /// Records that the control plane of this rank has failed, so that operations end with this error where they can.
    pub fn record_failure(&self, error: Error) {
        self.status.fail(Fault::Failed(error), 0);
    }

    /// Records that this rank has failed after it had completed so many collectives, and tells its peers.
    pub fn fail(&self, error: &Error, completed: u64) {
        self.status.fail(Fault::Failed(error.clone()), completed);
        self.request(ControlRequest::Failed(error.clone(), completed));
    }

    /// Tells the peers that this rank leaves: in order, or lost if its thread panics.
    pub fn leave(&self) {
        // For a cause that arrived between two operations: peers must not report this rank's leaving as the cause.
        if let Some((Fault::Failed(error), completed)) = self.status.failure() {
            self.request(ControlRequest::Failed(error, completed));
        }
        let goodbye = Goodbye { panicked: std::thread::panicking(), begun: self.status.begun() };
        self.request(ControlRequest::Goodbye(goodbye));
    }

    /// Monitors the operation `tag` for a thread that waits in it.
    pub fn watch<'a>(&'a self, tag: &'a Site, deadline: &'a Deadline) -> Watch<'a> {
        Watch::new(self.rank, &self.status, &self.requests, tag, deadline)
    }

    /// Returns the error of a collective that the ranks called like this, by rank. `None` for a rank whose call makes
    /// no sense.
    pub fn mismatch(sequence: u64, calls: &[Option<Call>]) -> Error {
        let inconsistent = || Error::broken("agreeing on an operation", "the ranks are at different sequence numbers");
        find_mismatch(sequence, calls).unwrap_or_else(inconsistent)
    }

    /// Invites the other members to a subgroup. All members call this with the same list of ranks.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no random numbers.
    pub fn invite(&self, members: &[usize]) -> Result<Invited, Error> {
        let own = Invitation { members: members.to_vec(), endpoint: Endpoint { port: 0, key: random()? } };
        for member in members.iter().filter(|member| **member != self.rank) {
            self.request(ControlRequest::Invites(*member, own.clone()));
        }
        Ok(Invited(own))
    }

    /// Returns the number of the subgroup once the invitations of all members have arrived, the same on all of them and
    /// different for each subgroup. Until then returns `None`, and after the deadline a timeout with the missing ranks.
    pub fn accepted(&self, own: &Invited, deadline: &Deadline) -> Result<Option<u64>, Fault> {
        match self.status.await_invitations(self.rank, &own.0, &Deadline::after(Duration::ZERO)) {
            Err(Fault::Timeout { .. }) if !deadline.passed() => Ok(None),
            endpoints => Ok(Some(session(endpoints?))),
        }
    }

    /// Sets what tells where this rank is in its program. Called once.
    pub fn locate_by(&self, own: Arc<dyn Locate>) {
        self.status.locate_by(own);
    }

    /// Returns where those of these ranks are that have told it.
    pub fn whereabouts(&self, ranks: &[usize]) -> Vec<(usize, Whereabouts)> {
        self.status.whereabouts(ranks)
    }

    fn request(&self, request: ControlRequest) {
        // It fails only once the messages are dropped, with which the group ends.
        let _ = self.requests.send(request);
    }
}

impl ControlMessages {
    /// Returns the next message to send, if there is one.
    pub fn next_message(&mut self) -> Result<Option<ControlMessage>, Error> {
        while let Ok(request) = self.requests.try_recv() {
            if let Some((message, to)) = message_of(request) {
                return Ok(Some(ControlMessage { to, bytes: encode(&message)? }));
            }
        }
        Ok(None)
    }

    /// Handles a message that has arrived from `peer`. Returns the answer to it, if there is one.
    ///
    /// # Errors
    /// [`Error::Io`] if these bytes are no message.
    pub fn receive(&mut self, control: &PolledControl, peer: usize, bytes: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let message = frame::decode(bytes.get(frame::HEAD..).unwrap_or_default());
        let message = message.map_err(|e| Error::io(format!("reading a control message from rank {peer}"), e))?;
        if let Message::Goodbye(goodbye) = &message {
            (self.left[peer], self.begun) = (true, self.begun.max(goodbye.begun));
        }
        apply_message(&control.status, peer, message).as_ref().map(encode).transpose()
    }

    /// Once all peers have sent their goodbye messages: the most collectives that any of them has begun.
    pub fn all_left(&self) -> Option<u64> {
        self.left.iter().all(|left| *left).then_some(self.begun)
    }
}

fn encode(message: &Message) -> Result<Vec<u8>, Error> {
    frame::encode(message).map_err(|e| Error::io("encoding a control message", e))
}

/// The message to send, if there is one, and its receiver if it is not for all peers.
fn message_of(request: ControlRequest) -> Option<(Message, Option<usize>)> {
    Some(match request {
        ControlRequest::Calling(site) => (Message::Calling(site), None),
        ControlRequest::Called(peer, site) => (Message::Called(site), Some(peer)),
        ControlRequest::Locate(peer) => (Message::Locate, Some(peer)),
        ControlRequest::Failed(error, completed) => (Message::Failed(error.for_peers(), completed), None),
        ControlRequest::Invites(peer, invitation) => (Message::Invites(invitation), Some(peer)),
        ControlRequest::ShrinkMessage(message) => (Message::ShrinkMessage(message), None),
        ControlRequest::Goodbye(goodbye) => (Message::Goodbye(goodbye), None),
        // The transport connects all ranks to each other.
        ControlRequest::Meet => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, Operation};

    /// The ranks of a group, whose messages [`deliver`] carries.
    fn ranks(n: usize) -> Vec<(PolledControl, ControlMessages)> {
        (0..n).map(|rank| PolledControl::new(rank, n).unwrap()).collect()
    }

    /// Carries all messages until there are none.
    fn deliver(ranks: &mut [(PolledControl, ControlMessages)]) {
        let mut in_flight = Vec::new();
        loop {
            for from in 0..ranks.len() {
                while let Some(ControlMessage { to, bytes }) = ranks[from].1.next_message().unwrap() {
                    let all = (0..ranks.len()).filter(|rank| *rank != from && to.is_none_or(|to| to == *rank));
                    in_flight.extend(all.map(|to| (from, to, bytes.clone())));
                }
            }
            if in_flight.is_empty() {
                return;
            }
            for (from, to, bytes) in std::mem::take(&mut in_flight) {
                let (control, messages) = &mut ranks[to];
                let answer = messages.receive(control, from, &bytes).unwrap();
                in_flight.extend(answer.map(|answer| (to, from, answer)));
            }
        }
    }

    fn site(sequence: u64, count: usize) -> Site {
        Site { call: Call::new(Operation::AllReduce, DType::F32, count), sequence }
    }

    #[test]
    fn a_failure_ends_the_operation_of_a_peer_unless_the_rank_had_completed_it() {
        let mut ranks = ranks(2);
        let error = Error::argument("a test", "it fails");
        ranks[0].0.fail(&error, 1);
        deliver(&mut ranks);
        let (control, _) = &ranks[1];
        assert_eq!(control.failure(), Some(Fault::Failed(error.clone())));
        assert_eq!(control.failure_in(&site(0, 1)), None);
        assert_eq!(control.failure_in(&site(1, 1)), Some(Fault::Failed(error.clone())));
        assert_eq!(control.begin(&site(1, 1)), Err(Fault::Failed(error)));
    }

    #[test]
    fn ranks_that_wait_learn_what_others_called_once_they_call_it() {
        let mut ranks = ranks(2);
        let (tag, deadline) = (site(0, 7), Deadline::after(Duration::from_secs(60)));
        ranks[0].0.begin(&tag).unwrap();
        ranks[0].0.watch(&tag, &deadline).tick(1).unwrap();
        deliver(&mut ranks);
        ranks[1].0.begin(&site(0, 8)).unwrap();
        deliver(&mut ranks);
        let calls = [Some(site(0, 7).call), Some(site(0, 8).call)];
        let found = ranks[0].0.status.calls(0, 0, tag.call);
        assert_eq!(found, calls);
        let Error::Mismatch { sequence: 0, calls, .. } = PolledControl::mismatch(0, &found) else { panic!() };
        assert_eq!(calls.len(), 2);
        assert!(matches!(PolledControl::mismatch(0, &[None, None]), Error::Broken { .. }));
    }

    #[test]
    fn all_have_left_once_all_goodbyes_are_there() {
        let mut ranks = ranks(3);
        for sequence in 0..4 {
            ranks[1].0.begin(&site(sequence, 1)).unwrap();
        }
        ranks[1].0.leave();
        deliver(&mut ranks);
        assert_eq!(ranks[0].1.all_left(), None);
        assert_eq!(ranks[0].0.absence_in(1, &site(4, 1)), Some(Fault::Left { peer: 1 }));
        ranks[2].0.leave();
        deliver(&mut ranks);
        assert_eq!(ranks[0].1.all_left(), Some(4));
    }

    #[test]
    fn a_subgroup_has_one_number_on_all_members_once_all_have_invited() {
        let mut ranks = ranks(4);
        let deadline = Deadline::after(Duration::from_secs(60));
        let first = ranks[3].0.invite(&[3, 0]).unwrap();
        deliver(&mut ranks);
        assert_eq!(ranks[3].0.accepted(&first, &deadline), Ok(None));
        let late = ranks[3].0.accepted(&first, &Deadline::after(Duration::ZERO));
        assert_eq!(late, Err(Fault::Timeout { missing: vec![0] }));
        let second = ranks[0].0.invite(&[3, 0]).unwrap();
        deliver(&mut ranks);
        let number = ranks[3].0.accepted(&first, &deadline).unwrap();
        assert!(number.is_some());
        assert_eq!(ranks[0].0.accepted(&second, &deadline), Ok(number));
    }

    #[test]
    fn bytes_that_are_no_message_are_an_error() {
        let mut ranks = ranks(2);
        let (control, messages) = &mut ranks[0];
        for bytes in [&[][..], &[1, 0, 0], &[1, 0, 0, 0, 255], &[2, 0, 0, 0, 0, 0]] {
            assert!(matches!(messages.receive(control, 1, bytes), Err(Error::Io { .. })), "{bytes:?}");
        }
    }
}
