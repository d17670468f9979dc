//! Which ranks of a group share a host.

use super::shm::Shm;
use crate::types::partition;

/// The division of a group's ranks into hosts, as one rank sees it. Every rank knows the same.
pub(crate) struct Hosts {
    /// The ranks of each host, in ascending order; the hosts in that of their lowest ranks.
    members: Vec<Vec<usize>>,
    /// This rank's host, and its place there.
    host: usize,
    place: usize,
    /// All ranks, host by host, are 0, 1, 2 and so on.
    contiguous: bool,
    shm: Option<Shm>,
}

impl Hosts {
    /// The division as the rank at `place` of `host` sees it, whose memory is `shm` where it shares any.
    pub fn new(members: Vec<Vec<usize>>, host: usize, place: usize, shm: Option<Shm>) -> Hosts {
        let contiguous = members.iter().flatten().enumerate().all(|(i, rank)| i == *rank);
        Hosts { members, host, place, contiguous, shm }
    }

    /// The number of hosts.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    pub fn members(&self, host: usize) -> &[usize] {
        &self.members[host]
    }

    /// This rank's host.
    pub fn host(&self) -> usize {
        self.host
    }

    /// This rank's place among the ranks of its host.
    pub fn place(&self) -> usize {
        self.place
    }

    /// This rank's own memory that it shares with its host; none where it is alone there.
    pub fn shm(&self) -> Option<&Shm> {
        self.shm.as_ref()
    }

    pub fn world_size(&self) -> usize {
        self.members.iter().map(Vec::len).sum()
    }

    /// Where all hosts have the same number of ranks, that number.
    pub fn even(&self) -> Option<usize> {
        let size = self.members[self.host].len();
        self.members.iter().all(|members| members.len() == size).then_some(size)
    }

    /// Whether the parts of a whole are in the same order host by host as rank by rank.
    pub fn contiguous(&self) -> bool {
        self.contiguous
    }

    /// The host of `rank`, and its place there.
    pub fn find(&self, rank: usize) -> Option<(usize, usize)> {
        let place = |members: &Vec<usize>| members.iter().position(|member| *member == rank);
        self.members.iter().enumerate().find_map(|(host, members)| Some((host, place(members)?)))
    }

    /// Where the host's elements begin in a whole of `count` elements that is put host by host: a host has those of its
    /// ranks, one after the other. The number of hosts gives the whole's end.
    pub fn start(&self, count: usize, host: usize) -> usize {
        let world_size = self.world_size();
        self.members[..host].iter().flatten().map(|rank| partition(count, world_size, *rank).len()).sum()
    }
}
