//! Communicators and requests.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use bonfire_core::Error;
use mpi_sys as mpi;

use super::library::{Held, abandon, check};

/// MPI's tags of messages in a group.
///
/// Open MPI (4.1 and 5.0) sends the messages of `MPI_Comm_create_group` in the same communicator, with the tag that
/// this function is given, although MPI's standard says that this tag does not conflict with those of messages. So
/// making a subgroup uses [another one](mpi_tag::for_subgroup).
pub(super) mod mpi_tag {
    use std::ffi::c_int;

    /// The head of a message between two ranks (with the payload of a short one), the reply "clear to send", and a
    /// payload.
    pub const HEAD: c_int = 1;
    pub const CTS: c_int = 2;
    pub const PAYLOAD: c_int = 3;
    /// A message of the control plane.
    pub const CONTROL: c_int = 4;

    /// The largest tag that every MPI library has.
    const LARGEST: c_int = 32_767;

    /// Returns the tag with which the subgroup of this number is made.
    pub fn for_subgroup(number: u64) -> c_int {
        const FIRST: c_int = CONTROL + 1;
        FIRST + (number % (LARGEST - FIRST + 1) as u64) as c_int
    }
}

/// A communicator, as MPI's handle. Only [`free`](Comm::free) frees it: under the MPI lock, with no message in flight.
#[derive(Clone, Copy)]
pub(super) struct Comm {
    raw: mpi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
}

// SAFETY: a handle of an object that MPI keeps, used only by threads that hold the MPI lock.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// A pending MPI request.
pub(super) struct Request(mpi::MPI_Request);

// SAFETY: as for `Comm`.
unsafe impl Send for Request {}

impl Comm {
    /// The communicator of all processes of the job.
    pub fn world(held: &Held) -> Result<Comm, Error> {
        // SAFETY: a constant of the library, which has been initialized.
        Comm::of(unsafe { mpi::RSMPI_COMM_WORLD }, held)
    }

