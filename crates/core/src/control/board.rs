//! What the control thread and the threads that run operations tell each other.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Instant;

use super::invitation::{Door, Invitation, Invitations};
use crate::sync::{AtomicBool, Bell, Deadline, Mutex, MutexGuard, Ordering, lock};
use crate::types::{Call, Error, Fault, Site};

pub(crate) struct Board {
    state: Mutex<State>,
    bell: Bell,
    /// Set with the first failure, so that looking for one costs a load.
    failed: AtomicBool,
    /// Readable from the first failure on: threads that wait on sockets wait on this too.
    wake: (UnixStream, UnixStream),
    /// Whether each peer has said anything since it was last asked for.
    spoke: Box<[AtomicBool]>,
    /// Wakes a thread that waits elsewhere, when a peer fails or leaves.
    alarm: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct State {
    /// The first failure, and how many collectives the rank that reported it had completed.
    failure: Option<(Fault, u64)>,
    peers: Vec<Peer>,
    /// The operations that this rank began last. Two are enough: a rank that has completed an operation knows that all
    /// have begun it, so nobody can ask about one further back.
    recent: [Option<Site>; 2],
    /// To subgroups, from peers.
    invitations: Invitations,
}

#[derive(Default)]
struct Peer {
    /// Data connections that the peer has opened and nobody has taken yet, some of them still to come.
    coming: Vec<Option<TcpStream>>,
    presence: Presence,
    /// What the peer said last about what it called.
    heard: Option<Site>,
    /// The peer asked about an operation that this rank has not begun.
    asked: bool,
    /// The peer takes part in no operation any more: it has called `shrink`.
    moved: bool,
}

#[derive(Default, Clone)]
enum Presence {
    #[default]
    Present,
    Left,
    Lost(String),
}

impl Peer {
    fn has_gathered(&self) -> bool {
        !self.coming.is_empty() && self.coming.iter().all(Option::is_some)
    }
}

impl Board {
    pub fn new(world_size: usize) -> std::io::Result<Board> {
        let state = State {
            failure: None,
            peers: (0..world_size).map(|_| Peer::default()).collect(),
            recent: [None; 2],
            invitations: Invitations::new(world_size),
        };
        Ok(Board {
            state: Mutex::new(state),
            bell: Bell::default(),
            failed: AtomicBool::new(false),
            spoke: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            wake: UnixStream::pair()?,
            alarm: OnceLock::new(),
        })
    }

    /// What else to call when a peer fails or leaves; set once.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub fn alarm(&self, ring: impl Fn() + Send + Sync + 'static) {
        // Nobody sets it twice.
        let _ = self.alarm.set(Box::new(ring));
    }

    fn ring(&self) {
        self.bell.ring();
        if let Some(alarm) = self.alarm.get() {
            alarm();
        }
    }

    /// This rank begins an operation. Gives the peers that asked about it before.
    pub fn begin(&self, site: &Site) -> Result<impl Iterator<Item = usize> + use<>, Fault> {
        let mut state = self.state();
        if let Some((fault, _)) = &state.failure {
            return Err(fault.clone());
        }
        // An operation ends on no rank before all have begun it: a peer that has left will not take part in this one.
        if let Some(fault) = (0..state.peers.len()).find_map(|peer| state.absence(peer)) {
            return Err(fault);
        }
        state.recent = [Some(*site), state.recent[0]];
        let mut asked = Vec::new();
        for (rank, peer) in state.peers.iter_mut().enumerate() {
            if std::mem::take(&mut peer.asked) {
                asked.push(rank);
            }
        }
        Ok(asked.into_iter())
    }

    /// A failure other than that ranks called different things, else a peer that is gone, first one without a farewell.
    pub fn trouble(&self) -> Option<Fault> {
        let state = self.state();
        let failure = state.failure.as_ref().map(|(fault, _)| fault.clone());
        let apart = |fault: &Fault| matches!(fault, Fault::Unexpected { .. } | Fault::Failed(Error::Mismatch { .. }));
        let absences: Vec<_> = (0..state.peers.len()).filter_map(|peer| state.absence(peer)).collect();
        let lost = absences.iter().find(|fault| matches!(fault, Fault::Lost { .. })).or(absences.first()).cloned();
        failure.filter(|fault| !apart(fault)).or(lost)
    }

