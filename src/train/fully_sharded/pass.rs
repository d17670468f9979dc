//! One step of a rank: blocks are gathered where the passes need them, and gradients leave where they are complete.
//!
//! This file has the forward pass; `backward.rs` has the backward pass and the end.
//!
//! # What waits
//! A pass waits for a block that it needs: that of the forward pass wherever a parameter is first used,
//! that of the backward pass in a recipe (`tensor/autodiff/hook.rs`), while burn-autodiff holds locks that other ranks
//! of this process may need. What it waits for are gathers, which run on the progress threads of all ranks once every
//! rank has started them. A rank starts its first gathers of the backward pass during its forward pass, and each
//! further one when its own backward pass needs the block before. So a rank whose backward pass has ended keeps no
//! other waiting, whatever locks it waits for. A rank that runs another backward pass between the two passes of a step
//! does: see [`FullyShardedParallel`](super::FullyShardedParallel). A gradient never waits; before the next block is
//! gathered, the backward pass of a rank that is a process waits for gradients in flight (`Scatterer::bound`).

use std::mem::replace;
use std::sync::{Arc, Mutex};

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;

use super::gather::{Gatherer, nothing};
use super::layout::{Part, ROOT};
use super::order::History;
use super::scatter::{Scatter, Scatterer};
use crate::tensor::autodiff::CollectiveBackend;
use crate::tensor::autodiff::hook::PassStart;
use crate::train::bucket::Weighting;
use crate::train::in_flight::InFlight;
use crate::train::sharded_block::at_end_of_run;
use crate::train::step_header::{Refused, StepHeader};
use crate::train::trailer::Problem;
use bonfire_core::internal::lock;
use bonfire_core::{Error, Work};

/// What steps keep from one to the next.
pub(super) struct Engine<B: AutodiffBackend> {
    pub gatherer: Gatherer<B>,
    pub scatterer: Scatterer<B>,
    pub history: History,
    /// Whether blocks stay gathered between the passes.
    pub keep: bool,
}

/// How often blocks were gathered in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GatherCounts {
    /// Gathers that the forward pass used.
    pub forward: usize,
    /// Gathers of the backward pass. The block that the forward pass used last is still there.
    pub backward: usize,
    /// The most blocks that were gathered, or being gathered, at a time, beside the parameters that are in no block.
    pub most: usize,
}

/// `None` before the step and after its end.
pub(super) type Shared<B> = Arc<Mutex<Option<Pass<B>>>>;

/// What the parameters of a step and its end share.
pub(super) struct Pass<B: CollectiveBackend> {
    pub engine: Engine<B>,
    start: PassStart<B>,
    pub header: StepHeader,
    pub agreement: Agreement,
    /// The number of all ranks, those of other replicas included.
    world_size: usize,
    /// By position, this rank's part.
    parts: Vec<Option<FloatTensor<B>>>,
    /// Whether the forward pass has come to a parameter that needs a gradient.
    tracks: bool,
    /// By position, the node of the whole parameter, from its first use until its gradient is there.
    pub nodes: Vec<Option<FloatTensor<B>>>,
    pub blocks: Vec<BlockState<B>>,
    /// The blocks in the order in which the forward pass has gathered them.
    pub forward: Vec<usize>,
    pub backward: Option<Backward<B>>,
    /// By block, whether the backward pass has needed its values.
    pub needed: Vec<bool>,
    /// By position, whether its gradient is there.
    pub received: Vec<bool>,
    pub problem: Option<Problem>,
    pub failure: Option<Error>,
    pub counts: GatherCounts,
}

pub(super) enum Agreement {
    Pending(Work<Vec<u64>>),
    Agreed(Weighting),
    Refused(Refused),
    /// The exchange failed, and [`Pass::failure`] says why.
    Failed,
}

pub(super) enum BlockState<B: AutodiffBackend> {
    Freed,
    InFlight(InFlight<B::InnerBackend>),
    /// The parameters of the block, in its order. The backward pass takes them.
    Gathered(Vec<Option<FloatTensor<B::InnerBackend>>>),
}

