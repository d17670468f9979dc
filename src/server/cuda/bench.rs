//! Timings of the kernels alone, on an otherwise idle stream, for `examples/gpu_bench`.

use std::sync::Arc;

use super::choice::{MODE, Topology, launch_config, parse_mode};
use super::control::{CONTROL_BYTES, HOST_WORDS, MAX_RANKS, Member, Parameters};
use super::driver::{Gpu, Stream};
use super::memory::{HostWords, Memory};
use crate::server::engine::Rows;
use bonfire_core::{Call, DType, Error, Operation, ReduceOp};

/// Untimed calls before the timed ones.
const WARM_UP: usize = 10;

/// Returns the seconds per all-reduce of f32, averaged over `calls` calls, with `bytes` bytes from each of `ranks`
/// ranks on GPU 0. `form` names one of the kernels, as in `BONFIRE_CUDA`; without it the size decides.
///
/// # Errors
/// [`Error::InvalidArgument`] for too many ranks, [`Error::Config`] for an unknown form, and [`Error::Io`] if the GPU
/// refuses a call or the sums are wrong.
pub fn all_reduce_seconds(ranks: usize, bytes: usize, form: Option<&str>, calls: usize) -> Result<f64, Error> {
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(Error::argument("all_reduce", format!("{ranks} ranks; kernels work for 1 to {MAX_RANKS}")));
    }
    let (gpu, stream) = start()?;
    let count = bytes / DType::F32.size();
    let call = Call::new(Operation::AllReduce, DType::F32, count).reducing(ReduceOp::Sum);
    let topology = Topology { ranks, gpus: 1, sharing: ranks as u32, multiprocessors: gpu.multiprocessors };
    let mode = form.map_or(Ok(*MODE), parse_mode)?;
    let config =
        launch_config(mode, &call, &topology).ok_or_else(|| Error::argument("all_reduce", "no kernel supports it"))?;
    let module = gpu.module(config.kernel)?;
    let memories = |bytes| (0..ranks).map(|_| Memory::zeroed(&stream, bytes)).collect::<Result<Vec<_>, _>>();
    let (controls, sources, targets) = (memories(CONTROL_BYTES)?, memories(bytes.max(1))?, memories(bytes.max(1))?);
    let host = HostWords::zeroed(&gpu, HOST_WORDS * ranks)?;
    let mut parameters =
        Parameters { timeout: 10_000_000_000, ranks: ranks as u64, count: call.count as u64, ..Parameters::default() };
    for rank in 0..ranks {
        stream.fill(sources[rank].address, (rank as f32 + 1.0).to_bits(), call.count)?;
        parameters.control[rank] = controls[rank].address;
        let (source, target) = (sources[rank].address, targets[rank].address);
        parameters.members[rank] = Member { source, target, rank: rank as u64, host: host.address(HOST_WORDS * rank) };
    }
    let run = |calls: usize| {
        (0..calls).try_for_each(|_| stream.launch(&module, (ranks as u32, config.blocks), config.threads, parameters))
    };
    run(WARM_UP)?;
    let seconds = stream.seconds(|| run(calls))?;
    let sum = (ranks * (ranks + 1) / 2) as f32;
    for target in &targets {
        if stream.read(target.address, call.count)?.iter().any(|element| f32::from_bits(*element) != sum) {
            return Err(Error::broken("all_reduce", format!("a sum is not {sum}: {:?}", config.kernel.form)));
        }
    }
    Ok(seconds / calls as f64)
}

/// Returns the bytes per second that copies within GPU 0 read and write.
///
/// # Errors
/// [`Error::Io`] if the GPU refuses a call.
pub fn copy_bandwidth(bytes: usize) -> Result<f64, Error> {
    const COPIES: usize = 20;
    let (_, stream) = start()?;
    let (from, to) = (Memory::zeroed(&stream, bytes)?, Memory::zeroed(&stream, bytes)?);
    let rows = Rows { count: 1, bytes, pitch: bytes };
    let run = |copies: usize| (0..copies).try_for_each(|_| stream.copy(from.address, to.address, rows));
    run(WARM_UP)?;
    let seconds = stream.seconds(|| run(COPIES))?;
    Ok((2 * bytes * COPIES) as f64 / seconds)
}

fn start() -> Result<(Arc<Gpu>, Arc<Stream>), Error> {
    let gpu = Gpu::of(0)?;
    let stream = Arc::new(Stream::new(&gpu)?);
    Ok((gpu, stream))
}
