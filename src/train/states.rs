//! Averages model states that differ between ranks, such as running statistics.

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{TensorData, TensorMetadata};

use super::adapter::flat;
use super::walk::{FloatParameter, map_floats, visit_floats};
use bonfire_core::{Error, Group, ReduceOp};

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

    let mut first = values.clone();
    group.broadcast(&mut first, 0)?;
    let mut start = 0;
    let differs = lens.iter().map(|len| {
        let bits = |values: &[f64]| values[start..start + len].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let differs = bits(&values) != bits(&first);
        start += len;
        u8::from(differs)
    });
    let mut differs: Vec<u8> = differs.collect();
    group.all_reduce(&mut differs, ReduceOp::Max)?;
    group.all_reduce(&mut values, ReduceOp::Mean)?;

    let (mut states, mut rest) = (differs.into_iter().zip(lens), &values[..]);
    Ok(map_floats(model, |parameter| {
        if !is_state(&parameter) {
            return None;
        }
        let (differs, len) = states.next()?;
        let (means, after) = rest.split_at(len);
        rest = after;
        let (shape, dtype) = (parameter.value.shape(), parameter.value.dtype());
        let data = TensorData::new(means.to_vec(), shape).convert_dtype(dtype);
        (differs == 1).then(|| B::InnerBackend::float_from_data(data, &B::float_device(&parameter.value)))
    }))
}
