//! How ranks find out that all have come to an operation, and to the same one.
//!
//! The bytes that name an operation are reduced to their largest and smallest over all ranks, which is one small
//! operation of MPI. It ends on no rank before all have begun it, so until then a rank may give up and return: MPI has none
//! of the caller's memory yet.

use std::ffi::c_void;
use std::ptr::NonNull;

use mpi_sys as mpi;

use super::comm::{Comm, Request};
use super::library::Held;
use crate::types::{Error, Site};

/// The words of a tag.
const WORDS: usize = Site::BYTES / 8;

/// A tag as words.
pub(super) fn words(tag: &Site) -> [u64; WORDS] {
    let bytes = tag.to_bytes();
    std::array::from_fn(|i| bytes[8 * i..8 * i + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)))
}

/// The inverse of [`words`].
pub(super) fn tag_of(words: &[u64; WORDS]) -> Option<Site> {
    let mut bytes = [0; Site::BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    Site::from_bytes(&bytes)
}

/// The memory of one group's meetings. MPI works on it, so it has a place of its own.
pub(super) struct Arrival {
    comm: Comm,
    mine: NonNull<[u64; 2 * WORDS]>,
    most: NonNull<[u64; 2 * WORDS]>,
    /// Every rank's words, where they disagree.
    all: Vec<[u64; WORDS]>,
    request: Option<Request>,
    /// Meetings that this rank has come to.
    begun: u64,
}

// SAFETY: the memory is this value's own, and so is the right to ask for the request.
unsafe impl Send for Arrival {}

impl Arrival {
    pub fn new(comm: Comm) -> Arrival {
        let place = || NonNull::from(Box::leak(Box::new([0; 2 * WORDS])));
        Arrival { comm, mine: place(), most: place(), all: vec![[0; WORDS]; comm.size], request: None, begun: 0 }
    }

    /// Begins to meet the others at this operation. The request of the meeting before is done.
    pub fn begin(&mut self, tag: &Site, held: &Held) -> Result<(), Error> {
        // SAFETY: the place is this value's own, and MPI is done with it.
        let mine = unsafe { self.mine.as_mut() };
        for (i, word) in words(tag).into_iter().enumerate() {
            // The largest of the complements is the complement of the smallest.
            (mine[i], mine[WORDS + i]) = (word, !word);
        }
        self.start(held)
    }

    /// Whether MPI still works on it.
    pub fn is_pending(&self) -> bool {
        self.request.is_some()
    }

    /// At the end of the group: whether this rank has come to so many meetings, and nothing is pending. It comes to one at
    /// which it was missing, which others gave up: Open MPI 4.1 crashes at its end where a collective is not done.
    pub fn join(&mut self, begun: u64, held: &Held) -> Result<bool, Error> {
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
        let (mine, most) = (self.mine.as_ptr().cast::<c_void>(), self.most.as_ptr().cast::<c_void>());
        // SAFETY: both places have so many words, which nobody else accesses until the request is done: they are leaked
        // where it never is.
        let request = Request::start("MPI_Iallreduce", |request| unsafe {
            let (words, largest) = (mpi::RSMPI_UINT64_T, mpi::RSMPI_MAX);
            mpi::MPI_Iallreduce(mine, most, 2 * WORDS as i32, words, largest, self.comm.raw(), request)
        });
        self.request = Some(request?);
        Ok(())
    }

    /// Whether all have come; then, whether to the same operation.
    pub fn met(&mut self, held: &Held) -> Result<Option<bool>, Error> {
        if !self.done(held)? {
            return Ok(None);
        }
        // SAFETY: MPI is done with it.
        let (most, least) = unsafe { self.most.as_ref() }.split_at(WORDS);
        Ok(Some(most.iter().zip(least).all(|(most, least)| *most == !least)))
    }

    /// Begins to ask what each rank calls.
    pub fn ask(&mut self, _held: &Held) -> Result<(), Error> {
        let (mine, all) = (self.mine.as_ptr().cast::<c_void>(), self.all.as_mut_ptr().cast::<c_void>());
        // SAFETY: there is room for the words of every rank, and as in `start`.
        let request = Request::start("MPI_Iallgather", |request| unsafe {
            let (words, count) = (mpi::RSMPI_UINT64_T, WORDS as i32);
            mpi::MPI_Iallgather(mine, count, words, all, count, words, self.comm.raw(), request)
        });
        self.request = Some(request?);
        Ok(())
    }

    /// Once all have answered, what they call, by rank.
    pub fn answers(&mut self, held: &Held) -> Result<Option<Vec<Option<Site>>>, Error> {
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

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            return request.abandon(std::mem::take(&mut self.all));
        }
        for place in [self.mine, self.most] {
            // SAFETY: it was leaked from a box in `new`, and MPI is done with it.
            drop(unsafe { Box::from_raw(place.as_ptr()) });
        }
    }
}
