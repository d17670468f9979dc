//! Gathers parameters of which each rank has a part.

use super::model::Model;
use crate::lane::{Call, Lane, Pending, Source, Target, Tensor, input};
use crate::shards::ALIGNED;
use bonfire_core::Error;
use bonfire_core::internal::Request;

/// Starts to gather the parameters at these positions: an all-gather of bytes. `part` returns this rank's part of a
/// parameter, if it has it. The others begin the operation even if it does not.
pub(crate) fn gather(
    model: &Model,
    lane: &mut dyn Lane,
    request: Request<'static>,
    positions: &[usize],
    mut part: impl FnMut(usize) -> Option<Tensor>,
) -> Result<Box<dyn Pending>, Error> {
    let widths = positions.iter().map(|&position| (position, model.parameters[position].dtype.size()));
    let place = model.layout.place(widths, ALIGNED);
    let (mut sources, mut targets) = (Vec::new(), Vec::new());
    for (index, &position) in positions.iter().enumerate() {
        let (parameter, own) = (&model.parameters[position], place.own(index));
        if let Some(part) = part(position).filter(|_| !own.is_empty()) {
            let input = input(&*model.tensors, lane, part);
            sources.push(Source { position, input, ranges: own.into() });
        }
        let (ranges, shape) = (place.whole(index).0, parameter.shape.clone());
        targets.push(Target { position, shape, dtype: parameter.dtype, ranges });
    }
    lane.start(Call { request, bytes: place.bytes(), factor: 1.0, sources, targets })
}
