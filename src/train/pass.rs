//! Passes, as programs see them: the models that they run, and their ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;

use super::adapter::handle;
use super::model::{InModel, Parameters};
use crate::tensor::autodiff::hook::is_tracked;
use bonfire_core::internal::{AgreedOperations, lock};
use bonfire_core::{Error, Group};
use bonfire_train::protocol::{Problem, Refusal};
use bonfire_train::step::layers::{Layers, Weight, attempt};
use bonfire_train::step::{self, Means, Outcome, PassWeight, check_loss};

/// What the program's own code returns if it fails in a pass: any error.
pub type Fault = Box<dyn std::error::Error + Send + Sync>;

/// The name of a step in errors.
pub(super) const OPERATION: &str = "training step";

/// A pass in progress that is not the last one of its step, from [`DataParallel::pass`](super::DataParallel::pass) and
/// its like: run a forward and a backward pass with [`model`](Self::model), then call [`finish`](Self::finish).
///
/// If it is dropped before its backward pass, it has not taken place. With full sharding, the groups fail on all ranks
/// then, because the others wait for this rank's parts.
#[must_use = "`finish` keeps the gradients for the last pass of the step"]
pub struct Pass<B: AutodiffBackend, M>(pub(super) Open<B, M>);

impl<B: AutodiffBackend, M> Pass<B, M> {
    /// Returns the model for this pass. Its parameters have the values of the model in training, and hand their
    /// gradients over during the backward pass.
    ///
    /// Run one backward pass over it. The gradients of a second one come too late, which is an error where `finish`
    /// gets them; it cannot know of those that a program drops. Clones of the model may be used too. A
    /// [`fork`](burn::module::Module::fork), or what [`no_grad`](burn::module::Module::no_grad) returns, hands no
    /// gradients over.
    pub fn model(&self) -> &M {
        &self.0.model
    }

    /// Ends the pass after its backward pass, which has returned `gradients`: takes those of the model in training from
    /// them. Those of inputs and of other models stay. It waits for no other rank, unless parameters are sharded, or
    /// ranks are threads and layers of the model communicate.
    ///
    /// # Errors
    /// What is wrong with the gradients is an error of the last pass, on all ranks. With full sharding: see
    /// [`LastPass::finish`].
    #[track_caller]
    pub fn finish(self, gradients: &mut B::Gradients) -> Result<(), Error> {
        let _call = self.0.engine.group().enter("Pass::finish");
        self.0.finish(gradients).map(drop)
    }

    /// As [`finish`](Self::finish), after a backward pass whose caller has taken these gradients of the pass's model,
    /// as burn-train's `TrainOutput` does. Those that have reached the model in training itself are lost then.
    ///
    /// # Errors
    /// See [`finish`](Self::finish).
    #[track_caller]
    pub fn finish_trained(self, gradients: GradientsParams) -> Result<(), Error> {
        let _call = self.0.engine.group().enter("Pass::finish_trained");
        self.0.finish_trained(gradients).map(drop)
    }
}

/// The last pass of a step in progress, from [`DataParallel::last_pass`](super::DataParallel::last_pass) and its like:
/// run a forward and a backward pass with [`model`](Self::model), then call [`finish`](Self::finish). Gradients leave
/// during the backward pass.
///
/// If it is dropped without `finish`, the group fails on all ranks, because the others wait for this rank's gradients.
/// If it is dropped by a panic, the others find this rank lost once its group is dropped too.
#[must_use = "`finish` returns the gradients, and the other ranks wait for it"]
pub struct LastPass<B: AutodiffBackend, M, G = GradientsParams> {
    pub(super) open: Open<B, M>,
    /// What the program gets of the mean gradients.
    pub(super) result: Box<dyn FnOnce(Means) -> G>,
}

impl<B: AutodiffBackend, M, G> LastPass<B, M, G> {
    /// Returns the model for this pass: see [`Pass::model`].
    pub fn model(&self) -> &M {
        &self.open.model
    }

