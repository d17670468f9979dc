//! Copies of one device: a stream of their own, and words that order it against the tensors' streams.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::address::{Address, Copy, Word};
use super::backoff::wait_idle;
use super::control::{ABORT, DONE, FAILURE, HOST_WORDS, Order, READY, RELEASED};
use super::driver::{Gpu, Stream};
use super::memory::{HostWords, word};
use super::order::ReadyCounter;
use super::runtime::{DeviceId, Kept, Look, Runtime};
use bonfire_core::Error;
use bonfire_core::internal::{Rows, lock};

/// Device memory that another device of the process may read while it has this.
pub struct PeerBuffer {
    memory: Kept,
    address: Address,
    bytes: usize,
    /// The word that signals readiness, and the value from which on the memory may be read.
    ready: (Word, u64),
}

pub(crate) struct CopyStream<R: Runtime> {
    in_flight: Arc<InFlight>,
    /// The word in GPU memory that counts the finished copies: `DONE` for streams of this GPU.
    done: Word,
    /// The values that the `READY` word was given.
    ready_counter: ReadyCounter<R>,
    copied: u64,
}

/// The copies in flight, as the device's checks see them, which run on any thread.
struct InFlight {
    stream: Stream,
    /// One line of host words, like that of a rank in a team.
    host: HostWords,
    /// The memory of each copy, by its number. The device's next copy, and its next read, sync or flush, release that
    /// of copies that are done. So a device that stays idle keeps no more than it had in flight at its last call. A
    /// host function on the stream would release it at once, but the next copy would wait for that function.
    kept: Mutex<VecDeque<(u64, Vec<Kept>)>>,
}

impl InFlight {
    /// Why the copies fail, if they do. Costs little if none is in flight.
    fn failure(&self, look: Look) -> Option<Error> {
        // Only `await_done` reports here.
        if self.host.load(FAILURE) != 0 {
            return Some(Error::broken("copy", "the GPU did not finish it, or the work queued before it, in time"));
        }
        self.release_done();
        if look == Look::Reports || lock(&self.kept).is_empty() { None } else { self.fault() }
    }

    /// The fault of the GPU, if it has one.
    fn fault(&self) -> Option<Error> {
        self.stream.is_idle().err().map(|fault| fault.error("copy", Vec::new(), Duration::ZERO))
    }

    /// Releases the memory of copies that are done.
    fn release_done(&self) {
        let done = self.host.load(DONE);
        let mut kept = lock(&self.kept);
        let over = kept.iter().take_while(|(number, _)| *number <= done).count();
        kept.drain(..over);
    }
}

impl<R: Runtime> CopyStream<R> {
    pub fn new(device: DeviceId) -> Result<CopyStream<R>, Error> {
        let gpu = Gpu::of(device.ordinal())?;
        let stream = Stream::new(&gpu)?;
        let done = word(&stream)?;
        let host = HostWords::zeroed(&gpu, HOST_WORDS)?;
        let in_flight = Arc::new(InFlight { stream, host, kept: Mutex::default() });
        let status = R::status(device);
        let watched = (Arc::downgrade(&in_flight), Arc::downgrade(&status));
        let check = move |look| {
            let (Some(in_flight), Some(status)) = (watched.0.upgrade(), watched.1.upgrade()) else { return false };
            let failure = in_flight.failure(look);
            let goes_on = failure.is_none();
            failure.into_iter().for_each(|error| status.fail(error));
            goes_on
        };
        status.add_check(Arc::new(check));
        Ok(CopyStream { in_flight, done, ready_counter: ReadyCounter::new(), copied: 0 })
    }

    /// Copies memory, as the work queued so far on the stream leaves it, to new memory. Returns that as a peer buffer,
    /// and what must be waited for before the original is written to. The peer does not read the original itself,
    /// because burn continues to use such a tensor's memory in place.
    pub fn lend(
        &mut self,
        server: &mut R::Server,
        memory: R::Memory,
        bytes: usize,
        stream: R::Stream,
        timeout: Duration,
    ) -> Result<(PeerBuffer, Order), Error> {
        check_size(bytes, R::bytes(&memory))?;
        let copy = R::allocate(server, bytes, stream);
        let (from, to) = (R::address(server, &memory, stream)?, R::address(server, &copy, stream)?);
        let ready = self.signal_ready(server, R::stream(&memory), stream);
        // Once for all that follows.
        let _entered = self.in_flight.stream.gpu.enter()?;
        self.wait_for(ready)?;
        // SAFETY: both have this many bytes, and `finish` keeps them until the copy is done.
        unsafe { self.in_flight.stream.copy(&Copy::of(from, to, bytes)) }?;
        // The peer buffer may be dropped before the copy to it is done.
        let copy: Kept = Arc::new(copy);
        let order = self.finish(vec![Arc::new(memory), copy.clone()], timeout)?;
        let ready = (self.in_flight.host.word(DONE), self.copied);
        Ok((PeerBuffer { memory: copy, address: to, bytes, ready }, order))
    }

