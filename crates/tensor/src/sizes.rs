//! Lengths of the ranks' parts along a dimension.

use bytemuck::cast_slice_mut;

use super::axis::Axis;
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation};

/// Where the lengths of the ranks' parts along the dimension come from.
#[derive(Clone, Copy, Debug)]
pub enum Sizes<'a> {
    /// All parts have the length of this rank's.
    Even,
    /// The caller passes them.
    Given(&'a [usize]),
    /// The ranks exchange them in an all_gather.
    Exchanged,
}

impl Sizes<'_> {
    /// Returns the sizes of all ranks' parts. This rank's size is `axis.length()`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the given sizes are not one for each rank, or not this rank's; those of the
    /// exchange.
    #[track_caller]
    pub fn resolve(self, group: &Group, operation: &str, axis: &Axis) -> Result<Vec<usize>, Error> {
        match self {
            Sizes::Even => Ok(vec![axis.length(); group.world_size()]),
            Sizes::Given(sizes) => {
                check_count(group, operation, sizes)?;
                let own = sizes[group.rank()];
                if own == axis.length() {
                    return Ok(sizes.to_vec());
                }
                let (rank, length) = (group.rank(), axis.length());
                let reason = format!("rank {rank}'s size in {sizes:?} is {own}, and its tensor has {length}");
                Err(Error::argument(operation, reason))
            }
            Sizes::Exchanged => {
                let mut sizes = vec![0u64; group.world_size()];
                sizes[group.rank()] = axis.length() as u64;
                let request = Request::new(Operation::AllGather, DType::U64).shape(&axis.common());
                group.operate(request, None, cast_slice_mut(&mut sizes))?;
                Ok(sizes.into_iter().map(|size| size as usize).collect())
            }
        }
    }
}

/// Lengths of the parts of an all_to_all along the dimension, one for each rank.
#[derive(Clone, Copy, Debug)]
pub struct PairSizes<'a> {
    /// To send to each rank; `None` for equal parts.
    pub send: Option<&'a [usize]>,
    /// To receive from each rank. With `None`, the ranks exchange it, unless the parts are equal.
    pub recv: Option<&'a [usize]>,
}

impl PairSizes<'_> {
    /// Returns what this rank receives from each rank. `send` is what it sends to each.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the given sizes are not one for each rank; those of the exchange.
    #[track_caller]
    pub fn received(&self, group: &Group, operation: &str, axis: &Axis, send: &[usize]) -> Result<Vec<usize>, Error> {
        match (self.send, self.recv) {
            (_, Some(recv)) => {
                check_count(group, operation, recv)?;
                Ok(recv.to_vec())
            }
            (None, None) => Ok(send.to_vec()),
            (Some(_), None) => exchange_recv_sizes(group, axis, send),
        }
    }
}

/// Checks that there is one size per rank.
///
/// # Errors
/// [`Error::InvalidArgument`] if there is not.
pub fn check_count(group: &Group, operation: &str, sizes: &[usize]) -> Result<(), Error> {
    let n = group.world_size();
    if sizes.len() == n {
        return Ok(());
    }
    Err(Error::argument(operation, format!("{} sizes for {n} ranks: give one for each", sizes.len())))
}

/// Returns the sizes into which a whole is split: the given ones, which must add up to its length, or equal ones.
///
/// # Errors
/// [`Error::InvalidArgument`] if the whole has no such parts.
pub fn split_sizes(group: &Group, operation: &str, axis: &Axis, sizes: Option<&[usize]>) -> Result<Vec<usize>, Error> {
    let (n, length) = (group.world_size(), axis.length());
    let Some(sizes) = sizes else {
        if length.is_multiple_of(n) {
            return Ok(vec![length / n; n]);
        }
        let reason =
            format!("length {length} along the dimension is not {n} equal parts: give a multiple of {n}, or sizes");
        return Err(Error::argument(operation, reason));
    };
    check_count(group, operation, sizes)?;
    if sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) == Some(length) {
        return Ok(sizes.to_vec());
    }
    Err(Error::argument(operation, format!("sizes {sizes:?} do not add up to the tensor's {length}")))
}

/// Whether all parts have one length.
pub fn all_equal(sizes: &[usize]) -> bool {
    sizes.windows(2).all(|pair| pair[0] == pair[1])
}

/// Exchanges the sizes of an all_to_all: passes `send[r]` to rank `r` and returns what each rank sends to this one.
///
/// # Errors
/// Those of [`Group::all_to_all`].
#[track_caller]
pub fn exchange_recv_sizes(group: &Group, axis: &Axis, send: &[usize]) -> Result<Vec<usize>, Error> {
    let mut sizes: Vec<u64> = send.iter().map(|size| *size as u64).collect();
    let request = Request::new(Operation::AllToAll, DType::U64).shape(&axis.common());
    group.operate(request, None, cast_slice_mut(&mut sizes))?;
    Ok(sizes.into_iter().map(|size| size as usize).collect())
}
