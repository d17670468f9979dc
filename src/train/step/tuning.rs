//! The buckets of overlapped steps: their order from the first step, their size from measurements.

use std::time::{Duration, Instant};

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{FloatDType, Shape};

use crate::tensor::device::start_all_reduce;
use crate::train::bucket::{BucketOp, BucketTable, Limits, buckets};
use crate::train::reduction::Reducer;
use crate::train::trailer::OPERATION;
use bonfire_core::{DType, Error, Group, ReduceOp};

/// The smallest and the largest bucket that is chosen, in bytes.
const RANGE: (usize, usize) = (64 << 10, 32 << 20);

/// Measurements of each kind, of which the fastest counts.
const TRIES: usize = 3;

/// The bytes of the all-reduce by which the bandwidth is measured: more than a link or a switch buffers.
const PROBE: usize = 1 << 20;

/// The same on devices, which are faster.
const PROBE_ON_DEVICES: usize = 4 << 20;

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
    reducer: &Reducer<B>,
    leader: usize,
    order: &[usize],
    bytes: Option<usize>,
) -> Result<BucketTable, Error> {
    let parameters = &reducer.parameters;
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
        None => {
            let device =
                order.first().filter(|_| reducer.on_devices).map(|first| parameters[*first as usize].device.clone());
            let total = items.clone().map(|item| item.bytes).sum();
            limits(measure::<B::InnerBackend>(group, leader, device.as_ref())?, total, reducer.on_devices)
        }
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
fn limits(speed: Speed, total: usize, on_devices: bool) -> Limits {
    log::debug!("buckets are chosen because of {speed:?}");
    let best = (speed.latency * speed.bandwidth * total as f64).sqrt() as usize;
    let bytes = best.clamp(RANGE.0, RANGE.1).next_power_of_two();
    let packing_pays = if on_devices { bytes } else { (speed.latency * COPY_RATE) as usize };
    Limits { first: bytes, next: bytes, alone: packing_pays.max(Limits::ON_HOST.alone).min(bytes) }
}

/// Measures the group's speed, on memory of the device if there is one. All ranks get the leader's result.
fn measure<B: Backend>(group: &Group, leader: usize, device: Option<&B::Device>) -> Result<Speed, Error> {
    // Started, as buckets are.
    let on_host = |elements: usize| {
        let mut buffer = vec![0.0f32; elements];
        fastest(group, || {
            let taken = std::mem::take(&mut buffer);
            buffer = group.start_all_reduce(taken, ReduceOp::Sum)?.wait().map_err(|(error, _)| error)?;
            Ok(())
        })
    };
    let on_device = |elements: usize, device: &B::Device| {
        let mut tensor = B::float_zeros(Shape::new([elements]), device, FloatDType::F32);
        fastest(group, || {
            let request = BucketOp::AllReduce(ReduceOp::Sum).request(DType::F32);
            let pending = start_all_reduce::<B>(group, vec![tensor.clone()], request)?;
            pending.wait()?.into_iter().for_each(|reduced| tensor = reduced);
            Ok(())
        })
    };
    let seconds = |elements| device.map_or_else(|| on_host(elements), |device| on_device(elements, device));
    let probe = if device.is_some() { PROBE_ON_DEVICES } else { PROBE };
    let mut seconds = [seconds(1)?, seconds(probe / size_of::<f32>())?];
    group.broadcast(&mut seconds, leader)?;
    let [small, large] = seconds;
    // Without a measurable difference the bandwidth is as good as unlimited.
    Ok(Speed { latency: small, bandwidth: probe as f64 / (large - small).max(1e-7) })
}

/// Returns the seconds that an operation takes at least.
fn fastest(group: &Group, mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let mut fastest = Duration::MAX;
    for _ in 0..TRIES {
        group.barrier()?;
        let start = Instant::now();
        run()?;
        fastest = fastest.min(start.elapsed());
    }
    Ok(fastest.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_grow_with_latency_bandwidth_and_the_model() {
        let size = |latency, bandwidth, total| limits(Speed { latency, bandwidth }, total, false).next;
        // A link of 1 Gbit/s with 150 us, and 100 MiB.
        assert_eq!(size(150e-6, 118e6, 100 << 20), 2 << 20);
        assert_eq!(size(150e-6, 118e6, 25 << 20), 1 << 20);
        assert_eq!(size(1e-6, 1e9, 1 << 10), RANGE.0);
        assert_eq!(size(1.0, 1e9, 1 << 30), 32 << 20);
    }

    #[test]
    fn packing_pays_where_an_operation_takes_long() {
        let alone = |latency, on_devices| limits(Speed { latency, bandwidth: 1e8 }, 1 << 30, on_devices).alone;
        assert_eq!(alone(1e-6, false), 256 << 10);
        assert_eq!(alone(1e-3, false), 2_500_000);
        // 100 us and 100 GB/s.
        let fast = limits(Speed { latency: 1e-4, bandwidth: 1e11 }, 1 << 30, true);
        assert_eq!((fast.next, fast.alone), (32 << 20, 32 << 20));
    }
}
