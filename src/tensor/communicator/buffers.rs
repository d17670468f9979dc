//! A model's parameters in memory that suits a group.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Float, Int, Tensor};

use crate::tensor::host::{Kind, Source, Via};
use bonfire_core::Error;

/// The model, with its parameters in the memory that results go to.
pub(super) fn move_parameters<B: Backend, M: Module<B>>(via: Via<'_>, model: M) -> Result<M, Error> {
    let mut mover = Mover { via, failure: None };
    let model = model.map(&mut mover);
    match mover.failure {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

struct Mover<'a> {
    via: Via<'a>,
    failure: Option<Error>,
}

impl Mover<'_> {
    /// The tensor there; after a failure, where it is.
    fn moved<B: Backend, const D: usize, K: Kind<B>>(&mut self, tensor: Tensor<B, D, K>) -> Tensor<B, D, K> {
        if self.failure.is_some() || !self.via.has_memory::<B>() {
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
        let (source, form) = Source::read::<B, K>(OPERATION, tensor.into_primitive())?;
        let mut room = self.via.room::<B>(OPERATION, form.carrier, shape.num_elements())?;
        room.copy_from_slice(source.bytes());
        Ok(Tensor::from_primitive(form.tensor::<B, K>(room, shape)))
    }
}

impl<B: Backend> ModuleMapper<B> for Mover<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        // A leaf of a graph must stay the tensor that it is.
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
