//! Gathers the parameters of a block as one operation.

use std::sync::Arc;

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Float, Shape, TensorData, TensorPrimitive};

use super::layout::{Layout, block_name};
use crate::tensor::host::{Context, Source, TensorSpec};
use crate::train::agree::Parameter;
use crate::train::bucket::{Bucket, BucketOp};
use bonfire_core::{Buffer, DType, Error, Group, Work};

/// Gathers blocks over the ranks that keep their parts.
pub(super) struct Gatherer<B: AutodiffBackend> {
    /// A group of its own, because gathers run at the same time as other operations, and in no order relative to them.
    pub lane: Group,
    pub layout: Arc<Layout>,
    /// By position.
    pub parameters: Arc<[Parameter<B>]>,
    /// Unused memory for what is gathered.
    memory: Vec<Buffer<u64>>,
}

/// A gather that was started.
pub(super) type Gathering = Work<Bucket>;

impl<B: AutodiffBackend> Gatherer<B> {
    pub fn new(lane: Group, layout: Arc<Layout>, parameters: Arc<[Parameter<B>]>) -> Gatherer<B> {
        Gatherer { lane, layout, parameters, memory: Vec::new() }
    }

    /// Starts to gather a block. `part` returns this rank's part of the parameter at a position, if it has it. The
    /// others begin the operation even if it does not.
    pub fn start(
        &mut self,
        block: usize,
        part: impl Fn(usize) -> Option<FloatTensor<B::InnerBackend>>,
    ) -> Result<Gathering, Error> {
        let bytes = self.layout.gathered_bytes(block);
        // Not much larger than needed: the largest block's memory must not stay for small ones.
        let words = bytes.div_ceil(size_of::<u64>());
        let fits = |memory: &Buffer<u64>| memory.len() >= words && memory.len() / 2 <= words;
        let memory = self.memory.iter().position(fits).map(|i| self.memory.swap_remove(i));
        self.memory.clear();
        let mut bucket = Bucket::packed(&self.lane, memory, bytes)?;
        for &position in &self.layout.blocks[block].positions {
            let Some(part) = part(position).map(TensorPrimitive::Float) else { continue };
            let (source, _) = Source::read::<B::InnerBackend, Float>("reading a parameter", part)?;
            let own = &mut bucket.bytes()[self.layout.own(position)];
            if source.bytes().len() != own.len() {
                let path = &self.parameters[position].path;
                return Err(Error::broken("gathering parameters", format!("the part of `{path}` has changed")));
            }
            own.copy_from_slice(source.bytes());
        }
        // Blocks of one size are different calls.
        bucket.start_request(&self.lane, BucketOp::AllGather.request(DType::U8).part_of(&block_name(block)))
    }

    /// Waits for a gather and returns the parameters of the block, in its order.
    pub fn finish(&mut self, block: usize, gathering: Gathering) -> Result<Vec<FloatTensor<B::InnerBackend>>, Error> {
        let mut bucket = gathering.wait().map_err(|(error, _)| error)?;
        let positions = self.layout.blocks[block].positions.iter();
        let wholes = positions.map(|&position| {
            let Parameter { shape, dtype, element, device, .. } = &self.parameters[position];
            let context = Context::from(&self.lane);
            let mut whole =
                context.buffer::<B::InnerBackend>("gathering parameters", *element, shape.num_elements())?;
            self.layout.join(position, bucket.bytes(), &mut whole);
            let spec = TensorSpec { device: device.clone(), dtype: *dtype, carrier: *element };
            Ok(spec.tensor::<B::InnerBackend, Float>(whole, shape.clone()).tensor())
        });
        let wholes = wholes.collect::<Result<_, Error>>()?;
        self.memory.extend(bucket.into_memory());
        Ok(wholes)
    }
}

/// Returns what takes the place of a parameter that could not be gathered: a tensor of its shape that takes no memory,
/// of elements that no result hides.
pub(super) fn nothing<B: AutodiffBackend>(parameter: &Parameter<B>) -> FloatTensor<B::InnerBackend> {
    let one = Shape::from(vec![1; parameter.shape.num_dims()]);
    let data = TensorData::full_dtype(one, f32::NAN, parameter.dtype);
    B::InnerBackend::float_expand(B::InnerBackend::float_from_data(data, &parameter.device), parameter.shape.clone())
}
