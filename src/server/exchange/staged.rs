//! Operations of a group through host memory.

use cubecl::bytes::Bytes;
use cubecl::device_handle::DeviceHandle;

use super::{Waiting, ask};
use crate::pool;
use crate::server::DeviceTransport;
use crate::server::compute::CollectiveServer;
use crate::server::engine::Job;
use crate::server::memory::{shared, writable};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Error, Group};

/// Host memory is filled from the device, the ranks work on it, and who waits has the results written.
pub(super) fn start<R: DeviceTransport>(
    device: DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    job: Job,
) -> Result<Waiting, Error> {
    let Job { call, sources, targets, stream, .. } = job;
    let starts: Vec<_> = sources.iter().map(|(_, place)| place.start).collect();
    let sources = sources.into_iter().map(|(source, place)| (source, place.len())).collect();
    let reading = ask(&device, call, move |server| server.snapshot(sources, stream));
    let work = group.start_operation(Request::from(call), Bytes::from_bytes_vec(Vec::new()), move |memory| {
        let operation = call.operation.to_string();
        let parts = reading()?.wait(&operation)?;
        *memory = pool::bytes(&operation, call.bytes())?;
        for (start, part) in starts.into_iter().zip(parts) {
            memory[start..start + part.len()].copy_from_slice(&part);
        }
        Ok(&mut memory[..])
    })?;
    Ok(Box::new(move || {
        let memory = shared(work.wait().map_err(|(error, _)| error)?);
        let part = |range| writable(memory.slice(range));
        let writes: Vec<_> = targets.into_iter().map(|(target, range)| (target, part(range))).collect();
        if !writes.is_empty() {
            device.submit(move |server| {
                let written = server.write_all(writes);
                server.status.record(written);
            });
            device.flush_queue();
        }
        Ok(())
    }))
}
