//! Timings of the kernels alone, on an otherwise idle stream, for `examples/gpu_bench`.

use std::sync::Arc;

use super::choice::{MODE, Topology, launch_config, parse_mode};
use super::control::{CONTROL_BYTES, HOST_WORDS, MAX_RANKS, Member, Parameters};
use super::driver::{Gpu, Stream};
use super::memory::{HostWords, Memory};
use crate::server::engine::Rows;
use bonfire_core::{Call, DType, Error, Operation, partition};
use half::bf16;

/// Untimed calls before the timed ones.
const WARM_UP: usize = 10;

/// Returns the seconds per call, averaged over `calls` calls, all ranks on GPU 0; without `form` the size decides which
/// kernel. Reductions are sums.
///
/// # Errors
/// [`Error::InvalidArgument`] for too many ranks or a call that no kernel supports, [`Error::Config`] for an unknown
/// form, and [`Error::Io`] if the GPU refuses a call or a result is wrong.
pub fn seconds(call: &Call, ranks: usize, form: Option<&str>, calls: usize) -> Result<f64, Error> {
    let name = call.operation.to_string();
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(Error::argument(&name, format!("{ranks} ranks; kernels work for 1 to {MAX_RANKS}")));
    }
    let (gpu, stream) = start()?;
    let topology = Topology { ranks, gpus: 1, sharing: ranks as u32, multiprocessors: gpu.multiprocessors };
    let mode = form.map_or(Ok(*MODE), parse_mode)?;
    let config = launch_config(mode, call, &topology).ok_or_else(|| Error::argument(&name, "no kernel supports it"))?;
    let module = gpu.module(config.kernel)?;
    let size = call.dtype.size();
    let memories = |bytes| (0..ranks).map(|_| Memory::zeroed(&stream, bytes)).collect::<Result<Vec<_>, _>>();
    let (controls, sources, targets) = (memories(CONTROL_BYTES)?, memories(call.bytes())?, memories(call.bytes())?);
    let host = HostWords::zeroed(&gpu, HOST_WORDS * ranks)?;
    let mut parameters = Parameters {
        timeout: 10_000_000_000,
        ranks: ranks as u64,
        count: call.count as u64,
        width: if call.reduction.is_some() { 0 } else { size as u64 },
        ..Parameters::default()
    };
    for rank in 0..ranks {
        stream.fill(sources[rank].address, word(call.dtype), call.bytes() / WORD)?;
        parameters.control[rank] = controls[rank].address;
        let (source, target) = (sources[rank].address, targets[rank].address);
        parameters.members[rank] = Member { source, target, rank: rank as u64, host: host.address(HOST_WORDS * rank) };
    }
    let run = |calls: usize| {
        (0..calls).try_for_each(|_| stream.launch(&module, (ranks as u32, config.blocks), config.threads, parameters))
    };
    run(WARM_UP)?;
    let seconds = stream.seconds(|| run(calls))?;
    let expected = result(call, ranks);
    for (rank, target) in targets.iter().enumerate() {
        // A rank of a reduce_scatter has the result of its part only.
        let count = match call.operation {
            Operation::ReduceScatter => partition(call.count, ranks, rank).len(),
            _ => call.count,
        };
        let read = stream.read(target.address, count * size / WORD)?;
        if read.chunks(2).any(|words| *words != expected[..words.len()]) {
            return Err(Error::broken(name, format!("a result on rank {rank} is wrong: {:?}", config.kernel.form)));
        }
    }
    Ok(seconds / calls as f64)
}

/// Bytes of the words that memory is filled with.
const WORD: usize = 4;

/// The word that all sources are filled with: a pattern that is a number of a few bits in each float type, so that sums
/// over ranks are exact.
fn word(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 1.0f32.to_bits(),
        // Twice the bf16 3, and half of the f64 32.50196...: sums of 2, 4 and 8 of them are exact.
        _ => 0x4040_4040,
    }
}

/// The words of the result, which repeats after 8 bytes, if all sources are filled with that word.
fn result(call: &Call, ranks: usize) -> [u32; 2] {
    let word = word(call.dtype);
    let ranks = if call.reduction.is_some() { ranks as f32 } else { 1.0 };
    match call.dtype {
        DType::F32 => [(f32::from_bits(word) * ranks).to_bits(); 2],
        DType::F64 => bytemuck::cast(bytemuck::cast::<[u32; 2], f64>([word; 2]) * f64::from(ranks)),
        DType::BF16 => bytemuck::cast([bf16::from_f32(bf16::from_bits(word as u16).to_f32() * ranks); 4]),
        _ => [word; 2],
    }
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
