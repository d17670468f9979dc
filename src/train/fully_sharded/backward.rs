//! The backward pass of a step, and its end.

use std::mem::replace;

use burn::optim::GradientsParams;
use burn::tensor::TensorMetadata;
use burn::tensor::ops::FloatTensor;

use super::layout::Part;
use super::order::History;
use super::pass::{Agreement, Backward, BlockState, Pass};
use super::scatter::Scatter;
use crate::tensor::autodiff::CollectiveBackend;
use crate::train::announcement;
use crate::train::bucket::Weighting;
use crate::train::step_header::{Refused, no_samples};
use crate::train::trailer::{OPERATION, Problem, Trailer, Trailers};
use bonfire_core::{Error, Group};

impl<B: CollectiveBackend> Pass<B> {
    /// Returns the value of the whole parameter at `position`, for a step of the backward pass. `None` after a failure.
    pub fn value_again(&mut self, position: usize) -> Option<FloatTensor<B::InnerBackend>> {
        let value = self.try_value_again(position);
        value.unwrap_or_else(|error| {
            self.failure.get_or_insert(error);
            None
        })
    }

    fn try_value_again(&mut self, position: usize) -> Result<Option<FloatTensor<B::InnerBackend>>, Error> {
        let Some(weighting) = self.agree()? else { return Ok(None) };
        self.begin_backward(weighting);
        let Part { block, index, .. } = self.engine.gatherer.layout.parts[position];
        self.needed[block] = true;
        let mut value = self.take(block, index);
        if value.is_none() {
            self.start_planned(block, 0)?;
            let mut another = false;
            if let Some(backward) = &mut self.backward {
                self.engine.scatterer.bound(&mut backward.scatter)?;
                // The plan of the first step has blocks that the pass may not need.
                another = !self.engine.history.needed.is_empty() && backward.plan.last() != Some(&block);
            }
            self.gather(block, another)?;
            self.counts.backward += 1;
            value = self.take(block, index);
        }
        // The next block arrives while this one's gradients are computed.
        self.start_planned(block, 1)?;
        Ok(value)
    }

    /// Takes a parameter of a block that is gathered.
    fn take(&mut self, block: usize, index: usize) -> Option<FloatTensor<B::InnerBackend>> {
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
        let due = backward.plan[backward.started.min(end)..end].to_vec();
        backward.started = backward.started.max(end);
        due.into_iter().try_for_each(|block| self.start(block))
    }

    /// Takes a gradient that the backward pass has completed.
    pub fn receive(&mut self, position: usize, gradient: FloatTensor<B::InnerBackend>) {
        // A second backward pass has a node of its own, and its gradient is noticed.
        self.nodes[position] = None;
        if self.failure.is_none()
            && let Err(error) = self.try_receive(position, gradient)
        {
            self.failure = Some(error);
        }
    }

    fn try_receive(&mut self, position: usize, gradient: FloatTensor<B::InnerBackend>) -> Result<(), Error> {
        let block = self.engine.gatherer.layout.parts[position].block;
        if !self.engine.gatherer.parameters[position].trained {
            self.free_completed(block);
            return Ok(());
        }
        let Some(weighting) = self.agree()? else { return Ok(()) };
        let parameter = &self.engine.gatherer.parameters[position];
        if gradient.shape() != parameter.shape || gradient.dtype() != parameter.dtype {
            self.report(Problem::Other(position));
            return Ok(());
        }
        self.begin_backward(weighting);
        // A second backward pass has either a second gradient, or gradients of blocks that the first one did not have.
        if replace(&mut self.received[position], true) || !self.forward.contains(&block) {
            self.report(Problem::Twice(position));
            return Ok(());
        }
        // Gradients of no samples are NaN.
        let gradient = Some(gradient).filter(|_| self.header.samples > 0);
        if let Some(backward) = &mut self.backward {
            self.engine.scatterer.add(&mut backward.scatter, position, gradient)?;
        }
        self.free_completed(block);
        Ok(())
    }

    /// Frees a block if all its gradients are there.
    fn free_completed(&mut self, block: usize) {
        if self.engine.gatherer.layout.blocks[block].positions.iter().all(|position| self.nodes[*position].is_none()) {
            self.blocks[block] = BlockState::Freed;
        }
    }

