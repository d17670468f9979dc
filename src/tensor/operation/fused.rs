//! Gathers several tensors in one operation of the group.

use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, Shape, TensorMetadata};

use super::carry::in_memory;
use crate::tensor::host::{Context, Kind, Source, TensorSpec, refuse_autodiff};
use bonfire_core::Error;
use bonfire_tensor::{Axis, HostMemory, Part, common_axis};

const OPERATION: &str = "all_gather";

/// One of the tensors that are gathered together.
pub(crate) struct GatherInput<D> {
    source: Source,
    axis: Axis,
    spec: TensorSpec<D>,
}

impl<D> GatherInput<D> {
    pub fn read<B: Backend<Device = D>, K: Kind<B>>(tensor: K::Primitive, dim: isize) -> Result<Self, Error> {
        refuse_autodiff::<B, K>(OPERATION, &K::device(&tensor))?;
        let axis = Axis::new(OPERATION, &tensor.shape(), dim)?;
        let (source, spec) = Source::read::<B, K>(OPERATION, tensor)?;
        Ok(GatherInput { source, axis, spec })
    }
}

/// Checks that all tensors have the same length along their axes and returns the axis of the first.
pub(crate) fn axis<D>(inputs: &[GatherInput<D>]) -> Result<Option<Axis>, Error> {
    common_axis(OPERATION, inputs.iter().map(|input| &input.axis)).map(|axis| axis.cloned())
}

/// Gathers several tensors of any shapes and element types in one operation of the group. On rank `r`, all have length
/// `sizes[r]` along their axes.
#[track_caller]
pub(crate) fn all_gather<B: Backend>(
    ctx: Context<'_>,
    inputs: Vec<GatherInput<B::Device>>,
    sizes: &[usize],
) -> Result<Vec<Gathered<B::Device>>, Error> {
    let parts = inputs.iter().map(|GatherInput { source, axis, spec }| {
        let (bytes, dtype) = (source.bytes(), spec.carrier);
        Part { bytes, dtype, axis }
    });
    let parts: Vec<_> = parts.collect();
    let wholes = in_memory!(ctx, B).all_gather_together(&parts, sizes)?;
    let gathered = inputs.iter().zip(wholes).map(|(GatherInput { axis, spec, .. }, whole)| Gathered {
        whole,
        shape: Shape::from(axis.shape(sizes.iter().sum())),
        spec: spec.clone(),
    });
    Ok(gathered.collect())
}

/// The result for one tensor.
pub(crate) struct Gathered<D> {
    whole: Bytes,
    shape: Shape,
    spec: TensorSpec<D>,
}

impl<D> Gathered<D> {
    pub fn tensor<B: Backend<Device = D>, K: Kind<B>>(self) -> K::Primitive {
        self.spec.tensor::<B, K>(self.whole, self.shape)
    }
}
