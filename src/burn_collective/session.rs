//! Sessions: the registered peers. There is one session per backend type and process.

use std::any::{Any, TypeId, type_name};
use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
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

/// The sessions by backend type.
static SESSIONS: Mutex<BTreeMap<TypeId, Arc<Session>>> = Mutex::new(BTreeMap::new());

/// Returns the session of backend `B`.
pub(super) fn session<B: Backend>() -> Arc<Session> {
    // Without the modules: `Autodiff<Flex>`.
    let name =
        || type_name::<B>().split_inclusive(['<', '>', ' ']).filter_map(|path| path.rsplit("::").next()).collect();
    let new = || Arc::new(Session { backend: name(), ..Session::default() });
    lock(&SESSIONS).entry(TypeId::of::<B>()).or_insert_with(new).clone()
}

#[derive(Default)]
pub(super) struct Session {
    /// The backend type's name, for errors.
    backend: String,
    state: Mutex<SessionState>,
    /// Notified when registrations complete or fail, and when the session is reset.
    changed: Condvar,
}

/// A type-erased device: only the generic callers know its type.
pub(super) type Device = Arc<dyn Any + Send + Sync>;

/// What a registered peer needs for an operation.
#[derive(Clone)]
pub(super) struct PeerHandle {
    /// The peer's rank among its node's peers, in the order of ids.
    pub rank: usize,
    /// The group of the node's peers.
    pub group: Group,
    pub table: Arc<Table>,
    pub node: Option<Arc<Node>>,
    pub device: Device,
}

#[derive(Default)]
struct SessionState {
    /// The number of resets.
    era: u64,
    /// Whether a peer has registered since the last reset.
    used: bool,
    config: Option<CollectiveConfig>,
    deadline: Duration,
    members: BTreeMap<PeerId, RegisteredPeer>,
    /// Errors of failed registrations, until the waiting calls fetch them.
    refusals: BTreeMap<PeerId, CollectiveError>,
    /// The peers whose registration timed out since one was last complete.
    timed_out: BTreeSet<PeerId>,
    /// Whether the last peer to register is connecting to the other nodes.
    connecting: bool,
    node: Option<Arc<Node>>,
    /// The table of the peers whose registration is complete.
    table: Option<Arc<Table>>,
}

struct RegisteredPeer {
    device: Device,
    /// `None` until the registration is complete.
    handle: Option<PeerHandle>,
}

