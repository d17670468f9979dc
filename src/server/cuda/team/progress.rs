//! What the ranks of a team have called so far.

use std::collections::VecDeque;

use bonfire_core::{Call, DType, Error, Operation};

#[derive(Default)]
pub(super) struct Progress {
    /// By seat.
    pub called: Vec<u64>,
    /// The calls that not all ranks have made, the first of which is number `min(called) + 1`.
    calls: VecDeque<Call>,
    pub failure: Option<Error>,
}

impl Progress {
    pub fn of(seats: usize) -> Progress {
        Progress { called: vec![0; seats], ..Progress::default() }
    }

    /// Gives the seat's next call its number, from 1 on. An error where another rank called something else there.
    pub fn number(&mut self, seat: usize, call: Call) -> Result<u64, Error> {
        let first = self.called.iter().min().copied().unwrap_or(0);
        let before = self.called[seat];
        match self.calls.get((before - first) as usize) {
            Some(other) if *other != call => {
                let called = self.called.iter().enumerate();
                let others = called.filter(|(_, called)| **called > before);
                let mut calls: Vec<_> = others.map(|(other_rank, _)| (other_rank, *other)).collect();
                calls.push((seat, call));
                calls.sort_by_key(|(rank, _)| *rank);
                return Err(Error::Mismatch { sequence: before, calls });
            }
            Some(_) => {}
            None => self.calls.push_back(call),
        }
        self.called[seat] += 1;
        let made_by_all = self.called.iter().min().copied().unwrap_or(0) - first;
        self.calls.drain(..made_by_all as usize);
        Ok(before + 1)
    }

    /// The call with this number, and the ranks that have not made it.
    pub fn made(&self, number: u64) -> (Call, Vec<usize>) {
        let absent = (0..self.called.len()).filter(|rank| self.called[*rank] < number).collect();
        let first = self.called.iter().min().copied().unwrap_or(0);
        let at = number.checked_sub(first + 1).and_then(|at| self.calls.get(at as usize));
        (at.copied().unwrap_or(NOTHING), absent)
    }
}

/// Stands for a call that is not known any more.
const NOTHING: Call = Call::new(Operation::AllReduce, DType::U8, 0);
