//! Timings for `examples/gpu_bench`: of the kernels alone, on an otherwise idle stream, and of agreements on the host.

use std::sync::Arc;
use std::time::Instant;

use super::address::Copy;
use super::choice::{Topology, launch_config, parse_paths, settings};
use super::control::{CONTROL_BYTES, HOST_WORDS, MAX_RANKS, Member, Parameters};
use super::driver::{Gpu, Stream};
use super::launches::Ticket;
use super::memory::{HostWords, Memory};
use super::reach::link;
use bonfire_core::error::Site;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Call, DType, Deadline, Error, Group, Operation, ReduceOp, partition};
use half::bf16;

/// Untimed calls before the timed ones.
const WARM_UP: usize = 10;

/// Returns the seconds per call on the slowest GPU, averaged over `calls` calls, with the ranks in turn on the first
/// `gpus` GPUs; without `form` the size decides which kernel. Reductions are sums.
///
/// # Errors
/// [`Error::InvalidArgument`] for too many ranks, GPUs that cannot access each other's memory, or a call that no kernel
/// supports, [`Error::Config`] for an unknown form, and [`Error::Io`] if a GPU refuses a call or a result is wrong.
pub fn seconds(call: &Call, ranks: usize, gpus: usize, form: Option<&str>, calls: usize) -> Result<f64, Error> {
    let name = call.operation.to_string();
    if !(1..=MAX_RANKS).contains(&ranks) || !(1..=ranks).contains(&gpus) {
        return Err(Error::argument(&name, format!("{ranks} ranks on {gpus} GPUs; kernels work for 1 to {MAX_RANKS}")));
    }
    let gpus = (0..gpus).map(start).collect::<Result<Vec<_>, _>>()?;
    for (one, other) in gpus.iter().flat_map(|one| gpus.iter().map(move |other| (&one.0, &other.0))) {
        if !one.reaches(other)? {
            let text = format!("GPU {} cannot access the memory of GPU {}", one.ordinal, other.ordinal);
            return Err(Error::argument(&name, text));
        }
    }
    let link = link(&gpus.iter().map(|(gpu, _)| &**gpu).collect::<Vec<_>>());
    let multiprocessors = gpus.iter().map(|(gpu, _)| gpu.multiprocessors).min().unwrap_or(1);
    let sharing = ranks.div_ceil(gpus.len()) as u32;
    let settings = settings()?;
    let topology = Topology { ranks, gpus: gpus.len(), link, sharing, multiprocessors, share: settings.share };
    let mode = form.map_or_else(|| Ok(settings.by_size.clone()), parse_paths)?.at(call.bytes());
    let config = launch_config(mode, call, &topology).ok_or_else(|| Error::argument(&name, "no kernel supports it"))?;
    let modules = gpus.iter().map(|(gpu, _)| gpu.module(config.kernel)).collect::<Result<Vec<_>, _>>()?;
    let size = call.dtype.size();
    let stream_of = |rank: usize| &gpus[rank % gpus.len()].1;
    let memories = |bytes| (0..ranks).map(|rank| Memory::zeroed(stream_of(rank), bytes)).collect::<Result<Vec<_>, _>>();
    let (controls, sources, targets) = (memories(CONTROL_BYTES)?, memories(call.bytes())?, memories(call.bytes())?);
    let host = HostWords::zeroed(&gpus[0].0, HOST_WORDS * ranks)?;
    let mut parameters = Parameters {
        timeout: 10_000_000_000,
        ranks: ranks as u64,
        root: call.root.unwrap_or(0) as u64,
        count: call.count as u64,
        width: if call.reduction.is_some() { 0 } else { size as u64 },
        ..Parameters::default()
    };
    for (rank, control) in controls.iter().enumerate() {
        sources[rank].fill(word(call.dtype))?;
        stream_of(rank).synchronize()?;
        parameters.control[rank] = control.address;
    }
    // One launch for each GPU, for all ranks on it.
    let launches: Vec<_> = (0..gpus.len())
        .map(|gpu| {
            let (mut parameters, mut members) = (parameters, 0);
            for rank in (gpu..ranks).step_by(gpus.len()) {
                let (source, target) = (sources[rank].address, targets[rank].address);
                let host = host.word(HOST_WORDS * rank).address();
                parameters.members[members] = Member { source, target, rank: rank as u64, host };
                members += 1;
            }
            (&gpus[gpu].1, &modules[gpu], members as u32, parameters)
        })
        .collect();
    // Dropped before the memory, also after an error.
    let _idle = WhenIdle(gpus.iter().map(|(_, stream)| stream.clone()).collect());
    let run = |calls: usize| -> Result<(), Error> {
        for _ in 0..calls {
            for (stream, module, members, parameters) in &launches {
                // SAFETY: the module was loaded on the stream's GPU. The memory of all ranks has the sizes that the
                // parameters say, and is dropped after `_idle`.
                unsafe { stream.launch(module, (*members, config.blocks), config.threads, *parameters) }?;
            }
        }
        Ok(())
    };
    run(WARM_UP)?;
    gpus.iter().try_for_each(|(_, stream)| stream.synchronize())?;
    let streams: Vec<_> = gpus.iter().map(|(_, stream)| stream).collect();
    let seconds = slowest(&streams, &mut || run(calls))?;
    let expected = result(call, ranks);
    for (rank, target) in targets.iter().enumerate() {
        // A rank may have the result of its part only, or none.
        let count = match call.operation {
            Operation::Gather if call.root != Some(rank) => continue,
            Operation::ReduceScatter | Operation::Scatter => partition(call.count, ranks, rank).len(),
            _ => call.count,
        };
        // Large results in pieces: reading all of one would take a hundred times as long as the calls.
        let (words, piece) = (count * size / WORD, 1 << 18);
        let last = words.saturating_sub(piece);
        for start in (0..last).step_by((last / 8).next_multiple_of(2).max(2)).chain([last & !1]) {
            let read = target.read(start, piece.min(words - start))?;
            if read.chunks(2).any(|words| *words != expected[..words.len()]) {
                return Err(Error::broken(name, format!("a result on rank {rank} is wrong: {:?}", config.kernel.form)));
            }
        }
    }
    Ok(seconds / calls as f64)
}

