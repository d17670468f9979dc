//! A communicator of NCCL: its asynchronous calls and its shutdown.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{fmt, ptr, thread};

use cudarc::driver::sys::{CUevent, CUresult};
use cudarc::nccl::sys::ncclComm_t;

use super::library::{Config, IN_PROGRESS, Library, SUCCESS};
use crate::backoff::Backoff;
use bonfire_core::error::Site;
use bonfire_core::{Deadline, Error};

/// How long the shutdown of a communicator may take: NCCL communicates with the other ranks to free resources.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// One rank's communicator. All its ranks call the same operations in the same order. One thread at a time may use it.
///
/// The calling thread must have the context current of the GPU that the communicator was created with.
pub struct Communicator {
    pub(super) library: &'static Library,
    /// Null before the communicator is created and after it has ended.
    pub(super) comm: ncclComm_t,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// The error that ended the communicator. It was aborted then.
    failure: Option<Error>,
    /// Set before the abort, after which work on a stream continues.
    pub(crate) ended: Arc<AtomicBool>,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, which `&mut` ensures.
unsafe impl Send for Communicator {}

impl Communicator {
    /// A communicator that is yet to be created.
    pub(super) fn unconnected(library: &'static Library, rank: usize, world_size: usize) -> Self {
        Communicator { library, comm: ptr::null_mut(), rank, world_size, failure: None, ended: Arc::default() }
    }

    /// Returns this rank, from 0 to `world_size - 1`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the error that ended the communicator, if it has ended.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Splits the communicator: all ranks call it, and those with the same `color` get a new one together, in the order
    /// of their keys, and of their ranks where keys are equal. A rank without a color gets none.
    ///
    /// All earlier operations must be on their streams ([`Submitted::settle`]). Blocks until all ranks have called it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a color or key above 2147483647, with nothing changed. [`Error::Nccl`], also if a
    /// rank has not called it before the deadline, which ends the communicator. The error that ended it before.
    pub fn split(
        &mut self,
        color: Option<u32>,
        key: usize,
        deadline: &Deadline,
    ) -> Result<Option<Communicator>, Error> {
        const FUNCTION: &str = "ncclCommSplit";
        const NO_COLOR: c_int = -1;
        self.check_alive()?;
        let number = |value: usize, what: &str| {
            c_int::try_from(value).map_err(|_| Error::argument("split", format!("{what} {value} is above 2147483647")))
        };
        let color = color.map_or(Ok(NO_COLOR), |color| number(color as usize, "color"))?;
        let key = number(key, "key")?;
        // NCCL writes to it once all ranks have called, perhaps after this function timed out: it is never freed then.
        let part = Box::into_raw(Box::new(ptr::null_mut::<cudarc::nccl::sys::ncclComm>()));
        // SAFETY: the communicator is valid, and so are the pointers to the new one and to the configuration, which
        // NCCL copies.
        let code = unsafe { (self.library.functions.split)(self.comm, color, key, part, &mut Config::polled()) };
        self.settle(FUNCTION, code, deadline, None)?;
        // SAFETY: allocated above by `Box`, and NCCL is done with it.
        let comm = *unsafe { Box::from_raw(part) };
        if comm.is_null() {
            return Ok(None);
        }
        let mut part = Communicator::unconnected(self.library, self.rank, self.world_size);
        part.comm = comm;
        part.settle(FUNCTION, IN_PROGRESS, deadline, None)?;
        part.world_size = part.query("ncclCommCount", self.library.functions.count)?;
        part.rank = part.query("ncclCommUserRank", self.library.functions.user_rank)?;
        Ok(Some(part))
    }

    fn query(
        &mut self,
        function: &str,
        query: unsafe extern "C" fn(ncclComm_t, *mut c_int) -> c_int,
    ) -> Result<usize, Error> {
        let mut number = 0;
        // SAFETY: the communicator is valid, and `number` receives the result.
        match unsafe { query(self.comm, &mut number) } {
            SUCCESS => Ok(usize::try_from(number).unwrap_or(0)),
            code => Err(self.fail(function, code, Duration::ZERO)),
        }
    }

