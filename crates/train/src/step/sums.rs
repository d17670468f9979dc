//! The gradients of the passes of a step on one rank.
//!
//! A rank's gradient is the mean over its passes, each with its weight. Sums of 16-bit gradients are kept in f32.

use std::sync::Arc;

use super::model::Model;
use crate::lane::Tensor;
use bonfire_core::DType;

/// The weighted sum of the gradients of passes that have ended.
pub(crate) struct Sums {
    model: Arc<Model>,
    /// By position.
    sums: Vec<Option<Tensor>>,
    /// The weights of these passes.
    pub weight: f64,
}

impl Sums {
    pub fn new(model: Arc<Model>) -> Sums {
        Sums { sums: model.parameters.iter().map(|_| None).collect(), model, weight: 0.0 }
    }

    /// Adds the gradients of a pass.
    pub fn add(&mut self, gradients: Vec<Option<Tensor>>, weight: f64) {
        self.weight += weight;
        for (position, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                self.add_one(position, gradient, weight);
            }
        }
    }

    /// Adds a gradient of a pass whose weight was counted.
    fn add_one(&mut self, position: usize, gradient: Tensor, weight: f64) {
        let tensors = &self.model.tensors;
        let weighted = tensors.scale(self.widen(position, gradient), self.wide(position), weight);
        self.sums[position] = Some(match self.sums[position].take() {
            Some(sum) => tensors.add(sum, weighted),
            None => weighted,
        });
    }

    /// Returns the mean of a gradient over all passes of this rank, of which the last one has this gradient, if it has
    /// any, and this weight.
    pub fn mean(&mut self, position: usize, last: Option<Tensor>, weight: f64) -> Option<Tensor> {
        let total = self.weight + weight;
        // A single pass is its own mean, with all its bits.
        if self.weight == 0.0 && self.sums[position].is_none() {
            return last;
        }
        if let Some(last) = last {
            self.add_one(position, last, weight);
        }
        let sum = self.sums[position].take()?;
        let (tensors, wide) = (&self.model.tensors, self.wide(position));
        let mean = tensors.scale(sum, wide, 1.0 / total);
        let dtype = self.model.parameters[position].dtype;
        Some(if wide == dtype { mean } else { tensors.cast(position, mean, dtype) })
    }

    /// The element type in which sums are kept.
    fn wide(&self, position: usize) -> DType {
        match self.model.parameters[position].dtype {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        }
    }

    fn widen(&self, position: usize, tensor: Tensor) -> Tensor {
        let wide = self.wide(position);
        if wide == self.model.parameters[position].dtype {
            tensor
        } else {
            self.model.tensors.cast(position, tensor, wide)
        }
    }
}
