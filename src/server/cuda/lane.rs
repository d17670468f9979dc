//! Copies of one device: a stream of its own, and words that order it against the tensors' streams.

use std::sync::Arc;
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::{Binding, ComputeServer};
use cubecl::stream_id::StreamId;

use super::control::{ABORT, DONE, FAILURE, HOST_WORDS, Order, READY, RELEASED, nanoseconds};
use super::driver::{Gpu, Stream};
use super::memory::{HostWords, word};
use super::order::{self, Server, Told};
use super::pause::settle;
use super::team::ordinal;
use crate::server::engine::{Loan, Rows};
use crate::server::status::Status;
use bonfire_core::Error;

pub(super) struct Lane {
    stream: Arc<Stream>,
    /// One line, as a rank of a team has it.
    host: Arc<HostWords>,
    /// How many copies are done, in GPU memory: `DONE` for streams of this GPU.
    done: u64,
    /// What the `READY` word was told.
    told: Told,
    copied: u64,
}

impl Lane {
    pub fn new(device: DeviceId) -> Result<Lane, Error> {
        let gpu = Gpu::of(ordinal(device))?;
        let stream = Arc::new(Stream::new(&gpu)?);
        let done = word(&stream)?;
        let host = Arc::new(HostWords::zeroed(&gpu, HOST_WORDS)?);
        let (watched, status) = (Arc::downgrade(&host), Status::of::<CudaRuntime>(device));
        let poisoned = Arc::downgrade(&status);
        // Only `await_done` reports here.
        let look = move || match (watched.upgrade(), poisoned.upgrade()) {
            (Some(host), Some(status)) if host.load(FAILURE) != 0 => {
                status.fail(Error::broken("copy", "the GPU did not end it in time, or what was queued before it"));
                false
            }
            (host, _) => host.is_some(),
        };
        status.watch(Arc::new(look));
        Ok(Lane { stream, host, done, told: Told::default(), copied: 0 })
    }

    /// Copies memory as it is once all that was queued so far on the stream is done, to memory that nobody else knows; and
    /// what must be waited for before the memory is written to.
    pub fn lend(
        &mut self,
        server: &mut Server,
        memory: Binding,
        bytes: usize,
        stream: StreamId,
        patience: Duration,
    ) -> Result<(Loan, Order), Error> {
        let copy = order::fresh(server, bytes, stream);
        let (from, to) = (place(server, &memory, stream)?, place(server, &copy, stream)?);
        let ready = self.tell_ready(server, memory.stream, stream);
        self.wait_for(ready)?;
        self.stream.copy(from, to, Rows { count: 1, bytes, pitch: bytes })?;
        let order = self.finish(memory, patience)?;
        let ready = (self.host.address(DONE), self.copied);
        Ok((Loan { memory: copy, address: to, ready }, order))
    }

    /// Copies what was lent; and what must be waited for before the target is used.
    pub fn copy(
        &mut self,
        server: &mut Server,
        loan: Loan,
        rows: Rows,
        target: Binding,
        patience: Duration,
    ) -> Result<Order, Error> {
        let stream = target.stream;
        let to = place(server, &target, stream)?;
        // What used the target's memory before may be under way.
        let free = self.tell_ready(server, stream, stream);
        self.wait_for(free)?;
        self.wait_for(loan.ready)?;
        self.stream.copy(loan.address, to, rows)?;
        self.finish((loan.memory, target), patience)
    }

    /// Where its GPU says how many copies are done.
    pub fn word(&self) -> u64 {
        self.done
    }

    /// Whether a copy did not end in time.
    pub fn has_failed(&self) -> bool {
        self.host.load(FAILURE) != 0
    }

    /// Ends what is under way, after a failure. The words stay: streams may still look at them.
    pub fn end(self) -> Result<(), Error> {
        let release = || {
            self.host.store(ABORT, 1);
            self.host.store(READY, RELEASED);
        };
        settle(|| self.stream.is_idle(), release)
    }

    /// Says that a copy is done, and keeps its memory until then.
    fn finish<T: Send + 'static>(&mut self, memory: T, patience: Duration) -> Result<Order, Error> {
        self.copied += 1;
        self.stream.write(self.done, self.copied)?;
        self.stream.write(self.host.address(DONE), self.copied)?;
        self.stream.keep(memory)?;
        let patience = nanoseconds(patience);
        Ok(Order { word: self.done, value: self.copied, patience, host: self.host.address(0) })
    }

    fn wait_for(&self, (word, value): (u64, u64)) -> Result<(), Error> {
        self.stream.wait_for(word, value)
    }

    /// The word, and the value that it will have when what is on both streams so far is done.
    fn tell_ready(&mut self, server: &mut Server, owner: StreamId, stream: StreamId) -> (u64, u64) {
        let word = self.host.address(READY);
        (word, self.told.tell(server, word, &[owner, stream], stream))
    }
}

/// A tensor's address.
pub(super) fn place(server: &mut Server, tensor: &Binding, stream: StreamId) -> Result<u64, Error> {
    let resource = server.get_resource(tensor.clone(), stream);
    resource.map(|resource| resource.resource().ptr).map_err(|e| Error::io("finding a tensor's memory", e))
}
