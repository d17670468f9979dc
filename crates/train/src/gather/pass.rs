//! A pass of a rank: blocks are gathered where it needs them, and gradients leave where they are complete.

mod backward;

use std::mem::{replace, take};
use std::sync::Arc;

use self::backward::Backward;
use super::blocks::Announcement;
use super::open::OpenPass;
use super::{Engine, GatherCounts, ROOT, Shared};
use crate::lane::{Pending, Tensor};
use crate::protocol::{Agreement, Exchanged, OPERATION, PASS_END, PassKind, Problem, Weight, Writer};
use crate::step::Decided;
use bonfire_core::internal::AgreedOperations;
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
    /// The blocks of the backward pass that the forward pass keeps, or starts to gather. No rank starts them again, not
    /// even one that gets their gradients without their values.
    ahead: Vec<usize>,
    /// By block, whether the backward pass has needed its values.
    pub needed: Vec<bool>,
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
            ahead: Vec::new(),
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

    /// Takes note of a failure, which the end of the pass returns. Gathers fail here already: a tensor library may end
    /// its backward pass with a wait for those of other threads, and they may wait for this rank's part of a block.
    fn noted<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        if let Err(error) = &result
            && self.failure.is_none()
        {
            let gathers = self.engine.gatherer.groups().into_iter();
            self.failure = Some(gathers.fold(error.clone(), |error, group| group.abandon_at_once(error)));
        }
        result.ok()
    }

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
            self.ahead.push(block);
            self.prefetch();
        } else {
            self.blocks[block] = BlockState::Freed;
            self.ahead.retain(|ahead| *ahead != block);
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
        let is_last = self.is_last();
        let next = match is_last {
            true => self.plan().into_iter().take(2).find(|block| matches!(self.blocks[*block], BlockState::Freed)),
            false => self.engine.history.next(&self.forward),
        };
        if let Some(block) = next {
            self.ahead.extend(is_last.then_some(block));
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

    /// Ends the pass: sends what is left and waits for all results.
    pub fn finish(&mut self) -> Result<Decided<Parts>, Error> {
        let announces = self.announces()?;
        if self.agreement.weight.is_none() {
            self.agreement.weigh(Weight { weight: 0.0, problem: None })?;
        }
        let Some(announces) = announces else {
            // All ranks send the same messages, also those that serve.
            if self.ended.is_empty() {
                self.say_end(self.shared.groups.main.clone())?;
            }
            self.hear_ends()?;
            return self.agreement.kinds().map(|kinds| kinds.map(|_| (Vec::new(), 0.0)));
        };
        let has_served = !self.ended.is_empty();
        match (self.backward.is_none(), announces) {
            _ if has_served => {}
            // The others may run a backward pass.
            (true, true) => self.serve_to_the_end()?,
            (false, true) => self.engine.gatherer.announce(Announcement::End)?,
            (_, false) => self.serve_backward()?,
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
                self.problem = self.problem.map_or_else(|| exchange.not_finite(), |problem| Ok(Some(problem)))?;
            }
            self.engine.channel = Some(exchange.channel);
        }
        self.engine.gatherer.unconfirmed.confirm()?;
        self.hear_ends()?;
        self.engine.history.forward = take(&mut self.forward);
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

    /// Takes part in the gathers of the other ranks' backward passes to which this rank's has not come.
    fn serve_backward(&mut self) -> Result<(), Error> {
        self.begin_backward();
        self.send_zeros()?;
        for block in self.left() {
            let is_started = match &self.blocks[block] {
                BlockState::Freed => self.ahead.contains(&block),
                BlockState::InFlight(_) => false,
                BlockState::Gathered(_) => true,
            };
            if !is_started {
                self.gather(block, false)?;
            }
            self.blocks[block] = BlockState::Freed;
        }
        Ok(())
    }

    /// Waits until all ranks' passes have ended.
    fn hear_ends(&mut self) -> Result<(), Error> {
        for (group, mut end) in take(&mut self.ended) {
            drop(end.get(&group, |_| Ok(()))?);
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
