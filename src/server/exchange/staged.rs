//! Operations of a group through host memory.

use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};

use cubecl::bytes::Bytes;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Binding;

use crate::pool;
use crate::server::DeviceTransport;
use crate::server::compute::CollectiveServer;
use crate::server::engine::Job;
use crate::server::memory::{shared, writable};
use crate::server::reading::Reading;
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Call, Error, Group, Work};

/// An operation under way, and where its result belongs.
pub(super) struct Staging {
    work: Work<Staged>,
    targets: Vec<(Binding, Range<usize>)>,
}

/// What an operation works on: parts of host memory, each filled from the device.
struct Staged {
    memory: Bytes,
    starts: Vec<usize>,
    reading: Receiver<Result<Reading, Error>>,
}

pub(super) fn start<R: DeviceTransport>(
    device: &DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    job: Job,
) -> Result<Staging, Error> {
    let Job { call, sources, targets, stream, .. } = job;
    let starts = sources.iter().map(|(_, place)| place.start).collect();
    let sources = sources.into_iter().map(|(source, place)| (source, place.len())).collect();
    let (sender, reading) = channel();
    device.submit(move |server| {
        // The receiver is gone only if the group's thread is.
        let _ = sender.send(server.snapshot(sources, stream));
    });
    device.flush_queue();
    let staged = Staged { memory: Bytes::from_bytes_vec(Vec::new()), starts, reading };
    let work = group.start_operation(Request::from(call), staged, move |staged| staged.fill(&call))?;
    Ok(Staging { work, targets })
}

impl Staging {
    /// Waits for the other ranks, and gives what is to be written where.
    pub fn wait(self) -> Result<Vec<(Binding, Bytes)>, Error> {
        let staged = self.work.wait().map_err(|(error, _)| error)?;
        let memory = shared(staged.memory);
        let part = |range| writable(memory.slice(range));
        Ok(self.targets.into_iter().map(|(target, range)| (target, part(range))).collect())
    }
}

impl Staged {
    fn fill(&mut self, call: &Call) -> Result<&mut [u8], Error> {
        let operation = call.operation.to_string();
        let started = self.reading.recv().map_err(|_| Error::broken(&operation, "the device's server is gone"))?;
        let parts = started?.wait(&operation)?;
        self.memory = pool::bytes(&operation, call.bytes())?;
        for (start, part) in self.starts.iter().zip(parts) {
            self.memory[*start..start + part.len()].copy_from_slice(&part);
        }
        Ok(&mut self.memory)
    }
}