    /// Whether this rank knows by its operations that all ranks have begun this group: a collective ends on no rank before
    /// all have begun it.
    pub fn all_began(&self) -> bool {
        self.state().recent.iter().flatten().any(|site| site.call.operation.is_collective() && site.sequence > 0)
    }

    /// Records the first failure.
    pub fn fail(&self, fault: Fault, completed: u64) {
        let mut state = self.state();
        if state.failure.is_none() {
            state.failure = Some((fault, completed));
            self.failed.store(true, Ordering::Release);
            // One byte that nobody reads keeps the other end readable. It cannot fail on a fresh socket pair.
            let _ = (&self.wake.0).write(&[1]);
        }
        drop(state);
        self.ring();
    }

    pub fn failure(&self) -> Option<(Fault, u64)> {
        if self.failed.load(Ordering::Acquire) { self.state().failure.clone() } else { None }
    }

    /// The failure, if it ends the operation that `tag` names too. One of a later collective does not: the rank that
    /// reports it has completed this one, so all ranks are in it and will end it, unless one of them died or goes on without
    /// others.
    pub fn failure_in(&self, tag: &Site) -> Option<Fault> {
        let (failure, completed) = self.failure()?;
        let later = completed > tag.sequence;
        let missing = |peer: &Peer| peer.moved || matches!(peer.presence, Presence::Lost(_));
        let missed = || self.state().peers.iter().any(missing);
        (!later || !tag.call.operation.is_collective() || missed()).then_some(failure)
    }

