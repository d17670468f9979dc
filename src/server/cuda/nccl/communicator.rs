//! A communicator of NCCL: what becomes of calls that it does not wait for, and how it ends.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{fmt, ptr, thread};

use cudarc::driver::sys::{CUevent, CUresult};
use cudarc::nccl::sys::ncclComm_t;

use super::library::{Config, IN_PROGRESS, Library, SUCCESS};
use crate::server::cuda::pause::Pause;
use bonfire_core::error::Site;
use bonfire_core::{Deadline, Error};

/// How long the end of a communicator may take: NCCL gives back what it has, and hears of the other ranks for that.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// One rank's communicator. Operations are called by all its ranks, in the same order; one thread at a time may use it.
///
/// Its thread must have the context of the GPU current that the communicator was made with.
pub struct Communicator {
    pub(super) library: &'static Library,
    /// Null where there is none, or none any more.
    pub(super) comm: ncclComm_t,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// What ended it. It was aborted then.
    failure: Option<Error>,
    /// Set before the abort: what was on a stream goes on after it.
    pub(in crate::server::cuda) ended: Arc<AtomicBool>,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, which `&mut` makes sure of.
unsafe impl Send for Communicator {}

impl Communicator {
    /// What will be a communicator.
    pub(super) fn none(library: &'static Library, rank: usize, world_size: usize) -> Self {
        Communicator { library, comm: ptr::null_mut(), rank, world_size, failure: None, ended: Arc::default() }
    }

    /// This rank, from 0 to `world_size - 1`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// What ended the communicator, if anything did.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Makes communicators of some ranks each: all ranks call it, and those with the same `color` get one together, in
    /// the order of their keys, and of their ranks where keys are equal. A rank without a color gets none.
    ///
    /// Every operation before must be on its stream ([`Submitted::settle`]).
    ///
    /// # Errors
    /// What ended the communicator, and [`Error::Nccl`], also where the ranks did not all come before the deadline.
    pub fn split(
        &mut self,
        color: Option<u32>,
        key: usize,
        deadline: &Deadline,
    ) -> Result<Option<Communicator>, Error> {
        const FUNCTION: &str = "ncclCommSplit";
        const NO_COLOR: c_int = -1;
        self.sound()?;
        let number = |value: usize, what: &str| {
            c_int::try_from(value).map_err(|_| Error::argument("split", format!("{what} {value} is above 2147483647")))
        };
        let color = color.map_or(Ok(NO_COLOR), |color| number(color as usize, "color"))?;
        let key = number(key, "key")?;
        // NCCL writes to it when all ranks have come, which may be after this function gave up: it is never freed then.
        let part = Box::into_raw(Box::new(ptr::null_mut::<cudarc::nccl::sys::ncclComm>()));
        // SAFETY: the communicator is there; the place for the new one and the configuration are, too, and NCCL copies
        // the latter.
        let code = unsafe { (self.library.functions.split)(self.comm, color, key, part, &mut Config::polled()) };
        self.settle(FUNCTION, code, deadline, None)?;
        // SAFETY: made above by `Box`, and NCCL is done with it.
        let comm = *unsafe { Box::from_raw(part) };
        if comm.is_null() {
            return Ok(None);
        }
        let mut part = Communicator::none(self.library, self.rank, self.world_size);
        part.comm = comm;
        part.settle(FUNCTION, IN_PROGRESS, deadline, None)?;
        part.world_size = part.ask("ncclCommCount", self.library.functions.count)?;
        part.rank = part.ask("ncclCommUserRank", self.library.functions.user_rank)?;
        Ok(Some(part))
    }

    fn ask(
        &mut self,
        function: &str,
        ask: unsafe extern "C" fn(ncclComm_t, *mut c_int) -> c_int,
    ) -> Result<usize, Error> {
        let mut number = 0;
        // SAFETY: the communicator is there and gets a place for a number.
        match unsafe { ask(self.comm, &mut number) } {
            SUCCESS => Ok(usize::try_from(number).unwrap_or(0)),
            code => Err(self.fail(function, code, Duration::ZERO)),
        }
    }

    /// Whether anything went wrong in the background, such as a connection to another rank. It aborts the communicator
    /// then.
    ///
    /// # Errors
    /// [`Error::Nccl`], or what ended the communicator before.
    pub fn poll(&mut self) -> Result<(), Error> {
        self.sound()?;
        match self.state() {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.fail("ncclCommGetAsyncError", code, Duration::ZERO)),
        }
    }

    /// Waits until `done`, such as [`has_passed`] for an event behind an operation. At the deadline and after any error
    /// the communicator is aborted, which ends its kernels: what is behind them on their stream runs, with whatever is
    /// in memory.
    ///
    /// # Errors
    /// [`Error::Timeout`], which says `site`: NCCL does not tell who is late, so it names all the others.
    /// [`Error::Nccl`] or what `done` returned. What ended the communicator, where it has.
    pub fn wait(
        &mut self,
        site: Site,
        deadline: &Deadline,
        mut done: impl FnMut() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        self.sound()?;
        let mut pause = Pause::default();
        loop {
            // In this order: what ended because of an error is not done.
            let done = done().map_err(|error| self.end(error))?;
            self.poll()?;
            if done {
                return Ok(());
            }
            if deadline.passed() {
                return Err(self.late(site, deadline));
            }
            pause.once();
        }
    }

