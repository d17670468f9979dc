//! Comparison with NCCL: several ranks on one GPU, which NCCL supports from 2.30 on if NCCL_MULTI_RANK_GPU_ENABLE is 1.
//!
//! Like with like: the time between events on the GPU, of calls in a row, with that of our kernels; and the host's wall
//! time of a call through the client API, from the call until its result is there, with the same call by our kernels.

use std::time::Duration;

use bonfire::error::Site;
use bonfire::server::cuda::bench;
use bonfire::server::cuda::nccl::{Action, Communicator, Gpu, Scalar, Work};
use bonfire::{Call, DType, Deadline, Group, Operation, ReduceOp};
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaContext, result};

use crate::Failure;
use crate::api::slowest;
use crate::kernels::{Extent, all_reduce};
use crate::paths::Measured;
use crate::report::Report;

const SIZES: [usize; 6] = [8, 512, 8 << 10, 32 << 10, 128 << 10, 256 << 10];
const RANKS: usize = 2;

pub fn compare(report: &mut Report, extent: Extent) {
    let calls = extent.calls;
    for bytes in SIZES {
        report.optional_figure(format!("NCCL's time over ours, {bytes} bytes, 2 ranks, events"), "times", || {
            let own = bench::seconds(&all_reduce(DType::F32, bytes), RANKS, 1, None, calls)?;
            Ok(event_seconds(bytes, calls)? / own)
        });
    }
    // One round of each measures all sizes.
    let by = |path| Measured::GroupCalls.by(path, extent);
    let round = |_| -> Result<Vec<f64>, Failure> {
        Ok(by("nccl")?.into_iter().zip(by("kernels")?).map(|(nccl, own)| nccl / own).collect())
    };
    let rounds = (0..report.rounds()).map(round).collect();
    let name = |bytes| format!("NCCL's time over ours, {bytes} bytes, 2 ranks, client API, wall");
    report.figures(SIZES.map(name), "times", &rounds);
}

/// Returns the seconds of a group's all-reduce of each size.
pub fn group_seconds(calls: usize) -> Result<Vec<f64>, Failure> {
    SIZES.into_iter().map(|bytes| crate::api::group_seconds(bytes, calls)).collect()
}

/// Returns the seconds between events that one all-reduce of `bytes` bytes of f32 per rank takes on the slowest rank.
fn event_seconds(bytes: usize, calls: usize) -> Result<f64, Failure> {
    slowest(Group::threads(RANKS)?, |group| rank(&group, bytes, calls))
}

fn rank(group: &Group, bytes: usize, calls: usize) -> Result<f64, Failure> {
    let deadline = || Deadline::after(Duration::from_secs(60));
    let context = CudaContext::new(0)?;
    context.bind_to_thread()?;
    let stream = context.new_stream()?;
    let mut communicator = Communicator::connect(group, Gpu::of(0)?, &deadline())?;
    // SAFETY: the context is current. Both buffers are freed below, after the stream has been synchronised.
    let [input, output] = unsafe { [result::malloc_sync(bytes)?, result::malloc_sync(bytes)?] };
    let (dtype, count) = (DType::F32, bytes / 4);
    let call = Call::new(Operation::AllReduce, dtype, count).reducing(ReduceOp::Sum);
    let action = Action::AllReduce(ReduceOp::Sum);
    let work = Work { action, scalar: Scalar::Of(dtype), count, sizes: None, input, output };
    let mut run = |calls: usize| -> Result<(), Failure> {
        for sequence in 0..calls as u64 {
            // SAFETY: both buffers hold `count` elements of `dtype`, and live until the stream has completed the work.
            let submitted = unsafe { communicator.submit(&work, stream.cu_stream())? };
            submitted.settle(Site::new(call, sequence), &deadline())?;
        }
        Ok(stream.synchronize()?)
    };
    run(10)?;
    group.barrier()?;
    let begin = stream.record_event(Some(CU_EVENT_DEFAULT))?;
    run(calls)?;
    let end = stream.record_event(Some(CU_EVENT_DEFAULT))?;
    let seconds = f64::from(begin.elapsed_ms(&end)?) / 1e3 / calls as f64;
    // SAFETY: no work is left on the stream.
    unsafe { (result::free_sync(input)?, result::free_sync(output)?) };
    Ok(seconds)
}