/// What begins with the backward pass.
pub(super) struct Backward<B: AutodiffBackend> {
    /// The blocks to gather, in this order.
    pub plan: Vec<usize>,
    /// How many of them were started.
    pub started: usize,
    pub scatter: Scatter<B>,
}

impl<B: CollectiveBackend> Pass<B> {
    pub fn new(
        engine: Engine<B>,
        start: PassStart<B>,
        parts: Vec<Option<FloatTensor<B>>>,
        header: StepHeader,
        headers: Work<Vec<u64>>,
        world_size: usize,
    ) -> Pass<B> {
        let (count, blocks) = (parts.len(), engine.gatherer.layout.blocks.len());
        let mut pass = Pass {
            engine,
            start,
            header,
            agreement: Agreement::Pending(headers),
            world_size,
            parts,
            tracks: false,
            nodes: (0..count).map(|_| None).collect(),
            blocks: (0..blocks).map(|_| BlockState::Freed).collect(),
            forward: Vec::new(),
            backward: None,
            needed: vec![false; blocks],
            received: vec![false; count],
            problem: None,
            failure: None,
            counts: GatherCounts::default(),
        };
        pass.prefetch();
        pass
    }

    /// Returns the whole parameter at `position`, for a use in the forward pass.
    pub fn parameter(&mut self, shared: &Shared<B>, position: usize) -> FloatTensor<B> {
        let value = self.value(shared, position);
        let trained = self.engine.gatherer.parameters[position].trained;
        self.tracks |= trained;
        let node = match (&self.nodes[position], &self.parts[position]) {
            (Some(node), _) => node.clone(),
            (None, Some(part)) if trained => {
                let node = self.node(shared, position, part.clone());
                self.nodes[position].insert(node).clone()
            }
            // burn keeps the value of a tensor that needs no gradient, and no recipe. So this one needs a gradient too.
            (None, Some(part)) if self.tracks && !self.stays(position) => {
                let leaf = B::float_set_require_grad(B::from_inner(B::inner(part.clone())), true);
                let node = self.node(shared, position, leaf);
                self.nodes[position].insert(node).clone()
            }
            // Frozen, and burn keeps nothing of it, or it stays anyway. Or a parameter that the model lacks: the header
            // has said so, and the step ends with that error.
            _ => B::from_inner(value.clone()),
        };
        B::with_value(node, value)
    }

    /// Whether a parameter stays gathered until the backward pass.
    fn stays(&self, position: usize) -> bool {
        self.engine.keep || self.engine.gatherer.layout.parts[position].block == ROOT
    }

    /// Returns the node of the whole parameter in the graph, with the part's value.
    fn node(&self, shared: &Shared<B>, position: usize, part: FloatTensor<B>) -> FloatTensor<B> {
        let parameter = self.engine.gatherer.parameters[position].clone();
        let pass = shared.clone();
        let receiver = Arc::new(move |gradient| {
            if let Some(pass) = &mut *lock(&pass) {
                pass.receive(position, gradient);
            }
        });
        // Without a recipe burn keeps the value where a backward step needs it.
        if self.stays(position) {
            return B::hook(part, &self.start, receiver);
        }
        let pass = shared.clone();
        let recipe = Arc::new(move || {
            let value = lock(&pass).as_mut().and_then(|pass| pass.value_again(position));
            value.unwrap_or_else(|| nothing(&parameter))
        });
        B::hook_with_recipe(part, &self.start, receiver, recipe)
    }

    fn value(&mut self, shared: &Shared<B>, position: usize) -> FloatTensor<B::InnerBackend> {
        let Part { block, index, .. } = self.engine.gatherer.layout.parts[position];
        if let BlockState::Gathered(values) = &self.blocks[block]
            && let Some(value) = &values[index]
        {
            return value.clone();
        }
        let gathered = self.agree().and_then(|agreed| match agreed {
            Some(_) => self.gather_for_forward(block, shared).map(Some),
            None => Ok(None),
        });
        if let Err(error) = gathered {
            self.failure.get_or_insert(error);
        }
        match &self.blocks[block] {
            BlockState::Gathered(values) if values[index].is_some() => values[index].clone(),
            _ => None,
        }
        .unwrap_or_else(|| nothing(&self.engine.gatherer.parameters[position]))
    }

