//! State that the control thread shares with the threads that run operations.

use std::io::Write;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::invitation::{Endpoint, Invitation, Invitations};
use super::peer::{Peer, Presence};
use crate::auth::LostPackets;
use crate::sync::{AtomicBool, Bell, Deadline, Mutex, MutexGuard, Ordering, lock};
use crate::types::{Call, Error, Fault, Locate, Site, Whereabouts};

/// What a rank knows of its group: failures, its peers and their calls, and connections and invitations to take.
pub(crate) struct GroupStatus {
    state: Mutex<StatusData>,
    bell: Bell,
    /// Set by the first failure, so that checking for one costs a load.
    failed: AtomicBool,
    /// Readable from the first failure on. Threads that poll sockets poll this too.
    wake: (UnixStream, UnixStream),
    /// By rank: whether anything has arrived from the peer since the last
    /// [`take_activity`](GroupStatus::take_activity).
    activity: Box<[AtomicBool]>,
    /// Wakes a thread that waits elsewhere. Called when a peer fails or leaves.
    alarm: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Tells where this rank is in its program.
    own: OnceLock<Arc<dyn Locate>>,
}

struct StatusData {
    /// The first failure, and the number of collectives that the reporting rank had completed.
    failure: Option<(Fault, u64)>,
    peers: Vec<Peer>,
    /// The last two operations that this rank began. Two are enough: a rank completes an operation only after all ranks
    /// have begun it, so no peer can ask about an earlier one.
    recent: [Option<Site>; 2],
    /// Invitations to subgroups from peers.
    invitations: Invitations,
    /// Set while the control thread has no descriptor for the next connection.
    shortage: Option<Error>,
}

impl GroupStatus {
    pub fn new(world_size: usize) -> std::io::Result<GroupStatus> {
        let state = StatusData {
            failure: None,
            peers: (0..world_size).map(|_| Peer::default()).collect(),
            recent: [None; 2],
            invitations: Invitations::new(world_size),
            shortage: None,
        };
        Ok(GroupStatus {
            state: Mutex::new(state),
            bell: Bell::default(),
            failed: AtomicBool::new(false),
            activity: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            wake: UnixStream::pair()?,
            alarm: OnceLock::new(),
            own: OnceLock::new(),
        })
    }

    /// Sets the function that is also called when a peer fails or leaves. Called at most once.
    #[cfg(all(feature = "shm", target_os = "linux"))]
    pub fn set_alarm(&self, ring: impl Fn() + Send + Sync + 'static) {
        // It is never set twice.
        let _ = self.alarm.set(Box::new(ring));
    }

    fn ring(&self) {
        self.bell.ring();
        if let Some(alarm) = self.alarm.get() {
            alarm();
        }
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.activity.len()
    }

    /// Records that this rank begins an operation. Returns the peers that asked about it before.
    pub fn begin(&self, site: &Site) -> Result<impl Iterator<Item = usize> + use<>, Fault> {
        let mut state = self.state();
        if let Some((fault, _)) = &state.failure {
            return Err(fault.clone());
        }
        // An operation completes on no rank before all have begun it, so a peer that is gone will miss this one.
        if let Some(fault) = (0..state.peers.len()).find_map(|peer| state.absence_in(peer, site)) {
            return Err(fault);
        }
        state.recent = [Some(*site), state.recent[0]];
        let mut asked = Vec::new();
        for (rank, peer) in state.peers.iter_mut().enumerate() {
            if std::mem::take(&mut peer.awaits_call) {
                asked.push(rank);
            }
        }
        Ok(asked.into_iter())
    }

    /// Returns the failure unless it is a mismatch, else an absent peer: one that was lost, or else one that left.
    pub fn known_failure(&self) -> Option<Fault> {
        let state = self.state();
        let failure = state.failure.as_ref().map(|(fault, _)| fault.clone());
        let mismatch =
            |fault: &Fault| matches!(fault, Fault::Unexpected { .. } | Fault::Failed(Error::Mismatch { .. }));
        let absences: Vec<_> = (0..state.peers.len()).filter_map(|peer| state.absence(peer)).collect();
        let lost = absences.iter().find(|fault| matches!(fault, Fault::Lost { .. })).or(absences.first()).cloned();
        failure.filter(|fault| !mismatch(fault)).or(lost)
    }

