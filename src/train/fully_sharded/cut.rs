//! Models of whole parameters and models of parts.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Bool, Float, Int, Tensor, TensorData, TensorPrimitive};

use super::layout::{Layout, Part, cut};
use crate::tensor::device::uses_collective_devices;
use crate::tensor::host::Source;
use crate::train::sharded_block::BlockPath;
use crate::train::values::Positions;
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// The blocks of a model's parameters.
#[derive(Default)]
pub(super) struct Blocks {
    path: BlockPath,
    /// Of all parameters, in visiting order.
    pub all: Vec<usize>,
    /// Of float parameters. That of the first use counts.
    pub floats: HashMap<ParamId, usize>,
}

impl Blocks {
    pub fn of<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Blocks {
        let mut blocks = Blocks::default();
        model.visit(&mut blocks);
        blocks
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Blocks {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.path.enter(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.all.push(self.path.block());
        self.floats.entry(param.id).or_insert(self.path.block());
    }

    fn visit_int<const D: usize>(&mut self, _: &Param<Tensor<B, D, Int>>) {
        self.all.push(self.path.block());
    }

    fn visit_bool<const D: usize>(&mut self, _: &Param<Tensor<B, D, Bool>>) {
        self.all.push(self.path.block());
    }
}

/// Finds the float parameters whose values a module takes when it is mapped, as running states do. They cannot be
/// gathered at their first use.
#[derive(Default)]
struct EagerParameters(Arc<Mutex<HashSet<ParamId>>>);

/// Returns the float parameters that must stay whole.
pub(super) fn eager<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> HashSet<ParamId> {
    let mut eager = EagerParameters::default();
    drop(model.clone().map(&mut eager));
    std::mem::take(&mut lock(&eager.0))
}

impl<B: AutodiffBackend> ModuleMapper<B> for EagerParameters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, value, _) = param.consume();
        let (device, shape, trained) = (value.device(), value.shape(), value.is_require_grad());
        let eager = self.0.clone();
        let init = move |_: &B::Device, _| {
            lock(&eager).insert(id);
            value.clone()
        };
        Param::uninitialized(id, init, device, trained, shape)
    }
}

/// Replaces each parameter by this rank's part of it.
pub(super) struct PartCutter<'a> {
    pub layout: &'a Layout,
    pub positions: &'a Positions,
    pub failure: Option<Error>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for PartCutter<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(&position) = self.positions.get(&param.id) else { return param };
        let (id, whole, mapper) = param.consume();
        let (part, rank) = (&self.layout.parts[position], self.layout.rank);
        let cut = match uses_collective_devices::<B::InnerBackend>() && part.bytes > 0 {
            true => Ok(cut_on_device(whole.clone().inner(), rank, part)),
            false => cut_on_host(whole.clone().inner(), rank, part),
        };
        let new = match cut {
            Ok(part) => Tensor::from_inner(part).set_require_grad(whole.is_require_grad()),
            Err(error) => {
                self.failure.get_or_insert(error);
                whole
            }
        };
        Param::from_mapped_value(id, new, mapper)
    }
}

/// The part is in memory of its own: a slice alone may keep all of the whole.
fn cut_on_device<B: Backend, const D: usize>(whole: Tensor<B, D>, rank: usize, part: &Part) -> Tensor<B, D> {
    let rows = whole.dims()[0];
    let [start, end] = [rank, rank + 1].map(|rank| (rank * part.shape[0]).min(rows));
    let padded = Tensor::zeros(part.shape.clone(), (&whole.device(), whole.dtype()));
    if start == end { padded } else { padded.slice_assign(0..end - start, whole.slice(start..end)) }
}

fn cut_on_host<B: Backend, const D: usize>(
    whole: Tensor<B, D>,
    rank: usize,
    part: &Part,
) -> Result<Tensor<B, D>, Error> {
    let (device, dtype) = (whole.device(), whole.dtype());
    let (source, _) = Source::read::<B, Float>("reading a parameter", whole.into_primitive())?;
    let mut bytes = vec![0; part.bytes];
    cut(source.bytes(), rank, &mut bytes);
    Ok(Tensor::from_data(TensorData::from_bytes_vec(bytes, part.shape.clone(), dtype), (&device, dtype)))
}

/// Replaces each part by the whole parameter.
pub(super) struct WholeWriter<'a, B: AutodiffBackend> {
    pub positions: &'a Positions,
    pub wholes: HashMap<usize, FloatTensor<B::InnerBackend>>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for WholeWriter<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let whole = self.positions.get(&param.id).and_then(|position| self.wholes.get(position));
        let Some(whole) = whole.cloned() else { return param };
        let (id, part, mapper) = param.consume();
        let whole = Tensor::from_inner(Tensor::from_primitive(TensorPrimitive::Float(whole)));
        Param::from_mapped_value(id, whole.set_require_grad(part.is_require_grad()), mapper)
    }
}
