//! Gradients of which each rank has a part.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use burn::grad_clipping::GradientClipping;
use burn::module::ParamId;
use burn::optim::{GradientsParams, ModuleOptimizer};

use super::adapter::{handle, opened, scaled};
use super::model::Parameters;
use super::slices::check_elementwise;
use bonfire_core::Error;
use bonfire_core::internal::{AgreedOperations, lock};
use bonfire_train::lane::Tensors;
use bonfire_train::shards::{Cut, Layout};
use bonfire_train::step::{Groups, Means};

/// The mean gradients of a step, of which this rank has parts: what a step of a sharded training returns. All ranks
/// call their methods alike.
///
/// A rank's part of a gradient cannot be clipped by a norm by itself. So norms and clipping are here, and mean what
/// they mean for whole gradients.
#[must_use = "an optimizer updates the model with them"]
pub struct Parts {
    /// This rank's parts, by position. `None` where no rank has a gradient, and where this rank has no part.
    pub(super) gradients: Vec<Option<DispatchTensor>>,
    /// By position, whether any rank has a gradient.
    pub(super) exists: Vec<bool>,
    pub(super) of: Arc<Sharded>,
}

/// What gradients are parts of.
pub(super) struct Sharded {
    pub groups: Groups,
    pub parameters: Parameters,
    pub tensors: Arc<dyn Tensors>,
    pub layout: Arc<Layout>,
    /// The optimizers that were tried, by their places in memory, and for which parameters.
    pub tried: Mutex<HashSet<(usize, usize)>>,
}

impl Parts {
    pub(super) fn new(means: Means, of: Arc<Sharded>) -> Parts {
        let gradients = means.gradients.into_iter().map(|part| part.map(opened));
        Parts { gradients: gradients.collect(), exists: means.exists, of }
    }

    /// Returns the norm of all gradients, over all ranks. It is computed in f64.
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
        Ok(self.map(|_, part| if norm > max { scaled(part, max / norm) } else { part }))
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
            norm if norm > max => scaled(part, max / norm),
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
        Ok(self.map(|_, part| Dispatch::float_clamp(part, (-max).into(), max.into())))
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
    /// The first call for an optimizer tries it, in the place of each parameter. An optimizer is known by its place in
    /// memory: another one that takes this place later is not tried.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks for an optimizer that mixes the elements of a parameter, such as `Muon`,
    /// and for parts of a sharded optimizer. Otherwise those of [`clip_norm`](Self::clip_norm).
    #[track_caller]
    pub fn for_optimizer(self, optimizer: &ModuleOptimizer) -> Result<GradientsParams, Error> {
        let _call = self.of.groups.main.enter("Parts::for_optimizer");
        if self.of.layout.cut == Cut::Slices {
            let reason = "the gradients are parts for a sharded optimizer; pass them to its `step`";
            return Err(Error::argument("for_optimizer", reason));
        }
        // All ranks have tried the same ones.
        for position in (0..self.exists.len()).filter(|position| self.exists[*position]) {
            let key = (std::ptr::from_ref(optimizer).addr(), position);
            if !lock(&self.of.tried).contains(&key) {
                check_elementwise("for_optimizer", optimizer, &self.of.parameters[position])?;
                lock(&self.of.tried).insert(key);
            }
        }
        let Parts { gradients, exists, of } = self.clipped_for(optimizer)?;
        let gradients = gradients.into_iter().map(|part| part.map(handle)).collect();
        Ok(of.parameters.means(Means { gradients, exists }))
    }

    /// Clips by norm as the optimizer is set to. Then its own clipping, by the norm of a part, changes nothing.
    #[track_caller]
    pub(super) fn clipped_for(self, optimizer: &ModuleOptimizer) -> Result<Self, Error> {
        match optimizer.grad_clipping() {
            Some(GradientClipping::Norm(max)) => self.clip_each_norm(f64::from(*max)),
            _ => Ok(self),
        }
    }

    /// Returns the sum of the squares of each gradient, by position.
    #[track_caller]
    fn squares(&self) -> Result<Vec<f64>, Error> {
        let parts = self.gradients.iter().enumerate();
        let parts =
            parts.map(|(position, part)| Some((handle(part.clone()?), self.of.parameters[position].spec.carrier)));
        self.of.groups.squares(&*self.of.tensors, parts.collect())
    }

    fn map(mut self, f: impl Fn(usize, DispatchTensor) -> DispatchTensor) -> Self {
        for (position, part) in self.gradients.iter_mut().enumerate() {
            *part = part.take().map(|part| f(position, part));
        }
        self
    }
}
