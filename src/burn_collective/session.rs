//! Who is registered. One session for each backend type and process.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::tensor::backend::Backend;

use super::config::CollectiveConfig;
use super::error::CollectiveError;
use super::names::PeerId;
use super::nodes::Node;
use super::table::Table;
use bonfire_core::internal::{DEADLINE, deadline_from_env, lock};
use bonfire_core::{Deadline, Error, Group};

/// The session of backend `B`.
pub(super) fn session<B: Backend>() -> Arc<Session> {
    static SESSIONS: Mutex<BTreeMap<TypeId, Arc<Session>>> = Mutex::new(BTreeMap::new());
    lock(&SESSIONS).entry(TypeId::of::<B>()).or_default().clone()
}

#[derive(Default)]
pub(super) struct Session {
    state: Mutex<State>,
    /// Registrations completed or failed, or the session was reset.
    changed: Condvar,
}

/// A device, whose type only the generic callers know.
pub(super) type Device = Arc<dyn Any + Send + Sync>;

/// What a registered peer needs for an operation.
#[derive(Clone)]
pub(super) struct Seat {
    /// The peer's place among its node's peers, by id.
    pub rank: usize,
    /// The node's peers.
    pub group: Group,
    pub table: Arc<Table>,
    pub node: Option<Arc<Node>>,
    pub device: Device,
}

#[derive(Default)]
struct State {
    /// Counts resets.
    era: u64,
    /// Whether anybody has registered since.
    used: bool,
    config: Option<CollectiveConfig>,
    deadline: Duration,
    members: BTreeMap<PeerId, Member>,
    /// Why registrations failed, until their callers fetch it.
    refusals: BTreeMap<PeerId, CollectiveError>,
    /// The last peer to register is looking for the other nodes.
    connecting: bool,
    node: Option<Arc<Node>>,
    /// Where the seated peers meet.
    table: Option<Arc<Table>>,
}

struct Member {
    device: Device,
    /// None until the registration is complete.
    seat: Option<Seat>,
}

impl Session {
    pub fn register(&self, id: PeerId, device: Device, config: CollectiveConfig) -> Result<(), CollectiveError> {
        let global = config.global()?;
        let deadline = deadline_from_env(|name| std::env::var(name).ok()).map_err(in_words)?.unwrap_or(DEADLINE);
        let mut state = lock(&self.state);
        if state.members.contains_key(&id) {
            return Err(CollectiveError::MultipleRegister);
        }
        let num_devices = config.num_devices;
        let other_config = state.config.as_ref().is_some_and(|first| *first != config);
        if other_config || state.members.len() >= num_devices {
            return Err(CollectiveError::RegisterParamsMismatch);
        }
        (state.used, state.config, state.deadline) = (true, Some(config), deadline);
        state.members.insert(id, Member { device, seat: None });
        if state.members.len() < num_devices {
            return self.await_seat(state, id);
        }
        if let (Some(global), None) = (global, &state.node) {
            let peers: Vec<PeerId> = state.members.keys().copied().collect();
            let era = state.era;
            state.connecting = true;
            drop(state);
            let node = Node::connect(&global, &peers, deadline);
            state = lock(&self.state);
            if state.era != era {
                return Err(CollectiveError::LocalServerMissing);
            }
            state.connecting = false;
            match node {
                Ok(node) => state.node = Some(Arc::new(node)),
                Err(error) => {
                    state.refuse_all(&error);
                    state.refusals.remove(&id);
                    self.changed.notify_all();
                    return Err(error);
                }
            }
        }
        let seated = state.seat(true);
        self.changed.notify_all();
        seated
    }

    pub fn finish(&self, id: PeerId) -> Result<(), CollectiveError> {
        let mut state = lock(&self.state);
        match state.members.get(&id) {
            None if state.used => return Err(CollectiveError::MultipleUnregister),
            Some(Member { seat: Some(_), .. }) => {}
            _ => return Err(CollectiveError::RegisterNotFirstOperation),
        }
        let member = state.members.remove(&id);
        let seated = state.seat(false);
        let node = if state.table.is_none() { state.node.take() } else { None };
        drop(state);
        // Outside the lock, because the last handle to a group says farewell to the other nodes.
        drop((member, node));
        seated
    }

