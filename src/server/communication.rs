//! cubecl's `ServerCommunication`, on any runtime.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cubecl::bytes::Bytes;
use cubecl::device::DeviceId;
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, Handle, ReduceOperation, ServerCommunication, ServerError,
};
use cubecl::stream_id::StreamId;

use super::DeviceTransport;
use super::compute::CollectiveServer;
use super::copy::Layout;
use super::engine::Job;
use super::memory::writable;
use super::post::{Message, Post};
use super::reading::{Reading, caught};
use super::round::{Results, Round, Source};
use bonfire_core::{Call, DType, Deadline, Error, Operation, ReduceOp};

pub(super) const UNFINISHED: &str = "the memory holds a part of an earlier result, or one from another list of devices, \
                                     that is not there yet; call sync_collective between the two";

/// An all-reduce whose result has not been written yet.
pub(super) struct Pending {
    round: Arc<Round>,
    rank: usize,
    number: u64,
    target: Binding,
    span: Span,
}

/// Nothing here returns an error: cubecl's client would unwrap it on this thread, where it is lost. A failure poisons
/// the device instead.
impl<R: DeviceTransport> ServerCommunication for CollectiveServer<R> {
    const SERVER_COMM_ENABLED: bool = true;

    /// The devices meet at their first all-reduce; there is nothing to prepare.
    fn comm_init(&mut self, _devices: Vec<DeviceId>) -> Result<(), ServerError> {
        Ok(())
    }

    fn all_reduce(
        &mut self,
        source: Binding,
        target: Binding,
        dtype: ElemType,
        stream: StreamId,
        op: ReduceOperation,
        devices: Vec<DeviceId>,
    ) -> Result<(), ServerError> {
        let started = self.start_all_reduce(source, target, dtype, stream, op, devices);
        self.status.record(started);
        Ok(())
    }

    fn sync_collective(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        self.forget_failed();
        let pending = std::mem::take(&mut self.pending);
        let finished = self.finish(pending);
        self.promised.clear();
        let ordered = match &mut self.engine {
            Some(engine) => caught("sync_collective", || engine.sync()),
            None => Ok(()),
        };
        self.status.record(ordered);
        self.status.record(finished);
        Ok(())
    }

    fn send(
        &mut self,
        source: CopyDescriptor,
        dtype: ElemType,
        stream: StreamId,
        destination: DeviceId,
    ) -> Result<(), ServerError> {
        // As it is, gaps and all: cubecl keeps the tensor's shape and strides.
        let size = source.handle.size_in_used();
        let data = self.offer(source.handle, size as usize, true, stream, destination);
        Post::between::<R>(self.device, destination).send(Message { stream, dtype, size, data });
        Ok(())
    }

    fn recv(&mut self, handle: Handle, dtype: ElemType, stream: StreamId, source: DeviceId) -> Result<(), ServerError> {
        // Also where nothing comes: later calls name this memory.
        self.initialize_memory(handle.memory.clone(), handle.size(), stream);
        let deadline = Deadline::after(self.status.deadline());
        let received = Post::between::<R>(source, self.device).receive(stream, &deadline);
        let delivered = received.and_then(|message| {
            let (expected, actual) = ((dtype, handle.size_in_used()), (message.dtype, message.size));
            if expected != actual {
                let reason = format!("expected {} bytes of {dtype:?}, got {} of {:?}", expected.1, actual.1, actual.0);
                return Err(Error::argument("recv", reason));
            }
            self.collect("recv", message.data?, &Layout::packed(message.size as usize), handle.binding())
        });
        self.status.record(delivered);
        Ok(())
    }
}

