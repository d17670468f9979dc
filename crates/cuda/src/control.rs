//! The interface between host and kernels: mirrors `kernels/signal.cuh` and `kernels/host.cuh`, word for word.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};

use super::address::{Address, Word};
use bonfire_core::Error;
use bonfire_core::error::Site;
use bonfire_core::internal::ENDLESS;

/// The most ranks that a kernel can serve.
pub(crate) const MAX_RANKS: usize = 8;
/// The most blocks of a grid, per rank.
pub(crate) const MAX_BLOCKS: u32 = 128;
/// The most bytes that a rank can push to another in one call.
pub(crate) const PUSH_BYTES: usize = 32 << 10;
/// Size of `Control`, which every rank has in its GPU's memory.
pub(crate) const CONTROL_BYTES: usize = 1_122_432;

/// A rank that a launch works for.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(crate) struct Member {
    pub source: Address,
    pub target: Address,
    pub rank: u64,
    /// The rank's words in host memory.
    pub host: Address,
}

/// The only parameter of a kernel.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(crate) struct Parameters {
    /// Addresses of the ranks' `Control`s.
    pub control: [Address; MAX_RANKS],
    pub members: [Member; MAX_RANKS],
    /// Nanoseconds that a kernel waits for a peer (`timeout` in the kernels).
    pub timeout: u64,
    pub ranks: u64,
    pub root: u64,
    /// Elements of the whole tensor.
    pub count: u64,
    /// Bytes of an element, for operations that only move data, else 0.
    pub width: u64,
}

/// The last parameter of the kernels that order streams: which word they write, or wait for.
#[derive(Clone, Copy)]
pub struct Order {
    pub(crate) word: Word,
    pub(crate) value: u64,
    pub(crate) timeout: u64,
    /// The first of the words in host memory by which a wait is ended, and reports that it took too long.
    pub(crate) host: Option<Word>,
}

impl Order {
    /// Writes this value to the word.
    pub(crate) fn write(word: Word, value: u64) -> Order {
        Order { word, value, timeout: 0, host: None }
    }

    /// Waits for the call that sets the word to this value. The call waits for its peers this long, and may start
    /// later, so this takes twice as long before it gives up.
    pub(crate) fn after_call(word: Word, value: u64, limit: Duration, host: Word) -> Order {
        Order { word, value, timeout: 2 * nanoseconds(limit), host: Some(host) }
    }

    /// Waits for the copy that sets the word to this value, for this long.
    pub(crate) fn after_copy(word: Word, value: u64, timeout: Duration, host: Word) -> Order {
        Order { word, value, timeout: nanoseconds(timeout), host: Some(host) }
    }

    /// Returns the parameter, word for word.
    pub fn words(self) -> [u64; 4] {
        let host = self.host.map_or(0, |host| host.address().get());
        [self.word.address().get(), self.value, self.timeout, host]
    }
}

/// Words per rank in host memory, and their indices. Each rank has its own line, so polls do not disturb others.
pub(crate) const HOST_WORDS: usize = 16;
pub(crate) const ABORT: usize = 0;
pub(crate) const FAILURE: usize = 1;
/// The number of the last call whose tensors are ready, or in a group the number of such calls. The driver waits for
/// this word; kernels do not read it. It is in host memory so that the host can release a stream if a launch of
/// `tensors_ready` failed: a write in stream order would be stuck behind the wait.
pub(crate) const READY: usize = 2;
/// A value that releases every wait. The driver compares by the signed difference, so this is the largest value.
pub(crate) const RELEASED: u64 = i64::MAX as u64;
/// The number of finished copies of a copy stream, or of finished calls of a group.
pub(crate) const DONE: usize = 3;

/// A duration as kernels take it.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    time.min(ENDLESS).as_nanos() as u64
}

/// A failure that a kernel reports: kind, operation, peer and epoch in one word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Report {
    kind: u8,
    peer: usize,
    /// The number of the call.
    pub number: u64,
}

impl Report {
    /// Decodes a report. Zero is none.
    pub fn of(word: u64) -> Option<Report> {
        let byte = |at: u32| (word >> at) as u8;
        (word != 0).then(|| Report { kind: byte(0), peer: usize::from(byte(16)), number: word >> 24 })
    }

    /// The error of the rank that reports the failure. `absent` are the ranks that have not made the call.
    pub fn error(self, site: Site, rank: usize, absent: Vec<usize>, timeout: Duration) -> Error {
        let peer = self.peer;
        let operation = site.to_string();
        // The peer's launch may be waiting for another rank on its GPU.
        let missing = if absent.is_empty() { vec![peer] } else { absent };
        match self.kind {
            1 | 2 => Error::Timeout { site, rank, missing, elapsed: timeout, whereabouts: Box::default() },
            3 => Error::broken(operation, format!("rank {peer} called something else on its GPU")),
            4 => Error::broken(operation, "aborted, because the devices' group failed"),
            6 => Error::broken(operation, format!("the GPU did not finish it within {timeout:.1?}")),
            kind => Error::broken(operation, format!("the GPU refused it (failure {kind}); this is a bug in bonfire")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::{Call, DType, Operation, ReduceOp};

    const SIGNAL: &str = include_str!("../kernels/signal.cuh");

    #[test]
    fn sizes_match_the_kernels() {
        assert_eq!(size_of::<Parameters>(), 45 * 8);
        for text in [
            format!("sizeof(Control) == {CONTROL_BYTES}"),
            "sizeof(Call) == 45 * sizeof(u64)".into(),
            format!("MAX_RANKS = {MAX_RANKS};"),
            format!("MAX_BLOCKS = {MAX_BLOCKS};"),
            format!("PUSH_BYTES = {} << 10;", PUSH_BYTES >> 10),
        ] {
            assert!(SIGNAL.contains(&text), "{text}");
        }
    }

    #[test]
    fn reports_name_the_peer() {
        assert_eq!(Report::of(0), None);
        let word = 2 | 1 << 8 | 3 << 16 | 77 << 24;
        let report = Report::of(word).unwrap();
        let call = Call::new(Operation::AllReduce, DType::F32, 4).reducing(ReduceOp::Sum);
        assert_eq!(report.number, 77);
        for (absent, named) in [(vec![], [3]), (vec![2], [2])] {
            let error = report.error(Site::new(call, 76), 1, absent, Duration::from_secs(2));
            assert!(matches!(error, Error::Timeout { rank: 1, ref missing, .. } if *missing == named), "{error}");
        }
    }
}
