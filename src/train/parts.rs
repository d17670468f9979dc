//! Gradients of which each rank has a part.

use std::any::{TypeId, type_name};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use burn::grad_clipping::GradientClipping;
use burn::module::{AutodiffModule, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, SimpleOptimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Tensor, TensorPrimitive};

use super::adapter::{flat, handle, opened, scaled};
use super::model::Parameters;
use bonfire_core::Error;
use bonfire_core::internal::{AgreedOperations, lock};
use bonfire_train::lane::Tensors;
use bonfire_train::shards::{Cut, Layout};
use bonfire_train::step::{Groups, Means};

/// The mean gradients of a step with sharded parameters ([`FullyShardedParallel`](crate::FullyShardedParallel)) or a
/// sharded optimizer ([`ShardedOptimizer`](crate::ShardedOptimizer)): this rank's part of each.
///
/// An optimizer that gets parts must treat each element by itself, and what looks at a whole gradient must look at all
/// ranks' parts. So parts are clipped here, and reach an optimizer by [`for_optimizer`](Self::for_optimizer), or by
/// [`ShardedOptimizer::step`](crate::ShardedOptimizer::step): both clip as the optimizer is set to, and refuse one that
/// mixes the elements of a parameter.
///
/// All ranks make the same calls in the same order.
#[must_use = "an optimizer updates the model with them"]
pub struct Parts<B: AutodiffBackend> {
    /// By position. `None` where no rank has a gradient, and where this rank has no part.
    pub(super) gradients: Vec<Option<FloatTensor<B::InnerBackend>>>,
    /// By position, whether any rank has a gradient.
    pub(super) exists: Vec<bool>,
    pub(super) of: Arc<Sharded<B>>,
}

/// Which parameters have parts, and where.
pub(super) struct Sharded<B: AutodiffBackend> {
    pub groups: Groups,
    pub parameters: Parameters<B>,
    pub tensors: Arc<dyn Tensors>,
    pub layout: Arc<Layout>,
}

impl<B: AutodiffBackend> Parts<B> {
    pub(super) fn new(means: Means, of: Arc<Sharded<B>>) -> Parts<B> {
        let gradients = means.gradients.into_iter().map(|part| part.map(opened::<B::InnerBackend>));
        Parts { gradients: gradients.collect(), exists: means.exists, of }
    }

    /// Returns the norm of all gradients, over all ranks. It is computed in f64, but on collective devices the squares
    /// of one part are added in its own type, or in f32 if that is narrower.
    ///
    /// # Errors
    /// [`Error::Io`] if a gradient cannot be read. Otherwise the errors of [`Group::all_gather`](crate::Group).
    #[track_caller]
    pub fn norm(&self) -> Result<f64, Error> {
        let _call = self.of.groups.main.enter("Parts::norm");
        Ok(self.squares()?.into_iter().sum::<f64>().sqrt())
    }

    /// Scales all gradients down to norm `max` if their [norm](Self::norm) exceeds it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks unless `max` is greater than 0, finite, and the same on all; the groups
    /// remain usable. Otherwise those of [`norm`](Self::norm).
    #[track_caller]
    pub fn clip_norm(self, max: f64) -> Result<Self, Error> {
        let _call = self.of.groups.main.enter("Parts::clip_norm");
        self.of.groups.check_limit("clip_norm", max)?;
        let norm = self.norm()?;
        Ok(self.map(|_, part| if norm > max { scaled::<B::InnerBackend>(part, max / norm) } else { part }))
    }

    /// Scales each gradient whose norm exceeds `max` down to it, as burn's `GradientClippingConfig::Norm` does.
    ///
    /// # Errors
    /// See [`clip_norm`](Self::clip_norm).
    #[track_caller]
    pub fn clip_each_norm(self, max: f64) -> Result<Self, Error> {
        let _call = self.of.groups.main.enter("Parts::clip_each_norm");
        self.of.groups.check_limit("clip_each_norm", max)?;
        let squares = self.squares()?;
        Ok(self.map(|position, part| match squares[position].sqrt() {
            norm if norm > max => scaled::<B::InnerBackend>(part, max / norm),
            _ => part,
        }))
    }

    /// Limits each element to `-max..=max`, as burn's `GradientClippingConfig::Value` does.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: see [`clip_norm`](Self::clip_norm).
    #[track_caller]
    pub fn clip_values(self, max: f64) -> Result<Self, Error> {
        let _call = self.of.groups.main.enter("Parts::clip_values");
        self.of.groups.check_limit("clip_values", max)?;
        Ok(self.map(|_, part| B::InnerBackend::float_clamp(part, (-max).into(), max.into())))
    }

    /// Splits them for two optimizers of one model: those of parameters for which `first` returns true, and the rest.
    pub fn split(self, first: impl Fn(ParamId) -> bool) -> (Self, Self) {
        let Parts { gradients, exists, of } = self;
        let is_first: Vec<bool> = of.parameters.iter().map(|parameter| first(parameter.id)).collect();
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for (part, is_first) in gradients.into_iter().zip(&is_first) {
            let (own, none) = if *is_first { (&mut one, &mut other) } else { (&mut other, &mut one) };
            own.push(part);
            none.push(None);
        }
        let exists =
            |side: bool| exists.iter().zip(&is_first).map(|(exists, first)| *exists && *first == side).collect();
        (
            Parts { gradients: one, exists: exists(true), of: of.clone() },
            Parts { gradients: other, exists: exists(false), of: of.clone() },
        )
    }

