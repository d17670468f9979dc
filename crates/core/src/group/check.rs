//! Argument checks.

use crate::types::Error;

/// Checks that `rank` is a rank of a group of `ranks`. `what` names the argument.
pub(super) fn rank(operation: &str, what: &str, rank: usize, ranks: usize) -> Result<(), Error> {
    if rank < ranks {
        return Ok(());
    }
    let last = ranks - 1;
    Err(Error::argument(operation, format!("{what} {rank} is not a rank of this group: give one from 0 to {last}")))
}

/// Checks that `peer` is a rank other than the caller, given the caller's rank and the world size.
pub(super) fn peer(operation: &str, peer: usize, rank_and_size: (usize, usize)) -> Result<(), Error> {
    rank(operation, "peer", peer, rank_and_size.1)?;
    if peer == rank_and_size.0 {
        return Err(Error::argument(operation, format!("rank {peer} is the caller itself: give another rank")));
    }
    Ok(())
}

/// Checks that `len` elements split into equal parts, one for each rank.
pub(super) fn parts(len: usize, ranks: usize) -> Result<(), Error> {
    if len.is_multiple_of(ranks) {
        return Ok(());
    }
    let reason = format!("{len} elements do not split into {ranks} equal parts: give a multiple of {ranks}");
    Err(Error::argument("all_to_all", reason))
}

/// Checks that there is one size per rank. Returns the number of elements of the whole.
pub(super) fn sizes(operation: &str, sizes: &[usize], ranks: usize) -> Result<usize, Error> {
    if sizes.len() != ranks {
        let reason = format!("{} sizes for {ranks} ranks: give one for each", sizes.len());
        return Err(Error::argument(operation, reason));
    }
    let count = sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size));
    let fits = |count: &usize| count.checked_mul(size_of::<u64>()).is_some_and(|bytes| bytes < isize::MAX as usize);
    count.filter(fits).ok_or_else(|| Error::argument(operation, "the sizes add up to more than memory can hold"))
}

/// Checks the length of a buffer.
pub(super) fn len(operation: &str, what: &str, len: usize, expected: usize) -> Result<(), Error> {
    if len == expected {
        return Ok(());
    }
    Err(Error::argument(operation, format!("the {what} has {len} elements and must have {expected}")))
}

/// Converts sizes that ranks sent each other.
pub(super) fn received_sizes(operation: &str, sizes: impl IntoIterator<Item = u64>) -> Result<Vec<usize>, Error> {
    let sizes: Result<_, _> = sizes.into_iter().map(usize::try_from).collect();
    sizes.map_err(|_| Error::argument(operation, "a rank has more elements than this rank can address"))
}
