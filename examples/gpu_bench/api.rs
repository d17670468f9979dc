//! Benchmarks through the API that programs use, on two logical devices.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

#[cfg(feature = "nccl")]
use bonfire::server::DeviceCollectives;
use bonfire::{CollectiveRuntime, CudaDevice};
use cubecl::client::ComputeClient;
use cubecl::cuda::CudaRuntime;
use cubecl::device::{Device, DeviceId};
use cubecl::future::block_on;
use cubecl::prelude::*;
use cubecl::server::{Handle, ReduceOperation};

use crate::Failure;
use crate::kernels::Extent;
use crate::paths::Measured;
use crate::report::{Goal, Report};

type Collective = CollectiveRuntime<CudaRuntime>;
type Client = ComputeClient<Collective>;

const RANKS: u8 = 2;

struct Rank {
    client: Client,
    ids: Vec<DeviceId>,
    tensor: Handle,
    /// One element, for the kernel that keeps the GPU busy.
    output: Handle,
}

impl Rank {
    /// Creates a device with a tensor of `bytes` bytes, whose values repeat after 1009 elements.
    fn new(number: u8, bytes: usize) -> Rank {
        let device = |number| CudaDevice::new(Default::default(), number);
        let client = Collective::client(&device(number));
        let values: Vec<f32> = (0..bytes / 4).map(|i| ((i * 31 + usize::from(number)) % 1009) as f32).collect();
        let tensor = client.create_from_slice(bytemuck::cast_slice(&values));
        // Not when it is used: allocating may wait for all work on the GPU.
        let output = client.create_from_slice(&[0; 4]);
        Rank { client, ids: (0..RANKS).map(|number| device(number).to_id()).collect(), tensor, output }
    }

    /// Starts an all-reduce in place. After the first one all ranks have the mean, which further ones do not change.
    fn all_reduce(&mut self) {
        let f32 = cubecl::ir::ElemType::Float(cubecl::ir::FloatKind::F32);
        self.client.all_reduce(self.tensor.clone(), self.tensor.clone(), f32, self.ids.clone(), ReduceOperation::Mean);
    }

    fn synchronise(&self) -> Result<(), Failure> {
        block_on(self.client.sync()).map_err(|error| error.to_string().into())
    }
}

/// Returns the seconds that the slower rank takes from the common start until its device is idle.
fn seconds(bytes: usize, part: impl Fn(u8, &mut Rank) + Sync) -> Result<f64, Failure> {
    let begin = Barrier::new(RANKS.into());
    slowest(0..RANKS, |number| {
        let mut rank = Rank::new(number, bytes);
        // The first call finds and loads its kernel.
        rank.all_reduce();
        rank.client.sync_collective();
        rank.synchronise()?;
        begin.wait();
        let clock = Instant::now();
        part(number, &mut rank);
        rank.synchronise()?;
        Ok(clock.elapsed().as_secs_f64())
    })
}

/// Runs each rank on a thread of its own. Returns the most of what they return.
pub fn slowest<T: Send>(
    ranks: impl IntoIterator<Item = T>,
    rank: impl Fn(T) -> Result<f64, Failure> + Sync,
) -> Result<f64, Failure> {
    let rank = &rank;
    thread::scope(|scope| {
        let ranks: Vec<_> = ranks.into_iter().map(|number| scope.spawn(move || rank(number))).collect();
        let mut ended = ranks.into_iter().map(|rank| rank.join().map_err(|_| Failure::from("a rank panicked"))?);
        ended.try_fold(0.0, |most: f64, seconds| Ok(seconds?.max(most)))
    })
}

/// Returns the seconds of an all-reduce of a group of two ranks through the client API, until its result is there.
#[cfg(feature = "nccl")]
pub fn group_seconds(bytes: usize, calls: usize) -> Result<f64, Failure> {
    slowest(bonfire::Group::threads(RANKS.into())?, |group| {
        let rank = Rank::new(group.rank() as u8, bytes);
        let all_reduce = || {
            let (tensor, client) = (&rank.tensor, &rank.client);
            // NCCL takes means of floats, but not maxima: its NaNs differ. And a mean does not grow from call to call.
            let (dtype, op) = (bonfire::DType::F32, bonfire::ReduceOp::Mean);
            client.start_all_reduce(&group, tensor, tensor, dtype, op)?.wait()
        };
        (0..10).try_for_each(|_| all_reduce())?;
        let clock = Instant::now();
        (0..calls).try_for_each(|_| all_reduce())?;
        Ok(clock.elapsed().as_secs_f64() / calls as f64)
    })
}

