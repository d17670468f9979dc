//! An operation of a program's own with its backward step, as burn 0.21 has them: the recurrence `state[t] = decay[t] *
//! state[t - 1] + input[t]` along the second dimension. `burn-0.22/tests/common/scan_version.rs` has the same for burn
//! 0.22.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::tensor::TensorPrimitive;

use crate::burn_version::{Tensor, Training};
use crate::shared::scan::{Scan, states};

pub use burn::tensor::TensorMetadata;
pub use burn::tensor::backend::Backend;
pub use burn::tensor::ops::FloatTensor;

pub fn scan(decay: Tensor<3>, input: Tensor<3>) -> Tensor<3> {
    let [decay, input] = [decay, input].map(|tensor| tensor.into_primitive().tensor());
    Tensor::from_primitive(TensorPrimitive::Float(Training::scan(decay, input)))
}

pub trait ScanOps: Backend {
    fn scan(decay: FloatTensor<Self>, input: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl ScanOps for Flex {
    fn scan(decay: FloatTensor<Self>, input: FloatTensor<Self>) -> FloatTensor<Self> {
        states::<Flex>(decay, input)
    }
}

impl<B: ScanOps, C: CheckpointStrategy> ScanOps for Autodiff<B, C> {
    fn scan(decay: FloatTensor<Self>, input: FloatTensor<Self>) -> FloatTensor<Self> {
        let states = B::scan(decay.primitive.clone(), input.primitive.clone());
        match Scan.prepare::<C>([decay.node, input.node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((decay.primitive, states.clone()), states),
            OpsKind::UnTracked(prepared) => prepared.finish(states),
        }
    }
}
