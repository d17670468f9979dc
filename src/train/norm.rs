//! What looks at the gradients of a step as a whole: their norm, and whether they are finite.

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;

use super::adapter::{handle, scaled};
use super::replicas::Replicas;
use super::{DataParallel, FullyShardedParallel};
use bonfire_core::Error;

impl<B: AutodiffBackend> DataParallel<B> {
    /// Leaves out each step in which a gradient of any rank is not finite, on all ranks alike: the step returns no
    /// gradients, so that an optimizer changes nothing, and rank 0 logs the parameter and the rank. Passes of a rank
    /// count together. A gradient with a sum of elements that overflows is not finite either. It costs a pass over the
    /// gradients. All ranks call it before the next step of this `DataParallel`, or of a
    /// [`ShardedOptimizer`](crate::ShardedOptimizer) for it.
    pub fn skip_non_finite(&mut self) {
        self.replicas.steps.skip_non_finite();
    }

    /// Returns the norm of the mean gradients of a step: the square root of the sum of the squares of all elements, as
    /// on one rank. It is computed in f64, but on collective devices the squares of one gradient are added in its own
    /// type, or in f32 if that is narrower. All ranks must call it, after which they have the same bits.
    ///
    /// # Errors
    /// [`Error::Io`] if a gradient cannot be read. Otherwise the errors of [`Group::broadcast`](crate::Group).
    #[track_caller]
    pub fn norm(&self, gradients: &GradientsParams) -> Result<f64, Error> {
        let Replicas { steps, parameters, .. } = &self.replicas;
        let gradients = parameters.iter().enumerate().map(|(position, parameter)| {
            let gradient = parameters.gradient(gradients, position)?;
            Some((handle::<B::InnerBackend>(gradient), parameter.element))
        });
        let squares = steps.groups().squares(&**steps.tensors(), gradients.collect())?;
        Ok(squares.into_iter().sum::<f64>().sqrt())
    }

    /// Scales the mean gradients of a step down to norm `max` if their [norm](Self::norm) exceeds it, as
    /// [`Parts::clip_norm`](crate::Parts::clip_norm) does. To clip each gradient by its own norm, or each element, set
    /// the optimizer's `grad_clipping`.
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
    /// # let (mut model, ddp) = DataParallel::new(group, linear)?;
    /// # let mut optimizer = SgdConfig::new().init();
    /// # let input = Tensor::<_, 2>::ones([3, 2], &device);
    /// let gradients = ddp.run(&model, [input], |model, input| (model.forward(input).mean(), 3))?;
    /// model = optimizer.step(0.1, model, ddp.clip_norm(gradients, 1.0)?);
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks unless `max` is greater than 0, finite, and the same on all; the group
    /// remains usable. Otherwise those of `norm`.
    #[track_caller]
    pub fn clip_norm(&self, mut gradients: GradientsParams, max: f64) -> Result<GradientsParams, Error> {
        let Replicas { steps, parameters, .. } = &self.replicas;
        steps.groups().check_limit("clip_norm", max)?;
        let norm = self.norm(&gradients)?;
        if norm > max {
            parameters.map_gradients(&mut gradients, |gradient| scaled::<B::InnerBackend>(gradient, max / norm));
        }
        Ok(gradients)
    }
}

impl<B: AutodiffBackend> FullyShardedParallel<B> {
    /// Leaves out each step in which a gradient of any rank is not finite: see
    /// [`DataParallel::skip_non_finite`](crate::DataParallel::skip_non_finite). All ranks call it.
    pub fn skip_non_finite(self) -> Self {
        self.steps.skip_non_finite();
        self
    }
}
