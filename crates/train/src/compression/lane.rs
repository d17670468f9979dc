//! All-reduces of buckets that travel compressed.
//!
//! A compressed bucket is two started operations: an all-to-all that brings all ranks' parts of a shard to its owner,
//! and an all-gather of the sums. An all-gather of whole buckets would send `n / 2` times as much with `n` ranks. The
//! encoding runs where an operation fetches its bytes, on the group's progress thread, so no hook computes or waits for
//! it. What it loses is kept by parameter and not by bucket, so it survives another bucket size.

use std::collections::HashMap;
use std::mem::{replace, take};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use bytemuck::{cast_slice, cast_slice_mut};

use super::Compression;
use crate::lane::{Call, Elements, Lane, Memory, Pending, Target, Tensor, Tensors};
use crate::protocol::Refusal;
use bonfire_core::internal::{ByteOperations, Request, hash, lock, panic_message};
use bonfire_core::{Buffer, DType, Error, Group, Operation, ReduceOp, Work};

/// What is cut off is kept up to so many times the largest gradient. An encoding of one bit sends an outlier in as many
/// steps as it is larger than the mean.
const KEPT: f32 = 64.0;

/// Compresses gradients for their exchange, and keeps what that loses. Clones share it.
#[derive(Clone)]
pub(crate) struct Compressor {
    compression: Arc<dyn Compression>,
    /// The encoding's name.
    name: String,
    rank: usize,
    feedback: Arc<Mutex<Feedback>>,
}

/// What this rank keeps from step to step.
#[derive(Default)]
struct Feedback {
    /// What compression has lost, by the position of the parameter. It is added to the next gradient.
    errors: HashMap<usize, Vec<f32>>,
    /// The largest magnitude in the last gradient of a parameter, by its position.
    largest: HashMap<usize, f32>,
    /// The first of this rank's gradients in this step that is not finite.
    not_finite: Option<usize>,
    /// Whether a mean in this step is not finite. All ranks find the same, because they decompress the same bytes.
    mean_not_finite: bool,
}

/// A bucket in flight, and memory that the next one reuses.
#[derive(Default)]
struct Exchange {
    /// This rank's gradients: the position, the number of elements, and the elements, if it has them.
    gradients: Vec<(usize, usize, Option<Elements>)>,
    /// The elements of all gradients, and zeros up to a multiple of the ranks. While the bucket is in flight, these
    /// are what compression has lost of them.
    values: Vec<f32>,
    /// One shard.
    shard: Vec<f32>,
    /// The sum over all ranks of this rank's shard.
    sum: Vec<f32>,
    /// The most that is kept of a value that was cut off.
    limit: f32,
    /// The compressed shards of all ranks, one after the other.
    memory: Option<Buffer<u64>>,
    layout: Layout,
}

/// The shards of a bucket.
#[derive(Clone, Copy, Default)]
struct Layout {
    ranks: usize,
    /// Elements of a shard.
    shard: usize,
    /// Bytes of a compressed shard.
    bytes: usize,
    /// Words of memory for a compressed shard.
    words: usize,
}

impl Compressor {
    pub fn new(compression: Arc<dyn Compression>, rank: usize) -> Result<Compressor, Error> {
        let mut compressor = Compressor { compression, name: String::new(), rank, feedback: Arc::default() };
        compressor.name = compressor.guarded(|| compressor.compression.name())?;
        Ok(compressor)
    }

    /// A compressor that has lost nothing yet, for a group in which this rank has another number.
    pub fn anew(&self, rank: usize) -> Compressor {
        Compressor { rank, feedback: Arc::default(), ..self.clone() }
    }

    /// Returns a hash of the encoding's name.
    pub fn digest(&self) -> u64 {
        hash(self.name.bytes())
    }

    /// Forgets what compression has lost, after a step whose result is not used.
    pub fn forget(&self) {
        *lock(&self.feedback) = Feedback::default();
    }

