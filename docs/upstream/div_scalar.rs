//! The gradient of a division by a number, in f64.

use burn::tensor::{DType, Device, Tensor, TensorData};

#[test]
fn the_gradient_of_a_division_is_as_exact_as_the_tensor() {
    let device = Device::flex().autodiff();
    let data = TensorData::new(vec![1.0f64], [1]);
    let x = Tensor::<1>::from_data(data, (&device, DType::F64)).require_grad();
    let gradients = (x.clone() / 3.0).backward();
    let gradient = x.grad(&gradients).expect("a gradient").into_scalar::<f64>();
    assert_eq!(gradient, 1.0 / 3.0);
}
