//! Agreement on a call: all ranks have begun an operation, and the same one.
//!
//! The maximum and the minimum over all ranks of the words of the operation's tag are computed by one `MPI_Iallreduce`
//! of 64 bytes in the group's own memory. It completes on no rank before all have begun it. Until then a rank may give
//! up and return, because MPI does not have its caller's memory yet. MPI still completes it for the others, so these
//! look for failures once more before they go on.

use std::ffi::c_void;
use std::ptr::NonNull;

use bonfire_core::Error;
use bonfire_core::error::Site;
use mpi_sys as mpi;

use super::comm::{Comm, Request};
use super::library::Held;

/// The number of words of a tag.
const WORDS: usize = Site::BYTES / 8;

/// Converts a tag to words.
pub(super) fn words(tag: &Site) -> [u64; WORDS] {
    let bytes = tag.to_bytes();
    std::array::from_fn(|i| bytes[8 * i..8 * i + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)))
}

/// The inverse of [`words`].
pub(super) fn tag_of(words: &[u64; WORDS]) -> Option<Site> {
    let mut bytes = [0; Site::BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    Site::from_bytes(&bytes)
}

/// The state of one group's agreements. MPI accesses the buffers, so their addresses are fixed.
pub(super) struct CallAgreement {
    comm: Comm,
    /// The words of this rank's tag and their complements, and the maxima of both over all ranks.
    own: NonNull<[u64; 2 * WORDS]>,
    max: NonNull<[u64; 2 * WORDS]>,
    /// The words of all ranks, for ranks that disagree.
    all: Vec<[u64; WORDS]>,
    request: Option<Request>,
    /// Agreements that this rank has begun.
    begun: u64,
}

// SAFETY: this value owns the memory, and only it polls the request.
unsafe impl Send for CallAgreement {}

impl CallAgreement {
    pub fn new(comm: Comm) -> CallAgreement {
        let buffer = || NonNull::from(Box::leak(Box::new([0; 2 * WORDS])));
        CallAgreement { comm, own: buffer(), max: buffer(), all: vec![[0; WORDS]; comm.size], request: None, begun: 0 }
    }

    /// Begins the agreement on this operation. The request of the previous agreement is done.
    pub fn begin(&mut self, tag: &Site, held: &Held) -> Result<(), Error> {
        // SAFETY: this value owns the buffer, and MPI is done with it.
        let own = unsafe { self.own.as_mut() };
        for (i, word) in words(tag).into_iter().enumerate() {
            // The maximum of the complements is the complement of the minimum.
            (own[i], own[WORDS + i]) = (word, !word);
        }
        self.start(held)
    }

    /// Whether MPI still works on an agreement.
    pub fn is_pending(&self) -> bool {
        self.request.is_some()
    }

    /// At the end of the group: whether this rank has begun `begun` agreements and none is pending. Begins one that
    /// peers gave up because this rank was missing: Open MPI 4.1 crashes when finalized with a pending collective.
    pub fn catch_up(&mut self, begun: u64, held: &Held) -> Result<bool, Error> {
        if !self.done(held)? {
            return Ok(false);
        }
        if self.begun < begun {
            self.start(held)?;
        }
        Ok(self.begun >= begun && self.done(held)?)
    }

    fn start(&mut self, _held: &Held) -> Result<(), Error> {
        self.begun += 1;
        let (own, max) = (self.own.as_ptr().cast::<c_void>(), self.max.as_ptr().cast::<c_void>());
        // SAFETY: both buffers have `2 * WORDS` words, which nothing else accesses until the request is done. They are
        // leaked if it never is.
        let request = Request::start("MPI_Iallreduce", |request| unsafe {
            let (words, max_op) = (mpi::RSMPI_UINT64_T, mpi::RSMPI_MAX);
            mpi::MPI_Iallreduce(own, max, 2 * WORDS as i32, words, max_op, self.comm.raw(), request)
        });
        self.request = Some(request?);
        Ok(())
    }

    /// Returns whether all ranks have begun the same operation, once all have begun one.
    pub fn agreed(&mut self, held: &Held) -> Result<Option<bool>, Error> {
        if !self.done(held)? {
            return Ok(None);
        }
        // SAFETY: MPI is done with the buffer.
        let (max, min_complement) = unsafe { self.max.as_ref() }.split_at(WORDS);
        Ok(Some(max.iter().zip(min_complement).all(|(max, min_complement)| *max == !min_complement)))
    }

    /// Begins to gather the calls of all ranks.
    pub fn gather_calls(&mut self, _held: &Held) -> Result<(), Error> {
        let (own, all) = (self.own.as_ptr().cast::<c_void>(), self.all.as_mut_ptr().cast::<c_void>());
        // SAFETY: `all` has space for the words of every rank; else as in `start`.
        let request = Request::start("MPI_Iallgather", |request| unsafe {
            let (words, count) = (mpi::RSMPI_UINT64_T, WORDS as i32);
            mpi::MPI_Iallgather(own, count, words, all, count, words, self.comm.raw(), request)
        });
        self.request = Some(request?);
        Ok(())
    }

    /// Returns the calls, by rank, once all are gathered. `None` for a rank whose words are invalid.
    pub fn calls(&mut self, held: &Held) -> Result<Option<Vec<Option<Site>>>, Error> {
        if !self.done(held)? {
            return Ok(None);
        }
        Ok(Some(self.all.iter().map(tag_of).collect()))
    }

    fn done(&mut self, held: &Held) -> Result<bool, Error> {
        let Some(request) = &mut self.request else { return Ok(true) };
        let done = request.done(held)?.is_some();
        if done {
            self.request = None;
        }
        Ok(done)
    }
}

impl Drop for CallAgreement {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            return request.abandon(std::mem::take(&mut self.all));
        }
        for buffer in [self.own, self.max] {
            // SAFETY: the buffer was leaked from a box in `new`, and MPI is done with it.
            drop(unsafe { Box::from_raw(buffer.as_ptr()) });
        }
    }
}
