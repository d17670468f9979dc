//! The registered peers, and how they meet.
//!
//! A group that loses a rank, or misses a deadline, stays failed, and peers register and finish at any time. So they
//! first tell each other what they call, and use a group only once all of them have called, and agree. A disagreement
//! costs one call.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use burn::tensor::{DType, Device};

use super::config::{CollectiveConfig, PeerId};
use super::error::CollectiveError;
use bonfire_core::internal::{DEADLINE, deadline_from_env, lock};
use bonfire_core::{Deadline, Error, Group, ReduceOp};

pub(super) static SESSION: Session = Session { state: Mutex::new(State::new(0)), changed: Condvar::new() };

pub(super) struct Session {
    state: Mutex<State>,
    /// Notified when registrations complete, peers agree or give up, and when the session is reset.
    changed: Condvar,
}

/// The operation that a peer calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Call {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, PeerId),
    Broadcast,
}

impl Call {
    fn name(self) -> &'static str {
        match self {
            Call::AllReduce(_) => "all_reduce",
            Call::Reduce(..) => "reduce",
            Call::Broadcast => "broadcast",
        }
    }
}

/// Shape and element type of a tensor.
pub(super) type Described = (Vec<usize>, DType);

/// What a peer calls, and its tensor, if it has one. The error of one peer becomes that of all.
type Claim = Result<(Call, Option<Described>), CollectiveError>;

struct State {
    /// The number of resets.
    era: u64,
    /// Whether a peer has registered since the last reset.
    used: bool,
    config: Option<CollectiveConfig>,
    deadline: Duration,
    peers: BTreeMap<PeerId, Peer>,
}

struct Peer {
    device: Device,
    /// The peer's handle in the group of all peers whose registration is complete; `None` until its own is.
    group: Option<Group>,
    turn: Turn,
}

/// Where a peer is.
enum Turn {
    Idle,
    /// It waits for the claims of the others. It finds the outcome even if the session is reset meanwhile, because the
    /// others may run the operation then.
    Waiting(Claim, Arc<OnceLock<Result<Met, CollectiveError>>>),
    /// It runs the operation.
    Running,
}

/// All have called, and run the operation on this group.
#[derive(Clone)]
struct Met {
    group: Group,
    agreed: Agreed,
}

/// What all peers call together.
#[derive(Clone)]
pub(super) struct Agreed {
    /// Shape and element type of the tensors.
    pub tensor: Option<Described>,
    /// The rank of a reduction's root, or of the peer with the tensor of a broadcast.
    pub holder: Option<usize>,
}

/// All peers call the same operation.
pub(super) struct Meeting {
    session: &'static Session,
    id: PeerId,
    era: u64,
    group: Group,
    /// The device with which this peer registered.
    pub device: Device,
    pub agreed: Agreed,
}

impl Meeting {
    /// Runs the operation on the group of the peers. After a failure the peers get a new group.
    pub fn run<T>(&self, operation: impl FnOnce(&Group) -> Result<T, Error>) -> Result<T, CollectiveError> {
        operation(&self.group).map_err(|error| {
            let mut state = lock(&self.session.state);
            let rebuilt = if state.era == self.era { state.regroup(false) } else { Ok(()) };
            rebuilt.err().unwrap_or_else(|| other_error(error))
        })
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        let mut state = lock(&self.session.state);
        if state.era == self.era
            && let Some(peer) = state.peers.get_mut(&self.id)
            && matches!(peer.turn, Turn::Running)
        {
            peer.turn = Turn::Idle;
        }
    }
}