    /// Returns the gradients for a step of this optimizer on a model of parts, that of a
    /// [`FullyShardedParallel`](crate::FullyShardedParallel). If the optimizer clips by norm, they are clipped by the
    /// norms of whole gradients.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks for an optimizer that mixes the elements of a parameter, such as `Muon`,
    /// and for parts of a sharded optimizer. Otherwise those of [`clip_norm`](Self::clip_norm).
    #[track_caller]
    pub fn for_optimizer<M, O>(self, optimizer: &OptimizerAdaptor<O, M, B>) -> Result<GradientsParams, Error>
    where
        M: AutodiffModule<B>,
        O: SimpleOptimizer<B::InnerBackend> + 'static,
    {
        let _call = self.of.groups.main.enter("Parts::for_optimizer");
        if self.of.layout.cut == Cut::Slices {
            let reason = "the gradients are parts for a sharded optimizer; pass them to its `step`";
            return Err(Error::argument("for_optimizer", reason));
        }
        let Parts { gradients, of, .. } = self.clipped_for("for_optimizer", optimizer)?;
        let parts = gradients.into_iter().enumerate();
        Ok(of.parameters.gradients(parts.filter_map(|(position, part)| Some((position, part?)))))
    }

    /// Clips by norm as the optimizer is set to.
    #[track_caller]
    pub(super) fn clipped_for<M, O>(self, operation: &str, optimizer: &OptimizerAdaptor<O, M, B>) -> Result<Self, Error>
    where
        M: AutodiffModule<B>,
        O: SimpleOptimizer<B::InnerBackend> + 'static,
    {
        if let Some(parameter) = self.of.parameters.first() {
            check_elementwise(operation, optimizer.optim(), &parameter.device)?;
        }
        match optimizer.grad_clipping() {
            Some(GradientClipping::Norm(max)) => self.clip_each_norm(f64::from(*max)),
            _ => Ok(self),
        }
    }

    /// Returns the sum of the squares of each gradient, by position.
    #[track_caller]
    fn squares(&self) -> Result<Vec<f64>, Error> {
        let parts = self.gradients.iter().enumerate();
        let parts = parts.map(|(position, part)| {
            Some((handle::<B::InnerBackend>(part.clone()?), self.of.parameters[position].element))
        });
        self.of.groups.squares(&*self.of.tensors, parts.collect())
    }

    fn map(mut self, f: impl Fn(usize, FloatTensor<B::InnerBackend>) -> FloatTensor<B::InnerBackend>) -> Self {
        for (position, part) in self.gradients.iter_mut().enumerate() {
            *part = part.take().map(|part| f(position, part));
        }
        self
    }
}

/// Fails if an optimizer's update of a slice is not the slice of its update. It updates twelve elements, twice, as a
/// whole and in two slices: an optimizer that looks at a whole parameter, such as LAMB or Muon, computes other values.
/// The outcome for a type of optimizer is kept.
pub(super) fn check_elementwise<I: Backend, O: SimpleOptimizer<I> + 'static>(
    operation: &str,
    optimizer: &O,
    device: &I::Device,
) -> Result<(), Error> {
    static ELEMENTWISE: Mutex<Option<HashSet<TypeId>>> = Mutex::new(None);
    let id = TypeId::of::<O>();
    if lock(&ELEMENTWISE).get_or_insert_default().contains(&id) {
        return Ok(());
    }
    let wave = |factor: f32| {
        let values: Vec<f32> = (0..12).map(|i| (factor * i as f32).sin()).collect();
        Tensor::<I, 1>::from_floats(&values[..], device).reshape([4, 3])
    };
    let (values, gradients) = (wave(0.7), wave(1.3));
    let updated = |rows: std::ops::Range<usize>| {
        let (mut own, gradients) = (values.clone().slice([rows.clone()]), gradients.clone().slice([rows]));
        let mut state = None;
        for _ in 0..2 {
            (own, state) = optimizer.step(0.1, own, gradients.clone(), state);
        }
        own
    };
    let difference = Tensor::cat(vec![updated(0..1), updated(1..4)], 0) - updated(0..4);
    let difference = flat::<I>(difference.into_primitive().tensor()).abs().max();
    let difference = difference.try_into_data().map_err(|e| Error::io("trying an optimizer on slices", e))?;
    if difference.iter::<f64>().all(|difference| difference < 1e-3) {
        lock(&ELEMENTWISE).get_or_insert_default().insert(id);
        return Ok(());
    }
    let name = type_name::<O>().split('<').next().and_then(|name| name.rsplit("::").next()).unwrap_or("it");
    let reason = format!(
        "`{name}` updates an element by others of its parameter, and a rank has a part only; give these parameters an \
         optimizer that treats each element by itself, such as `AdamW` (`Parts::split`), or train them with \
         `DataParallel`, where every rank updates whole ones"
    );
    Err(Error::argument(operation, reason))
}

/// Returns a tensor of one dimension as the primitive that it is.
pub(super) fn primitive<I: Backend, const D: usize>(tensor: Tensor<I, D>) -> FloatTensor<I> {
    match tensor.into_primitive() {
        TensorPrimitive::Float(tensor) => tensor,
        quantized => quantized.tensor(),
    }
}
