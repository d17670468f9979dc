//! Averages model states that differ between ranks, such as running statistics.

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{TensorData, TensorMetadata};

use super::adapter::flat;
use super::walk::{FloatParameter, map_floats, visit_floats};
use bonfire_core::{Error, Group};
use bonfire_train::agree::means_where_different;

/// Replaces every float parameter that needs no gradient and differs between ranks by the mean over all ranks.
/// `is_whole` tells whether the ranks have the whole parameter: each may have a part.
#[track_caller]
pub(super) fn average<B: AutodiffBackend, M: AutodiffModule<B>>(
    group: &Group,
    model: M,
    is_whole: impl Fn(ParamId) -> bool,
) -> Result<M, Error> {
    // A running state's last update is pending until the next one. `valid` writes it to the value, in `model` too.
    drop(model.valid());
    let is_state = |parameter: &FloatParameter<B>| !parameter.trained && is_whole(parameter.id);
    // By state, in visiting order. f64 represents all float types exactly, so the comparison is exact, and the mean is
    // exact up to rounding.
    let (mut lens, mut values) = (Vec::new(), Vec::new());
    visit_floats(&model, |parameter| {
        if is_state(&parameter) {
            let data = flat::<B::InnerBackend>(B::inner(parameter.value)).into_data();
            lens.push(data.num_elements());
            values.extend(data.iter::<f64>());
        }
    });

    let mut means = means_where_different(group, &lens, values)?.into_iter();
    Ok(map_floats(model, |parameter| {
        if !is_state(&parameter) {
            return None;
        }
        let mean = means.next()??;
        let (shape, dtype) = (parameter.value.shape(), parameter.value.dtype());
        let data = TensorData::new(mean, shape).convert_dtype(dtype);
        Some(B::InnerBackend::float_from_data(data, &B::float_device(&parameter.value)))
    }))
}
