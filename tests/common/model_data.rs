//! Parameters and gradients of models as data.
#![allow(dead_code, reason = "each test target uses a part of it")]

use std::collections::HashSet;

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::TensorData;

use crate::burn_version::*;

/// Replaces the values of parameters and states of floats. `f` gets each value, and whether it is trained.
pub fn map_floats<M: Model>(model: M, mut f: impl FnMut(TensorData, bool) -> TensorData) -> M {
    map_parameters(model, |id, data, trained| (id, f(data, trained)))
}

/// Returns a model of the same values, with these ids in visiting order.
pub fn with_ids<M: Model>(model: M, mut ids: Vec<ParamId>) -> M {
    map_parameters(model, |_, data, _| (ids.remove(0), data))
}

/// Returns the gradients of a model's float parameters, of one to three dimensions, in visiting order.
pub fn gradient_data<M: Model>(model: &M, gradients: &GradientsParams) -> Vec<Option<TensorData>> {
    let of = |FloatParameter { id, data, .. }: FloatParameter| match data.shape().num_dims() {
        1 => gradient::<1>(gradients, id).map(|gradient| gradient.into_data()),
        2 => gradient::<2>(gradients, id).map(|gradient| gradient.into_data()),
        _ => gradient::<3>(gradients, id).map(|gradient| gradient.into_data()),
    };
    floats(model).into_iter().map(of).collect()
}

/// Registers a gradient of one to three dimensions.
pub fn register(gradients: &mut GradientsParams, id: ParamId, data: TensorData) {
    let (dtype, dimensions) = (data.dtype(), data.shape().num_dims());
    let options = (&inner_device(), dtype);
    match dimensions {
        1 => gradients.register(id, Inner::<1>::from_data(data, options)),
        2 => gradients.register(id, Inner::<2>::from_data(data, options)),
        _ => gradients.register(id, Inner::<3>::from_data(data, options)),
    }
}

/// Returns the gradients of a model's float parameters with other elements.
pub fn map_gradients<M: Model>(model: &M, gradients: &GradientsParams, f: impl Fn(f64) -> f64) -> GradientsParams {
    let mut mapped = GradientsParams::new();
    for (parameter, own) in floats(model).iter().zip(gradient_data(model, gradients)) {
        let Some(own) = own else { continue };
        let values: Vec<f64> = own.iter::<f64>().map(&f).collect();
        register(&mut mapped, parameter.id, TensorData::new(values, own.shape().clone()).convert_dtype(own.dtype()));
    }
    mapped
}

/// Rounds gradients to multiples of 2^-16 and limits them to 16: so their sum over a few ranks is exact in f32, and
/// does not depend on the order of ranks.
pub fn with_few_bits<M: Model>(model: &M, gradients: &GradientsParams) -> GradientsParams {
    map_gradients(model, gradients, |value| (value.clamp(-16.0, 16.0) * 65536.0).round() / 65536.0)
}

/// Adds gradients times a factor to others.
pub fn add<M: Model>(model: &M, gradients: &GradientsParams, sum: &mut GradientsParams, factor: f64) {
    let sums = gradient_data(model, sum);
    for ((parameter, own), sum_of) in floats(model).iter().zip(gradient_data(model, gradients)).zip(sums) {
        let Some(own) = own else { continue };
        let mut values: Vec<f64> = own.iter::<f64>().map(|value| value * factor).collect();
        if let Some(sum_of) = sum_of {
            values.iter_mut().zip(sum_of.iter::<f64>()).for_each(|(value, other)| *value += other);
        }
        register(sum, parameter.id, TensorData::new(values, own.shape().clone()).convert_dtype(own.dtype()));
    }
}

/// The norm of a model's gradients. A parameter that the model has twice has one gradient.
pub fn norm<M: Model>(model: &M, gradients: &GradientsParams) -> f64 {
    let mut seen = HashSet::new();
    let of_model = floats(model).into_iter().zip(gradient_data(model, gradients));
    let once = of_model.filter(|(parameter, _)| seen.insert(parameter.id)).filter_map(|(_, gradient)| gradient);
    once.map(|gradient| gradient.iter::<f64>().map(|x| x * x).sum::<f64>()).sum::<f64>().sqrt()
}