impl Session {
    pub fn register(&self, id: PeerId, device: Device, config: CollectiveConfig) -> Result<(), CollectiveError> {
        config.check()?;
        let deadline = deadline_from_env().map_err(other_error)?.unwrap_or(DEADLINE);
        let mut state = lock(&self.state);
        if state.peers.contains_key(&id) {
            return Err(CollectiveError::MultipleRegister);
        }
        let num_devices = config.num_devices;
        let other_config = state.config.as_ref().is_some_and(|first| *first != config);
        if other_config || state.peers.len() >= num_devices {
            return Err(CollectiveError::RegisterParamsMismatch);
        }
        (state.used, state.config, state.deadline) = (true, Some(config), deadline);
        state.peers.insert(id, Peer { device, group: None, turn: Turn::Idle });
        if state.peers.len() == num_devices {
            let result = state.regroup(true);
            if result.is_err() {
                state.peers.remove(&id);
            }
            self.changed.notify_all();
            return result;
        }
        let era = state.era;
        let registered = |state: &State| {
            let peer = state.peers.get(&id).filter(|_| state.era == era)?;
            peer.group.is_some().then_some(Ok(()))
        };
        self.wait(state, registered).unwrap_or_else(|(mut state, deadline)| {
            let registered: Vec<u32> = state.peers.keys().map(|id| id.0).collect();
            state.peers.remove(&id);
            state.forget_config();
            Err(CollectiveError::Other(format!(
                "register: after {:.1?} only peers {registered:?} had registered, and {num_devices} are expected; if \
                 the others are merely slow, raise the deadline (BONFIRE_DEADLINE)",
                deadline.elapsed()
            )))
        })
    }

    pub fn finish(&self, id: PeerId) -> Result<(), CollectiveError> {
        let mut state = lock(&self.state);
        match state.peers.get(&id) {
            None if state.used => return Err(CollectiveError::MultipleUnregister),
            Some(Peer { group: Some(_), .. }) => {}
            _ => return Err(CollectiveError::RegisterNotFirstOperation),
        }
        if let Some(Peer { turn: Turn::Waiting(_, outcome), .. }) = state.peers.remove(&id) {
            // Another thread called for this peer.
            let _ = outcome.set(Err(CollectiveError::RegisterNotFirstOperation));
        }
        let result = state.regroup(false);
        // The others may have waited for this peer alone.
        state.meet();
        self.changed.notify_all();
        result
    }

    pub fn reset(&self) {
        let mut state = lock(&self.state);
        *state = State::new(state.era + 1);
        self.changed.notify_all();
    }

    /// Waits until all peers have called an operation. Fails on all if they do not agree.
    pub fn meet(
        &'static self,
        id: PeerId,
        call: Call,
        tensor: Result<Option<Described>, CollectiveError>,
    ) -> Result<Meeting, CollectiveError> {
        let mut state = lock(&self.state);
        let era = state.era;
        let peer = state.peers.get_mut(&id).filter(|peer| peer.group.is_some());
        let peer = peer.ok_or(CollectiveError::RegisterNotFirstOperation)?;
        if !matches!(peer.turn, Turn::Idle) {
            let reason = "the peer is in another operation: a peer's operations run one after the other";
            return Err(CollectiveError::Other(reason.into()));
        }
        let (device, outcome) = (peer.device.clone(), Arc::new(OnceLock::new()));
        peer.turn = Turn::Waiting(tensor.map(|tensor| (call, tensor)), outcome.clone());
        state.meet();
        self.changed.notify_all();
        let met = self.wait(state, |_| outcome.get().cloned()).unwrap_or_else(|(mut state, deadline)| {
            let missing = state.peers.iter().filter(|(_, peer)| peer.group.is_some() && peer.claim().is_none());
            let missing: Vec<u32> = missing.map(|(id, _)| id.0).collect();
            let error = CollectiveError::Other(format!(
                "{}: after {:.1?} peers {missing:?} had not called it; if they are merely slow, raise the deadline \
                 (BONFIRE_DEADLINE)",
                call.name(),
                deadline.elapsed()
            ));
            state.settle(Err(error.clone()));
            self.changed.notify_all();
            Err(error)
        });
        met.map(|Met { group, agreed }| Meeting { session: self, id, era, group, device, agreed })
    }