    /// Checks for errors in the background, such as a lost connection to another rank. Aborts the communicator if there
    /// is one.
    ///
    /// # Errors
    /// [`Error::Nccl`], or the error that ended the communicator before.
    pub fn poll(&mut self) -> Result<(), Error> {
        self.check_alive()?;
        match self.state() {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.fail("ncclCommGetAsyncError", code, Duration::ZERO)),
        }
    }

    /// Waits until `done` returns true, such as [`has_passed`] for an event after an operation. At the deadline and
    /// after any error the communicator is aborted, which ends its kernels: later work on their stream runs, on
    /// whatever is in memory.
    ///
    /// # Errors
    /// [`Error::Timeout`] with `site`; NCCL does not report which rank is late, so the error names all others.
    /// [`Error::Nccl`], or what `done` returned. The error that ended the communicator before.
    pub fn wait(
        &mut self,
        site: Site,
        deadline: &Deadline,
        mut done: impl FnMut() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        self.check_alive()?;
        let mut backoff = Backoff::default();
        loop {
            // In this order: an operation that an error ended is not done.
            let done = done().map_err(|error| self.end(error))?;
            self.poll()?;
            if done {
                return Ok(());
            }
            if deadline.passed() {
                return Err(self.time_out(site, deadline));
            }
            backoff.wait();
        }
    }

    /// Aborts the communicator, whatever it is doing: its kernels end, and it cannot be used any more. All ranks should
    /// do so, since the others wait for this one. If NCCL itself does not return within 5 s, this is logged, and the
    /// memory that its kernels use should not be reused.
    pub fn abort(&mut self) {
        self.end(Error::Nccl {
            function: "ncclCommAbort".into(),
            rank: self.rank,
            code: SUCCESS,
            reason: "the communicator was aborted by the program".into(),
            elapsed: Duration::ZERO,
        });
    }

    /// Returns the error that ended the communicator, if it has ended.
    pub(super) fn check_alive(&self) -> Result<(), Error> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Waits until a call that returned `code` has completed, and returns its outcome.
    pub(super) fn settle(
        &mut self,
        function: &str,
        mut code: c_int,
        deadline: &Deadline,
        site: Option<Site>,
    ) -> Result<(), Error> {
        let mut backoff = Backoff::default();
        loop {
            match code {
                SUCCESS => return Ok(()),
                IN_PROGRESS if !deadline.passed() => backoff.wait(),
                IN_PROGRESS => {
                    return Err(match site {
                        Some(site) => self.time_out(site, deadline),
                        None => self.fail(function, IN_PROGRESS, deadline.elapsed()),
                    });
                }
                code => return Err(self.fail(function, code, deadline.elapsed())),
            }
            code = self.state();
        }
    }