    fn gather_for_forward(&mut self, block: usize, shared: &Shared<B>) -> Result<(), Error> {
        let is_forward = self.backward.is_none();
        if is_forward {
            self.forward.push(block);
        }
        self.gather(block, is_forward && self.engine.history.next(&self.forward).is_some())?;
        self.counts.forward += 1;
        if is_forward {
            self.prefetch();
        }
        if block != ROOT && !self.engine.keep {
            let pass = shared.clone();
            at_end_of_run(move || {
                if let Some(pass) = &mut *lock(&pass) {
                    pass.end_run(block);
                }
            });
        }
        Ok(())
    }

    /// Frees a block at the end of its run.
    fn end_run(&mut self, block: usize) {
        let plan = self.plan();
        if self.backward.is_none() && self.is_last() && plan.first() == Some(&block) {
            // The backward pass begins with it.
            self.prefetch();
        } else {
            self.blocks[block] = BlockState::Freed;
        }
    }

    /// Whether this is the last block of the forward pass, if that repeats the one before.
    pub fn is_last(&self) -> bool {
        self.forward == self.engine.history.forward
    }

    /// The blocks that the backward pass will gather.
    pub fn plan(&self) -> Vec<usize> {
        if self.engine.keep { Vec::new() } else { self.engine.history.backward(&self.forward) }
    }

    /// Starts to gather the block that will be needed next, so that it is there by then. If the forward pass has
    /// gathered its last block, that is one of the first two of the backward pass.
    pub fn prefetch(&mut self) {
        let next = match self.is_last() {
            true => self.plan().into_iter().take(2).find(|block| matches!(self.blocks[*block], BlockState::Freed)),
            false => self.engine.history.next(&self.forward),
        };
        if let Some(block) = next
            && let Err(error) = self.start(block)
        {
            self.failure.get_or_insert(error);
        }
    }

    /// Starts to gather a block, unless it is gathered or in flight.
    pub fn start(&mut self, block: usize) -> Result<(), Error> {
        if !matches!(self.blocks[block], BlockState::Freed) {
            return Ok(());
        }
        let parts = &self.parts;
        let part = |position: usize| parts[position].clone().map(B::inner);
        self.blocks[block] = BlockState::InFlight(self.engine.gatherer.start(block, part)?);
        let gathered = self.blocks.iter().skip(ROOT + 1).filter(|block| !matches!(block, BlockState::Freed)).count();
        self.counts.most = self.counts.most.max(gathered);
        Ok(())
    }

    /// Gathers a block and waits for it. `another`: see [`Gatherer::finish`].
    pub fn gather(&mut self, block: usize, another: bool) -> Result<(), Error> {
        if !matches!(self.blocks[block], BlockState::InFlight(_)) {
            self.blocks[block] = BlockState::Freed;
        }
        self.start(block)?;
        if let BlockState::InFlight(gathering) = replace(&mut self.blocks[block], BlockState::Freed) {
            let values = self.engine.gatherer.finish(block, gathering, another)?;
            self.blocks[block] = BlockState::Gathered(values.into_iter().map(Some).collect());
        }
        Ok(())
    }

    /// Waits for the header and evaluates it. Returns how this rank's gradients are weighted, unless the ranks cannot
    /// make the step.
    pub fn agree(&mut self) -> Result<Option<Weighting>, Error> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        if matches!(self.agreement, Agreement::Pending(_))
            && let Agreement::Pending(headers) = replace(&mut self.agreement, Agreement::Failed)
        {
            let headers = headers.wait().map_err(|(error, _)| error)?;
            self.agreement = match self.header.agree(&self.engine.gatherer.parameters, &headers, self.world_size) {
                Ok(agreed) => Agreement::Agreed(agreed.weighting),
                Err(refused) => Agreement::Refused(refused),
            };
        }
        Ok(match self.agreement {
            Agreement::Agreed(weighting) => Some(weighting),
            _ => None,
        })
    }
}
