//! Operations on tensors of NdArray, which go through the backend's export of data: those of Flex are read in place.
//!
//! Not shared: on burn 0.21 the backend is a parameter of `Tensor`, so the checks are compiled again for NdArray. On
//! burn 0.22 it is a setting of `Device`, and no type.

#[allow(clippy::duplicate_mod, reason = "for another backend")]
#[path = "../shared/tensors/checks.rs"]
mod checks;

use bonfire_testing::{Kind, run_ranks};
use burn::tensor::{Bool, BoolStore, DType, Float, Int};

use self::checks::{every_kind_of_element, every_rank_of_numbers, every_rank_of_tensor};

mod tensor_version {
    use bonfire::tensor::operation;
    use burn::backend::NdArray;
    use burn::backend::ndarray::NdArrayDevice;
    use burn::tensor::{Float, Tensor};

    type Backend = NdArray<f64>;

    pub type Inner<const D: usize, K = Float> = Tensor<Backend, D, K>;
    pub type DeviceCommunicator = bonfire::DeviceCommunicator<Backend>;

    pub trait Kind: operation::Kind<Backend> {}

    impl<K: operation::Kind<Backend>> Kind for K {}

    pub trait Numeric: Kind + burn::tensor::Numeric<Backend> {}

    impl<K: Kind + burn::tensor::Numeric<Backend>> Numeric for K {}

    pub fn inner_device() -> NdArrayDevice {
        NdArrayDevice::default()
    }
}

#[test]
fn one_to_five_ranks_match_burn_on_one_rank() {
    for n in 1..=5 {
        run_ranks(Kind::Threads, n, |group| {
            every_rank_of_numbers::<Float>(&group, DType::F64);
            every_rank_of_numbers::<Int>(&group, DType::I64);
            every_rank_of_tensor::<Bool>(&group, DType::Bool(BoolStore::Native));
        });
    }
}

#[test]
fn every_kind_and_width_of_element_is_supported() {
    run_ranks(Kind::Threads, 2, |group| every_kind_of_element(&group));
}
