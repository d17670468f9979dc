//! New groups from the threads of a group: shrink and subgroups.

use std::collections::HashMap;
use std::time::Instant;

use super::ThreadEndpoint;
use crate::control::hang::{HangTimeout, is_majority};
use crate::control::invitation::{Endpoint, Invitation, Invitations};
use crate::sync::{Deadline, Mutex, MutexGuard, lock};
use crate::types::{Error, Fault, ShrinkError};

/// State of groups that are being formed, shared by the ranks of the old group.
pub(super) struct Regrouping {
    /// The ranks in `shrink`, by rank of the old group.
    shrink_states: Mutex<Vec<ThreadShrinkState>>,
    /// Invitations to subgroups, by receiving rank.
    invitations: Mutex<Vec<Invitations>>,
    /// Endpoints of subgroups that were not taken yet, by the number of the subgroup and then by rank in it.
    endpoints: Mutex<HashMap<u64, Vec<Option<ThreadEndpoint>>>>,
}

/// A rank of the old group in `shrink`.
#[derive(Default)]
struct ThreadShrinkState {
    /// The time of its first call.
    start: Option<Instant>,
    /// Whether it is in a call.
    waits: bool,
    /// The rank's endpoint of the new group, and that group's number.
    endpoint: Option<(ThreadEndpoint, u64)>,
    /// Set when the others go on without it: the rank that made their group.
    excluded: Option<usize>,
}

/// By rank: from when on `own` may leave it out. That is also some time after the last rank came.
fn limits(states: &[ThreadShrinkState], own: usize, hang: &HangTimeout) -> Vec<Instant> {
    let start = states[own].start.unwrap_or_else(Instant::now);
    let came = states.iter().filter_map(|state| state.start).max().unwrap_or(start);
    (0..states.len()).map(|rank| (start + hang.of(rank)).max(came + hang.grace())).collect()
}

impl Regrouping {
    pub fn new(ranks: usize) -> Regrouping {
        Regrouping {
            shrink_states: Mutex::new((0..ranks).map(|_| ThreadShrinkState::default()).collect()),
            invitations: Mutex::new((0..ranks).map(|_| Invitations::new(ranks)).collect()),
            endpoints: Mutex::default(),
        }
    }
}

impl ThreadEndpoint {
    /// Waits until every other rank waits here, is gone, or is alive and has not called for too long while the others
    /// are the majority. Returns this rank's endpoint of a group of the waiting ranks, and its number: the `number` of
    /// one of them. May be called again after an error.
    pub fn join_survivors(
        &self,
        number: u64,
        hang: &HangTimeout,
        deadline: &Deadline,
    ) -> Result<(ThreadEndpoint, u64), ShrinkError> {
        {
            let own = &mut self.shrink_states()[self.rank];
            own.waits = true;
            own.start.get_or_insert_with(Instant::now);
        }
        self.shared.bell.ring();
        let end = Instant::now() + deadline.remaining();
        let mut now = Instant::now();
        loop {
            // The next time at which a rank may be left out, if it comes before the deadline.
            let limits = limits(&self.shrink_states(), self.rank, hang);
            let next = limits.into_iter().filter(|limit| *limit > now).min().map_or(end, |limit| limit.min(end));
            let done = self.shared.bell.sleep(next, || self.try_form(number, hang));
            now = Instant::now();
            if done || now >= end {
                break;
            }
        }
        let mut states = self.shrink_states();
        // The others must not go on with a rank that does not wait any more.
        states[self.rank].waits = false;
        if let Some(by) = states[self.rank].excluded {
            return Err(ShrinkError::Excluded { by });
        }
        states[self.rank].endpoint.take().ok_or_else(|| {
            let mut ranks: Vec<_> = self.present(|rank| states[rank].start.is_none()).collect();
            if ranks.is_empty() {
                ranks = self.present(|rank| rank != self.rank && !states[rank].waits).collect();
            }
            ShrinkError::Missing { ranks, problem: String::new() }
        })
    }

    /// Forms the group if no rank is missing but those that are left out: the first rank to find this makes the
    /// endpoints of all. Returns whether this rank has its endpoint, or was left out.
    fn try_form(&self, number: u64, hang: &HangTimeout) -> bool {
        let mut states = self.shrink_states();
        let own = &states[self.rank];
        if own.endpoint.is_none() && own.excluded.is_none() {
            let waiting = states.iter().filter(|state| state.waits).count();
            let missing: Vec<_> = self.present(|rank| !states[rank].waits).collect();
            let (limits, now) = (limits(&states, self.rank, hang), Instant::now());
            let hung = missing.iter().all(|rank| limits[*rank] <= now);
            if missing.is_empty() || hung && is_majority(waiting, states[0].waits, states.len()) {
                let endpoints = ThreadEndpoint::group(waiting);
                for (state, endpoint) in states.iter_mut().filter(|state| state.waits).zip(endpoints) {
                    state.endpoint = Some((endpoint, number));
                }
                missing.iter().for_each(|rank| states[*rank].excluded = Some(self.rank));
            }
        }
        states[self.rank].endpoint.is_some() || states[self.rank].excluded.is_some()
    }

    /// The ranks that `selected` selects and that are not gone.
    fn present(&self, selected: impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
        (0..self.shared.ranks.len()).filter(move |rank| selected(*rank) && self.shared.absence(*rank).is_none())
    }

    fn shrink_states(&self) -> MutexGuard<'_, Vec<ThreadShrinkState>> {
        lock(&self.shared.regrouping.shrink_states)
    }

    /// Invites the other members of a subgroup and waits for their invitations. Returns the endpoints of all, in order.
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
    pub fn take_endpoint(&self, number: u64, ranks: usize, index: usize) -> Option<ThreadEndpoint> {
        let mut groups = lock(&self.shared.regrouping.endpoints);
        let endpoints =
            groups.entry(number).or_insert_with(|| ThreadEndpoint::group(ranks).into_iter().map(Some).collect());
        let endpoint = endpoints.get_mut(index).and_then(Option::take);
        if endpoints.iter().all(Option::is_none) {
            groups.remove(&number);
        }
        endpoint
    }
}
