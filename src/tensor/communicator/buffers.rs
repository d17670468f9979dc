//! Moves a model's parameters to memory of a group.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Float, Int, Tensor};

use crate::tensor::host::{Context, Kind, Source};
use bonfire_core::Error;

/// Moves the model's parameters to the context's memory for results.
pub(super) fn move_parameters<B: Backend, M: Module<B>>(ctx: Context<'_>, model: M) -> Result<M, Error> {
    let mut mover = Mover { ctx, failure: None };
    let model = model.map(&mut mover);
    match mover.failure {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

struct Mover<'a> {
    ctx: Context<'a>,
    failure: Option<Error>,
}

impl Mover<'_> {
    /// Moves the tensor. After a failure, returns it unchanged.
    fn moved<B: Backend, const D: usize, K: Kind<B>>(&mut self, tensor: Tensor<B, D, K>) -> Tensor<B, D, K> {
        if self.failure.is_some() || !self.ctx.has_memory::<B>() {
            return tensor;
        }
        match self.copy(tensor.clone()) {
            Ok(copy) => copy,
            Err(error) => {
                self.failure = Some(error);
                tensor
            }
        }
    }

    fn copy<B: Backend, const D: usize, K: Kind<B>>(&self, tensor: Tensor<B, D, K>) -> Result<Tensor<B, D, K>, Error> {
        const OPERATION: &str = "prepare_communication_buffer_for_model";
        let shape = tensor.shape();
        let (source, spec) = Source::read::<B, K>(OPERATION, tensor.into_primitive())?;
        let mut buffer = self.ctx.buffer::<B>(OPERATION, spec.carrier, shape.num_elements())?;
        buffer.copy_from_slice(source.bytes());
        Ok(Tensor::from_primitive(spec.tensor::<B, K>(buffer, shape)))
    }
}

impl<B: Backend> ModuleMapper<B> for Mover<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        // A leaf of a graph must keep its identity, so a tracked tensor is not replaced.
        let tensor = if tensor.is_require_grad() { tensor } else { self.moved::<B, D, Float>(tensor) };
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.moved(tensor), mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.moved(tensor), mapper)
    }
}
