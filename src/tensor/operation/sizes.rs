//! Lengths of the ranks' parts along a dimension.

use super::axis::Axis;
use crate::tensor::host::Context;
use bonfire_core::internal::{AgreedOperations, ByteOperations, Request};
use bonfire_core::{DType, Error, Operation};
use bytemuck::cast_slice_mut;

/// Where the lengths of the ranks' parts along the dimension come from.
#[derive(Clone, Copy)]
pub(crate) enum Sizes<'a> {
    /// All parts have the length of this rank's.
    Even,
    /// The caller passes them.
    Given(&'a [usize]),
    /// The ranks exchange them in an all_gather.
    Exchanged,
}

impl Sizes<'_> {
    /// Returns the sizes of all ranks' parts. This rank's size is `axis.len()`.
    #[track_caller]
    pub(crate) fn resolve(self, ctx: Context<'_>, operation: &str, axis: &Axis) -> Result<Vec<usize>, Error> {
        let group = ctx.group;
        match self {
            Sizes::Even => Ok(vec![axis.len(); group.world_size()]),
            Sizes::Given(sizes) => {
                check_count(ctx, operation, sizes)?;
                let own = sizes[group.rank()];
                if own == axis.len() {
                    return Ok(sizes.to_vec());
                }
                let reason =
                    format!("rank {}'s size in {sizes:?} is {own}, and its tensor has {}", group.rank(), axis.len());
                Err(Error::argument(operation, reason))
            }
            Sizes::Exchanged => {
                let mut sizes = vec![0u64; group.world_size()];
                sizes[group.rank()] = axis.len() as u64;
                let request = Request::new(Operation::AllGather, DType::U64).shape(&axis.common());
                group.operate(request, None, cast_slice_mut(&mut sizes))?;
                Ok(sizes.into_iter().map(|size| size as usize).collect())
            }
        }
    }
}

/// Checks that there is one size per rank.
pub(super) fn check_count(ctx: Context<'_>, operation: &str, sizes: &[usize]) -> Result<(), Error> {
    let n = ctx.group.world_size();
    if sizes.len() == n {
        return Ok(());
    }
    Err(Error::argument(operation, format!("{} sizes for {n} ranks: give one for each", sizes.len())))
}

/// Returns the sizes into which a whole is split: the given ones, which must add up to its length, or equal ones.
pub(crate) fn split_sizes(
    ctx: Context<'_>,
    operation: &str,
    axis: &Axis,
    sizes: Option<&[usize]>,
) -> Result<Vec<usize>, Error> {
    let (n, len) = (ctx.group.world_size(), axis.len());
    let Some(sizes) = sizes else {
        if len.is_multiple_of(n) {
            return Ok(vec![len / n; n]);
        }
        let reason =
            format!("length {len} along the dimension is not {n} equal parts: give a multiple of {n}, or sizes");
        return Err(Error::argument(operation, reason));
    };
    check_count(ctx, operation, sizes)?;
    if sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) == Some(len) {
        return Ok(sizes.to_vec());
    }
    Err(Error::argument(operation, format!("sizes {sizes:?} do not add up to the tensor's {len}")))
}

pub(super) fn all_equal(sizes: &[usize]) -> bool {
    sizes.windows(2).all(|pair| pair[0] == pair[1])
}

/// What a rank needs to know of the sizes of an all_to_all on devices.
pub(crate) struct PairSums {
    /// What this rank receives from each.
    pub recv: Vec<usize>,
    /// The largest size of all pairs, and the largest sum of the sizes that a rank sends or receives. The same on all
    /// ranks.
    pub longest: usize,
    pub most: usize,
}

impl PairSums {
    /// Exchanges what this rank sends to each rank. Fails on all ranks if one expects something else than another sends
    /// to it; the group remains usable.
    #[track_caller]
    pub fn exchange(
        ctx: Context<'_>,
        operation: &str,
        axis: &Axis,
        (send, expected): (&[usize], Option<&[usize]>),
    ) -> Result<PairSums, Error> {
        let (rank, n) = (ctx.group.rank(), ctx.group.world_size());
        let recv = exchange_recv_sizes(ctx, axis, send)?;
        let wrong =
            expected.and_then(|expected| (0..n).find(|from| expected[*from] != recv[*from]).zip(Some(expected)));
        let sum = |sizes: &[usize]| sizes.iter().fold(0, |sum: usize, size| sum.saturating_add(*size));
        let longest = send.iter().chain(&recv).max().copied().unwrap_or_default();
        let own = [longest as u64, sum(send).max(sum(&recv)) as u64, u64::from(wrong.is_some())];
        let mut all = vec![own; n];
        let request = Request::new(Operation::AllGather, DType::U64).shape(&axis.common());
        ctx.group.operate(request, None, cast_slice_mut(all.as_flattened_mut()))?;
        if all.iter().any(|[_, _, wrong]| *wrong != 0) {
            let own = wrong.map_or(Ok(()), |(from, expected)| {
                let (sent, expected) = (recv[from], expected[from]);
                let reason = format!("rank {from} sends length {sent} to rank {rank}, which expects {expected}");
                Err(Error::argument(operation, reason))
            });
            ctx.group.all_gather_results(own)?;
        }
        let largest = |which: usize| {
            let largest = all.iter().map(|numbers| numbers[which]).max().unwrap_or_default();
            usize::try_from(largest).unwrap_or(usize::MAX)
        };
        Ok(PairSums { recv, longest: largest(0), most: largest(1) })
    }
}

/// Exchanges the sizes of an all_to_all: passes `send[r]` to rank `r` and returns what each rank sends to this one.
#[track_caller]
pub(crate) fn exchange_recv_sizes(ctx: Context<'_>, axis: &Axis, send: &[usize]) -> Result<Vec<usize>, Error> {
    let mut sizes: Vec<u64> = send.iter().map(|size| *size as u64).collect();
    let request = Request::new(Operation::AllToAll, DType::U64).shape(&axis.common());
    ctx.group.operate(request, None, cast_slice_mut(&mut sizes))?;
    Ok(sizes.into_iter().map(|size| size as usize).collect())
}