    /// Whether this rank's operations prove that all ranks have begun to use this group: a collective completes on no
    /// rank before all have begun it.
    pub fn all_began(&self) -> bool {
        self.state().recent.iter().flatten().any(|site| site.call.operation.is_collective() && site.sequence > 0)
    }

    /// Records the first failure.
    pub fn fail(&self, fault: Fault, completed: u64) {
        self.set_failure(&mut self.state(), fault, completed);
        self.ring();
    }

    fn set_failure(&self, state: &mut StatusData, fault: Fault, completed: u64) {
        if state.failure.is_none() {
            state.failure = Some((fault, completed));
            self.failed.store(true, Ordering::Release);
            // One byte that is never read keeps the other end readable. The write cannot fail on a fresh socket pair.
            let _ = (&self.wake.0).write(&[1]);
        }
    }

    /// Returns the first failure, and the number of collectives that the reporting rank had completed.
    pub fn failure(&self) -> Option<(Fault, u64)> {
        if self.failed.load(Ordering::Acquire) { self.state().failure.clone() } else { None }
    }

    /// Returns the failure if it also ends the operation `tag`. A failure in a later collective does not: the reporting
    /// rank has completed this one, so all ranks are in it and will complete it, unless one died or called `shrink`.
    pub fn failure_in(&self, tag: &Site) -> Option<Fault> {
        let (failure, completed) = self.failure()?;
        let later = completed > tag.sequence;
        let absent = |peer: &Peer| peer.shrinking || matches!(peer.presence, Presence::Lost(_));
        let any_absent = || self.state().peers.iter().any(absent);
        (!later || !tag.call.operation.is_collective() || any_absent()).then_some(failure)
    }