    pub fn reset(&self) {
        let mut state = lock(&self.state);
        let era = state.era + 1;
        let old = std::mem::replace(&mut *state, State { era, ..State::default() });
        if let Some(table) = &old.table {
            table.close(Some(CollectiveError::LocalServerMissing));
        }
        self.changed.notify_all();
        drop(state);
        // Outside the lock, as above.
        drop(old);
    }

    pub fn seat(&self, id: PeerId) -> Result<Seat, CollectiveError> {
        let state = lock(&self.state);
        let seat = state.members.get(&id).and_then(|member| member.seat.clone());
        seat.ok_or(CollectiveError::RegisterNotFirstOperation)
    }

    /// The peers did not come together at this table, which is closed. Returns where the caller should try another.
    pub fn leave_table(&self, table: &Arc<Table>) -> Result<(), CollectiveError> {
        let Some(error) = table.reason() else { return Ok(()) };
        let mut state = lock(&self.state);
        // The failure is over with this call. Later ones meet at a new table.
        if state.table.as_ref().is_some_and(|current| Arc::ptr_eq(current, table)) {
            state.seat(false)?;
        }
        Err(error)
    }

    fn await_seat(&self, mut state: MutexGuard<'_, State>, id: PeerId) -> Result<(), CollectiveError> {
        let era = state.era;
        let deadline = Deadline::after(state.deadline);
        loop {
            if state.era != era {
                return Err(CollectiveError::LocalServerMissing);
            }
            if let Some(error) = state.refusals.remove(&id) {
                return Err(error);
            }
            if state.members.get(&id).is_some_and(|member| member.seat.is_some()) {
                return Ok(());
            }
            // The search for other nodes has a deadline of its own.
            if deadline.passed() && !state.connecting {
                return Err(state.give_up(id, &deadline));
            }
            let pause = if state.connecting { Duration::from_secs(1) } else { deadline.remaining() };
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl State {
    /// Seats the peers that have a seat, or all, at a new table, by id.
    fn seat(&mut self, all: bool) -> Result<(), CollectiveError> {
        if let Some(table) = self.table.take() {
            table.close(None);
        }
        let members: Vec<_> = self.members.iter_mut().filter(|(_, member)| all || member.seat.is_some()).collect();
        if members.is_empty() {
            self.forget_config();
            return Ok(());
        }
        let table = Arc::new(Table::new(members.iter().map(|(id, _)| **id).collect()));
        let groups = Group::builder().deadline(self.deadline).threads(members.len()).map_err(in_words)?;
        for (rank, ((_, member), group)) in members.into_iter().zip(groups).enumerate() {
            let (table, node, device) = (table.clone(), self.node.clone(), member.device.clone());
            member.seat = Some(Seat { rank, group, table, node, device });
        }
        self.table = Some(table);
        Ok(())
    }

    /// Ends all registrations that are not complete.
    fn refuse_all(&mut self, error: &CollectiveError) {
        for (id, _) in self.members.extract_if(.., |_, member| member.seat.is_none()) {
            self.refusals.insert(id, error.clone());
        }
        self.forget_config();
    }

    fn give_up(&mut self, id: PeerId, deadline: &Deadline) -> CollectiveError {
        let registered: Vec<u32> = self.members.keys().map(|id| id.0).collect();
        let expected = self.config.as_ref().map_or(0, |config| config.num_devices);
        self.members.remove(&id);
        self.forget_config();
        CollectiveError::Other(format!(
            "register: after {:.1?} only peers {registered:?} had registered, and {expected} are expected; if the \
             others are merely slow, raise the deadline (BONFIRE_DEADLINE)",
            deadline.elapsed()
        ))
    }

    /// The next session may be another.
    fn forget_config(&mut self) {
        if self.members.is_empty() {
            self.config = None;
        }
    }
}

/// An error of level 1 that a peer's call cannot be matched with.
pub(super) fn in_words(error: Error) -> CollectiveError {
    CollectiveError::Other(error.to_string())
}