impl Session {
    pub fn register(&self, id: PeerId, device: Device, config: CollectiveConfig) -> Result<(), CollectiveError> {
        let multi_node = config.multi_node()?;
        let deadline = deadline_from_env().map_err(other_error)?.unwrap_or(DEADLINE);
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
        state.members.insert(id, RegisteredPeer { device, handle: None });
        if state.members.len() < num_devices {
            return self.await_handle(state, id);
        }
        if let (Some(multi_node), None) = (multi_node, &state.node) {
            let peers: Vec<PeerId> = state.members.keys().copied().collect();
            let era = state.era;
            state.connecting = true;
            drop(state);
            let node = Node::connect(&multi_node, &peers, deadline);
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
        let result = state.rebuild_table(true);
        self.changed.notify_all();
        result
    }

    pub fn finish(&self, id: PeerId) -> Result<(), CollectiveError> {
        let mut state = lock(&self.state);
        match state.members.get(&id) {
            None if state.used => return Err(CollectiveError::MultipleUnregister),
            Some(RegisteredPeer { handle: Some(_), .. }) => {}
            _ => return Err(CollectiveError::RegisterNotFirstOperation),
        }
        let member = state.members.remove(&id);
        let result = state.rebuild_table(false);
        let node = if state.table.is_none() { state.node.take() } else { None };
        drop(state);
        // Dropped outside the lock: the last handle to a group sends goodbye messages to the other nodes.
        drop((member, node));
        result
    }

    pub fn reset(&self) {
        let mut state = lock(&self.state);
        let era = state.era + 1;
        let old = std::mem::replace(&mut *state, SessionState { era, ..SessionState::default() });
        if let Some(table) = &old.table {
            table.close(Some(CollectiveError::LocalServerMissing));
        }
        self.changed.notify_all();
        drop(state);
        // Dropped outside the lock, as in `finish`.
        drop(old);
    }

    pub fn handle(&self, id: PeerId) -> Result<PeerHandle, CollectiveError> {
        let state = lock(&self.state);
        let handle = state.members.get(&id).and_then(|member| member.handle.clone());
        handle.ok_or(CollectiveError::RegisterNotFirstOperation)
    }

    /// Handles a closed table. Returns `Ok` if the caller should retry on the new table, otherwise the reason why it
    /// was closed.
    pub fn leave_table(&self, table: &Arc<Table>) -> Result<(), CollectiveError> {
        let Some(error) = table.reason() else { return Ok(()) };
        let mut state = lock(&self.state);
        // The failure affects this operation only. Later ones use a new table.
        if state.table.as_ref().is_some_and(|current| Arc::ptr_eq(current, table)) {
            state.rebuild_table(false)?;
        }
        Err(error)
    }

    /// Returns a clause about the peers of this process that registered, or tried to, with another backend. Each
    /// backend has a session of its own, so these peers may be the missing ones.
    fn registered_elsewhere(&self) -> String {
        let sessions: Vec<_> = lock(&SESSIONS).values().cloned().collect();
        let others = sessions.iter().filter(|session| !ptr::eq(&***session, self));
        let peers = |session: &Session| {
            let state = lock(&session.state);
            state.members.keys().chain(&state.timed_out).map(|id| id.0).collect::<Vec<_>>()
        };
        let others = others.map(|session| (&session.backend, peers(session))).filter(|(_, ids)| !ids.is_empty());
        let clause = |(backend, ids)| {
            format!(
                "; peers {ids:?} have registered with the backend {backend}, not with {}: all peers of a session must \
                 use the same one, with autodiff its inner backend",
                self.backend
            )
        };
        others.map(clause).collect()
    }

    fn await_handle(&self, mut state: MutexGuard<'_, SessionState>, id: PeerId) -> Result<(), CollectiveError> {
        let era = state.era;
        let deadline = Deadline::after(state.deadline);
        loop {
            if state.era != era {
                return Err(CollectiveError::LocalServerMissing);
            }
            if let Some(error) = state.refusals.remove(&id) {
                return Err(error);
            }
            if state.members.get(&id).is_some_and(|member| member.handle.is_some()) {
                return Ok(());
            }
            // Connecting to other nodes has a deadline of its own.
            if deadline.passed() && !state.connecting {
                let error = state.time_out(id, &deadline);
                drop(state);
                return Err(CollectiveError::Other(format!("{error}{}", self.registered_elsewhere())));
            }
            let timeout = if state.connecting { Duration::from_secs(1) } else { deadline.remaining() };
            state = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl SessionState {
    /// Makes a new group and table for the peers whose registration is complete, or with `all` for all peers, and
    /// completes their registration. Ranks are in the order of ids.
    fn rebuild_table(&mut self, all: bool) -> Result<(), CollectiveError> {
        if let Some(table) = self.table.take() {
            table.close(None);
        }
        let members: Vec<_> = self.members.iter_mut().filter(|(_, member)| all || member.handle.is_some()).collect();
        if members.is_empty() {
            self.forget_config();
            return Ok(());
        }
        let table = Arc::new(Table::new(members.iter().map(|(id, _)| **id).collect()));
        let groups = Group::builder().deadline(self.deadline).threads(members.len()).map_err(other_error)?;
        for (rank, ((_, member), group)) in members.into_iter().zip(groups).enumerate() {
            let (table, node, device) = (table.clone(), self.node.clone(), member.device.clone());
            member.handle = Some(PeerHandle { rank, group, table, node, device });
        }
        self.table = Some(table);
        self.timed_out.clear();
        Ok(())
    }

    /// Fails all registrations that are not complete.
    fn refuse_all(&mut self, error: &CollectiveError) {
        for (id, _) in self.members.extract_if(.., |_, member| member.handle.is_none()) {
            self.refusals.insert(id, error.clone());
        }
        self.forget_config();
    }

    /// Removes a peer whose registration timed out and returns the message of its error.
    fn time_out(&mut self, id: PeerId, deadline: &Deadline) -> String {
        let registered: Vec<u32> = self.members.keys().map(|id| id.0).collect();
        let expected = self.config.as_ref().map_or(0, |config| config.num_devices);
        self.members.remove(&id);
        self.timed_out.insert(id);
        self.forget_config();
        format!(
            "register: after {:.1?} only peers {registered:?} had registered, and {expected} are expected; if the \
             others are merely slow, raise the deadline (BONFIRE_DEADLINE)",
            deadline.elapsed()
        )
    }

    /// Forgets the config if no peer is left, so that the next session may have another one.
    fn forget_config(&mut self) {
        if self.members.is_empty() {
            self.config = None;
        }
    }
}

/// Converts an error of a group, which burn-collective has no variant for.
pub(super) fn other_error(error: Error) -> CollectiveError {
    CollectiveError::Other(error.to_string())
}
