//! Copies of one device: a stream of their own, and words that order it against the tensors' streams.

use std::sync::Arc;
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::{Binding, ComputeServer};
use cubecl::stream_id::StreamId;

use super::backoff::wait_idle;
use super::control::{ABORT, DONE, FAILURE, HOST_WORDS, Order, READY, RELEASED, nanoseconds};
use super::driver::{Gpu, Stream};
use super::memory::{HostWords, word};
use super::order::{self, ReadyCounter, Server};
use super::team::ordinal;
use crate::server::engine::{PeerBuffer, Rows};
use crate::server::status::Status;
use bonfire_core::Error;

pub(super) struct CopyStream {
    stream: Arc<Stream>,
    /// One line of host words, like that of a rank in a team.
    host: Arc<HostWords>,
    /// Address of the word in GPU memory that counts the finished copies: `DONE` for streams of this GPU.
    done: u64,
    /// The values that the `READY` word was given.
    ready_counter: ReadyCounter,
    copied: u64,
}

impl CopyStream {
    pub fn new(device: DeviceId) -> Result<CopyStream, Error> {
        let gpu = Gpu::of(ordinal(device))?;
        let stream = Arc::new(Stream::new(&gpu)?);
        let done = word(&stream)?;
        let host = Arc::new(HostWords::zeroed(&gpu, HOST_WORDS)?);
        let status = Status::of::<CudaRuntime>(device);
        let watched = (Arc::downgrade(&host), Arc::downgrade(&stream), Arc::downgrade(&status));
        let check = move || {
            let (Some(host), Some(stream)) = (watched.0.upgrade(), watched.1.upgrade()) else { return false };
            let failure = failure(&host, &stream);
            let failed = failure.is_some();
            if let (Some(error), Some(status)) = (failure, watched.2.upgrade()) {
                status.fail(error);
            }
            !failed
        };
        status.add_check(Arc::new(check));
        Ok(CopyStream { stream, host, done, ready_counter: ReadyCounter::default(), copied: 0 })
    }

    /// Copies memory, as the work queued so far on the stream leaves it, to new memory. Returns that as a peer buffer,
    /// and what must be waited for before the original is written to. The peer does not read the original itself,
    /// because burn continues to use such a tensor's memory in place.
    pub fn lend(
        &mut self,
        server: &mut Server,
        memory: Binding,
        bytes: usize,
        stream: StreamId,
        timeout: Duration,
    ) -> Result<(PeerBuffer, Order), Error> {
        let copy = order::allocate(server, bytes, stream);
        let (from, to) = (address_of(server, &memory, stream)?, address_of(server, &copy, stream)?);
        let ready = self.signal_ready(server, memory.stream, stream);
        self.wait_for(ready)?;
        self.stream.copy(from, to, Rows { count: 1, bytes, pitch: bytes })?;
        let order = self.finish(memory, timeout)?;
        let ready = (self.host.address(DONE), self.copied);
        Ok((PeerBuffer { memory: copy, address: to, ready }, order))
    }

    /// Copies from a peer buffer. Returns what must be waited for before the target is used.
    pub fn copy(
        &mut self,
        server: &mut Server,
        loan: PeerBuffer,
        rows: Rows,
        target: Binding,
        timeout: Duration,
    ) -> Result<Order, Error> {
        let stream = target.stream;
        let to = address_of(server, &target, stream)?;
        // Earlier work on the target's memory may still be in flight.
        let free = self.signal_ready(server, stream, stream);
        self.wait_for(free)?;
        self.wait_for(loan.ready)?;
        self.stream.copy(loan.address, to, rows)?;
        self.finish((loan.memory, target), timeout)
    }

    /// Address of the word in GPU memory that counts the finished copies.
    pub fn done_word(&self) -> u64 {
        self.done
    }

    /// Whether a copy did not finish in time, or the GPU has a fault.
    pub fn has_failed(&self) -> bool {
        failure(&self.host, &self.stream).is_some()
    }

    /// Ends the copies in flight, after a failure. The words stay: streams may still read them.
    pub fn end(self) -> Result<(), Error> {
        let release = || {
            self.host.store(ABORT, 1);
            self.host.store(READY, RELEASED);
        };
        // A fault has ended them.
        wait_idle(|| self.stream.is_idle().unwrap_or(true), release)
    }

    /// Signals that a copy is done, and keeps its memory until then.
    fn finish<T: Send + 'static>(&mut self, memory: T, timeout: Duration) -> Result<Order, Error> {
        self.copied += 1;
        self.stream.write(self.done, self.copied)?;
        self.stream.write(self.host.address(DONE), self.copied)?;
        self.stream.keep(memory)?;
        let timeout = nanoseconds(timeout);
        Ok(Order { word: self.done, value: self.copied, timeout, host: self.host.address(0) })
    }

    fn wait_for(&self, (word, value): (u64, u64)) -> Result<(), Error> {
        self.stream.wait_for(word, value)
    }

    /// Returns the `READY` word, and its value once the work queued so far on both streams is done.
    fn signal_ready(&mut self, server: &mut Server, owner: StreamId, stream: StreamId) -> (u64, u64) {
        let word = self.host.address(READY);
        (word, self.ready_counter.signal(server, word, &[owner, stream], stream))
    }
}

/// Why the copies on this stream fail, if they do.
fn failure(host: &HostWords, stream: &Stream) -> Option<Error> {
    // Only `await_done` reports here.
    if host.load(FAILURE) != 0 {
        return Some(Error::broken("copy", "the GPU did not finish it, or the work queued before it, in time"));
    }
    stream.is_idle().err().map(|fault| fault.error("copy", Vec::new(), Duration::ZERO))
}

/// Returns a tensor's address.
pub(super) fn address_of(server: &mut Server, tensor: &Binding, stream: StreamId) -> Result<u64, Error> {
    let resource = server.get_resource(tensor.clone(), stream);
    resource.map(|resource| resource.resource().ptr).map_err(|e| Error::io("finding a tensor's memory", e))
}