    /// Waits for what `ready` returns. Returns the state and the deadline once that has passed.
    fn wait<'s, T>(
        &self,
        mut state: MutexGuard<'s, State>,
        ready: impl Fn(&State) -> Option<Result<T, CollectiveError>>,
    ) -> Result<Result<T, CollectiveError>, (MutexGuard<'s, State>, Deadline)> {
        let (era, deadline) = (state.era, Deadline::after(state.deadline));
        loop {
            if let Some(result) = ready(&state) {
                return Ok(result);
            }
            if state.era != era {
                return Ok(Err(CollectiveError::LocalServerMissing));
            }
            if deadline.passed() {
                return Err((state, deadline));
            }
            let waited = self.changed.wait_timeout(state, deadline.remaining());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Peer {
    fn claim(&self) -> Option<&Claim> {
        if let Turn::Waiting(claim, _) = &self.turn { Some(claim) } else { None }
    }
}

impl State {
    const fn new(era: u64) -> State {
        State { era, used: false, config: None, deadline: DEADLINE, peers: BTreeMap::new() }
    }

    /// Makes a new group of the peers whose registration is complete, or with `all` of all peers, and completes their
    /// registration. Ranks are in the order of ids.
    fn regroup(&mut self, all: bool) -> Result<(), CollectiveError> {
        let peers: Vec<_> = self.peers.values_mut().filter(|peer| all || peer.group.is_some()).collect();
        if !peers.is_empty() {
            let groups = Group::builder().deadline(self.deadline).threads(peers.len()).map_err(other_error)?;
            peers.into_iter().zip(groups).for_each(|(peer, group)| peer.group = Some(group));
        }
        self.forget_config();
        Ok(())
    }

    /// Ends the wait of the peers if all of them have called.
    fn meet(&mut self) {
        let registered: Vec<_> = self.peers.iter().filter(|(_, peer)| peer.group.is_some()).collect();
        let claims: Option<Vec<_>> = registered.iter().map(|(_, peer)| peer.claim().cloned()).collect();
        if let Some(claims) = claims {
            let ids: Vec<PeerId> = registered.iter().map(|(id, _)| **id).collect();
            self.settle(agree(&ids, claims));
        }
    }

    /// Ends the wait of all peers that wait.
    fn settle(&mut self, agreed: Result<Agreed, CollectiveError>) {
        for Peer { group, turn, .. } in self.peers.values_mut() {
            let Turn::Waiting(_, outcome) = turn else { continue };
            let group = group.clone().ok_or(CollectiveError::RegisterNotFirstOperation);
            let met = agreed.clone().and_then(|agreed| Ok(Met { group: group?, agreed }));
            let next = if met.is_ok() { Turn::Running } else { Turn::Idle };
            let _ = outcome.set(met);
            *turn = next;
        }
    }

    /// Forgets the config if no peer is left, so that the next session may have another one.
    fn forget_config(&mut self) {
        if self.peers.is_empty() {
            self.config = None;
        }
    }
}

/// Merges the claims of all peers into one. Returns an error if they disagree.
fn agree(ids: &[PeerId], claims: Vec<Claim>) -> Result<Agreed, CollectiveError> {
    let claims: Vec<(Call, Option<Described>)> = claims.into_iter().collect::<Result<_, _>>()?;
    let (call, tensor) = claims.first().cloned().ok_or(CollectiveError::LocalServerMissing)?;
    if let Some(error) = claims.iter().find_map(|(other, _)| disagreement(call, *other)) {
        return Err(error);
    }
    let differ = claims.iter().any(|(_, other)| *other != tensor);
    match call {
        Call::AllReduce(_) if differ => Err(CollectiveError::AllReduceShapeMismatch),
        Call::AllReduce(_) => Ok(Agreed { tensor, holder: None }),
        Call::Reduce(..) if differ => Err(CollectiveError::ReduceShapeMismatch),
        Call::Reduce(_, root) => {
            let holder = ids.iter().position(|id| *id == root);
            let holder = holder.ok_or(CollectiveError::RegisterNotFirstOperation)?;
            Ok(Agreed { tensor, holder: Some(holder) })
        }
        Call::Broadcast => {
            let mut holders = (0..claims.len()).filter(|at| claims[*at].1.is_some());
            let holder = holders.next().ok_or(CollectiveError::BroadcastNoTensor)?;
            if holders.next().is_some() {
                return Err(CollectiveError::BroadcastMultipleTensors);
            }
            Ok(Agreed { tensor: claims[holder].1.clone(), holder: Some(holder) })
        }
    }
}

fn disagreement(one: Call, other: Call) -> Option<CollectiveError> {
    use Call::*;
    match (one, other) {
        _ if one == other => None,
        (Reduce(op, _), Reduce(other, _)) if op == other => Some(CollectiveError::ReduceRootMismatch),
        (Reduce(..) | Broadcast, Reduce(..) | Broadcast) => Some(CollectiveError::ReduceOperationMismatch),
        _ => Some(CollectiveError::AllReduceOperationMismatch),
    }
}

/// Converts an error of a group, which burn-collective has no variant for.
pub(super) fn other_error(error: Error) -> CollectiveError {
    CollectiveError::Other(error.to_string())
}
