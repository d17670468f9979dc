//! Gradients of several iterations, which one step of the optimizer uses.
//!
//! burn adds up the gradients of the batches that it accumulates. Here each iteration contributes the mean over the
//! samples of all ranks, and all are exchanged together, with the weights of the last one. So a rank's gradients of
//! earlier iterations are multiplied by its share of the samples then, and divided by its share now. All factors are 1
//! as long as the ranks' batches have equally many samples.

use burn::module::AutodiffModule;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};

use super::iteration::Iteration;
use crate::train::agree::Parameter;
use crate::train::bucket::scale_tensor;

/// The iterations since the last step of the optimizer.
pub(super) struct Accumulation<M> {
    gradients: GradientsAccumulator<M>,
    iterations: usize,
    /// Whether each rank had a batch in one of them.
    present: Vec<bool>,
}

/// How a rank exchanges what it has accumulated, together with the gradients of its last batch.
pub(super) struct Exchange {
    pub earlier: GradientsParams,
    /// The rank's samples for [`DataParallel::step`](crate::DataParallel::step).
    pub samples: usize,
    /// The factor of the result.
    pub factor: f64,
}

impl<M> Accumulation<M> {
    pub fn new(world_size: usize) -> Accumulation<M> {
        Accumulation { gradients: GradientsAccumulator::new(), iterations: 0, present: vec![false; world_size] }
    }

    /// Counts an iteration. Returns whether it is the last of so many.
    pub fn ends_with_next(&mut self, iterations: usize) -> bool {
        self.iterations += 1;
        iterations <= self.iterations
    }

    /// Adds an iteration that is not the last, with the gradients of this rank's batch.
    pub fn add<B: AutodiffBackend>(
        &mut self,
        rank: usize,
        iteration: &Iteration,
        gradients: Option<(&M, GradientsParams)>,
        parameters: &[Parameter<B>],
    ) where
        M: AutodiffModule<B>,
    {
        self.present.iter_mut().zip(&iteration.weights).for_each(|(present, weight)| *present |= *weight > 0);
        if let Some((model, gradients)) = gradients {
            let total: u64 = iteration.weights.iter().sum();
            let factor = (iteration.weights[rank] * iteration.weights.len() as u64) as f64 / total as f64;
            self.gradients.accumulate(model, scaled(gradients, parameters, factor));
        }
    }

    /// Takes what has accumulated before this iteration, which is the last.
    pub fn exchange<B: AutodiffBackend>(
        &mut self,
        rank: usize,
        iteration: &Iteration,
        parameters: &[Parameter<B>],
    ) -> Exchange {
        let (weights, earlier) = (&iteration.weights, self.gradients.grads());
        // A rank whose data has ended in between still has a part in the exchange, which the factor takes away from the
        // others' shares again.
        let samples = |rank: usize| if weights[rank] == 0 { u64::from(self.present[rank]) } else { weights[rank] };
        let total: u64 = weights.iter().sum();
        let exchanged: u64 = (0..weights.len()).map(samples).sum();
        let own = samples(rank);
        let earlier = scaled(earlier, parameters, total as f64 / (own.max(1) * weights.len() as u64) as f64);
        self.present.fill(false);
        self.iterations = 0;
        Exchange { earlier, samples: own as usize, factor: exchanged as f64 / total as f64 }
    }
}

/// Returns the gradients of these parameters times `factor`.
pub(super) fn scaled<B: AutodiffBackend>(
    mut gradients: GradientsParams,
    parameters: &[Parameter<B>],
    factor: f64,
) -> GradientsParams {
    if factor == 1.0 {
        return gradients;
    }
    for parameter in parameters {
        // Gradients are stored without their number of dimensions.
        if let Some(gradient) = gradients.remove::<B::InnerBackend, 1>(parameter.id) {
            let gradient = gradient.into_primitive().tensor();
            let scaled = scale_tensor::<B::InnerBackend>(gradient, parameter.element, factor);
            let scaled = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(scaled));
            gradients.register(parameter.id, scaled);
        }
    }
    gradients
}
