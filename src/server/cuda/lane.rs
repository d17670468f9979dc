//! Copies to one device: a stream of its own, and words that order it against the tensors' streams.

use std::sync::Arc;
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::{Binding, ComputeServer};
use cubecl::stream_id::StreamId;

use super::control::{FAILURE, HOST_WORDS, Order, READY};
use super::driver::{Gpu, Stream};
use super::memory::{HostWords, Memory};
use super::order::{self, Server};
use crate::error::Error;
use crate::server::device::physical;
use crate::server::engine::{Loan, Rows};
use crate::server::status::Status;

pub(super) struct Lane {
    stream: Arc<Stream>,
    /// One line, as a rank of a team has it.
    host: Arc<HostWords>,
    /// How many copies are done, in GPU memory.
    done: Memory,
    /// How often the `READY` word was told something.
    said: u64,
    /// The stream that told it last: it only grows if each comes after the one before.
    last: Option<StreamId>,
    copied: u64,
}

impl Lane {
    pub fn new(device: DeviceId) -> Result<Lane, Error> {
        let gpu = Gpu::of(usize::from(physical(device).0.index_id))?;
        let stream = Arc::new(Stream::new(&gpu)?);
        let host = Arc::new(HostWords::zeroed(&gpu, HOST_WORDS)?);
        let watched = host.clone();
        let status = Arc::downgrade(&Status::of::<CudaRuntime>(device));
        // Only `await_done` reports here.
        let look = move || {
            let failed = watched.load(FAILURE) != 0;
            if let (true, Some(status)) = (failed, status.upgrade()) {
                watched.store(FAILURE, 0);
                status.fail(Error::io("copy", "the GPU did not end it in time, or what the source queued before it"));
            }
            true
        };
        Status::of::<CudaRuntime>(device).watch(Arc::new(look));
        Ok(Lane { done: Memory::zeroed(&stream, size_of::<u64>())?, stream, host, said: 0, last: None, copied: 0 })
    }

    pub fn lend(&mut self, server: &mut Server, memory: Binding, stream: StreamId) -> Result<Loan, Error> {
        let address = place(server, &memory, stream)?;
        let ready = self.tell_ready(server, memory.stream, stream);
        Ok(Loan { memory, address, ready })
    }

    pub fn copy(
        &mut self,
        server: &mut Server,
        loan: Loan,
        rows: Rows,
        target: Binding,
        patience: Duration,
    ) -> Result<(), Error> {
        let stream = target.stream;
        let to = place(server, &target, stream)?;
        // What used the target's memory before may be under way.
        let free = self.tell_ready(server, stream, stream);
        for (word, value) in [free, loan.ready] {
            self.stream.wait_for(word, value)?;
        }
        self.stream.copy(loan.address, to, rows)?;
        self.copied += 1;
        self.stream.write(self.done.address, self.copied)?;
        self.stream.keep((loan.memory, target))?;
        let patience = patience.as_nanos() as u64;
        let order = Order { word: self.done.address, value: self.copied, patience, host: self.host.address(0) };
        order::await_done(server, order, stream);
        Ok(())
    }

    /// The word, and the value that it will have when what is on both streams so far is done.
    fn tell_ready(&mut self, server: &mut Server, owner: StreamId, stream: StreamId) -> (u64, u64) {
        self.said += 1;
        let order = Order { word: self.host.address(READY), value: self.said, patience: 0, host: 0 };
        order::tensors_ready(server, [owner, stream, self.last.unwrap_or(stream)], order, stream);
        self.last = Some(stream);
        (order.word, order.value)
    }
}

/// A tensor's address.
pub(super) fn place(server: &mut Server, tensor: &Binding, stream: StreamId) -> Result<u64, Error> {
    let resource = server.get_resource(tensor.clone(), stream);
    resource.map(|resource| resource.resource().ptr).map_err(|e| Error::io("finding a tensor's memory", e))
}
