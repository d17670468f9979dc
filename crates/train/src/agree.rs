//! Small agreements between the ranks of a group.

mod seeded;

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

/// Returns the longest of the lengths of all ranks, to which all of them then pad. All ranks must call this. A rank
/// without sequences passes 0.
///
/// # Errors
/// [`Error::InvalidArgument`] on all ranks if a length is above the `limit`, of which the lowest counts; the group
/// remains usable. Otherwise those of [`Group::all_gather`].
#[track_caller]
pub fn longest(group: &Group, own: usize, limit: usize) -> Result<usize, Error> {
    let _call = group.enter("longest");
    let of_ranks = all_gather_values(group, [own as u64, limit as u64])?;
    let limit = of_ranks.iter().map(|[_, limit]| *limit).min().unwrap_or(0);
    let longest = of_ranks.iter().map(|[length, _]| *length).max().unwrap_or(0);
    match of_ranks.iter().position(|[length, _]| *length == longest && longest > limit) {
        None => Ok(longest as usize),
        Some(rank) => {
            let reason = format!(
                "rank {rank} has a sequence of {longest}, and the longest that is allowed has {limit}; cut it, or \
                 leave it out"
            );
            Err(Error::argument("agreeing on a length", reason))
        }
    }
}

/// Returns the mean of each value over all ranks, without weights.
///
/// # Errors
/// Those of [`Group::all_reduce`].
#[track_caller]
pub fn mean_over_ranks(group: &Group, mut values: Vec<f64>) -> Result<Vec<f64>, Error> {
    group.all_reduce(&mut values, ReduceOp::Mean)?;
    Ok(values)
}

/// Returns which of the things with these digests are not the same on all ranks.
///
/// # Errors
/// Those of [`Group::all_gather`].
#[track_caller]
pub fn different(group: &Group, digests: &[u64]) -> Result<Vec<bool>, Error> {
    let mut all = digests.repeat(group.world_size());
    group.all_gather_into(digests, &mut all)?;
    let differs = |place: usize| all[place..].iter().step_by(digests.len()).any(|digest| *digest != all[place]);
    Ok((0..digests.len()).map(differs).collect())
}
