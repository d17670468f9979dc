//! Gathers of blocks, and their announcements.

use bytemuck::cast_slice_mut;

use super::Shared;
use crate::bucket::block_name;
use crate::lane::{Lane, Pending, Tensor, Unconfirmed};
use crate::step::gather;
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, ReduceOp, Work};

/// Gathers blocks over the ranks that keep their parts.
pub(super) struct Gatherer {
    /// Over a group of its own, because gathers run at the same time as other operations, and in no order relative to
    /// them.
    pub lane: Box<dyn Lane>,
    /// The gather whose parameters are in use already.
    pub unconfirmed: Unconfirmed,
    /// A group of all ranks for announcements.
    announcements: Group,
}

/// What a rank that runs a pass tells those that serve it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Announcement {
    /// The forward pass uses a block.
    Forward(usize),
    /// The backward pass needs the values of a block again.
    Backward(usize),
    /// The pass has ended.
    End,
}

impl Announcement {
    fn to_word(self) -> u64 {
        match self {
            Announcement::Forward(block) => 2 * block as u64 + 1,
            Announcement::Backward(block) => 2 * block as u64 + 2,
            Announcement::End => u64::MAX,
        }
    }

    fn from_word(word: u64) -> Option<Announcement> {
        Some(match word {
            0 => return None,
            u64::MAX => Announcement::End,
            odd if odd % 2 == 1 => Announcement::Forward((odd / 2) as usize),
            even => Announcement::Backward((even / 2 - 1) as usize),
        })
    }
}

impl Gatherer {
    pub fn new(lane: Box<dyn Lane>, announcements: Group) -> Gatherer {
        Gatherer { lane, unconfirmed: Unconfirmed::default(), announcements }
    }

    /// Starts to gather a block. `part` returns this rank's part of the parameter at a position, if it has it.
    pub fn start(
        &mut self,
        shared: &Shared,
        block: usize,
        part: impl Fn(usize) -> Option<Tensor>,
    ) -> Result<Box<dyn Pending>, Error> {
        // Blocks of one size are different calls.
        let request = Request::new(Operation::AllGather, DType::U8).part_of(&block_name(block));
        gather(&shared.model, &mut *self.lane, request, &shared.blocks[block], part)
    }

    /// Returns the groups in which other ranks may wait for this one.
    pub fn groups(&self) -> [&Group; 2] {
        [self.lane.group(), &self.announcements]
    }

    /// Waits for a gather and returns the parameters of the block, in its order. If the pass will gather `another`
    /// block after it, the device waits instead, and the host only for the gather before: it is one block ahead of the
    /// device. After a pass that repeats the one before, all gathers are confirmed, in case the program then waits for
    /// the device, to print a loss.
    pub fn finish(&mut self, gathering: Box<dyn Pending>, another: bool) -> Result<Vec<Tensor>, Error> {
        let wholes = self.unconfirmed.follow(gathering)?;
        if !another {
            self.unconfirmed.confirm()?;
        }
        Ok(wholes)
    }

    /// Tells the ranks that serve this pass what comes. Does not wait.
    pub fn announce(&mut self, announcement: Announcement) -> Result<(), Error> {
        self.start_announcement(announcement.to_word()).map(drop)
    }

    /// Waits for what a rank that runs the pass announces.
    pub fn next(&mut self) -> Result<Announcement, Error> {
        let words = self.start_announcement(0)?.wait().map_err(|(error, _)| error)?;
        Announcement::from_word(words[0]).ok_or_else(|| Error::broken("gathering parameters", "no rank runs the pass"))
    }

    fn start_announcement(&mut self, word: u64) -> Result<Work<Vec<u64>>, Error> {
        let request = Request::new(Operation::AllReduce, DType::U64).reduction(ReduceOp::Max);
        let request = request.part_of("announced gathers");
        self.announcements.start_operation(request, 1, vec![word], |word| Ok(cast_slice_mut(word)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_come_back() {
        for announcement in [0, 1, 70].into_iter().flat_map(|b| [Announcement::Forward(b), Announcement::Backward(b)]) {
            assert_eq!(Announcement::from_word(announcement.to_word()), Some(announcement));
        }
        assert_eq!(Announcement::from_word(Announcement::End.to_word()), Some(Announcement::End));
        assert_eq!(Announcement::from_word(0), None);
    }
}
