//! Gathers the parameters of a block as one operation.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Float, Shape, TensorData, TensorMetadata, TensorPrimitive};

use super::layout::{Layout, block_name};
use super::on_device::{self, Lane};
use crate::tensor::device::uses_collective_devices;
use crate::tensor::host::{Context, Source, TensorSpec};
use crate::train::agree::Parameter;
use crate::train::bucket::{Bucket, BucketOp};
use crate::train::in_flight::{Elements, InFlight, Unconfirmed};
use bonfire_core::{Buffer, DType, Error, Group};

/// Gathers blocks over the ranks that keep their parts.
pub(super) struct Gatherer<B: AutodiffBackend> {
    /// A group of its own, because gathers run at the same time as other operations, and in no order relative to them.
    pub lane: Group,
    pub layout: Arc<Layout>,
    /// By position.
    pub parameters: Arc<[Parameter<B>]>,
    /// The gather whose parameters are in use already.
    pub unconfirmed: Unconfirmed,
    /// Unused memory for what is gathered.
    memory: Vec<Buffer<u64>>,
}

impl<B: AutodiffBackend> Gatherer<B> {
    pub fn new(lane: Group, layout: Arc<Layout>, parameters: Arc<[Parameter<B>]>) -> Gatherer<B> {
        Gatherer { lane, layout, parameters, unconfirmed: Unconfirmed::default(), memory: Vec::new() }
    }

    /// Starts to gather a block. `part` returns this rank's part of the parameter at a position, if it has it. The
    /// others begin the operation even if it does not.
    pub fn start(
        &mut self,
        block: usize,
        part: impl Fn(usize) -> Option<FloatTensor<B::InnerBackend>>,
    ) -> Result<InFlight<B::InnerBackend>, Error> {
        // Blocks of one size are different calls.
        let request = BucketOp::AllGather.request(DType::U8).part_of(&block_name(block));
        if uses_collective_devices::<B::InnerBackend>() {
            let positions = self.layout.blocks[block].positions.iter();
            let parts = positions.filter_map(|&position| Some((position, part(position)?)));
            let places = parts.map(|(position, part)| {
                let bytes = part.shape().num_elements() * self.parameters[position].element.size();
                Ok((part, self.own(position, bytes)?.into()))
            });
            let parts = places.collect::<Result<_, Error>>()?;
            let lane = Lane { group: &self.lane, layout: &self.layout, parameters: &self.parameters };
            return on_device::gather(lane, block, request, parts).map(InFlight::Device);
        }
        let bytes = self.layout.gathered_bytes(block);
        let mut bucket = Bucket::packed(&self.lane, reuse(&mut self.memory, bytes), bytes)?;
        for &position in &self.layout.blocks[block].positions {
            let Some(part) = part(position).map(TensorPrimitive::Float) else { continue };
            let (source, _) = Source::read::<B::InnerBackend, Float>("reading a parameter", part)?;
            let own = &mut bucket.bytes()[self.own(position, source.bytes().len())?];
            own.copy_from_slice(source.bytes());
        }
        bucket.start_request(&self.lane, request).map(InFlight::Host)
    }

    /// Returns where this rank's part of the parameter at `position` is in what its block gathers. Fails unless it has
    /// so many bytes.
    fn own(&self, position: usize, bytes: usize) -> Result<Range<usize>, Error> {
        let own = self.layout.own(position);
        if own.len() == bytes {
            return Ok(own);
        }
        let path = &self.parameters[position].path;
        Err(Error::broken("gathering parameters", format!("the part of `{path}` has changed")))
    }

