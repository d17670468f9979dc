//! Finds gradients that are not finite before they spoil the mean of all ranks.

use std::sync::Arc;

use super::model::Model;
use crate::lane::Tensor;
use crate::protocol::Problem;
use bonfire_core::{DType, Error};

/// The sums of a rank's gradients in a step: the sum of elements is finite only if all of them are.
pub(crate) struct Finite {
    model: Arc<Model>,
    /// With the positions. They are read one by one only if a total is not finite.
    sums: Vec<(usize, Tensor)>,
    /// Of the sums in f32, and of those in f64.
    totals: [Option<Tensor>; 2],
}

impl Finite {
    pub fn new(model: Arc<Model>) -> Finite {
        Finite { model, sums: Vec::new(), totals: [None, None] }
    }

    /// Adds a gradient. It waits for nothing.
    pub fn add(&mut self, position: usize, gradient: &Tensor) {
        let (parameter, tensors) = (&self.model.parameters[position], &self.model.tensors);
        if parameter.elements() == 0 {
            return;
        }
        let sum = tensors.sum(gradient.clone(), parameter.dtype);
        let total = &mut self.totals[usize::from(parameter.dtype == DType::F64)];
        *total = Some(match total.take() {
            Some(total) => tensors.add(total, sum.clone()),
            None => sum.clone(),
        });
        self.sums.push((position, sum));
    }

    /// Returns the lowest position of a gradient whose sum is not finite.
    ///
    /// # Errors
    /// [`Error::Io`] if a sum cannot be read.
    pub fn problem(&self) -> Result<Option<Problem>, Error> {
        let mut all = true;
        for total in self.totals.iter().flatten() {
            all &= self.is_finite(total)?;
        }
        let mut first: Option<usize> = None;
        for (position, sum) in self.sums.iter().filter(|_| !all) {
            if first.is_none_or(|first| *position < first) && !self.is_finite(sum)? {
                first = Some(*position);
            }
        }
        Ok(first.map(Problem::NotFinite))
    }

    fn is_finite(&self, sum: &Tensor) -> Result<bool, Error> {
        let elements = self.model.tensors.read(sum.clone()).wait()?;
        let bytes = elements.bytes();
        let narrow = bytes.try_into().map(|bytes| f32::from_ne_bytes(bytes).is_finite());
        let wide = || bytes.try_into().map(|bytes| f64::from_ne_bytes(bytes).is_finite());
        narrow.or_else(|_| wide()).map_err(|_| Error::broken("checking gradients", "a sum is not one element"))
    }
}
