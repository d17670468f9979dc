//! An operation of a program's own with its backward step, as burn 0.22 has them. `tests/common/scan_version.rs` of the
//! root package has the same for burn 0.21, and says what it computes.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::{Autodiff, Dispatch, Flex, backend_extension};

use crate::burn_version::Tensor;
use crate::shared::scan::{Scan, states};

pub use burn::backend::tensor::FloatTensor;
pub use burn::backend::{Backend, TensorMetadata};

pub fn scan(decay: Tensor<3>, input: Tensor<3>) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::scan(decay.into_dispatch(), input.into_dispatch()))
}

#[backend_extension(Flex, Autodiff)]
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
        let nodes = [decay.node(), input.node()];
        let decay = decay.into_primitive();
        let states = B::scan(decay.clone(), input.into_primitive());
        match Scan.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((decay, states.clone()), states),
            OpsKind::UnTracked(prepared) => prepared.finish(states),
        }
    }
}
