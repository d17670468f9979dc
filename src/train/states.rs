//! Averages model states that differ between ranks, such as running statistics.

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Float, TensorData, TensorMetadata, TensorPrimitive};

use super::walk::{FloatParameter, map_floats, visit_floats};
use crate::tensor::host::{Source, data};
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};
use bonfire_train::agree::{different, mean_over_ranks};
use bonfire_train::parameters::digest;

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
    let reading = |error| group.abandon(error);
    // By state, in visiting order. Most are frozen weights, which are the same on all ranks.
    let mut digests = Vec::new();
    visit_floats(&model, |parameter| {
        if is_state(&parameter) {
            let value = TensorPrimitive::Float(B::inner(parameter.value));
            let source = Source::read::<B::InnerBackend, Float>("reading a state", value);
            digests.push(source.map(|(source, _)| digest(source.bytes())));
        }
    });
    let digests = digests.into_iter().collect::<Result<Vec<_>, _>>().map_err(reading)?;
    let mut differs = different(group, &digests)?.into_iter();
    let mut failure = None;
    let model = map_floats(model, |parameter| {
        if !is_state(&parameter) || !differs.next()? || failure.is_some() {
            return None;
        }
        let (shape, dtype) = (parameter.value.shape(), parameter.value.dtype());
        let device = B::float_device(&parameter.value);
        // f64 represents all float types exactly, so the mean is exact up to rounding.
        let mean = data::<B::InnerBackend, Float>("reading a state", TensorPrimitive::Float(B::inner(parameter.value)))
            .map_err(reading)
            .and_then(|data| mean_over_ranks(group, data.iter().collect()));
        match mean {
            Ok(mean) => {
                let data = TensorData::new(mean, shape).convert_dtype(dtype);
                Some(B::InnerBackend::float_from_data(data, &device))
            }
            Err(error) => {
                failure = Some(error);
                None
            }
        }
    });
    failure.map_or(Ok(model), Err)
}