    /// Waits for a gather and returns the parameters of the block, in its order. If the pass will gather `another`
    /// block after it, the device waits instead, and the host only for the gather before: it is one block ahead of the
    /// device. After a pass that repeats the one before, all gathers are confirmed, in case the program then waits for
    /// the device, to print a loss.
    pub fn finish(
        &mut self,
        block: usize,
        gathering: InFlight<B::InnerBackend>,
        another: bool,
    ) -> Result<Vec<FloatTensor<B::InnerBackend>>, Error> {
        let gathered = gathering.follow(&mut self.unconfirmed)?;
        if !another {
            self.unconfirmed.confirm()?;
        }
        let mut bucket = match gathered {
            Elements::Host(bucket) => bucket,
            Elements::Device(wholes) => return Ok(wholes),
        };
        let positions = self.layout.blocks[block].positions.iter();
        let wholes = positions.map(|&position| {
            let Parameter { shape, dtype, element, device, .. } = &self.parameters[position];
            let context = Context::from(&self.lane);
            let mut whole =
                context.buffer::<B::InnerBackend>("gathering parameters", *element, shape.num_elements())?;
            for (at, range) in self.layout.gathered(position, whole.len()).places() {
                whole[at..][..range.len()].copy_from_slice(&bucket.bytes()[range]);
            }
            let spec = TensorSpec { device: device.clone(), dtype: *dtype, carrier: *element };
            Ok(spec.tensor::<B::InnerBackend, Float>(whole, shape.clone()).tensor())
        });
        let wholes = wholes.collect::<Result<_, Error>>()?;
        self.memory.extend(bucket.into_memory());
        Ok(wholes)
    }
}

/// Takes memory for `bytes` bytes from what is unused. Frees what is too small, or much larger than needed: the largest
/// block's memory must not stay for small ones.
pub(super) fn reuse(unused: &mut Vec<Buffer<u64>>, bytes: usize) -> Option<Buffer<u64>> {
    let words = bytes.div_ceil(size_of::<u64>());
    unused.retain(|memory| memory.len() >= words && memory.len() / 2 <= words);
    unused.pop()
}

/// Returns what takes the place of a parameter that could not be gathered: a tensor of its shape that takes no memory,
/// of elements that no result hides.
pub(super) fn nothing<B: AutodiffBackend>(parameter: &Parameter<B>) -> FloatTensor<B::InnerBackend> {
    let one = Shape::from(vec![1; parameter.shape.num_dims()]);
    let data = TensorData::full_dtype(one, f32::NAN, parameter.dtype);
    B::InnerBackend::float_expand(B::InnerBackend::float_from_data(data, &parameter.device), parameter.shape.clone())
}

// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::module::ParamId;
    use burn::tensor::{Tensor, TensorMetadata};

    use super::*;

    #[test]
    fn a_block_that_no_memory_can_hold_is_an_error() {
        let parameter = Parameter::<Autodiff<Flex>> {
            id: ParamId::new(),
            path: "huge".into(),
            shape: Shape::new([1, 1 << 58]),
            dtype: burn::tensor::DType::F32,
            element: DType::F32,
            device: Default::default(),
            trained: true,
        };
        let layout = Arc::new(Layout::new(std::slice::from_ref(&parameter), &[1], 1, 0));
        // What takes its place takes no memory.
        assert_eq!(nothing(&parameter).shape(), parameter.shape);
        let mut gatherer = Gatherer::new(Group::threads(1).unwrap().remove(0), layout, [parameter].into());
        let error = gatherer.start(1, |_| None).err().unwrap();
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }

    #[test]
    fn blocks_come_back_as_they_were_cut() {
        let device = Default::default();
        let parameter = |shape: [usize; 2]| Parameter::<Autodiff<Flex>> {
            id: ParamId::new(),
            path: String::new(),
            shape: Shape::new(shape),
            dtype: burn::tensor::DType::F32,
            element: DType::F32,
            device,
            trained: true,
        };
        let parameters: Arc<[_]> = [parameter([3, 5]), parameter([1, 4])].into();
        let layout = Arc::new(Layout::new(&parameters, &[0, 0], 1, 0));
        let mut gatherer = Gatherer::new(Group::threads(1).unwrap().remove(0), layout, parameters);
        let values = [[3, 5], [1, 4]].map(|[rows, columns]| {
            Tensor::<Flex, 1, burn::tensor::Int>::arange(0..(rows * columns) as i64, &device)
                .float()
                .reshape([rows, columns])
        });
        for _ in 0..2 {
            let part = |position: usize| Some(Tensor::<Flex, 2>::clone(&values[position]).into_primitive().tensor());
            let gathering = gatherer.start(0, part).unwrap();
            let wholes = gatherer.finish(0, gathering, false).unwrap();
            for (whole, value) in wholes.into_iter().zip(&values) {
                let whole = Tensor::<Flex, 2>::from_primitive(TensorPrimitive::Float(whole));
                assert_eq!(whole.into_data(), value.to_data());
            }
        }
    }
}
