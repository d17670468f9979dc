//! What arguments must be.

use crate::types::Error;

/// A rank of a group of `ranks`.
pub(super) fn rank(operation: &str, what: &str, rank: usize, ranks: usize) -> Result<(), Error> {
    if rank < ranks {
        return Ok(());
    }
    let last = ranks - 1;
    Err(Error::argument(operation, format!("{what} {rank} is no rank of this group: give one from 0 to {last}")))
}

/// Another rank than the caller, which is `place.0` of `place.1`.
pub(super) fn peer(operation: &str, peer: usize, place: (usize, usize)) -> Result<(), Error> {
    rank(operation, "peer", peer, place.1)?;
    if peer == place.0 {
        return Err(Error::argument(operation, format!("rank {peer} is the caller itself: give another rank")));
    }
    Ok(())
}

/// As many elements as can be cut into one part for each rank.
pub(super) fn parts(len: usize, ranks: usize) -> Result<(), Error> {
    if len.is_multiple_of(ranks) {
        return Ok(());
    }
    let reason = format!("{len} elements are no {ranks} parts of one length: give a multiple of {ranks}");
    Err(Error::argument("all_to_all", reason))
}

/// A size for each rank. Gives the number of elements of the whole.
pub(super) fn sizes(operation: &str, sizes: &[usize], ranks: usize) -> Result<usize, Error> {
    if sizes.len() != ranks {
        let reason = format!("{} sizes for {ranks} ranks: give one for each", sizes.len());
        return Err(Error::argument(operation, reason));
    }
    let count = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
    let fits = |count: &usize| count.checked_mul(size_of::<u64>()).is_some_and(|bytes| bytes < isize::MAX as usize);
    count.filter(fits).ok_or_else(|| Error::argument(operation, "these sizes are more than any memory has"))
}

/// A buffer of the right length.
pub(super) fn len(operation: &str, what: &str, len: usize, right: usize) -> Result<(), Error> {
    if len == right {
        return Ok(());
    }
    Err(Error::argument(operation, format!("the {what} has {len} elements and must have {right}")))
}

/// Sizes that ranks told each other.
pub(super) fn told(operation: &str, sizes: impl IntoIterator<Item = u64>) -> Result<Vec<usize>, Error> {
    let sizes: Result<_, _> = sizes.into_iter().map(usize::try_from).collect();
    sizes.map_err(|_| Error::argument(operation, "a rank has more elements than this one can address"))
}
