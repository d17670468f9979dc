//! Sizes of the parts that the ranks exchange on devices.
//!
//! The ranks of an all_to_all_v exchange them even if the caller knows its own, because all ranks must choose slots of
//! one length. So sizes that do not match are an error on all ranks, and the group remains usable.

use bonfire_core::internal::{AgreedOperations, ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation};
use bonfire_tensor::{Axis, exchange_recv_sizes};
use bytemuck::cast_slice_mut;

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
        group: &Group,
        operation: &str,
        axis: &Axis,
        (send, expected): (&[usize], Option<&[usize]>),
    ) -> Result<PairSums, Error> {
        let (rank, n) = (group.rank(), group.world_size());
        let recv = exchange_recv_sizes(group, axis, send)?;
        let wrong =
            expected.and_then(|expected| (0..n).find(|from| expected[*from] != recv[*from]).zip(Some(expected)));
        let sum = |sizes: &[usize]| sizes.iter().fold(0, |sum: usize, size| sum.saturating_add(*size));
        let longest = send.iter().chain(&recv).max().copied().unwrap_or_default();
        let own = [longest as u64, sum(send).max(sum(&recv)) as u64, u64::from(wrong.is_some())];
        let mut all = vec![own; n];
        let request = Request::new(Operation::AllGather, DType::U64).shape(&axis.common());
        group.operate(request, None, cast_slice_mut(all.as_flattened_mut()))?;
        if all.iter().any(|[_, _, wrong]| *wrong != 0) {
            let own = wrong.map_or(Ok(()), |(from, expected)| {
                let (sent, expected) = (recv[from], expected[from]);
                let reason = format!("rank {from} sends length {sent} to rank {rank}, which expects {expected}");
                Err(Error::argument(operation, reason))
            });
            group.all_gather_results(own)?;
        }
        let largest = |which: usize| {
            let largest = all.iter().map(|numbers| numbers[which]).max().unwrap_or_default();
            usize::try_from(largest).unwrap_or(usize::MAX)
        };
        Ok(PairSums { recv, longest: largest(0), most: largest(1) })
    }
}