    /// A descriptor that is readable from the first failure on.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.1.as_fd()
    }

    /// How many collectives this rank has begun.
    pub fn begun(&self) -> u64 {
        self.state().begun()
    }

    /// Records that `peer` left in order after it had begun so many collectives. If this rank is in a later one, that
    /// is a failure of the group, which is known no later than that the peer has left: no rank will complete it.
    pub fn mark_left(&self, peer: usize, begun: u64) {
        let mut state = self.state();
        state.peers[peer].presence = Presence::Left(begun);
        // A collective that this rank has completed was begun by all.
        if state.begun() > begun {
            self.set_failure(&mut state, Fault::Left { peer }, begun);
        }
        drop(state);
        self.ring();
    }

    /// Whether `peer` has left in order.
    pub fn has_left(&self, peer: usize) -> bool {
        self.state().peers[peer].left().is_some()
    }

    /// Whether `peer` has left in order before it began this collective.
    pub fn has_missed(&self, peer: usize, tag: &Site) -> bool {
        self.state().peers[peer].has_missed(tag)
    }

    /// Records that `peer` has called `shrink`. What it sent before may have been on a connection that broke.
    pub fn set_shrinking(&self, peer: usize) {
        self.state().peers[peer].shrinking = true;
        self.ring();
    }

    /// Records that `peer` is lost, and so the failure of the group. Returns whether that is new.
    pub fn mark_lost(&self, peer: usize, reason: String) -> bool {
        let mut state = self.state();
        let present = matches!(state.peers[peer].presence, Presence::Present);
        if present {
            state.peers[peer].presence = Presence::Lost(reason.clone());
            drop(state);
            self.fail(Fault::Lost { peer, reason }, 0);
        }
        present
    }

    /// Records that something arrived from `peer`.
    pub fn record_activity(&self, peer: usize) {
        // Relaxed: the flag publishes no other data.
        self.activity[peer].store(true, Ordering::Relaxed);
    }

    /// Returns whether something has arrived from `peer` since the last call.
    pub fn take_activity(&self, peer: usize) -> bool {
        self.activity[peer].swap(false, Ordering::Relaxed)
    }

    /// Returns why `peer` will not answer a message of the operation `tag`, if that is known.
    pub fn absence(&self, peer: usize, tag: &Site) -> Option<Fault> {
        let state = self.state();
        let failure = state.failure.as_ref().map(|(fault, _)| fault.clone());
        failure.or_else(|| state.absence_in(peer, tag))
    }

    /// Returns why `peer` will not answer in the operation `tag`, if that is known. If the group has failed, even in a
    /// later operation, the reason is that failure: a rank that reported or received it leaves because of it.
    pub fn absence_in(&self, peer: usize, tag: &Site) -> Option<Fault> {
        self.failure_in(tag).or_else(|| {
            let state = self.state();
            let absence = state.absence_in(peer, tag)?;
            Some(state.failure.as_ref().map_or(absence, |(fault, _)| fault.clone()))
        })
    }

    /// Records that the control thread lacks descriptors, or that it has some again.
    pub fn set_shortage(&self, shortage: Option<Error>) {
        let mut state = self.state();
        if state.shortage.is_none()
            && let Some(error) = &shortage
        {
            log::warn!("{error}");
        }
        state.shortage = shortage;
        drop(state);
        self.bell.ring();
    }

    /// Returns the error of an operation that waits for peers which may wait for a connection to this rank, while it
    /// lacks descriptors for one.
    pub fn shortage(&self) -> Option<Error> {
        let shortage = self.state().shortage.clone()?;
        // The program may have closed files since, and the control thread has not tried again.
        self.wake.1.try_clone().is_err().then_some(shortage)
    }

    /// Adds data connection `number` of `of` from `peer`. `of` is small.
    pub fn add_data_stream(&self, peer: usize, number: usize, of: usize, stream: TcpStream) {
        let mut state = self.state();
        state.peers[peer].lost_packets = LostPackets::default();
        let data_streams = &mut state.peers[peer].data_streams;
        data_streams.resize_with(of, || None);
        data_streams[number] = Some(stream);
        // A sleeper locks the state while it holds the bell's mutex, so release the state before ringing.
        drop(state);
        self.bell.ring();
    }

    /// A data connection that `peer` has opened begins to wait for the largest packets: see [`LostPackets::begin`].
    pub fn begin_packets(&self, peer: usize, largest: u16, own: Option<IpAddr>) {
        self.state().peers[peer].lost_packets.begin(largest, own);
    }

    /// That connection ends. `lost`: this rank's packets on it were not acknowledged.
    pub fn end_packets(&self, peer: usize, lost: bool) {
        self.state().peers[peer].lost_packets.end(lost);
        self.bell.ring();
    }

    /// What was lost on the data connections that `peer` has opened.
    pub fn lost_packets(&self, peer: usize) -> LostPackets {
        self.state().peers[peer].lost_packets
    }

    /// Whether all data connections of `peer` have arrived.
    pub fn has_data_streams(&self, peer: usize) -> bool {
        self.state().peers[peer].has_data_streams()
    }

    /// Takes the data connections of `peer`, in its order, once all have arrived.
    pub fn take_data_streams(&self, peer: usize) -> Option<Vec<TcpStream>> {
        let peer = &mut self.state().peers[peer];
        peer.has_data_streams().then(|| std::mem::take(&mut peer.data_streams).into_iter().flatten().collect())
    }

    /// Sleeps until a change makes `ready` true or the time is `until`. Returns the last result of `ready`.
    pub fn sleep(&self, until: Instant, ready: impl FnMut() -> bool) -> bool {
        self.bell.sleep(until, ready)
    }

    /// Records the call that `peer` reported. If it `asks`, returns this rank's call at that place, or marks the peer
    /// to be answered when this rank makes the call.
    pub fn record_call(&self, peer: usize, site: Site, asks: bool) -> Option<Site> {
        let mut state = self.state();
        state.peers[peer].set_last_call(site);
        let mine = state.recent.iter().flatten().find(|mine| mine.sequence == site.sequence).copied();
        if asks && mine.is_none() {
            state.peers[peer].awaits_call = true;
        }
        drop(state);
        self.bell.ring();
        mine.filter(|_| asks)
    }

    /// Sets what tells where this rank is in its program. Called once.
    pub fn locate_by(&self, own: Arc<dyn Locate>) {
        // It is never set twice.
        let _ = self.own.set(own);
    }

    /// Returns where this rank is. `None` before it has its group.
    pub fn own_whereabouts(&self) -> Option<Whereabouts> {
        self.own.get().map(|own| own.whereabouts())
    }

    /// Records where `peer` is.
    pub fn set_whereabouts(&self, peer: usize, whereabouts: Whereabouts) {
        self.state().peers[peer].whereabouts = Some(whereabouts.bounded());
        self.bell.ring();
    }

    /// Returns where those of these ranks are that have told it.
    pub fn whereabouts(&self, ranks: &[usize]) -> Vec<(usize, Whereabouts)> {
        let state = self.state();
        ranks.iter().filter_map(|rank| Some((*rank, state.peers[*rank].whereabouts.clone()?))).collect()
    }

    /// Records the calls of many ranks. Ranks that do not exist are ignored.
    pub fn record_calls(&self, calls: &[(Site, Vec<u32>)]) {
        let mut state = self.state();
        for (site, ranks) in calls {
            for rank in ranks {
                if let Some(peer) = state.peers.get_mut(*rank as usize) {
                    peer.set_last_call(*site);
                }
            }
        }
        drop(state);
        self.bell.ring();
    }

    /// Returns the call of each rank at `sequence`, as far as this rank knows. A rank that is past this operation has
    /// completed it, so all ranks have begun it in the same way.
    pub fn calls(&self, rank: usize, sequence: u64, own: Call) -> Vec<Option<Call>> {
        let state = self.state();
        if state.peers.iter().any(|peer| peer.last_call.is_some_and(|site| site.sequence > sequence)) {
            return vec![Some(own); state.peers.len()];
        }
        let called = |peer: &Peer| peer.last_call.filter(|site| site.sequence == sequence).map(|site| site.call);
        state.peers.iter().enumerate().map(|(r, peer)| if r == rank { Some(own) } else { called(peer) }).collect()
    }

    /// Adds an invitation from `peer` to a subgroup. A peer that exceeds the limits is lost.
    pub fn add_invitation(&self, peer: usize, invitation: Invitation) {
        if self.state().invitations.put(peer, invitation) {
            self.bell.ring();
        } else {
            self.mark_lost(peer, "it sent too many or too large invitations to subgroups".into());
        }
    }

    /// Waits until all members that this rank's invitation names have sent theirs. Returns their endpoints.
    pub fn await_invitations(
        &self,
        rank: usize,
        own: &Invitation,
        deadline: &Deadline,
    ) -> Result<Vec<Endpoint>, Fault> {
        let mut outcome = Ok(None);
        self.bell.sleep(Instant::now() + deadline.remaining(), || {
            outcome = self.state().assemble(rank, own);
            !matches!(outcome, Ok(None))
        });
        let missing = || self.state().invitations.missing(rank, &own.members).collect();
        outcome?.ok_or_else(|| Fault::Timeout { missing: missing() })
    }

    fn state(&self) -> MutexGuard<'_, StatusData> {
        lock(&self.state)
    }
}