    fn of(raw: mpi::MPI_Comm, _held: &Held) -> Result<Comm, Error> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI has just returned this communicator, and both functions get the address of an integer.
        unsafe {
            check("MPI_Comm_rank", mpi::MPI_Comm_rank(raw, &mut rank))?;
            check("MPI_Comm_size", mpi::MPI_Comm_size(raw, &mut size))?;
        }
        Ok(Comm { raw, rank: usize::try_from(rank).unwrap_or(0), size: usize::try_from(size).unwrap_or(1) })
    }

    pub fn raw(&self) -> mpi::MPI_Comm {
        self.raw
    }

    /// Begins to make a communicator of the same processes. `made` may be used once the request is done. The caller
    /// keeps `made` at its address until then, or forever.
    pub fn duplicate(&self, made: &mut MaybeUninit<mpi::MPI_Comm>, _held: &Held) -> Result<Request, Error> {
        // SAFETY: the caller keeps `made` until the request is done, or forever.
        Request::start("MPI_Comm_idup", |request| unsafe { mpi::MPI_Comm_idup(self.raw, made.as_mut_ptr(), request) })
    }

    /// The communicator that [`duplicate`](Comm::duplicate) made. It returns errors, and so do those made from it.
    ///
    /// # Safety
    /// The request of `duplicate` is done.
    pub unsafe fn duplicated(made: &MaybeUninit<mpi::MPI_Comm>, held: &Held) -> Result<Comm, Error> {
        // SAFETY: the caller ensures that the request is done, so MPI has initialized `made`.
        unsafe {
            let made = made.assume_init();
            check("MPI_Comm_set_errhandler", mpi::MPI_Comm_set_errhandler(made, mpi::RSMPI_ERRORS_RETURN))?;
            Comm::of(made, held)
        }
    }

    /// Makes a communicator of `members`, in their order. All of them call this, and it waits for them.
    pub fn of_members(&self, members: &[usize], number: u64, held: &Held) -> Result<Comm, Error> {
        let ranks: Vec<c_int> = members.iter().map(|rank| *rank as c_int).collect();
        let tag = mpi_tag::for_subgroup(number);
        let (mut all, mut some, mut made) = (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: every output is read only after the function that fills it has succeeded. The members are ranks of
        // this communicator, each listed once, as the group has checked.
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

    /// Makes a communicator of the ranks on this rank's host. All ranks call this.
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

    /// Frees the communicator on this rank, which has no pending request, and to which no message is in flight.
    pub fn free(mut self, _held: &Held) {
        // SAFETY: the communicator was made by one of the functions above, and is not used after this.
        let code = unsafe { mpi::MPI_Comm_free(&mut self.raw) };
        if let Err(error) = check("MPI_Comm_free", code) {
            log::warn!("{error}");
        }
    }

    /// Begins to send `bytes`.
    ///
    /// # Safety
    /// The bytes stay valid and unchanged until the request is done.
    pub unsafe fn send(&self, bytes: &[u8], to: usize, tag: c_int, _held: &Held) -> Result<Request, Error> {
        let (start, count) = (bytes.as_ptr().cast::<c_void>(), count(bytes.len())?);
        Request::start("MPI_Isend", |request| {
            // SAFETY: ensured by the caller.
            unsafe { mpi::MPI_Isend(start, count, mpi::RSMPI_UINT8_T, to as c_int, tag, self.raw, request) }
        })
    }

    /// Begins to receive at most `bytes.len()` bytes.
    ///
    /// # Safety
    /// The bytes stay valid, and nothing else accesses them, until the request is done.
    pub unsafe fn receive(&self, bytes: &mut [u8], from: usize, tag: c_int, _held: &Held) -> Result<Request, Error> {
        let (start, count) = (bytes.as_mut_ptr().cast::<c_void>(), count(bytes.len())?);
        Request::start("MPI_Irecv", |request| {
            // SAFETY: ensured by the caller.
            unsafe { mpi::MPI_Irecv(start, count, mpi::RSMPI_UINT8_T, from as c_int, tag, self.raw, request) }
        })
    }

    /// The sender and length of a message with this tag that has arrived from any rank, if there is one.
    pub fn probe(&self, tag: c_int, _held: &Held) -> Result<Option<(usize, usize)>, Error> {
        let (mut found, mut status, mut length) = (0, MaybeUninit::uninit(), 0);
        // SAFETY: the status is read only if there is a message.
        unsafe {
            let probed = mpi::MPI_Iprobe(mpi::RSMPI_ANY_SOURCE, tag, self.raw, &mut found, status.as_mut_ptr());
            check("MPI_Iprobe", probed)?;
            if found == 0 {
                return Ok(None);
            }
            let status: mpi::MPI_Status = status.assume_init();
            check("MPI_Get_count", mpi::MPI_Get_count(&status, mpi::RSMPI_UINT8_T, &mut length))?;
            Ok(Some((usize::try_from(status.MPI_SOURCE).unwrap_or(0), usize::try_from(length).unwrap_or(0))))
        }
    }
}

impl Request {
    /// Returns the request that `function` starts. `name` is the function's name, for errors.
    pub fn start(name: &str, function: impl FnOnce(*mut mpi::MPI_Request) -> c_int) -> Result<Request, Error> {
        let mut request = MaybeUninit::uninit();
        check(name, function(request.as_mut_ptr()))?;
        // SAFETY: the function has succeeded, so it has stored a request.
        Ok(Request(unsafe { request.assume_init() }))
    }

    /// Polls the request. Returns the number of received bytes if it is done; it must not be polled again then.
    pub fn done(&mut self, _held: &Held) -> Result<Option<usize>, Error> {
        let (mut done, mut status, mut length) = (0, MaybeUninit::<mpi::MPI_Status>::uninit(), 0);
        // SAFETY: the request was returned by MPI, and the status is read only once the request is done.
        unsafe {
            check("MPI_Test", mpi::MPI_Test(&mut self.0, &mut done, status.as_mut_ptr()))?;
            if done == 0 {
                return Ok(None);
            }
            // Meaningless for requests that are no receives.
            let _ = mpi::MPI_Get_count(status.as_ptr(), mpi::RSMPI_UINT8_T, &mut length);
        }
        Ok(Some(usize::try_from(length).unwrap_or(0)))
    }

    /// Cancels a receive, unless it has completed meanwhile.
    pub fn cancel(mut self, _held: &Held) {
        // SAFETY: the request was returned by MPI. A cancelled receive completes whatever the other rank does.
        let codes = unsafe { [mpi::MPI_Cancel(&mut self.0), mpi::MPI_Wait(&mut self.0, mpi::RSMPI_STATUS_IGNORE)] };
        codes.into_iter().for_each(|code| {
            if let Err(error) = check("MPI_Cancel", code) {
                log::warn!("{error}");
            }
        });
    }

    /// Abandons the request. Leaks `memory`, which MPI may still access.
    pub fn abandon<T>(self, memory: T) {
        abandon();
        std::mem::forget(memory);
    }
}

/// Converts a length to MPI's type for counts.
pub(super) fn count(len: usize) -> Result<c_int, Error> {
    c_int::try_from(len).map_err(|_| Error::argument("mpi", format!("{len} elements are more than MPI counts")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn making_a_subgroup_uses_no_tag_of_a_message() {
        let messages = [mpi_tag::HEAD, mpi_tag::CTS, mpi_tag::PAYLOAD, mpi_tag::CONTROL];
        for number in (0..1 << 17).chain(u64::MAX - (1 << 17)..=u64::MAX) {
            let tag = mpi_tag::for_subgroup(number);
            assert!((0..=32_767).contains(&tag) && !messages.contains(&tag), "{number}: {tag}");
        }
    }
}
