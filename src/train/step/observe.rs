//! Puts hooks on the parameters of a model, so that a step gets their gradients during the backward pass.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};

use crate::tensor::autodiff::CollectiveBackend;
use crate::tensor::autodiff::hook::{GradientReceiver, PassStart};
use crate::train::values::Positions;

/// The tensors with hooks, by their parameters' ids. Those that were not used are not made.
pub(super) type Hooked<B> = HashMap<ParamId, Arc<OnceLock<FloatTensor<B>>>>;

/// Replaces each tracked parameter by one whose first use puts a hook into the graph. So a hook's depth is that of the
/// parameter's first use, whatever the order in which the model declares its parameters.
pub(super) struct Observer<'a, B: CollectiveBackend> {
    pub positions: &'a Positions,
    pub start: PassStart<B>,
    /// Makes the receiver of the gradient of the parameter at a position.
    pub receiver: &'a dyn Fn(usize) -> GradientReceiver<B::InnerBackend>,
    /// A clone of the model, or a second parameter of the same id, must use the same hook, because a gradient that
    /// arrives in two parts is incomplete.
    pub hooked: Hooked<B>,
    /// Whether the model has a tracked parameter that it did not have at the start.
    pub unknown: bool,
}

impl<'a, B: CollectiveBackend> Observer<'a, B> {
    pub fn new(
        positions: &'a Positions,
        receiver: &'a dyn Fn(usize) -> GradientReceiver<B::InnerBackend>,
    ) -> Observer<'a, B> {
        Observer { positions, start: PassStart::now(), receiver, hooked: HashMap::new(), unknown: false }
    }
}

impl<B: CollectiveBackend> ModuleMapper<B> for Observer<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let tensor = param.val();
        if !tensor.is_require_grad() {
            return param;
        }
        let Some(&position) = self.positions.get(&param.id) else {
            self.unknown = true;
            return param;
        };
        let (device, shape) = (tensor.device(), tensor.shape());
        let (start, receiver) = (self.start.clone(), (self.receiver)(position));
        let hooked = self.hooked.entry(param.id).or_default().clone();
        let init = move |_: &B::Device, _| {
            let hook = || B::hook(tensor.clone().into_primitive().tensor(), &start, receiver.clone());
            Tensor::from_primitive(TensorPrimitive::Float(hooked.get_or_init(hook).clone()))
        };
        Param::uninitialized(param.id, init, device, true, shape)
    }
}
