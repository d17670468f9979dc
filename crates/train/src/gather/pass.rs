//! A pass of a rank: blocks are gathered where it needs them, and gradients leave where they are complete.

use std::mem::{replace, take};
use std::sync::Arc;

use super::blocks::Announcement;
use super::open::OpenPass;
use super::{Engine, GatherCounts, ROOT, Shared};
use crate::bucket::{Bucket, BucketTable};
use crate::lane::{Pending, Tensor};
use crate::protocol::{Agreement, Exchanged, OPERATION, PASS_END, PassKind, Problem, Weight, Writer};
use crate::step::{Decided, Exchange};
use bonfire_core::{Error, Group};

/// A pass in progress.
pub(super) struct Pass {
    shared: Arc<Shared>,
    pub engine: Engine,
    pub agreement: Agreement,
    /// By position, this rank's part.
    pub parts: Vec<Option<Tensor>>,
    blocks: Vec<BlockState>,
    /// The blocks in the order in which the forward pass has gathered them.
    forward: Vec<usize>,
    backward: Option<Backward>,
    /// By block, whether the backward pass has needed its values.
    needed: Vec<bool>,
    /// By position, whether the backward pass has a gradient that is not there yet.
    expected: Vec<bool>,
    /// By position, whether the gradient of a trained parameter is there.
    pub received: Vec<bool>,
    pub problem: Option<Problem>,
    failure: Option<Error>,
    /// The messages that say that this rank's pass has ended.
    ended: Vec<(Group, Exchanged<()>)>,
    pub counts: GatherCounts,
    open: OpenPass,
    /// The groups in which other ranks may wait for this one.
    pub groups: Vec<Group>,
}

enum BlockState {
    Freed,
    InFlight(Box<dyn Pending>),
    /// The parameters of the block, in its order. The backward pass takes them.
    Gathered(Vec<Option<Tensor>>),
}

/// What begins with the backward pass.
struct Backward {
    /// The blocks to gather, in this order.
    plan: Vec<usize>,
    /// How many of them were started.
    started: usize,
    exchange: Exchange,
}

/// A parameter for a use in the forward pass.
pub struct Value {
    /// The whole parameter. `None` after a failure, which the end of the pass returns.
    pub tensor: Option<Tensor>,
    /// A block that was gathered for it: [`end_run`](super::Hooks::end_run) frees it at the end of its run.
    pub gathered: Option<usize>,
}

/// This rank's parts of the means of a pass, and the weight of all ranks.
pub(super) type Parts = (Vec<Option<Tensor>>, f64);

impl Pass {
    pub fn new(shared: Arc<Shared>, engine: Engine, agreement: Agreement, parts: Vec<Option<Tensor>>) -> Pass {
        let (count, blocks) = (parts.len(), shared.blocks.len());
        let lanes = engine.channel.iter().flat_map(|channel| [channel.shards.group(), channel.replicas.group()]);
        let groups = engine.gatherer.groups().into_iter().chain(lanes).chain([&shared.groups.main]);
        let groups = groups.cloned().collect();
        let mut pass = Pass {
            shared,
            engine,
            agreement,
            parts,
            blocks: (0..blocks).map(|_| BlockState::Freed).collect(),
            forward: Vec::new(),
            backward: None,
            needed: vec![false; blocks],
            expected: vec![false; count],
            received: vec![false; count],
            problem: None,
            failure: None,
            ended: Vec::new(),
            counts: GatherCounts::default(),
            open: OpenPass::new(),
            groups,
        };
        // All ranks do, also those that will serve.
        pass.prefetch();
        pass
    }

