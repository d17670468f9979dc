//! Invitations to a new subgroup.
//!
//! A rank sends all its invitations before it waits for one. The first invitation of a pair that names other members
//! poisons the parent group, so all ranks return [`Error::MemberMismatch`]. A member that fails while it connects
//! poisons the parent group too, so the ranks that wait for it learn of it at once.
//!
//! # Tried and left
//! A first version exchanged the invitations one after the other, as messages of the parent group. Ranks that named
//! different members waited for each other in a circle until the deadline.
//!
//! # Limits
//! A member that names fewer members, without this rank, sends this rank nothing. That may be an earlier call of its
//! own, so this rank reports it as missing at the deadline.

use std::collections::VecDeque;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::types::{Error, Fault};

/// Where a rank accepts the connections of the other members of a new group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    /// The port, at the rank's address in the old group. Unused if the ranks have no addresses.
    pub port: u16,
    /// A random number. The keys of all members combine to the session number of the new group.
    pub key: u64,
}

/// Draws an unpredictable number, for a group or an endpoint, from the system's random numbers.
///
/// # Errors
/// [`Error::Io`] if the system has none.
pub fn random() -> Result<u64, Error> {
    getrandom::u64().map_err(|e| Error::io("drawing a random number", e))
}

/// Returns a number that distinguishes this process from all others, drawn by [`random`] when it is first asked for.
///
/// # Errors
/// See [`random`].
pub fn process_number() -> Result<u64, Error> {
    static NUMBER: LazyLock<Result<u64, Error>> = LazyLock::new(random);
    NUMBER.clone()
}

/// Returns the session number of the group whose members have these endpoints.
pub(crate) fn session(endpoints: impl IntoIterator<Item = Endpoint>) -> u64 {
    endpoints.into_iter().fold(0, |session, endpoint| session ^ endpoint.key)
}

/// The message that a rank sends to every other member of a new subgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Invitation {
    /// The members' ranks in the parent group, by their ranks in the subgroup.
    pub members: Vec<usize>,
    pub endpoint: Endpoint,
}

/// Maximum number of pending invitations from one rank.
const MAX_PENDING: usize = 1024;

/// The pending invitations that one rank has received: a queue for each sender.
pub(crate) struct Invitations(Box<[VecDeque<Invitation>]>);

impl Invitations {
    pub fn new(ranks: usize) -> Invitations {
        Invitations((0..ranks).map(|_| VecDeque::new()).collect())
    }

    /// Adds an invitation. Returns false if it exceeds the limits: a correct peer is only a few invitations ahead.
    pub fn put(&mut self, from: usize, invitation: Invitation) -> bool {
        let room = self.0[from].len() < MAX_PENDING && invitation.members.len() <= self.0.len();
        if room {
            self.0[from].push_back(invitation);
        }
        room
    }

    /// Returns the members, except `rank` itself, from which no invitation is pending.
    pub fn missing<'a>(&'a self, rank: usize, members: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        members.iter().copied().filter(move |member| *member != rank && self.0[*member].is_empty())
    }

    /// Takes the invitations of all members, once all are pending, and returns their endpoints in member order. Returns
    /// an error as soon as the next invitation of a member names other members.
    pub fn take(&mut self, rank: usize, own: &Invitation) -> Result<Option<Vec<Endpoint>>, Fault> {
        let others = || own.members.iter().filter(|member| **member != rank);
        for peer in others() {
            let theirs = self.0[*peer].front().map(|invitation| &invitation.members);
            if let Some(theirs) = theirs.filter(|theirs| **theirs != own.members) {
                let mut both = [(rank, own.members.clone()), (*peer, theirs.clone())];
                // Sorted, so that both ranks report the same error.
                both.sort();
                let [(rank, members), (peer, theirs)] = both;
                return Err(Fault::Failed(Error::MemberMismatch { rank, members, peer, theirs }));
            }
        }
        if self.missing(rank, &own.members).next().is_some() {
            return Ok(None);
        }
        let endpoint = |member: &usize| match self.0[*member].pop_front() {
            Some(invitation) if *member != rank => invitation.endpoint,
            _ => own.endpoint,
        };
        Ok(Some(own.members.iter().map(endpoint).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_invitations_are_bounded() {
        let mut invitations = Invitations::new(2);
        assert!(!invitations.put(1, invitation(&[0, 1, 1], 1)));
        assert!((0..MAX_PENDING).all(|_| invitations.put(1, invitation(&[0, 1], 1))));
        assert!(!invitations.put(1, invitation(&[0, 1], 1)));
    }

    fn invitation(members: &[usize], port: u16) -> Invitation {
        Invitation { members: members.to_vec(), endpoint: Endpoint { port, key: 1 << port } }
    }

    #[test]
    fn invitations_are_taken_in_order_once_all_are_pending() {
        let mut invitations = Invitations::new(4);
        let own = invitation(&[3, 1, 0], 1);
        assert_eq!(invitations.missing(1, &own.members).collect::<Vec<_>>(), [3, 0]);
        invitations.put(0, invitation(&[3, 1, 0], 2));
        invitations.put(0, invitation(&[0, 1], 3));
        assert_eq!(invitations.take(1, &own), Ok(None));
        invitations.put(3, invitation(&[3, 1, 0], 4));
        let endpoints = invitations.take(1, &own).unwrap().unwrap();
        assert_eq!(endpoints.iter().map(|endpoint| endpoint.port).collect::<Vec<_>>(), [4, 1, 2]);
        assert_eq!(session(endpoints), 1 << 4 | 1 << 1 | 1 << 2);
        // The second invitation of rank 0 is still pending, and names other members than this rank does now.
        let fault = invitations.take(1, &own).unwrap_err();
        let Fault::Failed(Error::MemberMismatch { rank: 0, peer: 1, members, .. }) = fault else { panic!("{fault:?}") };
        assert_eq!(members, [0, 1]);
        assert_eq!(invitations.take(1, &invitation(&[0, 1], 5)).unwrap().map(|endpoints| endpoints.len()), Some(2));
    }
}