    /// Ends a step whose exchanges have all ended. If a mean is not finite, all ranks return the same refusal, and the
    /// group stays usable.
    pub fn end_step(&self, group: &Group, operation: &'static str) -> Result<Option<Refusal>, Error> {
        let (mean_not_finite, own) = {
            let mut feedback = lock(&self.feedback);
            (replace(&mut feedback.mean_not_finite, false), take(&mut feedback.not_finite))
        };
        if !mean_not_finite {
            return Ok(None);
        }
        let mut positions = vec![u64::MAX; group.world_size()];
        positions[self.rank] = own.map_or(u64::MAX, |position| position as u64);
        let request = Request::new(Operation::AllGather, DType::U64).part_of(operation);
        group.operate(request, None, cast_slice_mut(&mut positions))?;
        let first = positions.into_iter().enumerate().find(|(_, position)| *position != u64::MAX);
        let gradient = first.map(|(rank, position)| (rank, position as usize));
        Ok(Some(Refusal::NotFinite { gradient, encoding: self.name.clone() }))
    }

    fn layout(&self, group: &Group, elements: usize) -> Result<Layout, Error> {
        let ranks = group.world_size();
        let shard = elements.div_ceil(ranks);
        let bytes = self.guarded(|| self.compression.bytes(shard))?;
        // An encoding may need a few bytes for a shard of one element.
        if bytes > shard.saturating_mul(2 * size_of::<f32>()).saturating_add(4096) {
            let rank = self.rank;
            let reason =
                format!("rank {rank}'s encoding makes {bytes} bytes of {shard} elements, which cannot be right");
            return Err(Error::broken("compression", reason));
        }
        Ok(Layout { ranks, shard, bytes, words: bytes.div_ceil(size_of::<u64>()) })
    }

