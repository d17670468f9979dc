//! Device operations through host memory.

use cubecl::bytes::Bytes;
use cubecl::device_handle::DeviceHandle;

use super::{Completion, WaitFn, run_on_device};
use crate::pool;
use crate::server::DeviceTransport;
use crate::server::compute::CollectiveServer;
use crate::server::engine::DeviceOperation;
use crate::server::memory::{shared, writable};
use bonfire_core::internal::{ByteOperations, Ranges, Request};
use bonfire_core::{Error, Group};

/// Copies the sources to host memory and runs the operation there. The returned function waits and writes the results.
pub(super) fn start<R: DeviceTransport>(
    device: DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    job: DeviceOperation,
) -> Result<WaitFn, Error> {
    let DeviceOperation { call, sources, targets, stream, .. } = job;
    let places: Vec<_> = sources.iter().map(|(_, ranges)| ranges.clone()).collect();
    let sources = sources.into_iter().map(|(source, ranges)| (source, ranges.bytes())).collect();
    let reading = run_on_device(&device, call, move |server| server.snapshot(sources, stream));
    let memory = Bytes::from_bytes_vec(Vec::new());
    let work = group.start_operation(Request::from(call), call.count, memory, move |memory| {
        let operation = call.operation.to_string();
        let parts = reading()?.wait(&operation)?;
        *memory = pool::bytes(&operation, call.bytes())?;
        for (ranges, part) in places.iter().zip(parts) {
            ranges.places().for_each(|(at, range)| memory[range.clone()].copy_from_slice(&part[at..][..range.len()]));
        }
        Ok(&mut memory[..])
    })?;
    Ok(Box::new(move |_| {
        let memory = shared(work.wait().map_err(|(error, _)| error)?);
        let part = |ranges: Ranges| match ranges.single() {
            Some(range) => writable(memory.slice(range)),
            None => {
                let mut packed = Vec::with_capacity(ranges.bytes());
                ranges.places().for_each(|(_, range)| packed.extend_from_slice(&memory[range]));
                Bytes::from_bytes_vec(packed)
            }
        };
        let writes: Vec<_> = targets.into_iter().map(|(target, ranges)| (target, part(ranges))).collect();
        if !writes.is_empty() {
            device.submit(move |server| {
                let written = server.write_all(writes);
                server.status.record(written);
            });
            device.flush_queue();
        }
        Ok(Completion::ended())
    }))
}
