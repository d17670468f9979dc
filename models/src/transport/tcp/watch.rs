//! As the crate's own, without questions to peers.

use std::time::Duration;

use super::board::Board;
use crate::call::{Call, Tag};
use crate::error::Error;
use crate::transport::Fault;
use crate::wait::Deadline;

pub(crate) struct Watch<'a> {
    board: &'a Board,
    tag: &'a Tag,
    deadline: &'a Deadline,
}

impl<'a> Watch<'a> {
    pub fn new(board: &'a Board, tag: &'a Tag, deadline: &'a Deadline) -> Self {
        Watch { board, tag, deadline }
    }

    /// Nothing but the deadline ends a sleep that nobody ends.
    pub fn pause(&self) -> Duration {
        self.deadline.remaining()
    }

    pub fn tick(&mut self, peer: usize) -> Result<(), Fault> {
        match self.board.failure_in(self.tag) {
            Some(fault) => Err(fault),
            None if self.deadline.passed() => Err(Fault::Timeout { missing: vec![peer] }),
            None => Ok(()),
        }
    }

    pub fn disagree(&mut self, seen: &[(usize, Call)]) -> Fault {
        Fault::Failed(Error::Mismatch { sequence: self.tag.sequence, calls: seen.to_vec() })
    }
}
