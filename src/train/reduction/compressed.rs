//! Reductions of buckets that travel compressed: see [`compression`](crate::train::compression).

use std::collections::HashMap;
use std::mem::{replace, take};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::tensor::TensorData;
use bytemuck::{cast_slice, cast_slice_mut};

use crate::train::compression::Compression;
use bonfire_core::internal::{ByteOperations, Request, hash, lock};
use bonfire_core::{Buffer, DType, Error, Group, Operation, Work};

/// Compresses buckets for their exchange, and keeps what that loses. Clones share it.
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
    /// The first of this rank's gradients in this step that is not finite.
    not_finite: Option<usize>,
    /// Whether a mean in this step is not finite. All ranks find the same, because they decompress the same bytes.
    mean_not_finite: bool,
}

/// A bucket in flight, and memory that the next one reuses.
#[derive(Default)]
pub(crate) struct Exchange {
    /// The gradients, by position: this rank's at first, then the mean.
    pub gradients: Vec<(usize, TensorData)>,
    /// The elements of all gradients, and zeros up to a multiple of the ranks. While the bucket is in flight, these
    /// are what compression has lost of them.
    values: Vec<f32>,
    /// One shard.
    shard: Vec<f32>,
    /// The sum over all ranks of this rank's shard.
    sum: Vec<f32>,
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

