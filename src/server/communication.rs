//! cubecl's `ServerCommunication` on any runtime.
//!
//! `all_reduce` and `send` never wait for another device: burn calls them from threads on which others depend, and a
//! device thread that waited there could stop the very thread that has to make the peer's call.

use std::sync::Arc;

use cubecl::device::DeviceId;
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, Handle, ReduceOperation, ServerCommunication, ServerError,
};
use cubecl::stream_id::StreamId;

use super::DeviceTransport;
use super::compute::CollectiveServer;
use super::copy::TensorLayout;
use super::device_group::{DeviceGroup, Source};
use super::download::catch_panic;
use super::engine::{DeviceOperation, call};
use super::mailbox::{DeviceMessage, Mailbox};
use super::memory::Span;
use super::pending::{PendingResult, UNFINISHED, results};
use bonfire_core::internal::Peers;
use bonfire_core::{Call, DType, Deadline, Error, Operation, ReduceOp};

/// No method returns an error: cubecl's client would unwrap it on this thread, where it is lost. A failure poisons the
/// device instead.
impl<R: DeviceTransport> ServerCommunication for CollectiveServer<R> {
    const SERVER_COMM_ENABLED: bool = true;

    /// Nothing to prepare: the devices meet at their first all-reduce.
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
        if started.is_err() {
            // A fault of the device, which says more than what it led to, becomes the failure first.
            let _ = self.status.failure();
        }
        self.status.record(started);
        Ok(())
    }

    fn sync_collective(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        self.drop_failed_calls();
        let deadline = Deadline::after(self.status.deadline());
        let finished = results(std::mem::take(&mut self.pending), &deadline).and_then(|writes| self.write_all(writes));
        self.engine_spans.clear();
        let ordered = match &mut self.engine {
            Some(engine) => catch_panic("sync_collective", || engine.sync()),
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
        // The span is sent with its gaps: cubecl keeps the tensor's shape and strides.
        let size = source.handle.size_in_used();
        let data = self.payload(source.handle, size as usize, true, stream, destination);
        Mailbox::between::<R>(self.device, destination).send(DeviceMessage { stream, dtype, size, data });
        Ok(())
    }

    fn recv(&mut self, handle: Handle, dtype: ElemType, stream: StreamId, source: DeviceId) -> Result<(), ServerError> {
        // Needed even if nothing arrives: later calls refer to this memory.
        self.initialize_memory(handle.memory.clone(), handle.size(), stream);
        let deadline = Deadline::after(self.status.deadline());
        let received = Mailbox::between::<R>(source, self.device).receive(stream, &deadline);
        let delivered = received.and_then(|message| {
            let (expected, actual) = ((dtype, handle.size_in_used()), (message.dtype, message.size));
            if expected != actual {
                let reason = format!("expected {} bytes of {dtype:?}, got {} of {:?}", expected.1, actual.1, actual.0);
                return Err(Error::argument("recv", reason));
            }
            self.deliver("recv", message.data?, &TensorLayout::packed(message.size as usize), handle.binding())
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
        self.drop_failed_calls();
        let direct = self.engine.as_mut().is_some_and(|engine| engine.takes(&devices));
        let spans = [Span::of(&source), Span::of(&target)];
        let call = self.describe(&source, &target, dtype, op);
        let call = call.and_then(|call| self.check_no_writes(call.operation, direct, &spans).map(|()| call));
        // On an error the other devices would wait for this call.
        match &mut self.engine {
            Some(engine) if direct => {
                let call = call.inspect_err(|error| engine.fail(&devices, error))?;
                self.engine_spans.extend(spans);
                let whole = |memory| vec![(memory, (0..call.bytes()).into())];
                let job = DeviceOperation {
                    call,
                    rank,
                    sources: whole(source),
                    targets: whole(target),
                    stream,
                    peers: Peers::default(),
                };
                catch_panic("all_reduce", || engine.all_reduce(&mut self.inner, devices, job))
            }
            _ => {
                let group = DeviceGroup::of::<R>(devices)?;
                let called = call.and_then(|call| group.call(rank, call, self.source(source, stream, &group)?));
                let number = called.inspect_err(|error| group.fail(error.clone()))?;
                let [_, span] = spans;
                self.pending.push(PendingResult { group, rank, number, target, span });
                Ok(())
            }
        }
    }

    /// Fails if the other path has a pending write to one of these spans: the paths do not wait for each other.
    pub(super) fn check_no_writes(&self, operation: Operation, direct: bool, spans: &[Span]) -> Result<(), Error> {
        let overlaps = |written: &Span| spans.iter().any(|span| span.overlaps(written));
        let elsewhere = match direct {
            true => self.pending.iter().any(|pending| overlaps(&pending.span)),
            false => self.engine_spans.iter().any(overlaps),
        };
        if elsewhere {
            return Err(Error::argument(operation, UNFINISHED));
        }
        Ok(())
    }

    /// Returns this device's rank among the devices, which are sorted.
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
        if let Some(error) = self.status.reported() {
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

    /// Returns a call's input: the memory as it is now, or the result of an earlier call that belongs there, as on a
    /// communication stream. Refuses memory that overlaps such a result in part, and results of other device lists.
    fn source(&mut self, source: Binding, stream: StreamId, group: &Arc<DeviceGroup>) -> Result<Source, Error> {
        let span = Span::of(&source);
        let written = self.pending.iter().rev().find(|pending| pending.span.overlaps(&span));
        let Some(pending) = written else {
            let size = source.size_in_used() as usize;
            return self.snapshot(vec![(source, size)], stream).map(Source::Snapshot);
        };
        if Arc::ptr_eq(&pending.group, group) && pending.span == span {
            return Ok(Source::Result(pending.number));
        }
        Err(Error::argument("all_reduce", UNFINISHED))
    }
}

/// The types that every path can reduce, including NCCL and the kernels, which support no others.
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