    /// Waits until the ranks have agreed on the pass. Returns whether gathers are announced, because a rank serves it.
    /// `None` if the ranks cannot make the step.
    fn announces(&mut self) -> Result<Option<bool>, Error> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        self.open.check()?;
        let Ok(kinds) = self.agreement.kinds()? else { return Ok(None) };
        if kinds.iter().any(|kind| *kind != kinds[0]) {
            self.open.set_uneven();
            self.open.check()?;
        }
        Ok(Some(kinds.contains(&PassKind::Serves)))
    }

    /// Takes note of a failure, which the end of the pass returns.
    fn noted<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        result.map_err(|error| self.failure.get_or_insert(error)).ok()
    }

    // The forward pass.

    /// Returns a whole parameter for a use in the forward pass.
    pub fn value(&mut self, position: usize) -> Value {
        let (block, index) = self.shared.places[position];
        let mut gathered = None;
        if self.at(block, index).is_none() {
            let result = self.gather_for_forward(block);
            gathered = self.noted(result).flatten();
        }
        Value { tensor: self.at(block, index).cloned(), gathered }
    }

    fn at(&self, block: usize, index: usize) -> Option<&Tensor> {
        match &self.blocks[block] {
            BlockState::Gathered(values) => values[index].as_ref(),
            _ => None,
        }
    }

    /// Gathers a block. Returns it if it is to be freed at the end of its run.
    fn gather_for_forward(&mut self, block: usize) -> Result<Option<usize>, Error> {
        let Some(announces) = self.announces()? else { return Ok(None) };
        let is_forward = self.backward.is_none();
        if is_forward {
            self.forward.push(block);
        }
        if announces {
            self.engine.gatherer.announce(Announcement::Forward(block))?;
        }
        let another = is_forward && !announces && self.engine.history.next(&self.forward).is_some();
        self.gather(block, another)?;
        self.counts.forward += 1;
        if is_forward && !announces {
            self.prefetch();
        }
        Ok(Some(block).filter(|block| !self.shared.stays(*block)))
    }

    /// Frees a block at the end of its run.
    pub fn end_run(&mut self, block: usize) {
        let is_kept = self.backward.is_none() && self.is_last() && self.plan().first() == Some(&block);
        if is_kept && self.announces().is_ok_and(|announces| announces == Some(false)) {
            // The backward pass begins with it.
            self.prefetch();
        } else {
            self.blocks[block] = BlockState::Freed;
        }
    }

    /// Whether this is the last block of the forward pass, if that repeats the one before.
    fn is_last(&self) -> bool {
        self.forward == self.engine.history.forward
    }

    /// The blocks that the backward pass will gather.
    fn plan(&self) -> Vec<usize> {
        if self.shared.keep() { Vec::new() } else { self.engine.history.backward(&self.forward) }
    }

    /// Starts to gather the block that will be needed next, so that it is there by then. If the forward pass has
    /// gathered its last block, that is one of the first two of the backward pass.
    fn prefetch(&mut self) {
        let next = match self.is_last() {
            true => self.plan().into_iter().take(2).find(|block| matches!(self.blocks[*block], BlockState::Freed)),
            false => self.engine.history.next(&self.forward),
        };
        if let Some(block) = next {
            let started = self.start(block);
            self.noted(started);
        }
    }

    /// Starts to gather a block, unless it is gathered or in flight.
    fn start(&mut self, block: usize) -> Result<(), Error> {
        if !matches!(self.blocks[block], BlockState::Freed) {
            return Ok(());
        }
        let part = |position: usize| self.parts[position].clone();
        self.blocks[block] = BlockState::InFlight(self.engine.gatherer.start(&self.shared, block, part)?);
        let gathered = self.blocks.iter().skip(ROOT + 1).filter(|block| !matches!(block, BlockState::Freed)).count();
        self.counts.most = self.counts.most.max(gathered);
        Ok(())
    }

    /// Gathers a block and waits for it. `another`: see [`Gatherer::finish`](super::blocks::Gatherer::finish).
    fn gather(&mut self, block: usize, another: bool) -> Result<(), Error> {
        if !matches!(self.blocks[block], BlockState::InFlight(_)) {
            self.blocks[block] = BlockState::Freed;
        }
        self.start(block)?;
        if let BlockState::InFlight(gathering) = replace(&mut self.blocks[block], BlockState::Freed) {
            let values = self.engine.gatherer.finish(gathering, another)?;
            self.blocks[block] = BlockState::Gathered(values.into_iter().map(Some).collect());
        }
        Ok(())
    }

    // The backward pass.

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
                        backward.exchange.bound()?;
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
        let due = backward.plan[backward.started.min(end)..end].to_vec();
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
        // Where other ranks wait for gradients in their backward passes, this one is sent at once: before this rank
        // needs a block that they have not begun to gather, of this model or of another one.
        let wait = self.engine.bounded;
        let decided = self.agreement.decided(wait)?;
        // Gradients of no samples are NaN.
        let counts = self.agreement.weight.is_some_and(|weight| weight.weight > 0.0);
        if let Some(backward) = &mut self.backward {
            if counts {
                backward.exchange.arrive(position, gradient);
            } else {
                backward.exchange.arrive_zeros(position);
            }
            if let Some(Ok((weighting, total))) = decided
                && total > 0.0
            {
                backward.exchange.agree(weighting);
                backward.exchange.advance(wait)?;
            }
        }
        self.free_completed(block);
        Ok(())
    }

    /// Frees a block if all its gradients are there.
    fn free_completed(&mut self, block: usize) {
        if self.shared.blocks[block].iter().all(|position| !self.expected[*position]) {
            self.blocks[block] = BlockState::Freed;
        }
    }

    fn begin_backward(&mut self) {
        if self.backward.is_none()
            && let Some(channel) = self.engine.channel.take()
        {
            let mut exchange = Exchange::new(self.shared.model.clone(), channel, self.buckets());
            // The buckets of what the forward pass has not used do not wait for its gradients.
            let unused = (0..self.expected.len()).filter(|position| !self.expected[*position]);
            unused.for_each(|position| exchange.arrive_zeros(position));
            self.backward = Some(Backward { plan: self.plan(), started: 0, exchange });
        }
    }

    /// Returns the buckets of this pass: for each block, the gradients of one element type.
    fn buckets(&self) -> BucketTable {
        let mut table: Vec<Bucket> = Vec::new();
        for block in self.engine.history.gradients(&self.forward) {
            let first = table.len();
            let trained = self.shared.blocks[block].iter().filter(|position| self.agreement.header.trained[**position]);
            for &position in trained {
                let dtype = |position: usize| self.shared.model.parameters[position].dtype;
                match table[first..].iter_mut().find(|bucket| dtype(bucket.positions[0]) == dtype(position)) {
                    Some(bucket) => bucket.positions.push(position),
                    None => table.push(Bucket { positions: vec![position], block: Some(block) }),
                }
            }
        }
        table.into()
    }

    // The end.

    /// Ends the pass: sends what is left and waits for all results.
    pub fn finish(&mut self) -> Result<Decided<Parts>, Error> {
        let Some(announces) = self.announces()? else {
            return self.agreement.kinds().map(|kinds| kinds.map(|_| (Vec::new(), 0.0)));
        };
        if self.agreement.weight.is_none() {
            self.agreement.weigh(Weight { weight: 0.0, problem: None })?;
        }
        let has_served = !self.ended.is_empty();
        match (self.backward.is_none(), announces) {
            _ if has_served => {}
            // The others may run a backward pass.
            (true, true) => self.serve_to_the_end()?,
            (true, false) => self.serve_backward()?,
            (false, true) => self.engine.gatherer.announce(Announcement::End)?,
            (false, false) => {}
        }
        // Ranks that have gathered other blocks than this one learn of it here.
        self.say_end(self.engine.gatherer.lane.group().clone())?;
        if !has_served {
            self.say_end(self.shared.groups.main.clone())?;
        }
        let (weighting, total) = match self.agreement.decided(true)? {
            Some(Ok(decided)) => decided,
            Some(Err(refusal)) => return Ok(Err(refusal)),
            None => return Err(Error::broken(OPERATION, "it has no weights")),
        };
        let mut parts = Vec::new();
        self.begin_backward();
        if let Some(Backward { mut exchange, .. }) = self.backward.take() {
            if total > 0.0 {
                exchange.agree(weighting);
                parts = exchange.finish()?;
            }
            self.engine.channel = Some(exchange.channel);
        }
        self.engine.gatherer.unconfirmed.confirm()?;
        for (group, mut end) in take(&mut self.ended) {
            drop(end.get(&group, |_| Ok(()))?);
        }
        self.engine.history.forward = take(&mut self.forward);
        self.engine.history.needed = take(&mut self.needed);
        Ok(Ok((parts, total)))
    }

    /// Takes part in the pass of other ranks, where this rank runs none.
    pub fn serve(&mut self) -> Result<(), Error> {
        // Before it waits, so that ranks whose model calls collectives learn that this rank's does not.
        self.agreement.weigh(Weight { weight: 0.0, problem: None })?;
        self.say_end(self.shared.groups.main.clone())?;
        let runs = self.agreement.kinds()?.is_ok_and(|kinds| kinds.iter().any(|kind| *kind != PassKind::Serves));
        if runs { self.serve_to_the_end() } else { Ok(()) }
    }

    /// Takes part in what other ranks announce, until their pass ends.
    fn serve_to_the_end(&mut self) -> Result<(), Error> {
        loop {
            let block = match self.engine.gatherer.next()? {
                Announcement::End => return Ok(()),
                Announcement::Forward(block) if block < self.blocks.len() => {
                    if self.backward.is_none() {
                        self.forward.push(block);
                    }
                    block
                }
                Announcement::Backward(block) if block < self.blocks.len() => {
                    self.begin_backward();
                    self.needed[block] = true;
                    block
                }
                other => return Err(Error::broken(OPERATION, format!("{other:?} is no block of this model"))),
            };
            self.gather(block, false)?;
            self.blocks[block] = BlockState::Freed;
        }
    }

    /// Takes part in the gathers of the other ranks' backward passes, where this rank runs none.
    fn serve_backward(&mut self) -> Result<(), Error> {
        self.begin_backward();
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

    /// Says that this rank's pass has ended.
    fn say_end(&mut self, group: Group) -> Result<(), Error> {
        let mut words = Writer::default();
        words.words(&0u64);
        let end = words.finish().start(&group, PASS_END)?;
        self.ended.push((group, end));
        Ok(())
    }
}