/// Measures calls of 8 KiB: some with one sync at the end, and as many with a sync after each.
pub fn small(report: &mut Report, calls: usize) {
    let micros = |seconds: f64| 1e6 * seconds / calls as f64;
    report.figure(format!("all_reduce of 8 KiB by clients, {calls} calls and one sync"), "us", Goal::None, || {
        let part = |_, rank: &mut Rank| {
            (0..calls).for_each(|_| rank.all_reduce());
            rank.client.sync_collective();
        };
        Ok(micros(seconds(8192, part)?))
    });
    report.figure("all_reduce of 8 KiB by clients, a sync after each", "us", Goal::None, || {
        let part = |_, rank: &mut Rank| {
            for _ in 0..calls {
                rank.all_reduce();
                rank.client.sync_collective();
            }
        };
        Ok(micros(seconds(8192, part)?))
    });
}

/// What each thread of [`busy`] computes at once, in as many registers.
const VALUES: usize = 48;

/// Keeps a thread busy with arithmetic that depends on itself.
#[cube(launch)]
fn busy(output: &mut Array<f32>, steps: u32) {
    let mut values = Array::<f32>::new(VALUES);
    #[unroll]
    for i in 0..VALUES {
        values[i] = f32::cast_from(ABSOLUTE_POS + i);
    }
    for _ in 0..steps {
        #[unroll]
        for i in 0..VALUES {
            values[i] = values[i] * 0.999 + 0.5;
        }
    }
    let mut sum = f32::new(0.0);
    #[unroll]
    for i in 0..VALUES {
        sum += values[i];
    }
    if ABSOLUTE_POS < output.len() {
        output[ABSOLUTE_POS] = sum;
    }
}

/// Launches half as many blocks as there are multiprocessors, each of which has one to itself: two would need more
/// registers than a multiprocessor has (64 Ki). A GPU that becomes idle bit by bit, as at the end of a collective,
/// could otherwise give one multiprocessor two of them, which then take up to twice as long.
fn launch_busy(rank: &Rank, steps: u32) {
    const THREADS: u32 = 1024;
    let multiprocessors = rank.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(2);
    // SAFETY: the buffer has one element.
    let output = unsafe { ArrayArg::from_raw_parts(rank.output.clone(), 1) };
    let cubes = CubeCount::new_1d((multiprocessors / 2).max(1));
    busy::launch::<Collective>(&rank.client, cubes, CubeDim::new_1d(THREADS), output, steps);
}

/// Returns the seconds of a kernel on half of the multiprocessors, of all-reduces that take as long, and of both at
/// once, for so many rounds after one as a warm-up.
pub fn overlap_seconds(largest: usize, rounds: usize) -> Result<Vec<f64>, Failure> {
    // Few and large: while the host enqueues them, the computation, which comes after them, cannot start.
    let bytes = largest.min(256 << 20);
    const CALLS: usize = 8;
    let reduce = |rank: &mut Rank| (0..CALLS).for_each(|_| rank.all_reduce());
    let compute = |number: u8, rank: &mut Rank, steps: u32| {
        if number == 0 {
            launch_busy(rank, steps);
        }
    };
    let compute_alone = |steps| seconds(bytes, |number, rank| compute(number, rank, steps));
    let reduce_alone = || {
        seconds(bytes, |_, rank| {
            reduce(rank);
            rank.client.sync_collective();
        })
    };
    let round = || {
        let reduced = reduce_alone()?;
        // The steps that take as long as the all-reduces, from the slope between two trials.
        let (short, more) = (compute_alone(2_000)?, compute_alone(22_000)?);
        let steps = 2_000.0 + 20_000.0 * (reduced - short) / (more - short);
        let steps = steps.clamp(1_000.0, 1e9) as u32;
        let both = seconds(bytes, |number, rank| {
            reduce(rank);
            compute(number, rank, steps);
            rank.client.sync_collective();
        })?;
        Ok::<_, Failure>([compute_alone(steps)?, reduced, both])
    };
    let all = (0..=rounds).map(|_| round()).skip(1).collect::<Result<Vec<_>, _>>()?;
    Ok(all.concat())
}

/// Measures the overlap of that kernel with all-reduces, on all multiprocessors and on half of them.
pub fn overlap(report: &mut Report, extent: Extent) {
    for (share, goal) in [("all", Goal::AtMost(1.3)), ("half", Goal::None)] {
        let variable = ("BONFIRE_CUDA_MULTIPROCESSORS", share);
        let measured = Measured::Overlap.with(variable, extent, report.rounds()).map_err(|error| error.to_string());
        let figure = |of_round: fn(&[f64]) -> f64| -> Result<Vec<f64>, Failure> {
            let seconds = measured.as_ref().map_err(Clone::clone)?;
            Ok(seconds.chunks(3).map(of_round).collect())
        };
        let at_once = format!("compute and all_reduce at once, {share}, over the longer of them");
        report.add(at_once, "times", goal, figure(|times| times[2] / times[0].max(times[1])));
        report.optional_values(format!("  compute alone, {share}"), "ms", figure(|times| 1e3 * times[0]));
        report.optional_values(format!("  all_reduces alone, {share}"), "ms", figure(|times| 1e3 * times[1]));
        report.optional_values(format!("  both at once, {share}"), "ms", figure(|times| 1e3 * times[2]));
    }
}
