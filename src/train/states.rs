//! States that ranks keep for themselves while they train.

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData};

use bonfire_core::{Error, Group, ReduceOp};

/// The model with the mean over all ranks of every float parameter that needs no gradient and differs between ranks.
pub(crate) fn average<B: AutodiffBackend, M: AutodiffModule<B>>(group: &Group, model: M) -> Result<M, Error> {
    // The last update of a running state is pending until the next one; this writes it to the value, in `model` too.
    drop(model.valid());
    let mut states = States::default();
    model.visit(&mut states);

    // All floats fit in f64, so the comparison is exact, and so is the mean up to the last rounding.
    let mut first = states.values.clone();
    group.broadcast(&mut first, 0)?;
    let mut start = 0;
    let mut differs = Vec::with_capacity(states.lens.len());
    for &len in &states.lens {
        let bits = |values: &[f64]| values[start..start + len].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        differs.push(u8::from(bits(&states.values) != bits(&first)));
        start += len;
    }
    group.all_reduce(&mut differs, ReduceOp::Max)?;
    group.all_reduce(&mut states.values, ReduceOp::Mean)?;
    Ok(model.map(&mut Write { differs: differs.into_iter(), means: &states.values }))
}

/// The float parameters that need no gradient, in visiting order.
#[derive(Default)]
struct States {
    lens: Vec<usize>,
    values: Vec<f64>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for States {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !param.is_require_grad() {
            let data = param.val().inner().into_data();
            self.lens.push(data.num_elements());
            self.values.extend(data.iter::<f64>());
        }
    }
}

/// Writes the means of those that differ, in the order of [`States`].
struct Write<'a> {
    differs: std::vec::IntoIter<u8>,
    means: &'a [f64],
}

impl<B: AutodiffBackend> ModuleMapper<B> for Write<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if param.is_require_grad() {
            return param;
        }
        let (means, rest) = self.means.split_at(param.shape().num_elements());
        self.means = rest;
        if self.differs.next() != Some(1) {
            return param;
        }
        param.map(|tensor| {
            let data = TensorData::new(means.to_vec(), tensor.shape()).convert_dtype(tensor.dtype());
            Tensor::from_data(data, (&tensor.device(), tensor.dtype()))
        })
    }
}
