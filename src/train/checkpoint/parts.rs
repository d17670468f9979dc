//! What a rank saves: ranges of named tensors, and small values.

use std::collections::HashSet;
use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Shape, Tensor};
use serde::{Deserialize, Serialize};

use super::SAVING;
use super::format::{Dtype, Part, ReadBytes, Sink, elements, width};
use crate::tensor::host::{Kind, Source};
use crate::train::values::digest;
use bonfire_core::{Error, partition};

/// Tensors that are the same on all ranks are cut into parts from this number of bytes on. Smaller ones are rank 0's.
const CUT_FROM: usize = 64 << 10;

/// Elements of such a tensor by which the ranks compare what each of them has.
const SAMPLE: usize = 1024;

/// The parts of one rank.
pub(crate) struct Parts {
    rank: usize,
    world_size: usize,
    names: HashSet<String>,
    list: Vec<Part>,
    samples: Vec<Sample>,
}

/// The digest of the first elements of a tensor that should be the same on all ranks.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    name: String,
    digest: u64,
}

impl Parts {
    pub fn new(rank: usize, world_size: usize) -> Parts {
        Parts { rank, world_size, names: HashSet::new(), list: Vec::new(), samples: Vec::new() }
    }

    pub(super) fn into_list(mut self) -> (Vec<Part>, Vec<Sample>) {
        // An optimizer lists its states in another order on each rank.
        self.samples.sort_by(|one, other| one.name.cmp(&other.name));
        (self.list, self.samples)
    }

    /// Adds a range of a tensor that only this rank, or only some ranks, hold. The ranges of all ranks together must
    /// cover the tensor. A rank has one range of each tensor.
    pub fn add(
        &mut self,
        name: String,
        dtype: DType,
        shape: &[usize],
        range: Range<usize>,
        read: ReadBytes,
    ) -> Result<(), Error> {
        if range.is_empty() && elements(shape) != Some(0) {
            return Ok(());
        }
        if !self.names.insert(name.clone()) {
            return Err(Error::argument(SAVING, format!("there are two tensors called `{name}`")));
        }
        let dtype = stored(dtype).ok_or_else(|| {
            Error::argument(SAVING, format!("`{name}` has elements of {dtype:?}, which cannot be saved"))
        })?;
        self.list.push(Part { name, dtype, shape: shape.to_vec(), range, read });
        Ok(())
    }

    /// Adds this rank's range of a tensor that is the same on all ranks. `read` passes the bytes of a range on.
    pub fn add_replicated(
        &mut self,
        name: String,
        dtype: DType,
        shape: &[usize],
        read: impl Fn(Range<usize>, Sink<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let len = elements(shape).unwrap_or(0);
        let range = if len.saturating_mul(stored(dtype).map_or(1, width)) >= CUT_FROM {
            let mut sample = Vec::new();
            read(0..len.min(SAMPLE), &mut |bytes| {
                sample.extend_from_slice(bytes);
                Ok(())
            })?;
            self.samples.push(Sample { name: name.clone(), digest: digest(&sample) });
            partition(len, self.world_size, self.rank)
        } else if self.rank == 0 {
            0..len
        } else {
            0..0
        };
        if range.is_empty() && self.rank > 0 {
            return Ok(());
        }
        self.add(name, dtype, shape, range.clone(), Box::new(move |sink| read(range, sink)))
    }

    /// Adds this rank's range of a tensor that is the same on all ranks. Holds the tensor, not a copy of its elements,
    /// until the range is written.
    pub fn add_tensor<B: Backend, K: Kind<B> + 'static, const D: usize>(
        &mut self,
        name: String,
        tensor: Tensor<B, D, K>,
    ) -> Result<(), Error>
    where
        K::Primitive: Send,
    {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        self.add_replicated(name, dtype, shape.as_slice(), move |range, sink| read(tensor.clone(), range, sink))
    }

    /// Adds a value that is the same on all ranks: rank 0's is saved.
    pub fn add_value(&mut self, name: String, bytes: Vec<u8>) -> Result<(), Error> {
        match self.rank {
            0 => self.add_own_value(name, bytes),
            _ => Ok(()),
        }
    }

    /// Adds a value that only this rank adds.
    pub fn add_own_value(&mut self, name: String, bytes: Vec<u8>) -> Result<(), Error> {
        self.add(name, DType::U8, &[bytes.len()], 0..bytes.len(), Box::new(move |sink| sink(&bytes)))
    }
}

/// Fails if the ranks have different tensors, of which each would write a part.
pub(super) fn check_samples(of_ranks: &[Vec<Sample>]) -> Result<(), Error> {
    for (rank, samples) in of_ranks.iter().enumerate() {
        let pairs = samples.iter().zip(&of_ranks[0]);
        let Some((own, _)) = pairs.into_iter().find(|(own, first)| own != first) else { continue };
        let reason = format!(
            "`{}` of rank {rank} differs from rank 0's, so the ranks' parts do not fit together; save a fully sharded \
             model as a pair with its `FullyShardedParallel`, and make replicas equal before: `verify` and \
             `average_states` tell more",
            own.name
        );
        return Err(Error::argument(SAVING, reason));
    }
    Ok(())
}

/// Passes the bytes of these elements of a tensor on.
pub(crate) fn read<B: Backend, K: Kind<B>, const D: usize>(
    tensor: Tensor<B, D, K>,
    range: Range<usize>,
    sink: Sink<'_>,
) -> Result<(), Error> {
    let len = tensor.shape().num_elements();
    let flat: Tensor<B, 1, K> = tensor.reshape([len]);
    let flat = if range.len() == len { flat } else { flat.slice(range) };
    let (source, _) = Source::read::<B, K>("reading a tensor to save it", flat.into_primitive())?;
    sink(source.bytes())
}

/// The element type in which elements of this type are saved. Bools are saved as bytes.
pub(crate) fn stored(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(_) => Dtype::BOOL,
        _ => return None,
    })
}

/// The element type of saved elements in host memory.
pub(crate) fn loaded(dtype: Dtype) -> Option<DType> {
    use burn::tensor::BoolStore;
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
}

/// Describes a tensor in an error.
pub(crate) fn describe(dtype: Dtype, shape: &[usize]) -> String {
    format!("{} {shape:?}", dtype.to_string().to_lowercase())
}

/// Converts a shape to one of burn's.
pub(crate) fn shape(shape: &[usize]) -> Shape {
    Shape::from(shape.to_vec())
}
