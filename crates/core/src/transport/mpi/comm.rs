//! Communicators and requests.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use mpi_sys as mpi;

use super::library::{Held, abandon, check};
use crate::types::Error;

/// A communicator, by the name that MPI has for it. It is freed by [`free`](Comm::free) only: that needs this thread's
/// turn, and that no message is on its way.
#[derive(Clone, Copy)]
pub(super) struct Comm {
    raw: mpi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
}

// SAFETY: a name of what MPI keeps, used by whoever is in its turn.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// Something that MPI works on.
pub(super) struct Request(mpi::MPI_Request);

// SAFETY: as for `Comm`.
unsafe impl Send for Request {}

impl Comm {
    /// All processes of the job.
    pub fn world(held: &Held) -> Result<Comm, Error> {
        // SAFETY: a constant of the library, which is up while there is a turn to hold.
        Comm::of(unsafe { mpi::RSMPI_COMM_WORLD }, held)
    }

    fn of(raw: mpi::MPI_Comm, _held: &Held) -> Result<Comm, Error> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the communicator is one that MPI has just given, and both get places for a number.
        unsafe {
            check("MPI_Comm_rank", mpi::MPI_Comm_rank(raw, &mut rank))?;
            check("MPI_Comm_size", mpi::MPI_Comm_size(raw, &mut size))?;
        }
        Ok(Comm { raw, rank: usize::try_from(rank).unwrap_or(0), size: usize::try_from(size).unwrap_or(1) })
    }

    pub fn raw(&self) -> mpi::MPI_Comm {
        self.raw
    }

    /// Begins to make a communicator of the same processes. It may be used once the request is done.
    pub fn duplicate(&self, made: &mut MaybeUninit<mpi::MPI_Comm>, _held: &Held) -> Result<Request, Error> {
        // SAFETY: the caller keeps the place until the request is done, or for ever.
        Request::start("MPI_Comm_idup", |request| unsafe { mpi::MPI_Comm_idup(self.raw, made.as_mut_ptr(), request) })
    }

    /// What [`duplicate`](Comm::duplicate) made.
    ///
    /// # Safety
    /// Its request is done.
    pub unsafe fn duplicated(made: &MaybeUninit<mpi::MPI_Comm>, held: &Held) -> Result<Comm, Error> {
        // SAFETY: as the caller vouches for. What is made of this communicator inherits how it fails.
        unsafe {
            let made = made.assume_init();
            check("MPI_Comm_set_errhandler", mpi::MPI_Comm_set_errhandler(made, mpi::RSMPI_ERRORS_RETURN))?;
            Comm::of(made, held)
        }
    }

    /// A communicator of these ranks in their order; all of them call this, and it waits for them.
    pub fn of_members(&self, members: &[usize], number: u64, held: &Held) -> Result<Comm, Error> {
        let ranks: Vec<c_int> = members.iter().map(|rank| *rank as c_int).collect();
        // The standard promises tags up to this.
        let tag = (number % (1 << 15)) as c_int;
        let (mut all, mut some, mut made) = (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: every output is read only after the function that fills it has succeeded; the ranks are of this
        // communicator, each once, as the group has checked.
        unsafe {
            check("MPI_Comm_group", mpi::MPI_Comm_group(self.raw, all.as_mut_ptr()))?;
            let mut all = all.assume_init();
            let incl = mpi::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), some.as_mut_ptr());
            check("MPI_Group_incl", incl)?;
            let mut some = some.assume_init();
            let create = mpi::MPI_Comm_create_group(self.raw, some, tag, made.as_mut_ptr());
            check("MPI_Group_free", mpi::MPI_Group_free(&mut some))?;
            check("MPI_Group_free", mpi::MPI_Group_free(&mut all))?;
            check("MPI_Comm_create_group", create)?;
            Comm::of(made.assume_init(), held)
        }
    }

    /// The processes of this one's host; all ranks call it.
    pub fn host(&self, held: &Held) -> Result<Comm, Error> {
        let mut made = MaybeUninit::uninit();
        // SAFETY: the output is read only after the function has succeeded.
        unsafe {
            let (kind, key) = (mpi::RSMPI_COMM_TYPE_SHARED, self.rank as c_int);
            let split = mpi::MPI_Comm_split_type(self.raw, kind, key, mpi::RSMPI_INFO_NULL, made.as_mut_ptr());
            check("MPI_Comm_split_type", split)?;
            Comm::of(made.assume_init(), held)
        }
    }

    /// Frees it on this rank. No message is on its way to this rank, and no request of its is pending.
    pub fn free(mut self, _held: &Held) {
        // SAFETY: it was made by one of the functions above, and is not used after this.
        let code = unsafe { mpi::MPI_Comm_free(&mut self.raw) };
        if let Err(error) = check("MPI_Comm_free", code) {
            log::warn!("{error}");
        }
    }

    /// Begins to send bytes.
    ///
    /// # Safety
    /// They stay as they are until the request is done.
    pub unsafe fn send(&self, bytes: &[u8], to: usize, tag: c_int, _held: &Held) -> Result<Request, Error> {
        let (start, count) = (bytes.as_ptr().cast::<c_void>(), count(bytes.len())?);
        Request::start("MPI_Isend", |request| {
            // SAFETY: as the caller vouches for.
            unsafe { mpi::MPI_Isend(start, count, mpi::RSMPI_UINT8_T, to as c_int, tag, self.raw, request) }
        })
    }

    /// Begins to receive at most so many bytes.
    ///
    /// # Safety
    /// Nobody else accesses them until the request is done.
    pub unsafe fn receive(&self, bytes: &mut [u8], from: usize, tag: c_int, _held: &Held) -> Result<Request, Error> {
        let (start, count) = (bytes.as_mut_ptr().cast::<c_void>(), count(bytes.len())?);
        Request::start("MPI_Irecv", |request| {
            // SAFETY: as the caller vouches for.
            unsafe { mpi::MPI_Irecv(start, count, mpi::RSMPI_UINT8_T, from as c_int, tag, self.raw, request) }
        })
    }

    /// The sender and length of a message that has come under `tag` from anybody.
    pub fn next(&self, tag: c_int, _held: &Held) -> Result<Option<(usize, usize)>, Error> {
        let (mut came, mut status, mut length) = (0, MaybeUninit::uninit(), 0);
        // SAFETY: the status is read only if there is a message.
        unsafe {
            let probed = mpi::MPI_Iprobe(mpi::RSMPI_ANY_SOURCE, tag, self.raw, &mut came, status.as_mut_ptr());
            check("MPI_Iprobe", probed)?;
            if came == 0 {
                return Ok(None);
            }
            let status: mpi::MPI_Status = status.assume_init();
            check("MPI_Get_count", mpi::MPI_Get_count(&status, mpi::RSMPI_UINT8_T, &mut length))?;
            Ok(Some((usize::try_from(status.MPI_SOURCE).unwrap_or(0), usize::try_from(length).unwrap_or(0))))
        }
    }
}