impl<R: DeviceTransport> CollectiveServer<R> {
    fn start_all_reduce(
        &mut self,
        source: Binding,
        target: Binding,
        dtype: ElemType,
        stream: StreamId,
        op: ReduceOperation,
        mut devices: Vec<DeviceId>,
    ) -> Result<(), Error> {
        devices.sort();
        let rank = self.check_devices(&devices)?;
        self.forget_failed();
        if self.engine.as_mut().is_some_and(|engine| engine.takes(&devices)) {
            return self.start_direct(devices, rank, (source, target), dtype, stream, op);
        }
        let round = Round::of::<R>(devices)?;
        let started = self.describe(&source, &target, dtype, op).and_then(|call| {
            self.apart(Operation::AllReduce, false, &[Span::of(&source), Span::of(&target)])?;
            let source = self.source(source, stream, &round)?;
            round.call(rank, call, source)
        });
        match started {
            Ok(number) => {
                let span = Span::of(&target);
                self.pending.push(Pending { round, rank, number, target, span });
                Ok(())
            }
            Err(error) => {
                // The others would wait for this call.
                round.fail(error.clone());
                Err(error)
            }
        }
    }

    fn start_direct(
        &mut self,
        devices: Vec<DeviceId>,
        rank: usize,
        (source, target): (Binding, Binding),
        dtype: ElemType,
        stream: StreamId,
        op: ReduceOperation,
    ) -> Result<(), Error> {
        let described = self.describe(&source, &target, dtype, op);
        let apart = self.apart(Operation::AllReduce, true, &[Span::of(&source), Span::of(&target)]);
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let call = match described.and_then(|call| apart.map(|()| call)) {
            Ok(call) => call,
            Err(error) => {
                // The others would wait for this call.
                engine.fail(&devices, &error);
                return Err(error);
            }
        };
        self.promised.extend([Span::of(&source), Span::of(&target)]);
        let job = Job { call, devices, rank, source, target, stream };
        caught("all_reduce", || engine.all_reduce(&mut self.inner, job))
    }

    /// Refuses memory that the other way than this one will write to: host and engine do not wait for each other.
    pub(super) fn apart(&self, operation: Operation, direct: bool, spans: &[Span]) -> Result<(), Error> {
        let overlaps = |written: &Span| spans.iter().any(|span| span.overlaps(written));
        let elsewhere = match direct {
            true => self.pending.iter().any(|pending| overlaps(&pending.span)),
            false => self.promised.iter().any(overlaps),
        };
        if elsewhere {
            return Err(Error::argument(operation, UNFINISHED));
        }
        Ok(())
    }