    /// The state of NCCL's work in the background.
    fn state(&self) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: the communicator is valid, and `state` receives the result.
        match unsafe { (self.library.functions.get_async_error)(self.comm, &mut state) } {
            SUCCESS => state,
            code => code,
        }
    }

    fn time_out(&mut self, site: Site, deadline: &Deadline) -> Error {
        let missing = (0..self.world_size).filter(|rank| *rank != self.rank).collect();
        let (rank, elapsed) = (self.rank, deadline.elapsed());
        self.end(Error::Timeout { site, rank, missing, elapsed, whereabouts: Box::default() })
    }

    /// Ends the communicator because a function returned `code`.
    pub(super) fn fail(&mut self, function: &str, code: c_int, elapsed: Duration) -> Error {
        self.end(self.library.error(function, code, self.comm, self.rank, elapsed))
    }

    /// Ends the communicator, once, and returns the error that ended it.
    pub(super) fn end(&mut self, error: Error) -> Error {
        let error = self.failure.get_or_insert(error).clone();
        // Release: a thread that finds a stream past the aborted work also finds this.
        self.ended.store(true, Ordering::Release);
        let comm = std::mem::replace(&mut self.comm, ptr::null_mut());
        if !comm.is_null() {
            log::debug!("rank {}: aborting NCCL's communicator: {error}", self.rank);
            let abort = self.library.functions.abort;
            // SAFETY: the communicator was valid until now, and no other thread is in a call on it.
            self.call_bounded("ncclCommAbort", FinalComm(comm), move |comm| unsafe { abort(comm.0) });
        }
        error
    }

    /// Shuts the communicator down gracefully: NCCL finishes its work, together with the other ranks.
    fn finish(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(GRACE);
        // The caller may have dropped an operation before it was on its stream.
        self.settle("an operation", self.state(), &deadline, None)?;
        // SAFETY: the communicator is valid and idle.
        let code = unsafe { (self.library.functions.finalize)(self.comm) };
        self.settle("ncclCommFinalize", code, &deadline, None)?;
        let (comm, destroy) = (std::mem::replace(&mut self.comm, ptr::null_mut()), self.library.functions.destroy);
        // SAFETY: as above, and finalized.
        self.call_bounded("ncclCommDestroy", FinalComm(comm), move |comm| unsafe { destroy(comm.0) });
        Ok(())
    }

    /// Makes a communicator's last call on a thread that is abandoned if the call does not return.
    fn call_bounded(&self, function: &str, comm: FinalComm, call: impl FnOnce(FinalComm) -> c_int + Send + 'static) {
        let (sender, receiver) = mpsc::channel();
        let work = move || sender.send(call(comm));
        let outcome = match thread::Builder::new().name("bonfire-nccl".into()).spawn(work) {
            Ok(_) => receiver.recv_timeout(GRACE).map_err(|_| format!("has not returned after {GRACE:?}")),
            Err(error) => Err(format!("has no thread: {error}")),
        };
        match outcome {
            Ok(SUCCESS | IN_PROGRESS) => {}
            Ok(code) => log::warn!("rank {}: {function} of NCCL failed with code {code}", self.rank),
            Err(problem) => log::error!(
                "rank {}: {function} of NCCL {problem}; its kernels may still run, and the GPU needs a new process",
                self.rank
            ),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.comm.is_null()
            && let Err(error) = self.finish()
        {
            log::warn!("rank {}: NCCL's communicator was aborted at its end: {error}", self.rank);
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("rank", &self.rank).field("world_size", &self.world_size).finish()
    }
}

/// A communicator that is passed to the last call on it.
struct FinalComm(ncclComm_t);

// SAFETY: as for `Communicator`.
unsafe impl Send for FinalComm {}

/// An operation that NCCL may not have enqueued on its stream yet, because it connects ranks first.
///
/// Until it is settled, other work must not be enqueued on that stream. A thread with several communicators calls the
/// operation on all of them and then settles each: NCCL may need all of them to connect.
#[must_use = "work that is put on the stream before `settle` may run before the operation"]
pub struct Submitted<'a> {
    pub(super) communicator: &'a mut Communicator,
    pub(super) function: &'static str,
    pub(super) code: c_int,
}

impl Submitted<'_> {
    /// Returns once the operation is on its stream.
    ///
    /// # Errors
    /// As [`Communicator::wait`].
    pub fn settle(self, site: Site, deadline: &Deadline) -> Result<(), Error> {
        self.communicator.settle(self.function, self.code, deadline, Some(site))
    }
}

/// Whether the work on a stream before the event is done.
///
/// # Errors
/// [`Error::Io`] with CUDA's error if that work failed.
///
/// # Safety
/// The event must be a valid event of CUDA.
pub unsafe fn has_passed(event: CUevent) -> Result<bool, Error> {
    // SAFETY: guaranteed by the caller.
    match unsafe { cudarc::driver::result::event::query(event) } {
        Ok(()) => Ok(true),
        Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        Err(error) => Err(Error::io("cuEventQuery", error)),
    }
}
