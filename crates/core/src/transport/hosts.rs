//! Which ranks of a group share memory on one host.

use super::shm::Shm;
use crate::types::partition;

/// The division of a group's ranks into hosts, the same on all ranks, and one rank's position in it.
pub(crate) struct Hosts {
    /// The ranks of each host, in ascending order. Hosts are in the order of their lowest ranks.
    members: Vec<Vec<usize>>,
    /// This rank's host, and its index among the ranks there (its local rank).
    host: usize,
    local_rank: usize,
    /// The ranks, listed host by host, are in ascending order.
    contiguous: bool,
    shm: Option<Shm>,
}

impl Hosts {
    /// The division, for the rank with the local rank `place` on `host`. `shm` is its shared memory, if it has any.
    pub fn new(members: Vec<Vec<usize>>, host: usize, local_rank: usize, shm: Option<Shm>) -> Hosts {
        let contiguous = members.iter().flatten().enumerate().all(|(i, rank)| i == *rank);
        Hosts { members, host, local_rank, contiguous, shm }
    }

    /// The number of hosts.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The ranks of `host`, in ascending order.
    pub fn members(&self, host: usize) -> &[usize] {
        &self.members[host]
    }

    /// This rank's host.
    pub fn host(&self) -> usize {
        self.host
    }

    /// This rank's local rank: its index among the ranks of its host.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The memory that this rank shares with its host; `None` if it is alone there.
    pub fn shm(&self) -> Option<&Shm> {
        self.shm.as_ref()
    }

    pub fn world_size(&self) -> usize {
        self.members.iter().map(Vec::len).sum()
    }

    /// The number of ranks per host, if it is the same on all hosts.
    pub fn ranks_per_host(&self) -> Option<usize> {
        let size = self.members[self.host].len();
        self.members.iter().all(|members| members.len() == size).then_some(size)
    }

    /// Whether the parts of a whole have the same order host by host as rank by rank.
    pub fn contiguous(&self) -> bool {
        self.contiguous
    }

    /// The host of `rank`, and its local rank there.
    pub fn find(&self, rank: usize) -> Option<(usize, usize)> {
        let local_rank = |members: &Vec<usize>| members.iter().position(|member| *member == rank);
        self.members.iter().enumerate().find_map(|(host, members)| Some((host, local_rank(members)?)))
    }

    /// The index of the host's first element in a whole of `count` elements that is ordered host by host, each host
    /// with the parts of its ranks. For `host == count()` the end of the whole.
    pub fn start(&self, count: usize, host: usize) -> usize {
        let world_size = self.world_size();
        self.members[..host].iter().flatten().map(|rank| partition(count, world_size, *rank).len()).sum()
    }
}
