//! Buckets: which gradients are exchanged together, in which order, and with which weights.

mod schedule;
mod tuning;

use std::sync::Arc;

pub(crate) use self::schedule::Schedule;
pub(crate) use self::tuning::{agree_on_order, measured_limits};
use crate::parameters::Parameter;
use bonfire_core::internal::Request;
use bonfire_core::{DType, Operation, ReduceOp};

/// How large buckets are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The most bytes in the first bucket.
    pub first: usize,
    /// The most bytes in each later bucket.
    pub next: usize,
    /// A tensor of at least this many bytes gets a bucket of its own and is reduced in its own memory, which saves two
    /// copies.
    pub alone: usize,
}

impl Limits {
    /// For gradients that are all there at the start. The first bucket is small, so that its reduction starts while
    /// the rest is being packed.
    pub const ON_HOST: Limits = Limits { first: 1 << 20, next: 25 << 20, alone: 256 << 10 };

    /// The same on collective devices. An operation there costs the host 50 to 150 us (an estimate for CUDA), in which
    /// a device copies 25 MiB several times: packing always pays.
    const ON_DEVICES: Limits = Limits { alone: 25 << 20, ..Limits::ON_HOST };

    pub fn of(on_devices: bool) -> Limits {
        if on_devices { Limits::ON_DEVICES } else { Limits::ON_HOST }
    }
}

/// Gradients of one element type that are reduced together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bucket {
    /// The positions of their parameters.
    pub positions: Vec<usize>,
    /// The block of these parameters, if blocks are gathered.
    pub block: Option<usize>,
}

impl Bucket {
    /// Returns a request for an operation on its elements. Those of different blocks are different calls.
    pub fn request(&self, operation: Operation, dtype: DType) -> Request<'static> {
        let request = Request::new(operation, dtype);
        self.block.map_or(request, |block| request.part_of(&block_name(block)))
    }
}

/// Returns the name of a block in errors. Block 0 is that of the parameters that are in no block.
pub(crate) fn block_name(block: usize) -> String {
    if block == 0 { "root block".into() } else { format!("block {block}") }
}

/// Returns the block that has this name.
pub(crate) fn block_of_name(name: &str) -> Option<usize> {
    if name == block_name(0) { Some(0) } else { name.strip_prefix("block ")?.parse().ok() }
}

/// The buckets of a step, in the order in which they are sent.
pub(crate) type BucketTable = Arc<[Bucket]>;

/// Buckets in flight at a time: one is reduced, the next is packed, the previous is unpacked.
pub(crate) const WINDOW: usize = 3;

/// Splits gradients into buckets of one element type each, in the order in which they fill up. Depends on the arguments
/// only, so all ranks get the same buckets.
pub(crate) fn buckets(
    parameters: &[Parameter],
    positions: impl IntoIterator<Item = usize>,
    limits: Limits,
) -> BucketTable {
    let mut full: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<(DType, usize, Vec<usize>)> = Vec::new();
    for position in positions {
        let (dtype, size) = (parameters[position].dtype, parameters[position].bytes());
        if size >= limits.alone {
            full.push(vec![position]);
            continue;
        }
        let limit = if full.is_empty() { limits.first } else { limits.next };
        let at = open.iter().position(|(open, ..)| *open == dtype).unwrap_or_else(|| {
            open.push((dtype, 0, Vec::new()));
            open.len() - 1
        });
        let (_, bytes, positions) = &mut open[at];
        if *bytes + size > limit && !positions.is_empty() {
            full.push(std::mem::take(positions));
            *bytes = 0;
        }
        *bytes += size;
        positions.push(position);
    }
    full.extend(open.into_iter().map(|(.., positions)| positions).filter(|positions| !positions.is_empty()));
    full.into_iter().map(|positions| Bucket { positions, block: None }).collect()
}

/// Returns the buckets of a backward pass through blocks, with the trained parameters of each: for each block, the
/// gradients of one element type. None has those of two blocks: it would wait for the second while the first one's
/// gradients could be sent, and freed.
pub(crate) fn buckets_of_blocks(
    parameters: &[Parameter],
    blocks: impl IntoIterator<Item = (usize, impl IntoIterator<Item = usize>)>,
) -> BucketTable {
    let mut table: Vec<Bucket> = Vec::new();
    for (block, trained) in blocks {
        let first = table.len();
        for position in trained {
            let dtype = |position: usize| parameters[position].dtype;
            match table[first..].iter_mut().find(|bucket| dtype(bucket.positions[0]) == dtype(position)) {
                Some(bucket) => bucket.positions.push(position),
                None => table.push(Bucket { positions: vec![position], block: Some(block) }),
            }
        }
    }
    table.into()
}

