//! Some ranks of a transport, as a transport of their own.

use super::Transport;
use crate::sync::Deadline;
use crate::types::Fault;
use crate::types::Site;

/// The ranks that `rank_of` returns, renumbered from 0 to `world_size - 1`.
///
/// Faults name ranks by their numbers in `all`, because they are reported to its group. That group also begins
/// operations, fails and leaves: only messages are forwarded.
pub(crate) struct Subset<'a, F> {
    pub all: &'a dyn Transport,
    /// This rank's number in the subset.
    pub rank: usize,
    pub world_size: usize,
    /// Maps a number in the subset to the rank in `all`.
    pub rank_of: F,
}

impl<F: Fn(usize) -> usize + Send + Sync> Transport for Subset<'_, F> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault> {
        self.all.send(tag, (self.rank_of)(to), bytes, deadline)
    }

    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
        self.all.recv(tag, (self.rank_of)(from), bytes, deadline)
    }

    fn exchange(
        &self,
        tag: &Site,
        (to, outgoing): (usize, &[u8]),
        (from, incoming): (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        self.all.exchange(tag, ((self.rank_of)(to), outgoing), ((self.rank_of)(from), incoming), deadline)
    }
}
