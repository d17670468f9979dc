//! Averages model states that differ between ranks, such as running statistics.

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData};

use bonfire_core::{Error, Group, ReduceOp};

/// Replaces every float parameter that needs no gradient and differs between ranks by the mean over all ranks.
/// `is_whole` tells whether the ranks have the whole parameter: each may have a part.
#[track_caller]
pub(crate) fn average<B: AutodiffBackend, M: AutodiffModule<B>>(
    group: &Group,
    model: M,
    is_whole: impl Fn(ParamId) -> bool,
) -> Result<M, Error> {
    // A running state's last update is pending until the next one. `valid` writes it to the value, in `model` too.
    drop(model.valid());
    let mut states = States { is_whole: &is_whole, lens: Vec::new(), values: Vec::new() };
    model.visit(&mut states);

    // f64 represents all float types exactly, so the comparison is exact, and the mean is exact up to rounding.
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
    Ok(model.map(&mut MeanWriter { is_whole: &is_whole, differs: differs.into_iter(), means: &states.values }))
}

/// The float parameters that need no gradient, in visiting order.
struct States<'a, W> {
    is_whole: &'a W,
    lens: Vec<usize>,
    values: Vec<f64>,
}

impl<B: AutodiffBackend, W: Fn(ParamId) -> bool> ModuleVisitor<B> for States<'_, W> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !param.is_require_grad() && (self.is_whole)(param.id) {
            let data = param.val().inner().into_data();
            self.lens.push(data.num_elements());
            self.values.extend(data.iter::<f64>());
        }
    }
}

/// Writes the means of the parameters that differ, in the order of [`States`].
struct MeanWriter<'a, W> {
    is_whole: &'a W,
    differs: std::vec::IntoIter<u8>,
    means: &'a [f64],
}

impl<B: AutodiffBackend, W: Fn(ParamId) -> bool> ModuleMapper<B> for MeanWriter<'_, W> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if param.is_require_grad() || !(self.is_whole)(param.id) {
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
