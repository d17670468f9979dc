//! The buckets of overlapped steps: their order from the first step, their size from measurements.

use std::time::{Duration, Instant};

use super::Limits;
use crate::lane::{Call, Input, Lane, Source, Target};
use bonfire_core::internal::Request;
use bonfire_core::{DType, Error, Group, Operation, ReduceOp};

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

/// Returns the order in which all ranks send the gradients of these parameters from now on: that in which they have
/// arrived on `leader`, as `order` says there, and those that had none last.
pub(crate) fn agree_on_order(group: &Group, leader: usize, order: &[usize], count: usize) -> Result<Vec<usize>, Error> {
    let mut used = vec![false; count];
    order.iter().for_each(|position| used[*position] = true);
    let unused = (0..count).rev().filter(|position| !used[*position]);
    let mut all: Vec<u64> = order.iter().copied().chain(unused).map(|position| position as u64).collect();
    group.broadcast(&mut all, leader)?;
    let all: Vec<usize> = all.into_iter().map(|position| position as usize).collect();
    let mut sorted = all.clone();
    sorted.sort_unstable();
    match sorted.into_iter().eq(0..count) {
        true => Ok(all),
        false => {
            Err(Error::broken("ordering gradients", format!("rank {leader}'s order is none of this model's gradients")))
        }
    }
}

/// Returns the limits of buckets for so many bytes of gradients on this lane. They depend on what `leader` measures, so
/// they are the same on all ranks. `position` is that of a parameter on the device of the gradients.
pub(crate) fn measured_limits(
    lane: &mut dyn Lane,
    leader: usize,
    position: usize,
    total: usize,
    on_devices: bool,
) -> Result<Limits, Error> {
    let limits = limits(measure(lane, leader, position)?, total, on_devices);
    log::info!("buckets of up to {} KiB", limits.next.div_ceil(1 << 10));
    Ok(limits)
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

/// Measures how fast a lane reduces. All ranks get the leader's result.
fn measure(lane: &mut dyn Lane, leader: usize, position: usize) -> Result<Speed, Error> {
    let probe = if lane.is_on_host() { PROBE } else { PROBE_ON_DEVICES };
    let mut seconds = [fastest(lane, position, 1)?, fastest(lane, position, probe / size_of::<f32>())?];
    lane.group().broadcast(&mut seconds, leader)?;
    let [small, large] = seconds;
    // Without a measurable difference the bandwidth is as good as unlimited.
    Ok(Speed { latency: small, bandwidth: probe as f64 / (large - small).max(1e-7) })
}

/// Returns the seconds that an all-reduce of so many elements takes at least.
fn fastest(lane: &mut dyn Lane, position: usize, elements: usize) -> Result<f64, Error> {
    let bytes = elements * size_of::<f32>();
    let mut fastest = Duration::MAX;
    for _ in 0..TRIES {
        lane.group().barrier()?;
        let start = Instant::now();
        let request = Request::new(Operation::AllReduce, DType::F32).reduction(ReduceOp::Sum);
        let mut call = Call { request, bytes, factor: 1.0, sources: Vec::new(), targets: Vec::new() };
        // In host memory the operation alone is measured, which packing would hide where it is fast.
        if !lane.is_on_host() {
            let all = || (0..bytes).into();
            call.sources.push(Source { position, input: Input::Zeros, ranges: all() });
            call.targets.push(Target { position, shape: vec![elements], dtype: DType::F32, ranges: all() });
        }
        lane.start(call)?.wait()?;
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
        // A tensor as large as a bucket shares none, whatever packing would save.
        let small = limits(Speed { latency: 1e-3, bandwidth: 1e6 }, 1 << 20, false);
        assert_eq!((small.next, small.alone), (64 << 10, 64 << 10));
    }
}