    /// Compresses this rank's elements of all shards. Returns the memory of the exchange.
    fn compress_own<'a>(&self, factor: f32, exchange: &'a mut Exchange) -> Result<&'a mut [u8], Error> {
        let Exchange { gradients, values, shard: scratch, memory, limit, layout, .. } = exchange;
        values.clear();
        let mut usual = 0f32;
        for (position, elements, gradient) in &*gradients {
            let start = values.len();
            match gradient.as_ref().map(Elements::bytes) {
                Some(bytes) if bytes.len() == elements * size_of::<f32>() => {
                    values.extend(bytes.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]) * factor))
                }
                Some(_) => return Err(Error::broken("compression", "a gradient has another size than its parameter")),
                None => values.resize(start + elements, 0.0),
            }
            let feedback = &mut *lock(&self.feedback);
            let largest = values[start..].iter().fold(0f32, |largest, value| largest.max(value.abs()));
            let before = feedback.largest.insert(*position, largest);
            usual = usual.max(before.map_or(largest, |before| before.min(largest)));
            if let Some(errors) = feedback.errors.get(position) {
                values[start..].iter_mut().zip(errors).for_each(|(value, error)| *value += error);
            }
            if !is_finite(&values[start..]) {
                feedback.not_finite.get_or_insert(*position);
            }
        }
        *limit = if usual > 0.0 { KEPT * usual } else { f32::MAX };
        values.resize(layout.ranks * layout.shard, 0.0);
        scratch.resize(layout.shard, 0.0);
        let memory = layout.memory(memory)?;
        for (rank, values) in values.chunks_exact_mut(layout.shard.max(1)).enumerate() {
            let bytes = layout.part(memory, rank);
            self.round_trip(values, bytes, scratch)?;
            values.iter_mut().zip(&*scratch).for_each(|(value, sent)| *value = lost(*value, *sent, *limit));
        }
        Ok(cast_slice_mut(memory))
    }

    /// Adds the ranks' elements of this rank's shard and compresses the sum. Returns the memory of the exchange.
    fn compress_sum<'a>(&self, exchange: &'a mut Exchange) -> Result<&'a mut [u8], Error> {
        let Exchange { gradients, values, shard: scratch, sum, memory, limit, layout } = exchange;
        sum.clear();
        sum.resize(layout.shard, 0.0);
        let memory = layout.memory(memory)?;
        for rank in 0..layout.ranks {
            self.decompress(layout.part(memory, rank), scratch)?;
            sum.iter_mut().zip(&*scratch).for_each(|(sum, value)| *sum += value);
        }
        self.round_trip(sum, layout.part(memory, self.rank), scratch)?;
        let errors = values[self.rank * layout.shard..].iter_mut();
        let limit = *limit * layout.ranks as f32;
        errors.zip(sum.iter().zip(&*scratch)).for_each(|(error, (sum, sent))| *error += lost(*sum, *sent, limit));

        let (mut rest, mut feedback) = (&values[..], lock(&self.feedback));
        for (position, elements, _) in gradients {
            let (errors, after) = rest.split_at(*elements);
            let kept = feedback.errors.entry(*position).or_default();
            kept.clear();
            kept.extend_from_slice(errors);
            rest = after;
        }
        drop(feedback);
        Ok(cast_slice_mut(memory))
    }

    /// Decompresses the mean.
    fn decompress_mean(&self, exchange: &mut Exchange) -> Result<(), Error> {
        let Exchange { values, memory, layout, .. } = exchange;
        let memory = layout.memory(memory)?;
        for (rank, values) in values.chunks_exact_mut(layout.shard.max(1)).enumerate() {
            self.decompress(layout.part(memory, rank), values)?;
        }
        if !is_finite(values) {
            lock(&self.feedback).mean_not_finite = true;
        }
        Ok(())
    }

    /// Compresses values, and decompresses what the others will get.
    fn round_trip(&self, values: &[f32], bytes: &mut [u8], back: &mut [f32]) -> Result<(), Error> {
        self.guarded(|| self.compression.compress(values, bytes))?;
        self.decompress(bytes, back)
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) -> Result<(), Error> {
        self.guarded(|| self.compression.decompress(bytes, values))
    }

    /// Runs the user's code. A panic of it is an error, because the other ranks wait for this one.
    fn guarded<R>(&self, code: impl FnOnce() -> R) -> Result<R, Error> {
        catch_unwind(AssertUnwindSafe(code)).map_err(|panic| {
            let text = panic_message(&*panic);
            Error::broken("compression", format!("rank {}'s encoding has panicked: {text}", self.rank))
        })
    }
}

impl Layout {
    /// Returns the part of the memory that is used.
    fn memory<'a>(&self, memory: &'a mut Option<Buffer<u64>>) -> Result<&'a mut [u64], Error> {
        let used = memory.as_mut().and_then(|memory| memory.get_mut(..self.ranks * self.words));
        used.ok_or_else(|| Error::broken("compression", "the exchange has no memory"))
    }

    /// Returns the bytes of a rank's compressed shard.
    fn part<'a>(&self, memory: &'a mut [u64], rank: usize) -> &'a mut [u8] {
        &mut cast_slice_mut(&mut memory[rank * self.words..][..self.words])[..self.bytes]
    }
}

/// Returns what compression has lost of a value, up to `limit` if it was cut off.
fn lost(value: f32, sent: f32, limit: f32) -> f32 {
    let lost = value - sent;
    // Rounding loses less than it sends, and what is left out is not sent at all.
    let is_cut_off = sent != 0.0 && lost.abs() > sent.abs();
    if is_cut_off { lost.clamp(-limit, limit) } else { lost }
}

fn is_finite(values: &[f32]) -> bool {
    // Without an early exit the loop is vectorised.
    values.iter().fold(true, |finite, value| finite & value.is_finite())
}

/// A lane on which gradients travel compressed. Its calls are all-reduces of f32, whose tensors lie one after the
/// other.
pub(crate) struct CompressedLane {
    group: Group,
    tensors: Arc<dyn Tensors>,
    compressor: Compressor,
    /// Unused exchanges.
    exchanges: Arc<Mutex<Vec<Exchange>>>,
}