    /// This device's rank among the devices, which are sorted.
    fn check_devices(&self, devices: &[DeviceId]) -> Result<usize, Error> {
        if let Some(pair) = devices.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::argument("all_reduce", format!("{} is listed twice", pair[0])));
        }
        devices.binary_search(&self.device).map_err(|_| {
            let list: Vec<_> = devices.iter().map(ToString::to_string).collect();
            let reason =
                format!("{} is not among the devices [{}]; list it on all of them", self.device, list.join(", "));
            Error::argument("all_reduce", reason)
        })
    }

    fn describe(
        &self,
        source: &Binding,
        target: &Binding,
        dtype: ElemType,
        op: ReduceOperation,
    ) -> Result<Call, Error> {
        if let Some(error) = self.status.failure() {
            return Err(error);
        }
        let reduction = match op {
            ReduceOperation::Sum => ReduceOp::Sum,
            ReduceOperation::Mean => ReduceOp::Mean,
        };
        let dtype = reducible(dtype).ok_or_else(|| {
            let reason = format!(
                "{dtype:?} cannot be reduced; cast to f16, bf16, f32, f64, or an integer of 8 (i8, u8), 32 or 64 bits"
            );
            Error::argument("all_reduce", reason)
        })?;
        let (bytes, written) = (source.size_in_used(), target.size_in_used());
        if bytes != written {
            let reason = format!("the source has {bytes} bytes and the target {written}; they must be equal");
            return Err(Error::argument("all_reduce", reason));
        }
        call(Operation::AllReduce, bytes, dtype, Some(reduction), None)
    }

    /// Where a call's data comes from: the memory as it is now, unless an earlier call's result belongs there.
    fn source(&mut self, source: Binding, stream: StreamId, round: &Arc<Round>) -> Result<Source, Error> {
        let span = Span::of(&source);
        let written = self.pending.iter().rev().find(|pending| pending.span.overlaps(&span));
        let Some(pending) = written else {
            let size = source.size_in_used() as usize;
            return self.snapshot(vec![(source, size)], stream).map(Source::Snapshot);
        };
        if Arc::ptr_eq(&pending.round, round) && pending.span == span {
            return Ok(Source::Result(pending.number));
        }
        Err(Error::argument("all_reduce", UNFINISHED))
    }

    /// Starts to read the first bytes of some memory, as many as it says, as the work that was queued so far leaves them.
    pub(super) fn snapshot(&mut self, sources: Vec<(Binding, usize)>, stream: StreamId) -> Result<Reading, Error> {
        if let Some(error) = self.status.failure() {
            return Err(error);
        }
        sources.iter().try_for_each(|(source, _)| check_start(source))?;
        self.status.downloads.fetch_add(sources.len() as u64, Ordering::Relaxed);
        let descriptor = |(source, size): (_, usize)| CopyDescriptor::new(source, [size].into(), [1].into(), 1);
        let descriptors = sources.into_iter().map(descriptor).collect();
        let copying = caught("read", || Ok(self.at(stream).read(descriptors, stream)))?;
        self.reader.start(copying)
    }

    /// Writes on each target's own stream, and hands that to the device: what is queued later, on any stream, sees it.
    pub(super) fn write_all(&mut self, data: Vec<(Binding, Bytes)>) -> Result<(), Error> {
        let mut streams: Vec<StreamId> = Vec::new();
        for (target, bytes) in data {
            let stream = target.stream;
            let (target, bytes) = self.whole_words(target, bytes)?;
            self.status.uploads.fetch_add(1, Ordering::Relaxed);
            let descriptor = CopyDescriptor::new(target, [bytes.len()].into(), [1].into(), 1);
            caught("write", || {
                self.at(stream).write(vec![(descriptor, bytes)], stream);
                Ok(())
            })?;
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
        // A flush hands over the stream's errors once, so they must not get lost here.
        let mut flush = |stream| self.at(stream).flush(stream).map_err(|e| Error::io("writing results", e));
        caught("write", || streams.into_iter().try_for_each(&mut flush))
    }

    /// Where the data ends inside a word of its memory, adds what follows there: wgpu writes whole words, and fills them
    /// up with zeros.
    fn whole_words(&mut self, target: Binding, bytes: Bytes) -> Result<(Binding, Bytes), Error> {
        check_start(&target)?;
        let end = target.size - target.offset_end.unwrap_or(0);
        let inside = end % WORD;
        if inside == 0 || end == target.size || bytes.is_empty() {
            return Ok((target, bytes));
        }
        let word_end = (end - inside + WORD).min(target.size);
        let mut last = target.clone();
        (last.offset_start, last.offset_end) = (Some(end - inside), Some(target.size - word_end));
        let size = (word_end - (end - inside)) as usize;
        let word = self.snapshot(vec![(last, size)], target.stream)?.wait_one("write")?;
        let bytes = [&bytes[..], &word[inside as usize..]].concat();
        Ok((Binding { offset_end: Some(target.size - word_end), ..target }, Bytes::from_bytes_vec(bytes)))
    }

    /// Once a failure was cleared, what failed with it is no longer waited for.
    pub(super) fn forget_failed(&mut self) {
        let cleared = self.status.cleared();
        if cleared != self.cleared && self.status.failure().is_none() {
            self.cleared = cleared;
            self.pending.retain(|pending| !pending.round.failed());
            if let Some(engine) = &mut self.engine {
                engine.forget();
                self.promised.clear();
            }
        }
    }

    /// Waits for the results of these calls, and writes them in the order of the calls.
    fn finish(&mut self, pending: Vec<Pending>) -> Result<(), Error> {
        let deadline = Deadline::after(self.status.deadline());
        let mut rounds: Vec<(Arc<Round>, usize)> = Vec::new();
        for pending in &pending {
            if !rounds.iter().any(|(round, _)| Arc::ptr_eq(round, &pending.round)) {
                // Before any wait: another device may wait for these first.
                pending.round.announce(pending.rank);
                rounds.push((pending.round.clone(), pending.rank));
            }
        }
        // Also after a failure: another list of devices may be sound, and would keep the results for this device's next
        // calls there.
        let taken = rounds.into_iter().map(|(round, rank)| Ok((round.take(rank, &deadline)?, round)));
        let taken: Vec<Result<(Results, Arc<Round>), Error>> = taken.collect();
        let results = taken.into_iter().collect::<Result<Vec<_>, _>>()?;
        let mut writes = Vec::with_capacity(pending.len());
        for pending in pending {
            let result = results.iter().find(|(_, round)| Arc::ptr_eq(round, &pending.round));
            let result = result.and_then(|(results, _)| results.get(pending.number));
            let result = result.ok_or_else(|| Error::io("sync_collective", "a result is gone"))?;
            writes.push((pending.target, writable(result)));
        }
        self.write_all(writes)
    }
}

