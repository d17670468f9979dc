//! Overlapped training steps: gradients are exchanged while the backward pass computes the next ones.
//!
//! A hook hands over each gradient as soon as it is complete ([`observe`]), a full bucket leaves at once ([`pass`]),
//! and all ranks send the same buckets in the same order (the schedule). What the ranks must agree on travels during
//! the forward pass (the step header) and beside the last buckets (the trailer), never between a gradient and its
//! exchange.
//!
//! Gradients have a group of their own, the lane: collectives of the model, such as those of
//! [`SyncBatchNorm`](crate::SyncBatchNorm), run at the same time and in no order relative to them.

mod observe;
mod pass;
mod tuning;

use std::sync::{Arc, Mutex, OnceLock};

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;

use self::observe::{Hooked, Observer};
use self::pass::{Ended, Pass};
use super::data_parallel::DataParallel;
use super::overlap::Overlap;
use super::step_header::{StepHeader, no_samples};
use super::trailer::{OPERATION, Problem};
use super::values::positions;
use crate::tensor::autodiff::CollectiveBackend;
use crate::tensor::autodiff::hook::GradientReceiver;
use bonfire_core::internal::{AgreedOperations, lock};
use bonfire_core::{Error, Group};

impl<B: CollectiveBackend> DataParallel<B> {
    /// Begins a training step that exchanges gradients during the backward pass. It replaces [`sync`](Self::sync),
    /// which exchanges them afterwards:
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{Optimizer, SgdConfig};
    /// # use burn::tensor::Tensor;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (mut model, mut ddp) = DataParallel::new(group, linear)?;
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let input = Tensor::<Autodiff<Flex>, 2>::ones([3, 2], &device);
    /// let step = ddp.step(&model, input.dims()[0])?;
    /// let loss = step.model().forward(input).mean();
    /// let gradients = step.finish(loss.backward())?;
    /// model = optimizer.step(0.1, model, gradients);
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// `samples` and the result are those of `sync`: the mean over all ranks, weighted by the number of samples of
    /// each. All ranks must call it in every step. A rank without samples passes 0, and calls
    /// [`skip`](TrainingStep::skip) instead of a backward pass. `sync` and this are not mixed within one step.
    ///
    /// # Buckets
    /// The first step measures how fast the group is, and records the order in which the backward pass completes the
    /// gradients. From the second step on all ranks send buckets of the best size in that order, and `sync` does too.
    /// The bits of a sum over three or more ranks may depend on the size:
    /// [`set_bucket_bytes`](Self::set_bucket_bytes) fixes it where two runs must have the same bits.
    ///
    /// # Errors
    /// The first call makes a subgroup, and returns the errors of [`Group::subgroup`](crate::Group::subgroup);
    /// [`Error::Config`] with the transport `mpi-blocking`, with which [`sync`](Self::sync) works. Errors of the
    /// exchange come from [`finish`](TrainingStep::finish).
    #[track_caller]
    pub fn step<M: AutodiffModule<B>>(&mut self, model: &M, samples: usize) -> Result<TrainingStep<'_, B, M>, Error> {
        let (digests, mut changed) = self.due_digests(model)?;
        let overlap = match self.overlap.take() {
            Some(overlap) => overlap,
            None => Overlap::new(&self.reducer)?,
        };
        let overlap = self.overlap.insert(overlap);