    /// Readable from the first failure on.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.1.as_fd()
    }

    pub fn left(&self, peer: usize) {
        self.state().peers[peer].presence = Presence::Left;
        self.ring();
    }

    /// Whether `peer` left in order.
    pub fn has_left(&self, peer: usize) -> bool {
        matches!(self.state().peers[peer].presence, Presence::Left)
    }

    /// `peer` has called `shrink`. What it sent before may have been on a connection that broke.
    pub fn moves(&self, peer: usize) {
        self.state().peers[peer].moved = true;
        self.ring();
    }

    /// Whether that is news.
    pub fn lost(&self, peer: usize, reason: String) -> bool {
        let mut state = self.state();
        let present = matches!(state.peers[peer].presence, Presence::Present);
        if present {
            state.peers[peer].presence = Presence::Lost(reason.clone());
            drop(state);
            self.fail(Fault::Lost { peer, reason }, 0);
        }
        present
    }

    /// Something came from `peer`.
    pub fn speaks(&self, peer: usize) {
        // Nothing else is read because of it.
        self.spoke[peer].store(true, Ordering::Relaxed);
    }

    /// Whether something has come from `peer` since this was last asked.
    pub fn spoke(&self, peer: usize) -> bool {
        self.spoke[peer].swap(false, Ordering::Relaxed)
    }

    /// Why `peer` will not answer, if it won't.
    pub fn absence(&self, peer: usize) -> Option<Fault> {
        let state = self.state();
        let failure = state.failure.as_ref().map(|(fault, _)| fault.clone());
        failure.or_else(|| state.absence(peer))
    }

    /// Why `peer` will not answer in the operation that `tag` names, if it won't. After a failure, also one of a later
    /// operation, that is the failure: a rank that was told of it, or told this one, leaves because of it.
    pub fn absence_in(&self, peer: usize, tag: &Site) -> Option<Fault> {
        self.failure_in(tag).or_else(|| {
            let state = self.state();
            let absence = state.absence(peer)?;
            Some(state.failure.as_ref().map_or(absence, |(fault, _)| fault.clone()))
        })
    }

    /// Takes one of `of` data connections of `peer`, of a few.
    pub fn gather(&self, peer: usize, number: usize, of: usize, stream: TcpStream) {
        let mut state = self.state();
        let coming = &mut state.peers[peer].coming;
        coming.resize_with(of, || None);
        coming[number] = Some(stream);
        // A sleeper looks at the state while it holds the bell.
        drop(state);
        self.bell.ring();
    }

    /// Whether all data connections of `peer` are here.
    pub fn has_gathered(&self, peer: usize) -> bool {
        self.state().peers[peer].has_gathered()
    }

    /// The data connections of `peer`, in its order, once all are here; given once.
    pub fn gathered(&self, peer: usize) -> Option<Vec<TcpStream>> {
        let peer = &mut self.state().peers[peer];
        peer.has_gathered().then(|| std::mem::take(&mut peer.coming).into_iter().flatten().collect())
    }

    /// Sleeps until something changes that makes `ready` true.
    pub fn sleep(&self, until: Instant, ready: impl FnMut() -> bool) -> bool {
        self.bell.sleep(until, ready)
    }

    /// `peer` said that it called this. If it `asks`, gives this rank's own call at that place, or remembers to.
    pub fn hear(&self, peer: usize, site: Site, asks: bool) -> Option<Site> {
        let mut state = self.state();
        state.peers[peer].heard = Some(site);
        let mine = state.recent.iter().flatten().find(|mine| mine.sequence == site.sequence).copied();
        if asks && mine.is_none() {
            state.peers[peer].asked = true;
        }
        drop(state);
        self.bell.ring();
        mine.filter(|_| asks)
    }

    /// What all ranks called at `sequence`, as far as this one knows.
    pub fn calls(&self, rank: usize, sequence: u64, own: Call) -> Vec<Option<Call>> {
        let state = self.state();
        let heard = |peer: &Peer| peer.heard.filter(|site| site.sequence == sequence).map(|site| site.call);
        state.peers.iter().enumerate().map(|(r, peer)| if r == rank { Some(own) } else { heard(peer) }).collect()
    }

    /// `peer` makes a subgroup with this rank.
    pub fn invited(&self, peer: usize, invitation: Invitation) {
        if self.state().invitations.put(peer, invitation) {
            self.bell.ring();
        } else {
            self.lost(peer, "it sent invitations to subgroups without end".into());
        }
    }

    /// Waits until all members that this rank's invitation names have sent theirs; gives their doors.
    pub fn assemble(&self, rank: usize, own: &Invitation, deadline: &Deadline) -> Result<Vec<Door>, Fault> {
        let mut outcome = Ok(None);
        self.bell.sleep(Instant::now() + deadline.remaining(), || {
            outcome = self.state().assemble(rank, own);
            !matches!(outcome, Ok(None))
        });
        let missing = || self.state().invitations.missing(rank, &own.members).collect();
        outcome?.ok_or_else(|| Fault::Timeout { missing: missing() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn assemble(&mut self, rank: usize, own: &Invitation) -> Result<Option<Vec<Door>>, Fault> {
        if let Some((fault, _)) = &self.failure {
            return Err(fault.clone());
        }
        let absence = self.invitations.missing(rank, &own.members).find_map(|peer| self.absence(peer));
        absence.map_or_else(|| self.invitations.take(rank, own), Err)
    }

    fn absence(&self, peer: usize) -> Option<Fault> {
        match &self.peers[peer].presence {
            Presence::Present => None,
            Presence::Left => Some(Fault::Left { peer }),
            Presence::Lost(reason) => Some(Fault::Lost { peer, reason: reason.clone() }),
        }
    }
}

/// The mismatch among `calls`, once every rank's is known.
pub(crate) fn verdict(sequence: u64, calls: &[Option<Call>]) -> Option<Error> {
    let calls: Option<Vec<(usize, Call)>> = calls.iter().enumerate().map(|(r, call)| Some((r, (*call)?))).collect();
    let calls = calls?;
    calls.iter().any(|(_, call)| *call != calls[0].1).then_some(Error::Mismatch { sequence, calls })
}