    /// Starts the mean of a bucket of f32 gradients, each multiplied by `factor` on this rank, in the memory of an
    /// `exchange` that has ended.
    ///
    /// Both operations are started here, so that they have the same order relative to other buckets' on all ranks. The
    /// second one finds the first one's result, because started operations of a group run one after the other.
    #[track_caller]
    pub(super) fn start(
        &self,
        group: &Group,
        gradients: Vec<(usize, TensorData)>,
        factor: f32,
        mut exchange: Exchange,
    ) -> Result<Work<Option<Exchange>>, Error> {
        let elements: usize = gradients.iter().map(|(_, data)| data.bytes.len() / size_of::<f32>()).sum();
        let layout = self.layout(group, elements)?;
        let words = layout.ranks * layout.words;
        (exchange.gradients, exchange.layout) = (gradients, layout);
        let memory = match exchange.memory.take().filter(|memory| memory.len() >= words) {
            Some(memory) => memory,
            None => group.allocate(words)?,
        };
        exchange.memory = Some(memory);

        let compressor = self.clone();
        let request = |operation| Request::new(operation, DType::U64);
        let scattered = group.start_operation(request(Operation::AllToAll), words, exchange, move |exchange| {
            compressor.compress_own(factor, exchange)
        })?;
        let compressor = self.clone();
        group.start_operation(request(Operation::AllGather), words, None, move |exchange: &mut Option<Exchange>| {
            let scattered = scattered.wait().map_err(|(error, _)| error)?;
            compressor.compress_sum(exchange.insert(scattered))
        })
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
        let Exchange { gradients, values, shard: scratch, memory, layout, .. } = exchange;
        values.clear();
        for (position, data) in &*gradients {
            let start = values.len();
            values.extend(data.bytes.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]) * factor));
            let feedback = &mut *lock(&self.feedback);
            if let Some(errors) = feedback.errors.get(position) {
                values[start..].iter_mut().zip(errors).for_each(|(value, error)| *value += error);
            }
            if !is_finite(&values[start..]) {
                feedback.not_finite.get_or_insert(*position);
            }
        }
        values.resize(layout.ranks * layout.shard, 0.0);
        scratch.resize(layout.shard, 0.0);
        let memory = layout.memory(memory)?;
        for (rank, values) in values.chunks_exact_mut(layout.shard.max(1)).enumerate() {
            let bytes = layout.part(memory, rank);
            self.round_trip(values, bytes, scratch)?;
            values.iter_mut().zip(&*scratch).for_each(|(value, sent)| *value -= sent);
        }
        Ok(cast_slice_mut(memory))
    }

    /// Adds the ranks' elements of this rank's shard and compresses the sum. Returns the memory of the exchange.
    fn compress_sum<'a>(&self, exchange: &'a mut Exchange) -> Result<&'a mut [u8], Error> {
        let Exchange { gradients, values, shard: scratch, sum, memory, layout } = exchange;
        sum.clear();
        sum.resize(layout.shard, 0.0);
        let memory = layout.memory(memory)?;
        for rank in 0..layout.ranks {
            self.decompress(layout.part(memory, rank), scratch)?;
            sum.iter_mut().zip(&*scratch).for_each(|(sum, value)| *sum += value);
        }
        self.round_trip(sum, layout.part(memory, self.rank), scratch)?;
        let errors = values[self.rank * layout.shard..].iter_mut();
        errors.zip(sum.iter().zip(&*scratch)).for_each(|(error, (sum, sent))| *error += sum - sent);

        let (mut rest, mut feedback) = (&values[..], lock(&self.feedback));
        for (position, data) in gradients {
            let (errors, after) = rest.split_at(data.bytes.len() / size_of::<f32>());
            let kept = feedback.errors.entry(*position).or_default();
            kept.clear();
            kept.extend_from_slice(errors);
            rest = after;
        }
        drop(feedback);
        Ok(cast_slice_mut(memory))
    }

    /// Waits for the exchange, and decompresses the mean into its gradients.
    pub(super) fn finish(&self, work: Work<Option<Exchange>>) -> Result<Exchange, Error> {
        let exchange = work.wait().map_err(|(error, _)| error)?;
        let mut exchange = exchange.ok_or_else(|| Error::broken("compression", "the exchange has no result"))?;
        let Exchange { gradients, values, memory, layout, .. } = &mut exchange;
        let memory = layout.memory(memory)?;
        for (rank, values) in values.chunks_exact_mut(layout.shard.max(1)).enumerate() {
            self.decompress(layout.part(memory, rank), values)?;
        }
        if !is_finite(values) {
            lock(&self.feedback).mean_not_finite = true;
        }
        let mut rest = cast_slice::<f32, u8>(values);
        for (_, data) in gradients {
            let (mean, after) = rest.split_at(data.bytes.len());
            data.bytes.copy_from_slice(mean);
            rest = after;
        }
        Ok(exchange)
    }

    /// Ends a step whose exchanges have all ended. If a mean is not finite, all ranks return the same inner error, and
    /// the group stays usable. `path` names the parameter at a position.
    pub fn end_step<'a>(
        &self,
        group: &Group,
        operation: &'static str,
        path: impl Fn(usize) -> Option<&'a str>,
    ) -> Result<Result<(), Error>, Error> {
        let (mean_not_finite, own) = {
            let mut feedback = lock(&self.feedback);
            (replace(&mut feedback.mean_not_finite, false), take(&mut feedback.not_finite))
        };
        if !mean_not_finite {
            return Ok(Ok(()));
        }
        let mut positions = vec![u64::MAX; group.world_size()];
        positions[self.rank] = own.map_or(u64::MAX, |position| position as u64);
        let request = Request::new(Operation::AllGather, DType::U64).part_of(operation);
        group.operate(request, None, cast_slice_mut(&mut positions))?;
        let name = &self.name;
        let reason = match positions.iter().enumerate().find(|(_, position)| **position != u64::MAX) {
            Some((rank, position)) => format!(
                "rank {rank}'s gradient of `{}` has elements that are not finite, which cannot travel as {name}; lower \
                 the learning rate, or exchange gradients without compression",
                path(*position as usize).unwrap_or("a parameter")
            ),
            None => format!("{name} has made a mean that is not finite of gradients that are"),
        };
        Ok(Err(Error::argument(operation, reason)))
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
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
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

fn is_finite(values: &[f32]) -> bool {
    // Without an early exit the loop is vectorised.
    values.iter().fold(true, |finite, value| finite & value.is_finite())
}
