//! The backward pass: blocks are gathered again, and gradients leave.

use super::super::blocks::Announcement;
use super::{BlockState, Pass};
use crate::bucket::{BucketTable, buckets_of_blocks};
use crate::lane::Tensor;
use crate::protocol::Problem;
use crate::step::Exchange;
use bonfire_core::Error;

/// What begins with the backward pass.
pub(super) struct Backward {
    /// The blocks to gather, in this order.
    plan: Vec<usize>,
    /// How many of them were started.
    started: usize,
    pub exchange: Exchange,
}

impl Pass {
    /// The backward pass will have the gradient of the parameter at a position.
    pub fn expect(&mut self, position: usize) {
        self.expected[position] = true;
    }

    /// Returns the value of a whole parameter for a step of the backward pass. `None` after a failure.
    pub fn value_again(&mut self, position: usize) -> Option<Tensor> {
        let value = self.try_value_again(position);
        self.noted(value).flatten()
    }

    fn try_value_again(&mut self, position: usize) -> Result<Option<Tensor>, Error> {
        let Some(announces) = self.announces()? else { return Ok(None) };
        self.begin_backward();
        let (block, index) = self.shared.places[position];
        if self.received[position] {
            // A second backward pass: its gradients come too late.
            self.problem.get_or_insert(Problem::Twice(position));
        }
        self.needed[block] = true;
        let mut value = self.take(block, index);
        if value.is_none() {
            let mut another = false;
            if announces {
                self.engine.gatherer.announce(Announcement::Backward(block))?;
            } else {
                self.start_planned(block, 0)?;
                if let Some(backward) = &mut self.backward {
                    if self.engine.bounded {
                        backward.exchange.bound(self.shared.groups.main.deadline() / 10)?;
                    }
                    // The plan of the first pass has blocks that the pass may not need.
                    another = !self.engine.history.needed.is_empty() && backward.plan.last() != Some(&block);
                }
            }
            self.gather(block, another)?;
            self.counts.backward += 1;
            value = self.take(block, index);
        }
        if !announces {
            // The next block arrives while this one's gradients are computed.
            self.start_planned(block, 1)?;
        }
        Ok(value)
    }

    /// Takes a parameter of a block that is gathered.
    fn take(&mut self, block: usize, index: usize) -> Option<Tensor> {
        match &mut self.blocks[block] {
            BlockState::Gathered(values) => values[index].take(),
            _ => None,
        }
    }

    /// Starts to gather the blocks of the plan up to this one and `more` after it, unless they were started before.
    fn start_planned(&mut self, block: usize, more: usize) -> Result<(), Error> {
        let Some(backward) = &mut self.backward else { return Ok(()) };
        let Some(at) = backward.plan.iter().position(|planned| *planned == block) else { return Ok(()) };
        let end = (at + 1 + more).min(backward.plan.len());
        let due = backward.plan[backward.started.min(end)..end].iter().filter(|block| !self.ahead.contains(block));
        let due: Vec<_> = due.copied().collect();
        backward.started = backward.started.max(end);
        due.into_iter().try_for_each(|block| self.start(block))
    }

    /// Takes a gradient that the backward pass has completed.
    pub fn receive(&mut self, position: usize, gradient: Tensor) {
        if self.failure.is_none() {
            let received = self.try_receive(position, gradient);
            self.noted(received);
        }
    }

    fn try_receive(&mut self, position: usize, gradient: Tensor) -> Result<(), Error> {
        let block = self.shared.places[position].0;
        if !self.agreement.header.trained[position] {
            self.expected[position] = false;
            self.free_completed(block);
            return Ok(());
        }
        if self.announces()?.is_none() {
            return Ok(());
        }
        if !self.shared.model.tensors.fits(position, &gradient) {
            self.problem.get_or_insert(Problem::Other(position));
            return Ok(());
        }
        self.begin_backward();
        self.expected[position] = false;
        // A second backward pass has either a second gradient, or those of parameters that the first one did not use.
        let has = |backward: &Backward| backward.exchange.has(position);
        if !self.forward.contains(&block) || self.backward.as_ref().is_some_and(has) {
            self.problem.get_or_insert(Problem::Twice(position));
            return Ok(());
        }
        self.received[position] = true;
        if self.agreement.weight.is_none() {
            self.problem.get_or_insert(Problem::Unweighed(position));
        }
        // Gradients of no samples are NaN.
        let counts = self.agreement.weight.is_some_and(|weight| weight.weight > 0.0);
        if let Some(backward) = &mut self.backward {
            if counts {
                backward.exchange.arrive(position, gradient);
            } else {
                backward.exchange.arrive_zeros(position);
            }
        }
        // Where other ranks wait for gradients in their backward passes, this one is sent at once: before this rank
        // needs a block that they have not begun to gather, of this model or of another one.
        self.advance(self.engine.bounded)?;
        self.free_completed(block);
        Ok(())
    }

    /// Sends zeros for the gradients that have not come, at the end of the backward pass.
    pub(super) fn send_zeros(&mut self) -> Result<(), Error> {
        if let Some(Backward { exchange, .. }) = &mut self.backward {
            for position in (0..self.expected.len()).filter(|position| self.expected[*position]) {
                if !exchange.has(position) {
                    exchange.arrive_zeros(position);
                }
            }
        }
        self.advance(true)
    }

    /// Sends the buckets that are complete, if the ranks have agreed on the weights; `wait` waits until they have.
    fn advance(&mut self, wait: bool) -> Result<(), Error> {
        match (self.agreement.decided(wait)?, &mut self.backward) {
            (Some(Ok((weighting, total))), Some(Backward { exchange, .. })) if total > 0.0 => {
                exchange.agree(weighting);
                exchange.advance(wait)
            }
            _ => Ok(()),
        }
    }

    /// Returns the blocks of the plan that were not started.
    pub(super) fn left(&self) -> Vec<usize> {
        self.backward
            .as_ref()
            .map_or_else(Vec::new, |backward| backward.plan[backward.started.min(backward.plan.len())..].to_vec())
    }

    /// Frees a block if all its gradients are there.
    fn free_completed(&mut self, block: usize) {
        if self.shared.blocks[block].iter().all(|position| !self.expected[*position]) {
            self.blocks[block] = BlockState::Freed;
        }
    }

    pub(super) fn begin_backward(&mut self) {
        if self.backward.is_none()
            && let Some(channel) = self.engine.channel.take()
        {
            let exchange = Exchange::new(self.shared.model.clone(), channel, self.buckets());
            let mut exchange = exchange.checked(self.shared.skips());
            // The buckets of what the forward pass has not used do not wait for its gradients.
            let unused = (0..self.expected.len()).filter(|position| !self.expected[*position]);
            unused.for_each(|position| exchange.arrive_zeros(position));
            self.backward = Some(Backward { plan: self.plan(), started: 0, exchange });
        }
    }

    /// Returns the buckets of this pass.
    fn buckets(&self) -> BucketTable {
        let trained = |block: usize| {
            let positions = self.shared.blocks[block].iter().copied();
            (block, positions.filter(|position| self.agreement.header.trained[*position]))
        };
        let blocks = self.engine.history.gradients(&self.forward).into_iter().map(trained);
        buckets_of_blocks(&self.shared.model.parameters, blocks)
    }
}
