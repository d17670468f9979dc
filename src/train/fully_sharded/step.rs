//! A training step as its caller sees it.

use std::sync::Arc;

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};

use super::FullyShardedParallel;
use super::gather::nothing;
use super::layout::Layout;
use super::pass::{Pass, Shared};
use crate::tensor::autodiff::CollectiveBackend;
use crate::tensor::autodiff::hook::PassStart;
use crate::train::agree::Parameter;
use crate::train::sharded_block::gather_at_use;
use crate::train::step_header::StepHeader;
use crate::train::trailer::{OPERATION, Problem};
use crate::train::values::Positions;
use bonfire_core::internal::{AgreedOperations, lock};
use bonfire_core::{Error, Group};

impl<B: CollectiveBackend> FullyShardedParallel<B> {
    /// Begins a training step. `model` is the model of parts, as the optimizer returned it, and `samples` the number of
    /// samples over which this rank's loss will be averaged. All ranks must call it in every step.
    ///
    /// Every rank runs both passes, because the others need its parts there: a rank without samples passes 0 and any
    /// batch, whose gradients are ignored, or calls [`skip`](ShardedStep::skip).
    ///
    /// To accumulate gradients over several micro-batches, make a step for each, and add what they return, for example
    /// with burn's `GradientsAccumulator`: these are gradients of parts, so the sum needs `1 / n` of the memory. Weight
    /// each loss by the micro-batch's share of the samples of all ranks.
    ///
    /// # Errors
    /// Those of the step before, if that has failed, and of [`Group::all_gather`]. Errors of this step come from
    /// [`finish`](ShardedStep::finish).
    #[track_caller]
    pub fn step<M: AutodiffModule<B>>(&mut self, model: &M, samples: usize) -> Result<ShardedStep<'_, B, M>, Error> {
        let (positions, layout) = (self.positions.clone(), self.layout.clone());
        let pass = Shared::<B>::default();
        let mut hooks = PartHooks {
            positions: &positions,
            layout: &layout,
            parameters: &self.parameters,
            pass: &pass,
            parts: (0..positions.len()).map(|_| None).collect(),
            unknown: false,
        };
        let model = model.clone().map(&mut hooks);
        let (parts, unknown) = (hooks.parts, hooks.unknown);
        let changed = parts.iter().position(Option::is_none).or(unknown.then_some(parts.len()));
        let mut header = StepHeader { operation: OPERATION, samples, changed, steps: self.steps, ..Default::default() };
        let Some(engine) = self.engine.take() else { return Err(self.failure()) };
        let headers = header.start(&self.main, &self.parameters)?;
        let (start, world_size) = (PassStart::now(), self.main.world_size());
        *lock(&pass) = Some(Pass::new(engine, start, parts.clone(), header, headers, world_size));
        Ok(ShardedStep { model, parts, guard: Guard { pass, parallel: self } })
    }
}

/// A training step in progress, from [`FullyShardedParallel::step`]: run the forward and the backward pass with
/// [`model`](Self::model), then call [`finish`](Self::finish).
///
/// If it is dropped without `finish`, the groups fail on all ranks, because the others wait for this rank's parts and
/// gradients.
#[must_use = "`finish` returns the gradients, and the other ranks wait for it"]
pub struct ShardedStep<'a, B: CollectiveBackend, M> {
    model: M,
    /// By position, this rank's part.
    parts: Vec<Option<FloatTensor<B>>>,
    guard: Guard<'a, B>,
}

/// Fails the groups if it is dropped before the step has ended.
struct Guard<'a, B: CollectiveBackend> {
    pass: Shared<B>,
    parallel: &'a mut FullyShardedParallel<B>,
}