        let (count, positions) = (self.reducer.parameters.len(), positions(&self.reducer.parameters));
        let pass = Shared::<B>::default();
        let receiver = |position: usize| -> GradientReceiver<B::InnerBackend> {
            let pass = pass.clone();
            Arc::new(move |gradient| {
                if let Some(pass) = &mut *lock(&pass) {
                    pass.receive(position, gradient);
                }
            })
        };
        let mut observer = Observer::<B>::new(&positions, &receiver);
        let model = model.clone().map(&mut observer);
        if observer.unknown {
            changed.get_or_insert(count);
        }
        let mut header = StepHeader {
            operation: OPERATION,
            samples,
            changed,
            steps: self.steps,
            buckets: self.bucket_bytes.unwrap_or(0) as u64,
            compression: self.reducer.compression(),
            digests,
            ..Default::default()
        };
        let headers = header.start(&self.reducer.group, &self.reducer.parameters)?;
        let reducer = overlap.reducer.take();
        let reducer = reducer.unwrap_or_else(|| self.reducer.over(overlap.lane.clone()));
        *lock(&pass) = Some(Pass::new(reducer, overlap.buckets.clone(), header, headers));
        let hooked = observer.hooked;
        Ok(TrainingStep { model, hooked, guard: Guard { pass, parallel: self } })
    }

    /// Takes part in a step of ranks that still have data, when this rank's has ended. Returns the mean of their
    /// gradients, or `None` on all ranks once no rank has data. Each rank calls it in a loop after its own last
    /// [`step`](Self::step), so ranks with different numbers of batches make the same number of steps:
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{Optimizer, SgdConfig};
    /// # use burn::tensor::Tensor;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (mut model, mut ddp) = DataParallel::new(group, linear)?;
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let own_batches = [Tensor::<Autodiff<Flex>, 2>::ones([3, 2], &device)];
    /// for input in own_batches {
    ///     let step = ddp.step(&model, input.dims()[0])?;
    ///     let loss = step.model().forward(input).mean();
    ///     let gradients = step.finish(loss.backward())?;
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// while let Some(gradients) = ddp.join(&model)? {
    ///     model = optimizer.step(0.1, model, gradients);
    /// }
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// The mean is over the samples of the ranks that have some. A model whose layers communicate, such as one with
    /// [`SyncBatchNorm`](crate::SyncBatchNorm), cannot be trained so: its layers wait for all ranks, and the ranks get
    /// [`Error::Mismatch`]. Give every rank as many batches instead, as [`ShardedSampler`](crate::ShardedSampler) does.
    ///
    /// # Errors
    /// See [`step`](Self::step) and [`TrainingStep::finish`].
    #[track_caller]
    pub fn join<M: AutodiffModule<B>>(&mut self, model: &M) -> Result<Option<GradientsParams>, Error> {
        self.step(model, 0)?.end(None)
    }

    /// Sets the most bytes in a bucket of an overlapped step. Then the first step measures nothing. All ranks set the
    /// same, before the first [`step`](Self::step). A tensor of that size or more is a bucket of its own.
    pub fn set_bucket_bytes(&mut self, bytes: usize) {
        self.bucket_bytes = Some(bytes.max(1));
        self.overlap = None;
    }
}

/// A training step in progress, from [`DataParallel::step`]: run the forward and the backward pass with
/// [`model`](Self::model), then call [`finish`](Self::finish).
///
/// If it is dropped without `finish`, the group fails on all ranks, because the others wait for this rank's gradients.
/// If it is dropped by a panic, the others find this rank lost once its group is dropped too.
#[must_use = "`finish` returns the gradients, and the other ranks wait for it"]
pub struct TrainingStep<'a, B: CollectiveBackend, M> {
    model: M,
    hooked: Hooked<B>,
    guard: Guard<'a, B>,
}

/// `None` before the step and after its end, when gradients are ignored.
type Shared<B> = Arc<Mutex<Option<Pass<B>>>>;

/// Fails the groups if it is dropped before the step has ended.
struct Guard<'a, B: CollectiveBackend> {
    pass: Shared<B>,
    parallel: &'a mut DataParallel<B>,
}

