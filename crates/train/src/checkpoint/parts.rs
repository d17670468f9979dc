//! What a rank saves: ranges of named tensors, and small values.

use std::collections::HashSet;
use std::ops::Range;

use super::SAVING;
use super::format::{Dtype, Part, ReadBytes, Sink, elements, width};
use super::scalar::Scalar;
use crate::parameters::{Difference, Digest, Digested};
use bonfire_core::{Error, partition};

/// Tensors that are the same on all ranks are cut into parts from this number of bytes on. Smaller ones are rank 0's.
const CUT_FROM: usize = 64 << 10;

/// The parts of one rank.
pub struct Parts {
    rank: usize,
    world_size: usize,
    /// What all names begin with.
    prefix: String,
    names: HashSet<String>,
    list: Vec<Part>,
    /// What other ranks have too.
    digests: Vec<Digested>,
}

impl Parts {
    /// The parts of a rank that has added none.
    pub fn new(rank: usize, world_size: usize) -> Parts {
        Parts { rank, world_size, prefix: String::new(), names: HashSet::new(), list: Vec::new(), digests: Vec::new() }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Adds what `add` adds, under names that begin with `prefix`.
    pub(super) fn within(
        &mut self,
        prefix: &str,
        add: impl FnOnce(&mut Parts) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let len = self.prefix.len();
        self.prefix.push_str(prefix);
        let added = add(self);
        self.prefix.truncate(len);
        added
    }

    pub(super) fn into_list(mut self) -> (Vec<Part>, Vec<Digested>) {
        // An optimizer lists its states in another order on each rank.
        self.digests.sort_by(|one, other| one.what.cmp(&other.what));
        (self.list, self.digests)
    }

    /// Reads elements that other ranks must have, too: `part` says which of the tensor they are.
    pub(super) fn compare(
        &mut self,
        name: &str,
        part: usize,
        read: impl FnOnce(Sink<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut digest = Digest::default();
        read(&mut |bytes| {
            digest.add(bytes);
            Ok(())
        })?;
        let what = format!("`{}{name}`", self.prefix);
        self.digests.push(Digested { what, part: part as u64, digest: digest.finish() });
        Ok(())
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
        let name = format!("{}{name}", self.prefix);
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
        if self.world_size > 1 {
            self.compare(&name, 0, |sink| read(0..len, sink))?;
        }
        let range = if len.saturating_mul(width(dtype)) >= CUT_FROM {
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
        self.add_scalar_of(name, scalar, self.rank == 0)
    }

    /// Adds a number that is the same on all ranks, of which one saves it.
    pub(super) fn add_scalar_of(&mut self, name: String, scalar: Scalar, saves: bool) -> Result<(), Error> {
        let (dtype, bytes) = scalar.to_bytes();
        self.compare(&name, 0, |sink| sink(&bytes))?;
        if !saves {
            return Ok(());
        }
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

/// Fails if ranks have different values of what should be the same.
pub(super) fn check_equal(operation: &str, of_ranks: &[Vec<Digested>]) -> Result<(), Error> {
    let Some(difference) = Difference::of(of_ranks) else { return Ok(()) };
    let reason = format!(
        "{difference}, so what each rank saves does not fit together; save a fully sharded model as a pair with its \
         `FullyShardedParallel`, average running statistics with `average_states` before, and find out with `verify` \
         since when the ranks differ"
    );
    Err(Error::argument(operation, reason))
}

/// Describes a tensor in an error.
pub fn describe(dtype: Dtype, shape: &[usize]) -> String {
    format!("{} {shape:?}", dtype.to_string().to_lowercase())
}
