//! Optimizers of burn 0.22 with several groups of parameters. Not shared: burn 0.21 has no `ParamGroup`.

use burn::grad_clipping::GradientClipping;
use burn::module::ParamGroup;
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::DType;

use crate::shared::sharded::check_all_forms;

#[test]
fn groups_of_parameters_have_optimizers_of_their_own() {
    check_all_forms(DType::F64, || {
        let of_matrix = ParamGroup::from_predicate("matrix");
        AdamConfig::new().init().with_group(of_matrix, SgdConfig::new().build(), Some(GradientClipping::Value(0.1)))
    });
}
