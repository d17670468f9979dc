//! New groups from the threads of a group: shrink and subgroups.

use std::collections::HashMap;
use std::time::Instant;

use super::Local;
use crate::control::invitation::{Endpoint, Invitation, Invitations};
use crate::sync::{Deadline, Mutex, MutexGuard, lock};
use crate::types::{Error, Fault};

/// State of groups that are being formed, shared by the ranks of the old group.
pub(super) struct Regrouping {
    /// The ranks in `shrink`, by rank of the old group.
    shrink_states: Mutex<Vec<ShrinkState>>,
    /// Invitations to subgroups, by receiving rank.
    invitations: Mutex<Vec<Invitations>>,
    /// Endpoints of subgroups that were not taken yet, by the number of the subgroup and then by rank in it.
    endpoints: Mutex<HashMap<u64, Vec<Option<Local>>>>,
}

/// A rank of the old group in `shrink`.
#[derive(Default)]
struct ShrinkState {
    arrived: bool,
    timed_out: bool,
    /// The rank's endpoint of the new group, and that group's number.
    endpoint: Option<(Local, u64)>,
}

impl ShrinkState {
    fn is_waiting(&self) -> bool {
        self.arrived && !self.timed_out
    }
}

impl Regrouping {
    pub fn new(ranks: usize) -> Regrouping {
        Regrouping {
            shrink_states: Mutex::new((0..ranks).map(|_| ShrinkState::default()).collect()),
            invitations: Mutex::new((0..ranks).map(|_| Invitations::new(ranks)).collect()),
            endpoints: Mutex::default(),
        }
    }
}

impl Local {
    /// Waits until every other rank waits here or is gone. Returns this rank's endpoint of a group of the waiting
    /// ranks, and its number: the `number` of one of them. Returns the missing ranks at the deadline. Called once.
    pub fn join_survivors(&self, number: u64, deadline: &Deadline) -> Result<(Local, u64), Vec<usize>> {
        self.shrink_states()[self.rank].arrived = true;
        self.shared.bell.ring();
        self.shared.bell.sleep(Instant::now() + deadline.remaining(), || self.try_form(number));
        let mut states = self.shrink_states();
        states[self.rank].endpoint.take().ok_or_else(|| {
            let mut missing: Vec<_> = self.present(|rank| !states[rank].arrived).collect();
            if missing.is_empty() {
                missing = self.present(|rank| !states[rank].is_waiting()).collect();
            }
            // The others must not continue without a rank that times out, unless it leaves.
            states[self.rank].timed_out = true;
            missing
        })
    }

    /// Forms the group if no rank is missing: the first rank to find this makes the endpoints of all. Returns whether
    /// this rank has its endpoint.
    fn try_form(&self, number: u64) -> bool {
        let mut states = self.shrink_states();
        if states[self.rank].endpoint.is_none() && self.present(|rank| !states[rank].is_waiting()).next().is_none() {
            let waiting = states.iter().filter(|state| state.is_waiting()).count();
            for (state, endpoint) in states.iter_mut().filter(|state| state.is_waiting()).zip(Local::group(waiting)) {
                state.endpoint = Some((endpoint, number));
            }
        }
        states[self.rank].endpoint.is_some()
    }

    /// The ranks that `selected` selects and that are not gone.
    fn present(&self, selected: impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
        (0..self.shared.ranks.len()).filter(move |rank| selected(*rank) && self.shared.absence(*rank).is_none())
    }

    fn shrink_states(&self) -> MutexGuard<'_, Vec<ShrinkState>> {
        lock(&self.shared.regrouping.shrink_states)
    }

    /// Invites the other members of a subgroup and waits for their invitations. Returns the doors of all, in order.
    pub fn invite(&self, own: &Invitation, deadline: &Deadline) -> Result<Vec<Endpoint>, Fault> {
        let (rank, shared) = (self.rank, &self.shared);
        let all = || lock(&shared.regrouping.invitations);
        for to in own.members.iter().filter(|member| **member != rank) {
            if !all()[*to].put(rank, own.clone()) {
                let reason = format!("rank {to} has too many unanswered invitations: have it call subgroup too");
                return Err(Fault::Failed(Error::argument("subgroup", reason)));
            }
        }
        shared.bell.ring();
        let mut outcome = Ok(None);
        shared.bell.sleep(Instant::now() + deadline.remaining(), || {
            let invitations = &mut all()[rank];
            let absence = invitations.missing(rank, &own.members).find_map(|peer| shared.absence(peer));
            outcome = match absence {
                _ if shared.failed() => Err(shared.cause()),
                Some(fault) => Err(fault),
                None => invitations.take(rank, own),
            };
            !matches!(outcome, Ok(None))
        });
        outcome?.ok_or_else(|| Fault::Timeout { missing: all()[rank].missing(rank, &own.members).collect() })
    }

    /// Takes the endpoint of rank `index` of subgroup `number`. The first caller makes the endpoints of all its ranks.
    pub fn take_endpoint(&self, number: u64, ranks: usize, index: usize) -> Option<Local> {
        let mut groups = lock(&self.shared.regrouping.endpoints);
        let endpoints = groups.entry(number).or_insert_with(|| Local::group(ranks).into_iter().map(Some).collect());
        let endpoint = endpoints.get_mut(index).and_then(Option::take);
        if endpoints.iter().all(Option::is_none) {
            groups.remove(&number);
        }
        endpoint
    }
}