/// Waits, when it is dropped, until all work on these streams has ended.
struct WhenIdle(Vec<Arc<Stream>>);

impl Drop for WhenIdle {
    fn drop(&mut self) {
        // After a fault nothing runs any more.
        self.0.iter().for_each(|stream| drop(stream.synchronize()));
    }
}

/// Returns the seconds of the slowest of these streams, on which `work` enqueues.
fn slowest(streams: &[&Arc<Stream>], work: &mut dyn FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let Some((first, rest)) = streams.split_first() else { return work().map(|()| 0.0) };
    let mut others = 0.0;
    let own = first.seconds(|| {
        others = slowest(rest, work)?;
        Ok(())
    })?;
    Ok(others.max(own))
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
    let (_, stream) = start(0)?;
    let (from, to) = (Memory::zeroed(&stream, bytes)?, Memory::zeroed(&stream, bytes)?);
    let copy = Copy::of(from.address, to.address, bytes);
    // SAFETY: both have this many bytes, and free themselves on the same stream, after the copies.
    let run = |copies: usize| (0..copies).try_for_each(|_| unsafe { stream.copy(&copy) });
    run(WARM_UP)?;
    let seconds = stream.seconds(|| run(COPIES))?;
    Ok((2 * bytes * COPIES) as f64 / seconds)
}

/// Returns the seconds in which the ranks of a group agree on a call, averaged over `calls` calls that launch nothing:
/// with the exchange of times by which processes order their launches, or without.
///
/// # Errors
/// Those of the group's operations.
pub fn agreement_seconds(group: &Group, ordered: bool, calls: usize) -> Result<f64, Error> {
    let call = Call::new(Operation::AllReduce, DType::F32, 1).reducing(ReduceOp::Sum);
    let agree = || {
        // In the queue of a GPU that does not exist: no other call is in it.
        let ticket = ordered.then(|| Arc::new(Ticket::new(usize::MAX, 0, group.rank())));
        let proposing = ticket.clone();
        let propose = move |_: &mut ()| proposing.map(|ticket| ticket.propose());
        let run = move |(), time: Option<u64>, _: &Site, deadline: &Deadline| match (ticket, time) {
            (Some(ticket), Some(time)) => ticket.turn(time, deadline, || None),
            _ => Ok(()),
        };
        group.start_agreed(call, || Ok(()), propose, run)?.wait(|(), _| Ok(()))
    };
    (0..WARM_UP).try_for_each(|_| agree())?;
    let clock = Instant::now();
    (0..calls).try_for_each(|_| agree())?;
    Ok(clock.elapsed().as_secs_f64() / calls as f64)
}

fn start(ordinal: usize) -> Result<(Arc<Gpu>, Arc<Stream>), Error> {
    let gpu = Gpu::of(ordinal)?;
    let stream = Arc::new(Stream::new(&gpu)?);
    Ok((gpu, stream))
}