    /// Copies from a peer buffer. Returns what must be waited for before the target is used.
    pub fn copy(
        &mut self,
        server: &mut R::Server,
        lent: PeerBuffer,
        rows: Rows,
        target: R::Memory,
        timeout: Duration,
    ) -> Result<Order, Error> {
        let span = rows.count.checked_sub(1).map_or(0, |gaps| gaps * rows.pitch + rows.bytes);
        check_size(span, lent.bytes)?;
        check_size(rows.count * rows.bytes, R::bytes(&target))?;
        let stream = R::stream(&target);
        let to = R::address(server, &target, stream)?;
        // Earlier work on the target's memory may still be in flight.
        let free = self.signal_ready(server, stream, stream);
        // Once for all that follows.
        let _entered = self.in_flight.stream.gpu.enter()?;
        self.wait_for(free)?;
        self.wait_for(lent.ready)?;
        // SAFETY: as checked above, both have these rows, and `finish` keeps them until the copy is done.
        unsafe { self.in_flight.stream.copy(&Copy::packing(lent.address, to, rows)) }?;
        self.finish(vec![lent.memory, Arc::new(target)], timeout)
    }

    /// The word in GPU memory that counts the finished copies.
    pub fn done_word(&self) -> Word {
        self.done
    }

    /// The fault of the GPU, if it has one. Then any call of the driver fails, with an error that does not say so.
    pub fn fault(&self) -> Option<Error> {
        self.in_flight.fault()
    }

    /// Whether a copy did not finish in time, or the GPU has a fault.
    pub fn has_failed(&self) -> bool {
        self.in_flight.failure(Look::Faults).is_some()
    }

    /// Signals that a copy is done, and keeps its memory until then.
    fn finish(&mut self, memory: Vec<Kept>, timeout: Duration) -> Result<Order, Error> {
        let InFlight { stream, host, kept } = &*self.in_flight;
        self.copied += 1;
        lock(kept).push_back((self.copied, memory));
        stream.write(self.done, self.copied)?;
        stream.write(host.word(DONE), self.copied)?;
        self.in_flight.release_done();
        Ok(Order::after_copy(self.done, self.copied, timeout, host.word(0)))
    }

    fn wait_for(&self, (word, value): (Word, u64)) -> Result<(), Error> {
        self.in_flight.stream.wait_for(word, value)
    }

    /// Returns the `READY` word, and its value once the work queued so far on both streams is done.
    fn signal_ready(&mut self, server: &mut R::Server, owner: R::Stream, stream: R::Stream) -> (Word, u64) {
        let word = self.in_flight.host.word(READY);
        (word, self.ready_counter.signal(server, word, &[owner, stream], stream))
    }
}

impl<R: Runtime> Drop for CopyStream<R> {
    /// Ends the copies in flight, after a failure or with the device. The words stay: streams may still read them.
    fn drop(&mut self) {
        let InFlight { stream, host, kept } = &*self.in_flight;
        let release = || {
            host.store(ABORT, 1);
            host.store(READY, RELEASED);
        };
        // A fault has ended them. The driver frees nothing then, and does not say when the last write has arrived.
        let ended = wait_idle(|| stream.is_idle().unwrap_or(true), release);
        let ended = ended.and_then(|()| self.in_flight.failure(Look::Faults).map_or(Ok(()), Err));
        if let Err(error) = ended {
            log::warn!("ending the copies of a device: {error}");
            std::mem::forget(std::mem::take(&mut *lock(kept)));
        }
    }
}

/// Fails if a copy would go beyond the end of memory.
fn check_size(used: usize, there: usize) -> Result<(), Error> {
    match used <= there {
        true => Ok(()),
        false => Err(Error::argument("copy", format!("memory of {there} bytes was given for {used} bytes"))),
    }
}
