//! An optimizer's state comes back from a record in the dtype it was saved in.

use burn::module::Param;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor};

type Model = Param<Tensor<1>>;

fn step(optimizer: &mut ModuleOptimizer, model: Model) -> Model {
    let loss = (model.val() * 0.1).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(0.1, model, grads)
}

/// Returns the model after two steps, and whether a record of the state in between loads unchanged.
fn two_steps(dtype: DType, reload: bool) -> (Vec<f64>, bool) {
    let device = Device::flex().autodiff();
    let values = Tensor::<1>::from_data([0.1, 0.2, 0.3], (&device, dtype)).require_grad();
    let mut optimizer = AdamConfig::new().init();
    let model = step(&mut optimizer, Param::from_tensor(values));
    let saved = optimizer.to_record().into_bytes().unwrap();
    let mut loaded = AdamConfig::new().init().load_record(optimizer.to_record());
    let same = loaded.to_record().into_bytes().unwrap() == saved;
    let model = step(if reload { &mut loaded } else { &mut optimizer }, model);
    (model.val().into_data().iter().collect(), same)
}

fn check_state(dtype: DType) {
    assert!(two_steps(dtype, false).1, "the state has changed");
}

fn check_step(dtype: DType) {
    assert_eq!(two_steps(dtype, true).0, two_steps(dtype, false).0);
}

#[test]
fn state_in_f32() {
    check_state(DType::F32);
}

#[test]
fn state_in_f64() {
    check_state(DType::F64);
}

#[test]
fn state_in_bf16() {
    check_state(DType::BF16);
}

#[test]
fn step_in_f32() {
    check_step(DType::F32);
}

#[test]
fn step_in_f64() {
    check_step(DType::F64);
}

#[test]
fn step_in_bf16() {
    check_step(DType::BF16);
}
