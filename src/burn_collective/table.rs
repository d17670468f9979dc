//! The table on which the peers of a node exchange their claims: each posts its own and reads those of all.
//!
//! A group fails permanently when a rank leaves or misses a deadline. Peers of a session register and finish at any
//! time. So they synchronise on the table first, and use their group only once all of them have entered the operation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use super::claim::{ClaimResult, merge};
use super::error::CollectiveError;
use super::names::PeerId;
use bonfire_core::internal::{Bell, lock, oversubscribed, spin};
use bonfire_core::{Error, Group};

/// The table of a fixed set of peers.
pub(super) struct Table {
    slots: Vec<PeerSlot>,
    /// The number of arrivals over all operations: operation `s` is complete at `(s + 1) * peers`. The top bit marks a
    /// closed table. The number no longer changes then, so all peers come to the same conclusion.
    arrived: AtomicU64,
    /// Why the table was closed. `None` if peers registered or finished: there is a new table then.
    reason: OnceLock<Option<CollectiveError>>,
    bell: Bell,
    /// Whether there are more peers than processors.
    oversubscribed: bool,
    /// The merged claim of all nodes, written by the leader (rank 0). It writes once all peers have entered the
    /// operation, when no peer reads the previous operation's value any more.
    agreed: Mutex<ClaimResult>,
    /// The outcome of moving data between nodes, written by the leader.
    outcome: Mutex<Result<(), CollectiveError>>,
}

/// A peer's slot in the table.
struct PeerSlot {
    peer: PeerId,
    /// The number of the peer's operations so far. Locked while the peer is in an operation.
    turn: Mutex<u64>,
    /// The same number, for the other peers to read.
    entered: AtomicU64,
    /// Double-buffered: a fast peer may begin the next operation while a slow one still reads the claims of this one.
    /// It cannot get two operations ahead, because the next one needs the slow peer.
    claims: [Mutex<ClaimResult>; 2],
}

/// The bit of `arrived` that marks a closed table.
const CLOSED: u64 = 1 << 63;

impl Table {
    pub fn new(peers: Vec<PeerId>) -> Table {
        let no_claim = || Mutex::new(Err(CollectiveError::LocalServerMissing));
        let slot =
            |peer| PeerSlot { peer, turn: Mutex::new(0), entered: AtomicU64::new(0), claims: [no_claim(), no_claim()] };
        Table {
            arrived: AtomicU64::new(0),
            reason: OnceLock::new(),
            bell: Bell::default(),
            oversubscribed: oversubscribed(peers.len()),
            agreed: no_claim(),
            outcome: Mutex::new(Ok(())),
            slots: peers.into_iter().map(slot).collect(),
        }
    }

    /// Begins an operation of the peer with this rank. Fails if the peer is in another one.
    pub fn turn(&self, rank: usize) -> Result<MutexGuard<'_, u64>, CollectiveError> {
        match self.slots[rank].turn.try_lock() {
            Ok(turn) => Ok(turn),
            Err(TryLockError::Poisoned(turn)) => Ok(turn.into_inner()),
            Err(TryLockError::WouldBlock) => Err(CollectiveError::Other(
                "the peer is in another operation: a peer's operations run one after the other".into(),
            )),
        }
    }

    /// Posts the claim, waits for the claims of all peers and merges them. Returns `None` if the table was closed
    /// before all peers arrived.
    pub fn merge(&self, rank: usize, turn: &mut u64, claim: ClaimResult, limit: Duration) -> Option<ClaimResult> {
        let operation = *turn;
        *turn += 1;
        let buffer = (operation % 2) as usize;
        let slot = &self.slots[rank];
        *lock(&slot.claims[buffer]) = claim;
        slot.entered.store(*turn, Ordering::Relaxed);
        let complete = self.arrive(operation, limit);
        complete.then(|| merge(self.slots.iter().map(|slot| lock(&slot.claims[buffer]).clone())))
    }

    /// Closes the table: fails waiting operations and those that begin later.
    pub fn close(&self, reason: Option<CollectiveError>) {
        // The first reason counts.
        let _ = self.reason.set(reason);
        self.arrived.fetch_or(CLOSED, Ordering::AcqRel);
        self.bell.ring();
    }

    /// Returns the error with which the table was closed, if there was one.
    pub fn reason(&self) -> Option<CollectiveError> {
        self.reason.get().cloned().flatten()
    }

    /// Shares the merged claim of all nodes: the leader passes it, the other peers pass `None` and wait for it.
    pub fn share_agreed(&self, group: &Group, agreed: Option<ClaimResult>) -> Result<ClaimResult, Error> {
        share(&self.agreed, group, agreed)
    }

    /// Shares the outcome of moving data between nodes: the leader passes it, the other peers pass `None` and wait for
    /// it.
    pub fn share_outcome(
        &self,
        group: &Group,
        outcome: Option<Result<(), CollectiveError>>,
    ) -> Result<Result<(), CollectiveError>, Error> {
        share(&self.outcome, group, outcome)
    }

    /// Registers this peer's arrival and waits for all peers. Returns whether all arrived before the table was closed.
    fn arrive(&self, operation: u64, limit: Duration) -> bool {
        let complete = (operation + 1) * self.slots.len() as u64;
        let open = |arrived: u64| (arrived & CLOSED == 0).then_some(arrived + 1);
        match self.arrived.fetch_update(Ordering::AcqRel, Ordering::Acquire, open) {
            Ok(before) if before + 1 == complete => {
                self.bell.ring();
                return true;
            }
            Ok(_) => {}
            Err(_) => return false,
        }
        // Also true for a closed table, because of the top bit.
        let ready = || self.arrived.load(Ordering::Acquire) >= complete;
        if !spin(self.oversubscribed, ready) {
            let start = Instant::now();
            if !self.bell.sleep(start + limit / 10, ready) {
                log::warn!("{}", self.missing(operation, start));
                if !self.bell.sleep(start + limit, ready) {
                    let remedy = "if they are merely slow, raise the deadline (BONFIRE_DEADLINE)";
                    let reason = format!("timed out: {}; {remedy}", self.missing(operation, start));
                    self.close(Some(CollectiveError::Other(reason)));
                }
            }
        }
        self.arrived.load(Ordering::Acquire) & !CLOSED >= complete
    }

    fn missing(&self, operation: u64, start: Instant) -> String {
        let late = self.slots.iter().filter(|slot| slot.entered.load(Ordering::Relaxed) <= operation);
        let peers: Vec<u32> = late.map(|slot| slot.peer.0).collect();
        format!("peers {peers:?} have not called the operation that the others wait in for {:.1?}", start.elapsed())
    }
}

/// Shares the leader's value with all peers. All have entered the operation, so none leaves the group meanwhile.
fn share<T: Clone>(shared: &Mutex<T>, group: &Group, value: Option<T>) -> Result<T, Error> {
    if let Some(value) = value {
        *lock(shared) = value;
    }
    group.barrier()?;
    Ok(lock(shared).clone())
}