impl CompressedLane {
    pub fn new(group: Group, tensors: Arc<dyn Tensors>, compressor: Compressor) -> CompressedLane {
        CompressedLane { group, tensors, compressor, exchanges: Arc::default() }
    }
}

impl Lane for CompressedLane {
    fn group(&self) -> &Group {
        &self.group
    }

    fn is_on_host(&self) -> bool {
        true
    }

    /// Both operations are started here, so that they have the same order relative to other buckets' on all ranks. The
    /// second one finds the first one's result, because started operations of a group run one after the other.
    #[track_caller]
    fn start(&mut self, call: Call) -> Result<Box<dyn Pending>, Error> {
        let Call { request, bytes, factor, sources, targets } = call;
        let mean = request.call(0).reduction == Some(ReduceOp::Mean);
        let factor = if mean { factor / self.group.world_size() as f64 } else { factor } as f32;
        let mut exchange = lock(&self.exchanges).pop().unwrap_or_default();
        exchange.gradients.clear();
        for source in sources {
            let elements = source.input.elements(&*self.tensors)?;
            exchange.gradients.push((source.position, source.ranges.bytes() / size_of::<f32>(), elements));
        }
        let layout = self.compressor.layout(&self.group, bytes / size_of::<f32>())?;
        let words = layout.ranks * layout.words;
        exchange.layout = layout;
        let memory = match exchange.memory.take().filter(|memory| memory.len() >= words) {
            Some(memory) => memory,
            None => self.group.allocate(words)?,
        };
        exchange.memory = Some(memory);

        let compressor = self.compressor.clone();
        let request = |operation| Request::new(operation, DType::U64);
        let scattered = self.group.start_operation(request(Operation::AllToAll), words, exchange, move |exchange| {
            compressor.compress_own(factor, exchange)
        })?;
        let compressor = self.compressor.clone();
        let gather = request(Operation::AllGather);
        let work = self.group.start_operation(gather, words, None, move |exchange: &mut Option<Exchange>| {
            let scattered = scattered.wait().map_err(|(error, _)| error)?;
            compressor.compress_sum(exchange.insert(scattered))
        })?;
        let (compressor, tensors) = (self.compressor.clone(), self.tensors.clone());
        Ok(Box::new(InFlight { work, compressor, targets, tensors, exchanges: self.exchanges.clone() }))
    }
}

/// A compressed bucket in flight.
struct InFlight {
    work: Work<Option<Exchange>>,
    compressor: Compressor,
    targets: Vec<Target>,
    tensors: Arc<dyn Tensors>,
    exchanges: Arc<Mutex<Vec<Exchange>>>,
}

impl Pending for InFlight {
    fn is_finished(&self) -> Option<bool> {
        Some(self.work.is_finished())
    }

    fn wait(self: Box<Self>) -> Result<Vec<Tensor>, Error> {
        let InFlight { work, compressor, targets, tensors, exchanges } = *self;
        let exchange = work.wait().map_err(|(error, _)| error)?;
        let mut exchange = exchange.ok_or_else(|| Error::broken("compression", "the exchange has no result"))?;
        compressor.decompress_mean(&mut exchange)?;
        let mut own = take(&mut exchange.gradients).into_iter();
        let mut rest = cast_slice::<f32, u8>(&exchange.values);
        let made = targets.into_iter().map(|Target { position, shape, dtype, ranges }| {
            let mut memory: Box<dyn Memory> = match own.next() {
                Some((_, _, Some(Elements::Owned(memory)))) if memory.bytes().len() == ranges.bytes() => memory,
                _ => tensors.memory(dtype, ranges.bytes() / dtype.size())?,
            };
            let (mean, after) = rest.split_at(ranges.bytes());
            memory.bytes_mut().copy_from_slice(mean);
            rest = after;
            Ok(tensors.tensor(position, &shape, dtype, memory))
        });
        let made = made.collect::<Result<_, Error>>()?;
        lock(&exchanges).push(exchange);
        Ok(made)
    }
}