    /// Ends the step after the backward pass, which has returned `gradients`: waits for the exchange and returns the
    /// mean over all passes and ranks, bit-identical on all of them; of sharded gradients this rank's parts. Gradients
    /// of inputs and of other models stay in `gradients`, so one backward pass may end the steps of several models.
    ///
    /// A gradient that is missing on some ranks counts as zero there; one that is missing on all ranks stays missing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, if a weight is negative or not finite, if the
    /// ranks' parameters or settings differ, if the model is not the one in training or has no trained parameters, if a
    /// rank with samples has no gradients, has run two backward passes in one pass, or has another pass of the step
    /// open; with full sharding also if it has used its part of a parameter as if it were the whole. The groups remain
    /// usable. Otherwise the errors of [`Group::all_reduce`](crate::Group::all_reduce), also if a rank cannot read a
    /// gradient from its device or has dropped its step. The call may have succeeded on other ranks then, which are one
    /// step ahead: continue with [`shrink`](super::DataParallel::shrink) or from a checkpoint.
    #[track_caller]
    pub fn finish(self, gradients: &mut B::Gradients) -> Result<G, Error> {
        let _call = self.open.engine.group().enter("LastPass::finish");
        let outcome = self.open.finish(gradients)?;
        Ok((self.result)(means(outcome)?))
    }

    /// As [`finish`](Self::finish), after a backward pass whose caller has taken these gradients of the pass's model,
    /// as burn-train's `TrainOutput` does.
    ///
    /// # Errors
    /// See [`finish`](Self::finish).
    #[track_caller]
    pub fn finish_trained(self, gradients: GradientsParams) -> Result<G, Error> {
        let _call = self.open.engine.group().enter("LastPass::finish_trained");
        let outcome = self.open.finish_trained(gradients)?;
        Ok((self.result)(means(outcome)?))
    }

    /// As [`finish`](Self::finish), without a backward pass, in a pass of weight 0. If one backward pass ends the steps
    /// of several models, a rank without samples begins the last pass of each, as the others do, and then skips each.
    /// With full sharding such a rank runs both passes instead, with any batch.
    ///
    /// # Errors
    /// See [`finish`](Self::finish).
    #[track_caller]
    pub fn skip(self) -> Result<G, Error> {
        let _call = self.open.engine.group().enter("LastPass::skip");
        let outcome = self.open.end(Vec::new(), None)?;
        Ok((self.result)(means(outcome)?))
    }
}

/// Returns the means of a step that has ended.
pub(super) fn means(outcome: Option<Outcome>) -> Result<Means, Error> {
    match outcome {
        Some(Outcome::Gradients(means)) => Ok(means),
        Some(Outcome::NoSamples) => Err(Refusal::NoSamples.error(OPERATION, &[])),
        None => Err(Error::broken(OPERATION, "its last pass has no outcome")),
    }
}

/// What stands for a parameter in the graph once a pass has used it: a leaf of the pass's own, and that leaf with a
/// hook. burn-autodiff 0.21 may free a leaf while another thread's backward pass ends, so both live until that of the
/// pass has returned.
pub(super) struct Node<B: AutodiffBackend> {
    /// The last one is in use.
    made: Mutex<Vec<[FloatTensor<B>; 2]>>,
    /// Whether a backward pass has used up the last one.
    used_up: AtomicBool,
}

impl<B: AutodiffBackend> Node<B> {
    /// Returns the leaf with a hook, which is made unless there is one that is not used up.
    pub fn hooked(&self, make: impl FnOnce() -> [FloatTensor<B>; 2]) -> FloatTensor<B> {
        let mut made = lock(&self.made);
        // Relaxed: a program that uses a model on two threads orders them.
        if made.is_empty() || self.used_up.swap(false, Ordering::Relaxed) {
            made.push(make());
        }
        made.last().map(|[_, hooked]| hooked.clone()).unwrap_or_else(|| unreachable!("one was just made"))
    }

    /// Says that a backward pass has used up the node.
    pub fn use_up(&self) {
        self.used_up.store(true, Ordering::Relaxed);
    }

    /// Whether `gradients` has one that no hook has received. A hook runs once, so a second backward pass has left it.
    fn is_left_in(&self, gradients: &mut B::Gradients) -> bool {
        lock(&self.made).iter().any(|[_, hooked]| B::grad_remove(hooked, gradients).is_some())
    }
}

impl<B: AutodiffBackend> Default for Node<B> {
    fn default() -> Self {
        Node { made: Mutex::default(), used_up: AtomicBool::new(false) }
    }
}

/// The nodes of a pass, by position.
pub(super) type Nodes<B> = Vec<Arc<Node<B>>>;

