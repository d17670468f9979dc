//! The buckets of overlapped steps: their order from the first step, their size from measurements.

use std::time::{Duration, Instant};

use burn::tensor::backend::AutodiffBackend;

use crate::train::agree::Parameter;
use crate::train::bucket::{BucketTable, Limits, buckets};
use crate::train::trailer::OPERATION;
use bonfire_core::{Error, Group, ReduceOp};

/// The smallest and the largest bucket that is chosen, in bytes.
const RANGE: (usize, usize) = (64 << 10, 32 << 20);

/// Measurements of each kind, of which the fastest counts.
const TRIES: usize = 3;

/// The bytes of the all-reduce by which the bandwidth is measured: more than a link or a switch buffers.
const PROBE: usize = 1 << 20;

/// Bytes that are copied in a second, at least. Packing a tensor pays where that is faster than an operation of its
/// own.
const COPY_RATE: f64 = 2.5e9;

/// How fast a group reduces.
#[derive(Clone, Copy, Debug)]
struct Speed {
    /// Of an all-reduce of one element, in seconds.
    latency: f64,
    /// Of a large all-reduce, in bytes per second.
    bandwidth: f64,
}

/// Returns the buckets of the steps that follow. They depend on what `leader` knows and measures, so they are the same
/// on all ranks. `order` is the order in which this rank's gradients have arrived. If `bytes` is set, it is the size of
/// a bucket, and nothing is measured.
pub(super) fn tune<B: AutodiffBackend>(
    group: &Group,
    parameters: &[Parameter<B>],
    leader: usize,
    order: &[usize],
    bytes: Option<usize>,
) -> Result<BucketTable, Error> {
    // Parameters without a gradient in that step come last.
    let trained = |position: &usize| parameters[*position].trained;
    let mut used = vec![false; parameters.len()];
    order.iter().for_each(|position| used[*position] = true);
    let unused = (0..parameters.len()).rev().filter(|position| !used[*position]);
    let mut order: Vec<u64> = order.iter().copied().chain(unused).filter(trained).map(|p| p as u64).collect();
    group.broadcast(&mut order, leader)?;
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq((0..parameters.len()).filter(trained).map(|position| position as u64)) {
        return Err(Error::broken(OPERATION, format!("rank {leader}'s order of gradients is none of this model's")));
    }
    let items = order.iter().map(|position| parameters[*position as usize].item(*position as usize));
    let limits = match bytes {
        // No measurement, so that the buckets, and with them the bits, are the same in every run.
        Some(bytes) => Limits { first: bytes, next: bytes, alone: bytes },
        None => limits(measure(group, leader)?, items.clone().map(|item| item.bytes).sum()),
    };
    let table: BucketTable = buckets(items, limits).into();
    log::info!("{} buckets of up to {} KiB", table.len(), limits.next.div_ceil(1 << 10));
    Ok(table)
}

/// Returns limits for `total` bytes of gradients.
///
/// Each bucket costs the latency once, and the last one is exposed as a whole, because no computation is left. Buckets
/// of `s` bytes cost `latency * total / s + s / bandwidth`, which is least at the square root below. A power of two, so
/// that measurements that differ a little give the same buckets.
fn limits(speed: Speed, total: usize) -> Limits {
    log::debug!("buckets are chosen because of {speed:?}");
    let best = (speed.latency * speed.bandwidth * total as f64).sqrt() as usize;
    let bytes = best.clamp(RANGE.0, RANGE.1).next_power_of_two();
    let packing_pays = (speed.latency * COPY_RATE) as usize;
    Limits { first: bytes, next: bytes, alone: packing_pays.max(Limits::DEFAULT.alone).min(bytes) }
}

/// Measures the group's speed. All ranks get the leader's result.
fn measure(group: &Group, leader: usize) -> Result<Speed, Error> {
    let fastest = |elements: usize| {
        let mut buffer = vec![0.0f32; elements];
        let mut fastest = Duration::MAX;
        for _ in 0..TRIES {
            group.barrier()?;
            let start = Instant::now();
            // Started, as buckets are.
            buffer = group.start_all_reduce(buffer, ReduceOp::Sum)?.wait().map_err(|(error, _)| error)?;
            fastest = fastest.min(start.elapsed());
        }
        Ok::<_, Error>(fastest.as_secs_f64())
    };
    let mut seconds = [fastest(1)?, fastest(PROBE / 4)?];
    group.broadcast(&mut seconds, leader)?;
    let [small, large] = seconds;
    // Without a measurable difference the bandwidth is as good as unlimited.
    Ok(Speed { latency: small, bandwidth: PROBE as f64 / (large - small).max(1e-7) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_grow_with_latency_bandwidth_and_the_model() {
        let size = |latency, bandwidth, total| limits(Speed { latency, bandwidth }, total).next;
        // A link of 1 Gbit/s with 150 us, and 100 MiB.
        assert_eq!(size(150e-6, 118e6, 100 << 20), 2 << 20);
        assert_eq!(size(150e-6, 118e6, 25 << 20), 1 << 20);
        assert_eq!(size(1e-6, 1e9, 1 << 10), RANGE.0);
        assert_eq!(size(1.0, 1e9, 1 << 30), 32 << 20);
    }

    #[test]
    fn packing_pays_where_an_operation_takes_long() {
        let alone = |latency| limits(Speed { latency, bandwidth: 1e8 }, 1 << 30).alone;
        assert_eq!(alone(1e-6), 256 << 10);
        assert_eq!(alone(1e-3), 2_500_000);
    }
}
