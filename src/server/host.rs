//! Copies between a device's memory and the host.

use cubecl::bytes::Bytes;
use cubecl::server::{Binding, ComputeServer, CopyDescriptor};
use cubecl::stream_id::StreamId;

use super::DeviceTransport;
use super::compute::CollectiveServer;
use super::download::{PendingRead, catch_panic};
use bonfire_core::Error;

/// Offsets of copies between device and host are multiples of this many bytes: wgpu refuses others.
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

impl<R: DeviceTransport> CollectiveServer<R> {
    /// Starts to read the first bytes of each source, as many as given with it, as the work queued so far leaves them.
    pub(super) fn snapshot(&mut self, sources: Vec<(Binding, usize)>, stream: StreamId) -> Result<PendingRead, Error> {
        if let Some(error) = self.status.failure() {
            return Err(error);
        }
        sources.iter().try_for_each(|(source, _)| check_start(source))?;
        self.status.count(|counters| counters.downloads += sources.len() as u64);
        self.order_after(sources.iter().map(|(source, _)| source.stream).filter(|other| *other != stream));
        let descriptor = |(source, size): (_, usize)| CopyDescriptor::new(source, [size].into(), [1].into(), 1);
        let descriptors = sources.into_iter().map(descriptor).collect();
        let copying = catch_panic("read", || Ok(self.inner_on(stream).read(descriptors, stream)))?;
        self.reader.start(copying)
    }

    /// Writes on each target's own stream and flushes it, so that work queued later on any stream sees the data: on
    /// wgpu, a write on the caller's stream would stay in that stream's queue, and other streams would not see it.
    /// Where streams have queues of their own, the next work on another stream waits.
    pub(super) fn write_all(&mut self, data: Vec<(Binding, Bytes)>) -> Result<(), Error> {
        let mut streams: Vec<StreamId> = Vec::new();
        for (target, bytes) in data {
            let stream = target.stream;
            let (target, bytes) = self.whole_words(target, bytes)?;
            self.status.count(|counters| counters.uploads += 1);
            let descriptor = CopyDescriptor::new(target, [bytes.len()].into(), [1].into(), 1);
            catch_panic("write", || {
                self.inner_on(stream).write(vec![(descriptor, bytes)], stream);
                Ok(())
            })?;
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
        // A flush returns the stream's errors only once, so they must not be dropped here.
        let mut flush = |stream| self.inner_on(stream).flush(stream).map_err(|e| Error::io("writing results", e));
        catch_panic("write", || streams.iter().copied().try_for_each(&mut flush))?;
        self.order_after(streams);
        Ok(())
    }

    /// If the data ends inside a word of its memory, appends the bytes that follow there: wgpu writes whole words,
    /// padded with zeros.
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
}
