//! Benchmark of NCCL, for comparison: several ranks on one GPU, which NCCL supports from 2.30 on if
//! NCCL_MULTI_RANK_GPU_ENABLE is 1.

use std::thread;
use std::time::{Duration, Instant};

use bonfire::error::Site;
use bonfire::server::cuda::nccl::{Action, Communicator, Gpu, Scalar, Work};
use bonfire::{Call, DType, Deadline, Group, Operation, ReduceOp};
use cudarc::driver::{CudaContext, result};

use crate::Failure;

/// Returns the seconds that one all-reduce of `bytes` bytes of f32 per rank takes on the slowest rank, all on GPU 0.
pub fn all_reduce_seconds(ranks: usize, bytes: usize, calls: usize) -> Result<f64, Failure> {
    let groups = Group::threads(ranks)?;
    thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || rank(&group, bytes, calls))).collect();
        let mut ended = ranks.into_iter().map(|rank| rank.join().map_err(|_| Failure::from("a rank panicked"))?);
        ended.try_fold(0.0, |most: f64, seconds| Ok(seconds?.max(most)))
    })
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
    let clock = Instant::now();
    run(calls)?;
    let seconds = clock.elapsed().as_secs_f64() / calls as f64;
    // SAFETY: no work is left on the stream.
    unsafe { (result::free_sync(input)?, result::free_sync(output)?) };
    Ok(seconds)
}