/// How a rank's gradients enter the mean over the samples of all ranks.
///
/// A weight is at most 1, and the ranks' weights add up to 1. So neither a product nor a sum of products exceeds the
/// largest gradient: what has a mean in the range of the element type stays in that range on the way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Weighting {
    /// All ranks have equally many samples: the mean over ranks.
    Equal,
    /// The sum over ranks, each with its gradients times this part of the samples.
    Share(f64),
}

impl Weighting {
    /// The factor of this rank's gradients before the reduction.
    pub fn factor(self) -> f64 {
        match self {
            Weighting::Equal => 1.0,
            Weighting::Share(share) => share,
        }
    }

    pub fn reduction(self) -> ReduceOp {
        match self {
            Weighting::Equal => ReduceOp::Mean,
            Weighting::Share(_) => ReduceOp::Sum,
        }
    }

    /// The element type in which gradients of type `dtype` are multiplied and reduced. The range of f16 ends at 6e-8,
    /// near the gradients of many models, so their products need more. They are rounded once, after the reduction.
    pub fn carrier(self, dtype: DType) -> DType {
        match (self, dtype) {
            (Weighting::Share(_), DType::F16) => DType::F32,
            _ => dtype,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters of these element types and bytes.
    fn parameters(items: &[(DType, usize)]) -> Vec<Parameter> {
        let parameter = |&(dtype, bytes): &(DType, usize)| Parameter {
            path: String::new(),
            shape: vec![bytes / dtype.size()],
            dtype,
        };
        items.iter().map(parameter).collect()
    }

    fn split(items: &[(DType, usize)]) -> Vec<Vec<usize>> {
        split_with(Limits::ON_HOST, items)
    }

    fn split_with(limits: Limits, items: &[(DType, usize)]) -> Vec<Vec<usize>> {
        let buckets = buckets(&parameters(items), (0..items.len()).rev(), limits);
        buckets.iter().map(|bucket| bucket.positions.clone()).collect()
    }

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;

    #[test]
    fn the_first_bucket_takes_1_mib_and_the_next_ones_25_mib_in_the_given_order() {
        let sizes = vec![(DType::F32, 128 * KIB); 8 + 200 + 3];
        let buckets = split(&sizes);
        assert_eq!(buckets.iter().map(Vec::len).collect::<Vec<_>>(), [8, 200, 3]);
        assert_eq!(buckets.concat(), (0..211).rev().collect::<Vec<_>>());
    }

    #[test]
    fn a_bucket_has_one_element_type() {
        let sizes = [(DType::F32, 8), (DType::F16, 8), (DType::F32, 8), (DType::F16, 8)];
        assert_eq!(split(&sizes), [vec![3, 1], vec![2, 0]]);
    }

    #[test]
    fn large_tensors_get_a_bucket_of_their_own() {
        let sizes = [(DType::F32, 8), (DType::F32, 256 * KIB), (DType::F32, 8), (DType::F64, 30 * MIB)];
        assert_eq!(split(&sizes), [vec![3], vec![1], vec![2, 0]]);
        assert!(split(&[]).is_empty());
    }

    /// 150 tensors of a model of 100 MiB are few operations: on the host each would be its own.
    #[test]
    fn on_devices_large_tensors_are_packed_too() {
        let sizes = vec![(DType::F32, 700 * KIB); 150];
        assert_eq!(split(&sizes).len(), 150);
        let buckets = split_with(Limits::of(true), &sizes);
        assert_eq!(buckets.iter().map(Vec::len).collect::<Vec<_>>(), [1, 36, 36, 36, 36, 5]);
        assert_eq!(split_with(Limits::of(true), &[(DType::F32, 8), (DType::F32, 25 * MIB)]), [vec![1], vec![0]]);
    }
    #[test]
    fn a_bucket_has_one_block_and_one_element_type() {
        let (small, half) = ((DType::F32, 8), (DType::F16, 8));
        let parameters = parameters(&[small, small, half, small, half, small]);
        let of = |blocks: Vec<(usize, Vec<usize>)>| buckets_of_blocks(&parameters, blocks);
        let bucket = |block, positions: &[usize]| Bucket { positions: positions.to_vec(), block: Some(block) };
        // Block 1 has only frozen parameters.
        let table = of(vec![(2, vec![4, 3, 5]), (1, vec![]), (0, vec![0, 2, 1])]);
        let expected = [bucket(2, &[4]), bucket(2, &[3, 5]), bucket(0, &[0, 1]), bucket(0, &[2])];
        assert_eq!(table[..], expected);
        assert!(of(vec![]).is_empty());
    }
}
