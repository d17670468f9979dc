//! The communication of a sharded step on a collective device: its server moves tensors' memory, and no host tensor is
//! made. Elements have the same places in buckets as on the host, so a block may have ranks of both kinds.

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Tensor, TensorPrimitive};

use super::layout::{BucketLayout, bytes};
use crate::tensor::device::{DeviceCall, PendingTensors, Target, TensorKind, start};
use crate::train::agree::Parameter;
use crate::train::bucket::{BucketOp, Weighting, scale_tensor};
use crate::train::values::Flat;
use bonfire_core::{Error, Group};

/// What an operation on a bucket's tensors needs.
pub(super) struct OfBucket<'a, B: AutodiffBackend> {
    /// The ranks of this rank's block.
    pub group: &'a Group,
    pub layout: &'a BucketLayout,
    pub parameters: &'a [Parameter<B>],
}

pub(super) fn flat<B: AutodiffBackend>(tensor: FloatTensor<B::InnerBackend>) -> Flat<B> {
    Tensor::from_primitive(TensorPrimitive::Float(tensor))
}

fn primitive<B: AutodiffBackend>(tensor: Flat<B>) -> FloatTensor<B::InnerBackend> {
    tensor.into_primitive().tensor()
}

/// Starts the reduction of a bucket in the block. It makes a tensor of this rank's elements of each gradient that has
/// some. A gradient that this rank does not have counts as zero.
#[track_caller]
pub(super) fn reduce<B: AutodiffBackend>(
    OfBucket { group, layout, parameters }: OfBucket<'_, B>,
    exists: &[bool],
    grads: &mut GradientsParams,
    weighting: Weighting,
) -> Result<PendingTensors<FloatTensor<B::InnerBackend>>, Error> {
    let carrier = weighting.carrier(layout.dtype);
    let (mut sources, mut targets) = (Vec::new(), Vec::new());
    for span in layout.spans.iter().filter(|span| exists[span.position]) {
        let (parameter, elements) = (&parameters[span.position], span.range.len());
        let grad: Flat<B> = match grads.remove::<B::InnerBackend, 1>(parameter.id) {
            Some(grad) => grad.reshape([elements]),
            None => Tensor::zeros([elements], (&parameter.device, parameter.dtype)),
        };
        let mut grad = parameter.widen(primitive::<B>(grad), carrier);
        if weighting.factor() != 1.0 {
            grad = scale_tensor::<B::InnerBackend>(grad, carrier, weighting.factor());
        }
        if !span.own().is_empty() {
            let shape = Shape::new([span.own().len()]);
            targets.push(Target { like: grad.clone(), shape, ranges: bytes(span.own(), carrier).into() });
        }
        sources.push((grad, bytes(span.range.clone(), carrier).into()));
    }
    let request = BucketOp::ReduceScatter(weighting.reduction()).request(carrier);
    let call = DeviceCall::collective(request, layout.len * carrier.size(), sources, targets);
    start::<B::InnerBackend, _>(group, TensorKind::Float, call)
}

/// Starts the all-gather of a bucket's parameters in the block. It makes a tensor of each parameter with a gradient.
/// `updated` are the new values of this rank's elements.
#[track_caller]
pub(super) fn gather<B: AutodiffBackend>(
    OfBucket { group, layout, parameters }: OfBucket<'_, B>,
    exists: &[bool],
    updated: Vec<Flat<B>>,
) -> Result<PendingTensors<FloatTensor<B::InnerBackend>>, Error> {
    let own = layout.own_spans(exists).map(|span| bytes(span.own(), layout.dtype).into());
    let sources = updated.into_iter().map(primitive::<B>).zip(own).collect();
    let targets = layout.spans.iter().filter(|span| exists[span.position]).map(|span| {
        let parameter = &parameters[span.position];
        let like = Tensor::empty([0], (&parameter.device, parameter.dtype));
        let shape = Shape::new([span.range.len()]);
        Target { like: primitive::<B>(like), shape, ranges: bytes(span.range.clone(), layout.dtype).into() }
    });
    let (targets, request) = (targets.collect(), BucketOp::AllGather.request(layout.dtype));
    let call = DeviceCall::collective(request, layout.len * layout.dtype.size(), sources, targets);
    start::<B::InnerBackend, _>(group, TensorKind::Float, call)
}