impl StatusData {
    fn assemble(&mut self, rank: usize, own: &Invitation) -> Result<Option<Vec<Endpoint>>, Fault> {
        if let Some((fault, _)) = &self.failure {
            return Err(fault.clone());
        }
        let absence = self.invitations.missing(rank, &own.members).find_map(|peer| self.absence(peer));
        absence.map_or_else(|| self.invitations.take(rank, own), Err)
    }

    fn begun(&self) -> u64 {
        self.recent[0].map_or(0, |site| site.sequence + 1)
    }

    /// As [`absence`](Self::absence). Of ranks that left, the cause is the first that has not begun this collective:
    /// others may have called it, failed because of that rank, and left then.
    fn absence_in(&self, peer: usize, tag: &Site) -> Option<Fault> {
        let absence = self.absence(peer)?;
        if !matches!(absence, Fault::Left { .. }) {
            return Some(absence);
        }
        let missed = (0..self.peers.len()).filter(|peer| self.peers[*peer].has_missed(tag));
        Some(missed.min_by_key(|peer| self.peers[*peer].left()).map_or(absence, |peer| Fault::Left { peer }))
    }

    fn absence(&self, peer: usize) -> Option<Fault> {
        self.peers[peer].absence(peer)
    }
}

/// Returns the mismatch among `calls`, once the calls of all ranks are known.
pub(crate) fn find_mismatch(sequence: u64, calls: &[Option<Call>]) -> Option<Error> {
    let calls: Option<Vec<(usize, Call)>> = calls.iter().enumerate().map(|(r, call)| Some((r, (*call)?))).collect();
    let calls = calls?;
    calls.iter().any(|(_, call)| *call != calls[0].1).then_some(Error::Mismatch {
        sequence,
        calls,
        note: String::new(),
    })
}