impl Request {
    /// What `function` begins.
    pub fn start(name: &str, function: impl FnOnce(*mut mpi::MPI_Request) -> c_int) -> Result<Request, Error> {
        let mut request = MaybeUninit::uninit();
        check(name, function(request.as_mut_ptr()))?;
        // SAFETY: the function has succeeded, and then there is a request.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Whether it is done, with the number of bytes that were received. Not to be asked again then.
    pub fn done(&mut self, _held: &Held) -> Result<Option<usize>, Error> {
        let (mut done, mut status, mut length) = (0, MaybeUninit::<mpi::MPI_Status>::uninit(), 0);
        // SAFETY: the request is one that MPI gave; the status is read only once it is done.
        unsafe {
            check("MPI_Test", mpi::MPI_Test(&mut self.0, &mut done, status.as_mut_ptr()))?;
            if done == 0 {
                return Ok(None);
            }
            // Of what is no receive it has no meaning.
            let _ = mpi::MPI_Get_count(status.as_ptr(), mpi::RSMPI_UINT8_T, &mut length);
        }
        Ok(Some(usize::try_from(length).unwrap_or(0)))
    }

    /// Takes a receive back, unless it is done meanwhile.
    pub fn cancel(mut self, _held: &Held) {
        // SAFETY: the request is one that MPI gave. A receive that is cancelled is done whatever the other rank does.
        let codes = unsafe { [mpi::MPI_Cancel(&mut self.0), mpi::MPI_Wait(&mut self.0, mpi::RSMPI_STATUS_IGNORE)] };
        codes.into_iter().for_each(|code| {
            if let Err(error) = check("MPI_Cancel", code) {
                log::warn!("{error}");
            }
        });
    }

    /// Gives up waiting for it. `memory` is what MPI still works on, and is never freed.
    pub fn abandon<T>(self, memory: T) {
        abandon();
        std::mem::forget(memory);
    }
}

/// As MPI counts.
pub(super) fn count(len: usize) -> Result<c_int, Error> {
    c_int::try_from(len).map_err(|_| Error::argument("mpi", format!("{len} elements are more than MPI counts")))
}