impl<B: CollectiveBackend, M> ShardedStep<'_, B, M> {
    /// Returns the model for the forward pass of this step: its parameters are whole, gathered at their first use. Run
    /// the forward pass with it, then one backward pass.
    ///
    /// It is for this step only. After a failure its parameters are NaN, so that the pass goes on to
    /// [`finish`](Self::finish), which returns the error.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Ends the step after its backward pass, which has returned `gradients`. Returns the means over all ranks of the
    /// gradients of this rank's parts, weighted by the ranks' numbers of samples. A gradient that is missing on some
    /// ranks counts as zero there; one that is missing on all ranks stays missing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, if a rank's model is not the one in training, if
    /// a rank with samples has no gradients or has run two backward passes, or if it has used its part of a parameter
    /// as if it were the whole; the groups remain usable. [`Error::Mismatch`] on all ranks if they have used different
    /// blocks. [`Error::Io`] or [`Error::Broken`] if a rank has no memory to gather a block. Otherwise the errors of
    /// [`Group::all_gather`], whose ranks may be those of a subgroup. After these the groups have failed: continue from
    /// a checkpoint.
    #[track_caller]
    pub fn finish(self, gradients: B::Gradients) -> Result<GradientsParams, Error> {
        let has_gradient = |part: &Option<_>| part.as_ref().is_some_and(|part| B::grad(part, &gradients).is_some());
        let part = self.parts.iter().position(has_gradient);
        self.end(part.map(Problem::Part))
    }

    /// Ends the step of a rank without samples that has run no pass. It takes part in the gathers of the step before,
    /// and the other ranks' mean is its result too.
    ///
    /// # Errors
    /// See [`finish`](Self::finish). [`Error::Mismatch`] on all ranks if the other ranks gather other blocks than in
    /// the step before, or in the first step of all.
    #[track_caller]
    pub fn skip(self) -> Result<GradientsParams, Error> {
        if let Some(pass) = &mut *lock(&self.guard.pass) {
            pass.serve_forward();
        }
        self.end(None)
    }

    fn end(self, problem: Option<Problem>) -> Result<GradientsParams, Error> {
        let ShardedStep { model, parts, guard } = self;
        // Their tensors share the parts' memory, which the optimizer changes in place if it is the only owner.
        drop((model, parts));
        guard.end(problem)
    }
}

impl<B: CollectiveBackend> Guard<'_, B> {
    fn end(self, problem: Option<Problem>) -> Result<GradientsParams, Error> {
        let Some(mut pass) = lock(&self.pass).take() else {
            return Err(Error::broken(OPERATION, "the step has ended before"));
        };
        if let Some(problem) = problem {
            pass.report(problem);
        }
        let ended = pass.finish(&self.parallel.main);
        self.parallel.counts = pass.counts;
        match ended {
            Ok(ended) => {
                self.parallel.engine = Some(pass.engine);
                self.parallel.steps += u64::from(ended.is_ok());
                ended
            }
            Err(error) => Err(abandon(&pass, &self.parallel.main, error)),
        }
    }
}

impl<B: CollectiveBackend> Drop for Guard<'_, B> {
    fn drop(&mut self) {
        let Some(pass) = lock(&self.pass).take() else { return };
        // A panic ends this rank, unless it is caught: the others find it lost.
        if std::thread::panicking() {
            return;
        }
        let main = &self.parallel.main;
        // A collective of the model that failed is the cause, and the other ranks must hear of it, not of this drop.
        let error = main.failure().unwrap_or_else(|| {
            let reason = format!("rank {} has dropped its training step; it must call `finish`", main.rank());
            Error::broken(OPERATION, reason)
        });
        abandon(&pass, main, error);
    }
}

/// Fails all groups, so that no rank waits for this one. Returns the first cause.
fn abandon<B: CollectiveBackend>(pass: &Pass<B>, main: &Group, error: Error) -> Error {
    let (gatherer, scatterer) = (&pass.engine.gatherer, &pass.engine.scatterer);
    let groups = [&gatherer.lane, &scatterer.lane, &scatterer.replicas, main];
    groups.into_iter().fold(error, |error, group| group.abandon(error))
}

/// Replaces each part by a parameter whose first use gathers its block.
struct PartHooks<'a, B: CollectiveBackend> {
    positions: &'a Positions,
    layout: &'a Arc<Layout>,
    parameters: &'a [Parameter<B>],
    pass: &'a Shared<B>,
    /// By position, what the model has. The first of several parameters with one id counts, as in burn's optimizers.
    parts: Vec<Option<FloatTensor<B>>>,
    /// Whether the model has a parameter that needs a gradient and that it did not have at the start.
    unknown: bool,
}

impl<B: CollectiveBackend> ModuleMapper<B> for PartHooks<'_, B> {
    fn enter_module(&mut self, _name: &str, container: &str) {
        gather_at_use(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let part = param.val();
        let Some(&position) = self.positions.get(&param.id) else {
            self.unknown |= part.is_require_grad();
            return param;
        };
        let parameter = self.parameters[position].clone();
        let (device, shape) = (parameter.device.clone(), parameter.shape.clone());
        let fits = part.shape() == self.layout.parts[position].shape && part.dtype() == parameter.dtype;
        let trained = parameter.trained;
        if fits && part.is_require_grad() == trained && self.parts[position].is_none() {
            self.parts[position] = Some(part.clone().into_primitive().tensor());
        }
        let pass = self.pass.clone();
        let init = move |_: &B::Device, _| {
            let whole = lock(&pass).as_mut().map(|state| state.parameter(&pass, position));
            // After the end of the step, in a clone of its model, nothing can be gathered.
            let whole = whole.unwrap_or_else(|| B::from_inner(nothing(&parameter)));
            Tensor::from_primitive(TensorPrimitive::Float(whole))
        };
        Param::uninitialized(param.id, init, device, trained, shape)
    }
}
