//! How long each rank's part is along a dimension.

use super::axis::Axis;
use crate::tensor::host::Via;
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Operation};
use bytemuck::cast_slice_mut;

/// How long each rank's part is along the dimension.
#[derive(Clone, Copy)]
pub(crate) enum Sizes<'a> {
    /// All alike.
    Even,
    /// As the caller says.
    Given(&'a [usize]),
    /// As the ranks tell each other.
    Exchanged,
}

impl Sizes<'_> {
    /// The sizes of all ranks' parts, of which this rank's is the axis's.
    pub(crate) fn resolve(self, via: Via<'_>, operation: &str, axis: &Axis) -> Result<Vec<usize>, Error> {
        let group = via.group;
        match self {
            Sizes::Even => Ok(vec![axis.len(); group.world_size()]),
            Sizes::Given(sizes) => {
                check(via, operation, sizes)?;
                let own = sizes[group.rank()];
                if own == axis.len() {
                    return Ok(sizes.to_vec());
                }
                let reason = format!(
                    "sizes {sizes:?} give this rank, {}, {own}, and its tensor has {}",
                    group.rank(),
                    axis.len()
                );
                Err(Error::argument(operation, reason))
            }
            Sizes::Exchanged => {
                let mut sizes = vec![0u64; group.world_size()];
                sizes[group.rank()] = axis.len() as u64;
                let request = Request::new(Operation::AllGather, DType::U64).shape(&axis.agreed());
                group.operate(request, None, cast_slice_mut(&mut sizes))?;
                Ok(sizes.into_iter().map(|size| size as usize).collect())
            }
        }
    }
}

pub(super) fn check(via: Via<'_>, operation: &str, sizes: &[usize]) -> Result<(), Error> {
    let n = via.group.world_size();
    if sizes.len() == n {
        return Ok(());
    }
    Err(Error::argument(operation, format!("{} sizes for {n} ranks: give one for each", sizes.len())))
}

/// The sizes into which a whole is cut: those given, which must add up to it, or equal ones.
pub(crate) fn cut(via: Via<'_>, operation: &str, axis: &Axis, sizes: Option<&[usize]>) -> Result<Vec<usize>, Error> {
    let (n, len) = (via.group.world_size(), axis.len());
    let Some(sizes) = sizes else {
        if len.is_multiple_of(n) {
            return Ok(vec![len / n; n]);
        }
        let reason =
            format!("{len} along the dimension are no {n} parts of one length: give a multiple of {n}, or sizes");
        return Err(Error::argument(operation, reason));
    };
    check(via, operation, sizes)?;
    if sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) == Some(len) {
        return Ok(sizes.to_vec());
    }
    Err(Error::argument(operation, format!("sizes {sizes:?} do not add up to the tensor's {len}")))
}

pub(super) fn equal(sizes: &[usize]) -> bool {
    sizes.windows(2).all(|pair| pair[0] == pair[1])
}

/// How much comes from each rank, if it sends as it says.
pub(crate) fn awaited(via: Via<'_>, axis: &Axis, send: &[usize]) -> Result<Vec<usize>, Error> {
    let mut sizes: Vec<u64> = send.iter().map(|size| *size as u64).collect();
    let request = Request::new(Operation::AllToAll, DType::U64).shape(&axis.agreed());
    via.group.operate(request, None, cast_slice_mut(&mut sizes))?;
    Ok(sizes.into_iter().map(|size| size as usize).collect())
}
