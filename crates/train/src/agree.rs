//! Small agreements between the ranks of a group.

mod seeded;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use self::seeded::seeded;
use bonfire_core::internal::{AgreedOperations, process_number};
use bonfire_core::{Element, Error, Group, ReduceOp};

/// Makes a group of the same ranks, for communication that takes place beside that of `group`. All ranks must call it.
///
/// # Errors
/// Those of [`Group::subgroup`].
#[track_caller]
pub fn lane(group: &Group) -> Result<Group, Error> {
    let ranks: Vec<usize> = (0..group.world_size()).collect();
    if ranks.len() == 1 { Ok(group.clone()) } else { group.subgroup(&ranks) }
}

/// Returns whether no two ranks are threads of one process. All ranks must call it.
///
/// # Errors
/// Those of [`Group::all_gather`].
#[track_caller]
pub fn ranks_are_processes(group: &Group) -> Result<bool, Error> {
    let own = process_number().map_err(|error| group.abandon(error))?;
    let mut numbers = all_gather_values(group, [own])?;
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers.len() == group.world_size())
}

/// All-gathers `N` values from each rank. Returns them by rank.
///
/// # Errors
/// Those of [`Group::all_gather`].
#[track_caller]
pub fn all_gather_values<T: Element, const N: usize>(group: &Group, own: [T; N]) -> Result<Vec<[T; N]>, Error> {
    let mut all = vec![own; group.world_size()];
    group.all_gather(all.as_flattened_mut())?;
    Ok(all)
}

/// Returns `own` if all ranks succeeded. Otherwise all ranks return the error of the lowest rank that failed, and the
/// group stays usable.
///
/// # Errors
/// That error, or those of [`Group::all_gather`].
#[track_caller]
pub fn all_or_none<T>(group: &Group, own: Result<T, Error>) -> Result<T, Error> {
    let told = own.as_ref().map_or_else(|error| Err(error.clone()), |_| Ok(()));
    group.all_gather_results(told).and(own)
}

/// Returns the lowest rank among those that are furthest, by epoch and samples.
///
/// # Errors
/// Those of [`Group::all_gather`].
#[track_caller]
pub fn furthest(group: &Group, own: [u64; 2]) -> Result<usize, Error> {
    let positions = all_gather_values(group, own)?;
    let furthest = positions.iter().max();
    Ok(positions.iter().position(|position| Some(position) == furthest).unwrap_or(0))
}

/// Broadcasts `root`'s value: returns its `own` on all ranks. The others' `own` is ignored.
///
/// # Errors
/// [`Error::Io`] if the value cannot be encoded or decoded. Otherwise those of [`Group::broadcast`].
#[track_caller]
pub fn broadcast_value<T: Serialize, R: for<'de> Deserialize<'de>>(
    group: &Group,
    own: &T,
    root: usize,
) -> Result<R, Error> {
    let broken = |e| Error::io("encoding or decoding a value for all ranks", e);
    let mut bytes = if group.rank() == root { postcard::to_stdvec(own).map_err(broken)? } else { Vec::new() };
    let mut len = [bytes.len() as u64];
    group.broadcast(&mut len, root)?;
    bytes.resize(len[0] as usize, 0);
    group.broadcast(&mut bytes, root)?;
    postcard::from_bytes(&bytes).map_err(broken)
}

/// Averages states that the ranks have in common: one after the other in `values`, of these lengths. Returns for each
/// the mean over all ranks, or `None` if it is bit-identical on all.
///
/// # Errors
/// Those of [`Group::all_reduce`].
#[track_caller]
pub fn means_where_different(
    group: &Group,
    lens: &[usize],
    mut values: Vec<f64>,
) -> Result<Vec<Option<Vec<f64>>>, Error> {
    let mut first = values.clone();
    group.broadcast(&mut first, 0)?;
    let mut start = 0;
    let ranges = lens.iter().map(|len| {
        start += len;
        start - len..start
    });
    let ranges: Vec<_> = ranges.collect();
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let differs = |range: &Range<usize>| bits(&values[range.clone()]) != bits(&first[range.clone()]);
    let mut differ: Vec<u8> = ranges.iter().map(|range| u8::from(differs(range))).collect();
    group.all_reduce(&mut differ, ReduceOp::Max)?;
    group.all_reduce(&mut values, ReduceOp::Mean)?;
    let means = ranges.into_iter().zip(differ);
    Ok(means.map(|(range, differs)| (differs == 1).then(|| values[range].to_vec())).collect())
}