/// A pass in progress.
pub(super) struct Open<B: AutodiffBackend, M> {
    pub model: M,
    pub engine: Box<dyn step::Pass>,
    /// What the loss is a mean over, for layers that communicate in the backward pass.
    pub weight: Weight,
    pub nodes: Nodes<B>,
    /// What the model in training has.
    pub own: InModel<B>,
    pub parameters: Parameters<B>,
    pub layers: Layers,
    /// If layers of the model communicate, the ranks wait for each other here at the end of the pass.
    pub barrier: Option<Group>,
}

impl<B: AutodiffBackend, M> Open<B, M> {
    /// Says what the loss is a mean over.
    pub fn weigh(self, weight: f64) -> Result<Self, Error> {
        self.weight.set(weight);
        self.engine.set_weight(weight)?;
        Ok(self)
    }

    fn finish(self, gradients: &mut B::Gradients) -> Result<Option<Outcome>, Error> {
        let left = self.nodes.iter().position(|node| node.is_left_in(gradients));
        let mut problem = left.map(Problem::Twice);
        if self.own.unknown.iter().any(|tensor| B::grad_remove(tensor, gradients).is_some()) {
            problem.get_or_insert(Problem::Unknown);
        }
        let own = self.own.values.iter().enumerate();
        let direct = own.filter_map(|(position, tensor)| {
            let gradient = B::grad_remove(tensor.as_ref()?, gradients)?;
            Some((position, handle::<B::InnerBackend>(gradient)))
        });
        let direct = direct.collect();
        self.end(direct, problem)
    }

    fn finish_trained(self, gradients: GradientsParams) -> Result<Option<Outcome>, Error> {
        let (left, _) = self.parameters.take(gradients);
        let problem = left.first().map(|(position, _)| Problem::Twice(*position));
        self.end(Vec::new(), problem)
    }

    /// Ends the pass. Its tensors share the parameters' memory, which the optimizer changes in place if it is the only
    /// owner, so they are dropped.
    fn end(
        self,
        direct: Vec<(usize, bonfire_train::lane::Tensor)>,
        problem: Option<Problem>,
    ) -> Result<Option<Outcome>, Error> {
        let Open { engine, layers, barrier, .. } = self;
        let outcome = engine.finish(direct, problem)?;
        barrier.filter(|_| layers.communicate()).map_or(Ok(()), |group| group.barrier())?;
        Ok(outcome)
    }
}

/// A form of training, for what all forms have in common.
pub(super) trait Form<B: AutodiffBackend> {
    /// Begins a pass, whose weight is not known.
    fn begin<M: AutodiffModule<B>>(&self, model: &M, is_last: bool) -> Result<Open<B, M>, Error>;

    /// Makes a step, or what is left of it, without a pass of this rank.
    fn skip<M: AutodiffModule<B>>(&self, model: &M) -> Result<Outcome, Error>;

    /// Makes a step with a pass for each batch. `loss` returns the loss and what it is a mean over. A collective of the
    /// model that fails is an error here.
    fn run<M: AutodiffModule<B>, T, W: PassWeight>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        mut loss: impl FnMut(&M, T) -> Result<(Tensor<B, 1>, W), Fault>,
    ) -> Result<Means, Error> {
        let mut batches = batches.into_iter().peekable();
        while let Some(batch) = batches.next() {
            let open = self.begin(model, batches.peek().is_none())?;
            let returned = attempt(|| loss(&open.model, batch))?.and_then(|(loss, weight)| {
                check_loss(loss.dims()[0])?;
                Ok((loss, weight))
            });
            let outcome = match returned {
                Ok((loss, weight)) => {
                    let open = open.weigh(weight.value())?;
                    // burn panics in the backward pass of a loss that depends on nothing that is trained.
                    match is_tracked::<B>(loss.clone().into_primitive().tensor()) {
                        true => open.finish(&mut attempt(|| loss.backward())?)?,
                        false => open.end(Vec::new(), None)?,
                    }
                }
                Err(fault) => match open.engine.fail(fault.to_string(), open.layers.communicate())? {
                    None => self.begin(model, true)?.engine.fail(fault.to_string(), false)?,
                    outcome => outcome,
                },
            };
            if outcome.is_some() {
                return means(outcome);
            }
        }
        self.skip(model).and_then(|outcome| means(Some(outcome)))
    }
}