    fn begin_backward(&mut self, weighting: Weighting) {
        if self.backward.is_none() {
            let order = self.engine.history.gradients(&self.forward);
            let scatter = Scatter::new(&self.engine.gatherer.layout, weighting, &order);
            self.backward = Some(Backward { plan: self.plan(), started: 0, scatter });
        }
    }

    /// Tells the other ranks of a problem with this rank's gradients at the end of the step.
    pub fn report(&mut self, problem: Problem) {
        self.problem.get_or_insert(problem);
    }

    /// Ends the step after the backward pass: sends what is left and waits for all results. The inner error is the same
    /// on all ranks, and the groups stay usable; after the outer one they do not. `main` is the group of all ranks.
    pub fn finish(&mut self, main: &Group) -> Result<Result<GradientsParams, Error>, Error> {
        let Some(weighting) = self.agree()? else {
            return match &self.agreement {
                Agreement::Refused(Refused::NoSamples) => Ok(Err(no_samples(OPERATION))),
                Agreement::Refused(Refused::Because(error)) => Ok(Err(error.clone())),
                _ => Err(Error::broken(OPERATION, "it has no agreement and no failure")),
            };
        };
        if self.backward.is_none() {
            self.serve_backward(weighting)?;
        }
        if self.header.samples > 0 && !self.received.contains(&true) {
            self.report(Problem::NoGradients);
        }
        let has_samples = self.header.samples > 0;
        let exists = self.received.iter().map(|received| *received && has_samples).collect();
        let trailer = Trailer { problem: self.problem, ordered: false, exists }.start(main)?;
        // Ranks that have gathered other blocks than this one learn of it here.
        let lane = &self.engine.gatherer.lane;
        let end = announcement::start(lane, OPERATION, vec![0; lane.world_size()])?;
        let mut gradients = GradientsParams::new();
        if let Some(mut backward) = self.backward.take() {
            self.engine.scatterer.finish(&mut backward.scatter)?;
            gradients = backward.scatter.results;
        }
        self.engine.gatherer.unconfirmed.confirm()?;
        end.wait().map_err(|(error, _)| error)?;
        let all = trailer.wait().map_err(|(error, _)| error)?;
        let trailers = match Trailer::evaluate(&all, main.world_size(), &self.engine.gatherer.parameters) {
            Ok(trailers) => trailers,
            Err(error) => return Ok(Err(error)),
        };
        for (parameter, _) in
            self.engine.gatherer.parameters.iter().zip(&trailers.exists).filter(|(_, exists)| !**exists)
        {
            gradients.remove::<B::InnerBackend, 1>(parameter.id);
        }
        self.remember(&trailers);
        Ok(Ok(gradients))
    }

    /// Takes part in the gathers of the other ranks' forward passes, where this rank runs none.
    pub fn serve_forward(&mut self) {
        while let Some(block) = self.engine.history.next(&self.forward) {
            let served = self.agree().and_then(|agreed| match agreed {
                Some(_) => self.gather(block, false),
                None => Ok(()),
            });
            if let Err(error) = served {
                self.failure.get_or_insert(error);
                return;
            }
            self.forward.push(block);
            self.prefetch();
            if !self.is_last() || self.plan().first() != Some(&block) {
                self.blocks[block] = BlockState::Freed;
            }
        }
    }

    /// Takes part in the gathers of the other ranks' backward passes, where this rank runs none.
    fn serve_backward(&mut self, weighting: Weighting) -> Result<(), Error> {
        self.begin_backward(weighting);
        for block in self.plan() {
            self.start_planned(block, 0)?;
            if !matches!(self.blocks[block], BlockState::Gathered(_)) {
                self.gather(block, false)?;
            }
            self.blocks[block] = BlockState::Freed;
            self.needed[block] = true;
        }
        Ok(())
    }

    fn remember(&mut self, trailers: &Trailers) {
        let blocks = self.engine.gatherer.layout.blocks.iter();
        let parameters = &self.engine.gatherer.parameters;
        let complete = |position: &usize| trailers.everywhere[*position] || !parameters[*position].trained;
        let complete = blocks.map(|block| block.positions.iter().all(complete));
        self.engine.history = History {
            complete: complete.collect(),
            forward: std::mem::take(&mut self.forward),
            needed: std::mem::take(&mut self.needed),
        };
    }
}
