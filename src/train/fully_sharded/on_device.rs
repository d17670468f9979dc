//! The communication of full sharding on a collective device: its server moves tensors' memory, and no host tensor is
//! made. Elements have the same places in what is gathered and reduced as on the host. So where devices stage data in
//! host memory, ranks may be of both kinds.

use burn::tensor::Shape;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};

use super::layout::Layout;
use crate::tensor::device::{DeviceCall, PendingTensors, Target, TensorKind, start};
use crate::train::agree::Parameter;
use crate::train::bucket::scale_tensor;
use bonfire_core::internal::{Ranges, Request};
use bonfire_core::{DType, Error, Group};

/// What operations on tensors need.
pub(super) struct Lane<'a, B: AutodiffBackend> {
    pub group: &'a Group,
    pub layout: &'a Layout,
    /// By position.
    pub parameters: &'a [Parameter<B>],
}

/// How gradients are reduced: the element type, and the factor of this rank's.
pub(super) struct Weighted {
    pub carrier: DType,
    pub factor: f64,
}

/// Starts to gather a block's parameters from this rank's parts and those of the others. It makes a tensor of each, in
/// the block's order.
#[track_caller]
pub(super) fn gather<B: AutodiffBackend>(
    Lane { group, layout, parameters }: Lane<'_, B>,
    block: usize,
    request: Request<'static>,
    parts: Vec<(FloatTensor<B::InnerBackend>, Ranges)>,
) -> Result<PendingTensors<FloatTensor<B::InnerBackend>>, Error> {
    let targets = layout.blocks[block].positions.iter().map(|&position| {
        let parameter = &parameters[position];
        let whole = parameter.shape.num_elements() * parameter.element.size();
        let (like, ranges) = (like(parameter, parameter.element), layout.gathered(position, whole));
        Target { like, shape: parameter.shape.clone(), ranges }
    });
    let call = DeviceCall::collective(request, layout.gathered_bytes(block), parts, targets.collect());
    start::<B::InnerBackend, _>(group, TensorKind::Float, call)
}

/// Adds a gradient, or zeros, to the tensors of its bucket, and the zeros that pad it.
pub(super) fn fill<B: AutodiffBackend>(
    tensors: &mut Vec<(FloatTensor<B::InnerBackend>, Ranges)>,
    Weighted { carrier, factor }: Weighted,
    parameter: &Parameter<B>,
    gradient: Option<FloatTensor<B::InnerBackend>>,
    (values, padding): (Ranges, Ranges),
) {
    let zeros = |shape| B::InnerBackend::float_zeros(shape, &parameter.device, parameter.dtype_of(carrier).into());
    let gradient = match gradient {
        Some(gradient) if factor != 1.0 => scale_tensor::<B::InnerBackend>(gradient, carrier, factor),
        Some(gradient) => gradient,
        None => zeros(parameter.shape.clone()),
    };
    tensors.push((gradient, values));
    if padding.bytes() > 0 {
        tensors.push((zeros(Shape::new([padding.bytes() / carrier.size()])), padding));
    }
}

/// Starts the reduction of a bucket's gradients. It makes a tensor of this rank's part of each, in the bucket's order.
#[track_caller]
pub(super) fn reduce<B: AutodiffBackend>(
    Lane { group, layout, parameters }: Lane<'_, B>,
    bucket: usize,
    carrier: DType,
    request: Request<'static>,
    gradients: Vec<(FloatTensor<B::InnerBackend>, Ranges)>,
) -> Result<PendingTensors<FloatTensor<B::InnerBackend>>, Error> {
    let targets = layout.buckets[bucket].positions.iter().map(|&position| Target {
        like: like(&parameters[position], carrier),
        shape: layout.parts[position].shape.clone(),
        ranges: layout.own_reduced(position, carrier.size()).into(),
    });
    let bytes = layout.reduced_bytes(bucket, carrier.size());
    let call = DeviceCall::collective(request, bytes, gradients, targets.collect());
    start::<B::InnerBackend, _>(group, TensorKind::Float, call)
}

/// Returns a tensor without elements, in the place of a parameter's.
fn like<B: AutodiffBackend>(parameter: &Parameter<B>, carrier: DType) -> FloatTensor<B::InnerBackend> {
    B::InnerBackend::float_empty(Shape::new([0]), &parameter.device, parameter.dtype_of(carrier).into())
}