    /// Ends the communicator at once, whatever it is at: its kernels end, and it is of no use any more. All ranks
    /// should do so, since the others wait for this one. Where NCCL itself does not come to an end within 5 s the log
    /// says so, and memory that its kernels were given should not be used again.
    pub fn abort(&mut self) {
        self.end(Error::Nccl {
            function: "ncclCommAbort".into(),
            rank: self.rank,
            code: SUCCESS,
            reason: "the communicator was aborted by the program".into(),
            elapsed: Duration::ZERO,
        });
    }

    /// What ended the communicator, if anything did.
    pub(super) fn sound(&self) -> Result<(), Error> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Waits until a call is over that returned `code`, or fails with what came of it.
    pub(super) fn settle(
        &mut self,
        function: &str,
        mut code: c_int,
        deadline: &Deadline,
        site: Option<Site>,
    ) -> Result<(), Error> {
        let mut pause = Pause::default();
        loop {
            match code {
                SUCCESS => return Ok(()),
                IN_PROGRESS if !deadline.passed() => pause.once(),
                IN_PROGRESS => {
                    return Err(match site {
                        Some(site) => self.late(site, deadline),
                        None => self.fail(function, IN_PROGRESS, deadline.elapsed()),
                    });
                }
                code => return Err(self.fail(function, code, deadline.elapsed())),
            }
            code = self.state();
        }
    }

    /// How it is with what NCCL does in the background.
    fn state(&self) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: the communicator is there, and gets a place for a number.
        match unsafe { (self.library.functions.get_async_error)(self.comm, &mut state) } {
            SUCCESS => state,
            code => code,
        }
    }

    fn late(&mut self, site: Site, deadline: &Deadline) -> Error {
        let missing = (0..self.world_size).filter(|rank| *rank != self.rank).collect();
        self.end(Error::Timeout { site, rank: self.rank, missing, elapsed: deadline.elapsed() })
    }

    /// Ends the communicator because a function returned `code`.
    pub(super) fn fail(&mut self, function: &str, code: c_int, elapsed: Duration) -> Error {
        self.end(self.library.error(function, code, self.comm, self.rank, elapsed))
    }

    /// Ends the communicator, once, and gives what ended it.
    pub(super) fn end(&mut self, error: Error) -> Error {
        let error = self.failure.get_or_insert(error).clone();
        // Release: who finds a stream past what was aborted finds this, too.
        self.ended.store(true, Ordering::Release);
        let comm = std::mem::replace(&mut self.comm, ptr::null_mut());
        if !comm.is_null() {
            log::debug!("rank {}: aborting NCCL's communicator: {error}", self.rank);
            let abort = self.library.functions.abort;
            // SAFETY: the communicator was there until now, and no other thread is in a call on it.
            self.bounded("ncclCommAbort", Last(comm), move |comm| unsafe { abort(comm.0) });
        }
        error
    }

    /// Ends the communicator in good order: NCCL finishes what it has, together with the other ranks.
    fn finish(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(GRACE);
        // Somebody may have left an operation before it was on its stream.
        self.settle("an operation", self.state(), &deadline, None)?;
        // SAFETY: the communicator is there and at rest.
        let code = unsafe { (self.library.functions.finalize)(self.comm) };
        self.settle("ncclCommFinalize", code, &deadline, None)?;
        let (comm, destroy) = (std::mem::replace(&mut self.comm, ptr::null_mut()), self.library.functions.destroy);
        // SAFETY: as above, and finalized.
        self.bounded("ncclCommDestroy", Last(comm), move |comm| unsafe { destroy(comm.0) });
        Ok(())
    }

    /// Makes a communicator's last call on a thread that is left alone where it does not come back.
    fn bounded(&self, function: &str, comm: Last, call: impl FnOnce(Last) -> c_int + Send + 'static) {
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

/// A communicator that is given to the last call on it.
struct Last(ncclComm_t);

// SAFETY: as `Communicator`.
unsafe impl Send for Last {}

/// An operation that NCCL may not have put on its stream yet, because it connects ranks first.
///
/// Until it is settled other work must not be put on that stream. A thread with several communicators calls the
/// operation on all of them and then settles each: NCCL may need all to connect them.
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

/// Whether what was on a stream when the event was recorded is done.
///
/// # Errors
/// [`Error::Io`] with what CUDA says of work before it that failed.
///
/// # Safety
/// The event is one of CUDA's that is there.
pub unsafe fn has_passed(event: CUevent) -> Result<bool, Error> {
    // SAFETY: as the caller promises.
    match unsafe { cudarc::driver::result::event::query(event) } {
        Ok(()) => Ok(true),
        Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        Err(error) => Err(Error::io("cuEventQuery", error)),
    }
}
