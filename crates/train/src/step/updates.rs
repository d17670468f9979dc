//! The parameters that the ranks of a sharded optimizer update, each its own part.

use std::collections::VecDeque;

use super::Steps;
use crate::bucket::{Limits, WINDOW, buckets};
use crate::lane::{Tensor, Unconfirmed};
use crate::protocol::{Problem, Reader, Refusal, Writer};
use bonfire_core::internal::Request;
use bonfire_core::{DType, Error, Operation};

impl Steps {
    /// Begins to update parameters: the ranks agree on the learning rate. `problem` is what is wrong with this rank's
    /// gradients. All ranks must call this.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if rates differ, or if a rank has a problem; the groups stay usable.
    /// Otherwise those of [`Group::all_gather`](bonfire_core::Group::all_gather).
    #[track_caller]
    pub fn begin_update(&self, operation: &str, rate: f64, problem: Option<Problem>) -> Result<(), Error> {
        let main = &self.groups().main;
        let mut words = Writer::default();
        words.words(&rate);
        words.words(&Problem::to_words(problem));
        let all = words.finish().exchange(main, operation)?;
        let from = &mut Reader::new(&all, main.world_size());
        let (rates, problems): (Vec<f64>, Vec<[u64; 2]>) = (from.words(), from.words());
        let differs = || rates.iter().position(|other| other.to_bits() != rates[0].to_bits());
        let refusal = match Problem::first(problems.into_iter()) {
            Some((rank, problem)) => Some(Refusal::Problem { rank, problem }),
            None => differs().map(|rank| Refusal::Rates { first: rates[0], rank, other: rates[rank] }),
        };
        refusal.map_or(Ok(()), |refusal| Err(refusal.error(operation, self.parameters())))
    }

    /// Updates the parameters for which a gradient exists, and returns them by position, whole. `update` returns this
    /// rank's part of the one at a position; `None` where it has none. While it updates some, those before are
    /// gathered. All ranks must call this, after [`begin_update`](Self::begin_update).
    ///
    /// # Errors
    /// Those of [`Group::all_gather`](bonfire_core::Group::all_gather), after which the groups have failed.
    #[track_caller]
    pub fn update(
        &self,
        exists: &[bool],
        update: impl FnMut(usize) -> Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>, Error> {
        self.try_update(exists, update).map_err(|error| self.groups().abandon(error))
    }

    fn try_update(
        &self,
        exists: &[bool],
        mut update: impl FnMut(usize) -> Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>, Error> {
        let positions = (0..exists.len()).rev().filter(|position| exists[*position]);
        let buckets = buckets(self.parameters(), positions, Limits::of(self.is_on_devices()));
        let mut channel = self.take_blocking(&mut self.state())?;
        let mut wholes: Vec<Option<Tensor>> = exists.iter().map(|_| None).collect();
        let (mut in_flight, mut unconfirmed) = (VecDeque::new(), Unconfirmed::default());
        // After the last bucket come as many turns as there are buckets in flight.
        for bucket in buckets.iter().map(Some).chain([None; WINDOW]) {
            if bucket.is_none() || in_flight.len() >= WINDOW {
                let Some((oldest, gathering)) = in_flight.pop_front() else { break };
                let gathered: Vec<Tensor> = unconfirmed.follow(gathering)?;
                let positions: &Vec<usize> = oldest;
                positions.iter().zip(gathered).for_each(|(position, whole)| wholes[*position] = Some(whole));
            }
            let Some(bucket) = bucket else { continue };
            let mut parts: Vec<_> = bucket.positions.iter().map(|&position| (position, update(position))).collect();
            let mut part = |position| parts.iter_mut().find(|(other, _)| *other == position)?.1.take();
            let request = Request::new(Operation::AllGather, DType::U8).part_of("gathering updated parameters");
            let model = &self.shared.model;
            let gathering = super::gather(model, &mut *channel.shards, request, &bucket.positions, &mut part)?;
            in_flight.push_back((&bucket.positions, gathering));
        }
        unconfirmed.confirm()?;
        self.state().blocking = Some(channel);
        Ok(wholes)
    }
}