impl<B: CollectiveBackend, M> TrainingStep<'_, B, M> {
    /// Returns the model for the forward pass of this step. Its parameters have the values of the model that
    /// [`DataParallel::step`] got, and hand their gradients over during the backward pass.
    ///
    /// It is for this step only. Clones of it may be used too. A [`fork`](burn::module::Module::fork), or what
    /// [`no_grad`](burn::module::Module::no_grad) returns, hands no gradients over. The gradients that `backward`
    /// returns do not contain those of the parameters: change them, for example by clipping, in what
    /// [`finish`](Self::finish) returns.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Adds gradients of earlier micro-batches to those of this step's backward pass, whose micro-batch is the last.
    /// Call it before the backward pass. `samples` of [`DataParallel::step`] are those of all micro-batches, as with
    /// [`DataParallel::sync`].
    pub fn accumulate(&self, gradients: GradientsParams) {
        if let Some(pass) = &mut *lock(&self.guard.pass) {
            pass.add_earlier(gradients);
        }
    }

    /// Ends the step after its backward pass, which has returned `gradients`: waits for the exchange and returns the
    /// mean over all ranks, bit-identical on all of them. A gradient that is missing on some ranks counts as zero
    /// there; one that is missing on all ranks stays missing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, if the ranks' parameters or settings differ, if
    /// a rank with samples has no gradients, or if it has run two backward passes; the group remains usable. Otherwise
    /// the errors of [`Group::all_reduce`](crate::Group::all_reduce), also if a rank cannot read a gradient from its
    /// device or has dropped its step. The call may have succeeded on other ranks then, which are one step ahead:
    /// continue with [`shrink`](DataParallel::shrink) or from a checkpoint.
    #[track_caller]
    pub fn finish(self, gradients: B::Gradients) -> Result<GradientsParams, Error> {
        // A hook runs once. What a second backward pass has computed stays in its gradients.
        let late = |tensor: &Arc<OnceLock<_>>| tensor.get().is_some_and(|tensor| B::grad(tensor, &gradients).is_some());
        let late = self.hooked.iter().find(|(_, tensor)| late(tensor)).map(|(id, _)| *id);
        self.end(late)?.ok_or_else(|| no_samples(OPERATION))
    }

    /// Ends the step of a rank without samples, which has run no backward pass. The other ranks' mean is its result
    /// too.
    ///
    /// # Errors
    /// See [`finish`](Self::finish).
    #[track_caller]
    pub fn skip(self) -> Result<GradientsParams, Error> {
        self.end(None)?.ok_or_else(|| no_samples(OPERATION))
    }

    /// As [`finish`](Self::finish), after a backward pass whose caller has taken these gradients of the step's model.
    #[cfg(feature = "ddp")]
    pub(super) fn finish_with(self, gradients: &GradientsParams) -> Result<GradientsParams, Error> {
        let late = self.hooked.keys().find(|id| gradients.get::<B::InnerBackend, 1>(**id).is_some()).copied();
        self.end(late)?.ok_or_else(|| no_samples(OPERATION))
    }

    /// Ends the step. `late` is a parameter with a gradient that no hook has received. `None` if no rank has samples.
    fn end(self, late: Option<ParamId>) -> Result<Option<GradientsParams>, Error> {
        let TrainingStep { model, hooked, guard } = self;
        // Their tensors share the parameters' memory, which the optimizer changes in place if it is the only owner.
        drop((model, hooked));
        let position = late.and_then(|id| guard.parallel.parameters().iter().position(|parameter| parameter.id == id));
        guard.end(position.map(Problem::Twice))
    }
}

impl<B: CollectiveBackend> Guard<'_, B> {
    /// Returns the gradients; `None` if no rank has samples.
    fn end(self, problem: Option<Problem>) -> Result<Option<GradientsParams>, Error> {
        let Some(mut pass) = lock(&self.pass).take() else {
            return Err(Error::broken(OPERATION, "the step has ended before"));
        };
        if let Some(problem) = problem {
            pass.report(problem);
        }
        let main = self.parallel.group().clone();
        let outcome = pass.finish(&main);
        let order = std::mem::take(&mut pass.order);
        let Some(overlap) = &mut self.parallel.overlap else {
            return Err(Error::broken(OPERATION, "the step's groups are gone"));
        };
        if !matches!(outcome, Ok(Ok(_))) {
            pass.reducer.forget_errors();
        }
        overlap.reducer = Some(pass.reducer);
        let lane = overlap.lane.clone();
        let ended = outcome.and_then(|ended| {
            let Ok(Some(Ended { gradients, ordered })) = ended else { return Ok(ended) };
            if let Some(leader) = ordered.filter(|_| !overlap.tuned && lane.world_size() > 1) {
                let (reducer, bytes) = (&self.parallel.reducer, self.parallel.bucket_bytes);
                overlap.buckets = tuning::tune(&lane, reducer, leader, &order, bytes)?;
                overlap.tuned = true;
            }
            Ok(Ok(Some(Ended { gradients, ordered })))
        });
        match ended {
            Ok(Ok(Some(ended))) => {
                self.parallel.steps += 1;
                Ok(Some(ended.gradients))
            }
            Ok(Ok(None)) => Ok(None),
            Ok(Err(error)) => Err(error),
            Err(error) => Err(abandon(&lane, &main, error)),
        }
    }
}

impl<B: CollectiveBackend> Drop for Guard<'_, B> {
    fn drop(&mut self) {
        let Some(pass) = lock(&self.pass).take() else { return };
        // A panic ends this rank, unless it is caught: the others find it lost, and can go on without it.
        if std::thread::panicking() {
            return;
        }
        let (lane, main) = (&pass.reducer.group, self.parallel.group());
        // A collective of the model that failed is the cause, and the other ranks must hear of it, not of this drop.
        let error = main.failure().or_else(|| lane.failure()).unwrap_or_else(|| {
            let reason = format!("rank {} has dropped its training step; it must call `finish`", main.rank());
            Error::broken(OPERATION, reason)
        });
        abandon(lane, main, error);
    }
}

/// Fails both groups, so that no rank waits for this one. Returns the first cause.
fn abandon(lane: &Group, main: &Group, error: Error) -> Error {
    let error = lane.abandon(error);
    main.abandon(error)
}