/// An operation on memory of so many bytes.
pub(super) fn call(
    operation: Operation,
    bytes: u64,
    dtype: DType,
    reduction: Option<ReduceOp>,
    root: Option<usize>,
) -> Result<Call, Error> {
    let bytes = bytes as usize;
    if !bytes.is_multiple_of(dtype.size()) {
        return Err(Error::argument(operation, format!("{bytes} bytes are no whole number of {dtype}")));
    }
    Ok(Call { operation, dtype, count: bytes / dtype.size(), reduction, root, sizes: None })
}

/// The types that can be reduced on every runtime: also where NCCL or kernels do it, which know no others.
fn reducible(dtype: ElemType) -> Option<DType> {
    match dtype {
        ElemType::Float(FloatKind::F16) => Some(DType::F16),
        ElemType::Float(FloatKind::BF16) => Some(DType::BF16),
        ElemType::Float(FloatKind::F32) => Some(DType::F32),
        ElemType::Float(FloatKind::F64) => Some(DType::F64),
        ElemType::Int(IntKind::I8) => Some(DType::I8),
        ElemType::Int(IntKind::I32) => Some(DType::I32),
        ElemType::Int(IntKind::I64) => Some(DType::I64),
        ElemType::UInt(UIntKind::U8) => Some(DType::U8),
        ElemType::UInt(UIntKind::U32) => Some(DType::U32),
        ElemType::UInt(UIntKind::U64) => Some(DType::U64),
        _ => None,
    }
}

/// What the host copies to and from devices is made of words: wgpu refuses other offsets.
const WORD: u64 = 4;

fn check_start(binding: &Binding) -> Result<(), Error> {
    match binding.offset_start.unwrap_or(0) {
        start if start % WORD == 0 => Ok(()),
        start => {
            let reason = format!("the data starts at byte {start} of its memory; that must be a multiple of {WORD}");
            Err(Error::argument("copying between device and host", reason))
        }
    }
}

/// The part of its memory that a binding names.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Span {
    memory: Option<u64>,
    /// In bytes.
    start: u64,
    end: u64,
}

impl Span {
    pub fn of(binding: &Binding) -> Span {
        let start = binding.offset_start.unwrap_or(0);
        Span { memory: memory_id(binding), start, end: start + binding.size_in_used() }
    }

    pub fn overlaps(&self, other: &Span) -> bool {
        self.start < other.end && other.start < self.end && self.memory.is_some() && self.memory == other.memory
    }
}

/// cubecl shows a memory's id only in its debug text; a test notices if that changes.
fn memory_id(binding: &Binding) -> Option<u64> {
    let text = format!("{:?}", binding.memory);
    let digits = text.split("value: ").nth(1)?;
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_memory_is_recognised_where_the_parts_overlap() {
        let handle = Handle::new(StreamId { value: 0 }, 64);
        let part = |start, end| handle.clone().offset_start(start).offset_end(end).binding();
        let other = Handle::new(StreamId { value: 0 }, 64).binding();
        let overlap = |a: &Binding, b: &Binding| Span::of(a).overlaps(&Span::of(b));
        assert!(memory_id(&other).is_some());
        assert!(!overlap(&part(0, 0), &other));
        assert!(overlap(&part(0, 0), &part(0, 0)));
        assert!(overlap(&part(0, 32), &part(16, 0)));
        assert!(!overlap(&part(0, 32), &part(32, 0)));
    }
}
