//! What a rank saves: ranges of named tensors, and small values.

use std::collections::HashSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::SAVING;
use super::format::{Dtype, Part, ReadBytes, Sink, elements, width};
use super::scalar::Scalar;
use crate::parameters::digest;
use bonfire_core::{Error, partition};

/// Tensors that are the same on all ranks are cut into parts from this number of bytes on. Smaller ones are rank 0's.
const CUT_FROM: usize = 64 << 10;

/// Elements of such a tensor by which the ranks compare what each of them has.
const SAMPLE: usize = 1024;

/// The parts of one rank.
pub struct Parts {
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
    /// The parts of a rank that has added none.
    pub fn new(rank: usize, world_size: usize) -> Parts {
        Parts { rank, world_size, names: HashSet::new(), list: Vec::new(), samples: Vec::new() }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn into_list(mut self) -> (Vec<Part>, Vec<Sample>) {
        // An optimizer lists its states in another order on each rank.
        self.samples.sort_by(|one, other| one.name.cmp(&other.name));
        (self.list, self.samples)
    }

    /// Adds a range of a tensor that only this rank, or only some ranks, hold. The ranges of all ranks together must
    /// cover the tensor. A rank has one range of each tensor.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is a tensor of this name.
    pub fn add(
        &mut self,
        name: String,
        dtype: Dtype,
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
        self.list.push(Part { name, dtype, shape: shape.to_vec(), range, read });
        Ok(())
    }

    /// Adds this rank's range of a tensor that is the same on all ranks. `read` passes the bytes of a range on.
    ///
    /// # Errors
    /// Those of [`add`](Self::add) and of `read`.
    pub fn add_replicated(
        &mut self,
        name: String,
        dtype: Dtype,
        shape: &[usize],
        read: impl Fn(Range<usize>, Sink<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let len = elements(shape).unwrap_or(0);
        let range = if len.saturating_mul(width(dtype)) >= CUT_FROM {
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

    /// Adds a value that is the same on all ranks: rank 0's is saved.
    ///
    /// # Errors
    /// Those of [`add`](Self::add).
    pub fn add_value(&mut self, name: String, bytes: Vec<u8>) -> Result<(), Error> {
        match self.rank {
            0 => self.add_own_value(name, bytes),
            _ => Ok(()),
        }
    }

    /// Adds a number that is the same on all ranks: rank 0's is saved.
    ///
    /// # Errors
    /// Those of [`add`](Self::add).
    pub fn add_scalar(&mut self, name: String, scalar: Scalar) -> Result<(), Error> {
        match self.rank {
            0 => self.add_own_scalar(name, scalar),
            _ => Ok(()),
        }
    }

    /// Adds a number that only this rank adds.
    pub(super) fn add_own_scalar(&mut self, name: String, scalar: Scalar) -> Result<(), Error> {
        let (dtype, bytes) = scalar.to_bytes();
        self.add(name, dtype, &[], 0..1, Box::new(move |sink| sink(&bytes)))
    }

    /// Adds a value that only this rank adds.
    ///
    /// # Errors
    /// Those of [`add`](Self::add).
    pub(super) fn add_own_value(&mut self, name: String, bytes: Vec<u8>) -> Result<(), Error> {
        self.add(name, Dtype::U8, &[bytes.len()], 0..bytes.len(), Box::new(move |sink| sink(&bytes)))
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

/// Describes a tensor in an error.
pub fn describe(dtype: Dtype, shape: &[usize]) -> String {
    format!("{} {shape:?}", dtype.to_string().to_lowercase())
}
