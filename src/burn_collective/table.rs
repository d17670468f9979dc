//! Where the peers of a node meet: each lays down what it is about to do, and all look at all.
//!
//! A group of level 1 fails for good when a rank leaves or is late. Here peers come and go, so they meet here first and
//! use their group once all are in the operation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use super::claim::{Claimed, merge};
use super::error::CollectiveError;
use super::names::PeerId;
use bonfire_core::internal::{Bell, crowded, lock, spin};
use bonfire_core::{Error, Group};

pub(super) struct Table {
    places: Vec<Place>,
    /// Peers that came, over all operations: operation `s` has all its peers from `(s + 1) * peers` on. With the top bit
    /// the table is closed, and the number stays, so that all who were or come here draw the same conclusion.
    arrived: AtomicU64,
    /// Why the table was closed; none if peers came or went, and there is another.
    reason: OnceLock<Option<CollectiveError>>,
    bell: Bell,
    /// More peers than processors.
    crowded: bool,
    /// What the first peer, which talks to the other nodes, learned from them before and after the data moved.
    /// It writes once all peers are in the operation, so nobody looks at the previous operation's any more.
    agreed: Mutex<Claimed>,
    outcome: Mutex<Result<(), CollectiveError>>,
}

struct Place {
    peer: PeerId,
    /// Locked while the peer is in an operation. The number of its operations so far.
    turn: Mutex<u64>,
    /// The same number, for others.
    entered: AtomicU64,
    /// Two, used in turn: a fast peer may begin the next operation while a slow one still looks at this one's claims. It
    /// cannot get two ahead, because the operation between needs the slow one.
    claims: [Mutex<Claimed>; 2],
}

const CLOSED: u64 = 1 << 63;

impl Table {
    pub fn new(peers: Vec<PeerId>) -> Table {
        let nothing = || Mutex::new(Err(CollectiveError::LocalServerMissing));
        let place =
            |peer| Place { peer, turn: Mutex::new(0), entered: AtomicU64::new(0), claims: [nothing(), nothing()] };
        Table {
            arrived: AtomicU64::new(0),
            reason: OnceLock::new(),
            bell: Bell::default(),
            crowded: crowded(peers.len()),
            agreed: nothing(),
            outcome: Mutex::new(Ok(())),
            places: peers.into_iter().map(place).collect(),
        }
    }

    /// Begins an operation of the peer with this rank, unless it is in one.
    pub fn turn(&self, rank: usize) -> Result<MutexGuard<'_, u64>, CollectiveError> {
        match self.places[rank].turn.try_lock() {
            Ok(turn) => Ok(turn),
            Err(TryLockError::Poisoned(turn)) => Ok(turn.into_inner()),
            Err(TryLockError::WouldBlock) => Err(CollectiveError::Other(
                "the peer is in another operation: a peer's operations run one after the other".into(),
            )),
        }
    }

    /// Lays down the claim, waits for the others and merges all. `None` if the table was closed before all came.
    pub fn merge(&self, rank: usize, turn: &mut u64, claim: Claimed, limit: Duration) -> Option<Claimed> {
        let operation = *turn;
        *turn += 1;
        let side = (operation % 2) as usize;
        let place = &self.places[rank];
        *lock(&place.claims[side]) = claim;
        place.entered.store(*turn, Ordering::Relaxed);
        let all_here = self.meet(operation, limit);
        all_here.then(|| merge(self.places.iter().map(|place| lock(&place.claims[side]).clone())))
    }

    /// Ends the waiting here, and operations that begin later.
    pub fn close(&self, reason: Option<CollectiveError>) {
        // The first reason counts.
        let _ = self.reason.set(reason);
        self.arrived.fetch_or(CLOSED, Ordering::AcqRel);
        self.bell.ring();
    }

    /// Why a closed table was closed.
    pub fn reason(&self) -> Option<CollectiveError> {
        self.reason.get().cloned().flatten()
    }

    /// On the first peer: tells the others what the nodes agreed on. Elsewhere: waits for it.
    pub fn share_agreed(&self, group: &Group, agreed: Option<Claimed>) -> Result<Claimed, Error> {
        share(&self.agreed, group, agreed)
    }

    /// On the first peer: tells the others how moving data between the nodes ended. Elsewhere: waits for it.
    pub fn share_outcome(
        &self,
        group: &Group,
        outcome: Option<Result<(), CollectiveError>>,
    ) -> Result<Result<(), CollectiveError>, Error> {
        share(&self.outcome, group, outcome)
    }

    /// Whether all peers came to the operation.
    fn meet(&self, operation: u64, limit: Duration) -> bool {
        let complete = (operation + 1) * self.places.len() as u64;
        let open = |arrived: u64| (arrived & CLOSED == 0).then_some(arrived + 1);
        match self.arrived.fetch_update(Ordering::AcqRel, Ordering::Acquire, open) {
            Ok(before) if before + 1 == complete => {
                self.bell.ring();
                return true;
            }
            Ok(_) => {}
            Err(_) => return false,
        }
        // A closed table has a large number, too.
        let ready = || self.arrived.load(Ordering::Acquire) >= complete;
        if !spin(self.crowded, ready) {
            let start = Instant::now();
            if !self.bell.sleep(start + limit / 10, ready) {
                log::warn!("{}", self.missing(operation, start));
                if !self.bell.sleep(start + limit, ready) {
                    let advice = "if they are merely slow, raise the deadline (BONFIRE_DEADLINE)";
                    let reason = format!("timed out: {}; {advice}", self.missing(operation, start));
                    self.close(Some(CollectiveError::Other(reason)));
                }
            }
        }
        self.arrived.load(Ordering::Acquire) & !CLOSED >= complete
    }

    fn missing(&self, operation: u64, start: Instant) -> String {
        let late = self.places.iter().filter(|place| place.entered.load(Ordering::Relaxed) <= operation);
        let peers: Vec<u32> = late.map(|place| place.peer.0).collect();
        format!("peers {peers:?} have not called the operation that the others wait in for {:.1?}", start.elapsed())
    }
}

/// Everybody is in the operation, so nobody leaves the group meanwhile.
fn share<T: Clone>(shelf: &Mutex<T>, group: &Group, news: Option<T>) -> Result<T, Error> {
    if let Some(news) = news {
        *lock(shelf) = news;
    }
    group.barrier()?;
    Ok(lock(shelf).clone())
}
