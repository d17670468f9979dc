//! How the members of a subgroup to be tell each other so.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::types::{Error, Fault};

/// Where a rank awaits the others of a group to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Door {
    /// At the rank's address in the old group, where its ranks have addresses.
    pub port: u16,
    /// Random: what all members bring makes the new group's number.
    pub key: u64,
}

/// A number for a group or a door that cannot be guessed, from the system's random numbers.
///
/// # Errors
/// [`Error::Io`] where the system has none.
pub fn random() -> Result<u64, Error> {
    getrandom::u64().map_err(|e| Error::io("drawing a random number", e))
}

/// The number of the group behind these doors.
pub(crate) fn session(doors: impl IntoIterator<Item = Door>) -> u64 {
    doors.into_iter().fold(0, |session, door| session ^ door.key)
}

/// What a rank tells every other member of a subgroup to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Invitation {
    /// By their ranks in the subgroup, their ranks in the group that it is made of.
    pub members: Vec<usize>,
    pub door: Door,
}

/// Invitations of one rank that wait.
const MOST: usize = 1024;

/// What one rank was told, by rank, in the order of coming.
pub(crate) struct Invitations(Box<[VecDeque<Invitation>]>);

impl Invitations {
    pub fn new(ranks: usize) -> Invitations {
        Invitations((0..ranks).map(|_| VecDeque::new()).collect())
    }

    /// Whether there is room for it: a rank that is ahead of this one is ahead by a few.
    pub fn put(&mut self, from: usize, invitation: Invitation) -> bool {
        let room = self.0[from].len() < MOST && invitation.members.len() <= self.0.len();
        if room {
            self.0[from].push_back(invitation);
        }
        room
    }

    /// The members that have told nothing, but for `rank` itself.
    pub fn missing<'a>(&'a self, rank: usize, members: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        members.iter().copied().filter(move |member| *member != rank && self.0[*member].is_empty())
    }

    /// The doors of all members in their order, once all have told them. An error as soon as one has told that it makes
    /// another group.
    pub fn take(&mut self, rank: usize, own: &Invitation) -> Result<Option<Vec<Door>>, Fault> {
        let others = || own.members.iter().filter(|member| **member != rank);
        for peer in others() {
            let theirs = self.0[*peer].front().map(|invitation| &invitation.members);
            if let Some(theirs) = theirs.filter(|theirs| **theirs != own.members) {
                let mut both = [(rank, own.members.clone()), (*peer, theirs.clone())];
                // So that both report the same.
                both.sort();
                let [(rank, members), (peer, theirs)] = both;
                return Err(Fault::Failed(Error::Members { rank, members, peer, theirs }));
            }
        }
        if self.missing(rank, &own.members).next().is_some() {
            return Ok(None);
        }
        let door = |member: &usize| match self.0[*member].pop_front() {
            Some(invitation) if *member != rank => invitation.door,
            _ => own.door,
        };
        Ok(Some(own.members.iter().map(door).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_does_not_fill_anothers_memory() {
        let mut invitations = Invitations::new(2);
        assert!(!invitations.put(1, invitation(&[0, 1, 1], 1)));
        assert!((0..MOST).all(|_| invitations.put(1, invitation(&[0, 1], 1))));
        assert!(!invitations.put(1, invitation(&[0, 1], 1)));
    }

    fn invitation(members: &[usize], port: u16) -> Invitation {
        Invitation { members: members.to_vec(), door: Door { port, key: 1 << port } }
    }

    #[test]
    fn invitations_are_taken_in_their_order_once_all_are_there() {
        let mut invitations = Invitations::new(4);
        let own = invitation(&[3, 1, 0], 1);
        assert_eq!(invitations.missing(1, &own.members).collect::<Vec<_>>(), [3, 0]);
        invitations.put(0, invitation(&[3, 1, 0], 2));
        invitations.put(0, invitation(&[0, 1], 3));
        assert_eq!(invitations.take(1, &own), Ok(None));
        invitations.put(3, invitation(&[3, 1, 0], 4));
        let doors = invitations.take(1, &own).unwrap().unwrap();
        assert_eq!(doors.iter().map(|door| door.port).collect::<Vec<_>>(), [4, 1, 2]);
        assert_eq!(session(doors), 1 << 4 | 1 << 1 | 1 << 2);
        // The other one is still there, and names others than this rank does now.
        let fault = invitations.take(1, &own).unwrap_err();
        let Fault::Failed(Error::Members { rank: 0, peer: 1, members, .. }) = fault else { panic!("{fault:?}") };
        assert_eq!(members, [0, 1]);
        assert_eq!(invitations.take(1, &invitation(&[0, 1], 5)).unwrap().map(|doors| doors.len()), Some(2));
    }
}
