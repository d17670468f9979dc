//! The MPI library of this process: started with the first group, ended with the process, used by one thread at a time.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use mpi_sys as mpi;

use crate::sync::lock;
use crate::types::Error;

/// Every call into MPI is made under this lock: that is what `MPI_THREAD_SERIALIZED` asks for.
static TURN: Mutex<()> = Mutex::new(());

/// Whether requests were given up that MPI still works on.
static ABANDONED: AtomicBool = AtomicBool::new(false);

/// This thread is the one that may call MPI.
pub(super) struct Held(#[expect(dead_code, reason = "held until this is dropped")] MutexGuard<'static, ()>);

/// Waits for this thread's turn to call MPI.
pub(super) fn hold() -> Held {
    Held(lock(&TURN))
}

/// As [`hold`], unless another thread is in MPI for so long.
pub(super) fn try_hold(limit: Duration) -> Option<Held> {
    let until = Instant::now() + limit;
    loop {
        match TURN.try_lock() {
            Ok(guard) => return Some(Held(guard)),
            Err(TryLockError::Poisoned(guard)) => return Some(Held(guard.into_inner())),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Err(TryLockError::WouldBlock) => return None,
        }
    }
}

/// Notes that a request was given up. What MPI works on with it must never be freed.
pub(super) fn abandon() {
    ABANDONED.store(true, Ordering::Relaxed);
}

/// Ends the whole job, where this rank can neither go on nor return: MPI has its caller's memory.
pub(super) fn abort(rank: usize, why: &str) -> ! {
    // The log may be off, and this is the last that the process says.
    eprintln!("bonfire: rank {rank}: {why}; ending the job with MPI_Abort");
    log::error!("rank {rank}: {why}; ending the job with MPI_Abort");
    // SAFETY: MPI is up, since there is a group. Another thread may be in a call: of all functions this one is meant for a
    // process that does not go on.
    unsafe { mpi::MPI_Abort(mpi::RSMPI_COMM_WORLD, 1) };
    std::process::abort()
}

/// Makes an error of what a function of MPI returns.
pub(super) fn check(function: &str, code: c_int) -> Result<(), Error> {
    if code == mpi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; mpi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the text has room for the longest message and its end. The caller is in its turn.
    unsafe { mpi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let text = &text[..usize::try_from(length).unwrap_or(0).min(text.len())];
    Err(Error::Mpi { function: function.into(), code, reason: String::from_utf8_lossy(text).trim().to_owned() })
}

/// What is known of the library once it is up.
#[derive(Clone, Copy)]
pub(super) struct Library {
    /// What stands for "the input is in the output", where the library is one whose value is known.
    pub in_place: Option<usize>,
    /// Which threads may call it.
    level: c_int,
}

/// Refuses a level at which threads may not take turns, which polled groups rely on.
fn enough(level: c_int, blocking: bool) -> Result<(), Error> {
    // SAFETY: a constant of the library.
    if blocking || level >= unsafe { mpi::RSMPI_THREAD_SERIALIZED } {
        return Ok(());
    }
    let reason = "MPI does not let several threads take turns, which groups on 'mpi' need: start it with \
                  MPI_THREAD_SERIALIZED or more, make the first group of the process one on 'mpi' and not on \
                  'mpi-blocking', or give this one 'mpi-blocking'";
    Err(Error::Config(reason.into()))
}

/// Starts MPI unless it is up already, by this function or by the program. Where this one does, `finalize` is called at the
/// end of the process.
///
/// For groups that block MPI is started as `MPI_Init` starts it, with `MPI_THREAD_SINGLE`: any other level makes Open MPI's
/// small calls slower by half of their time. The lock keeps threads apart all the same.
pub(super) fn start(held: &Held, blocking: bool, finalize: extern "C" fn()) -> Result<Library, Error> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if !is_up(held) {
        return Err(Error::Config("the program has ended MPI (MPI_Finalize), which cannot be started again".into()));
    }
    if let Some(library) = LIBRARY.get() {
        enough(library.level, blocking)?;
        return Ok(*library);
    }
    let (mut up, mut level) = (0, 0);
    // SAFETY: it may be called before MPI is up, and gets a place for a number.
    unsafe { check("MPI_Initialized", mpi::MPI_Initialized(&mut up))? };
    // SAFETY: MPI is not up, and takes no arguments; or it is up, and says at which level.
    unsafe {
        if up == 0 {
            let wanted = if blocking { mpi::RSMPI_THREAD_SINGLE } else { mpi::RSMPI_THREAD_SERIALIZED };
            check("MPI_Init_thread", mpi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), wanted, &mut level))?;
            // What the program started it ends itself.
            if libc::atexit(finalize) != 0 {
                log::warn!("MPI will not be ended with the process, and its launcher may complain");
            }
            // Also of calls that are on no communicator. What the program started fails as it chose.
            for comm in [mpi::RSMPI_COMM_WORLD, mpi::RSMPI_COMM_SELF] {
                check("MPI_Comm_set_errhandler", mpi::MPI_Comm_set_errhandler(comm, mpi::RSMPI_ERRORS_RETURN))?;
            }
        } else {
            check("MPI_Query_thread", mpi::MPI_Query_thread(&mut level))?;
        }
    }
    enough(level, blocking)?;
    let version = version(held)?;
    log::info!("{version}");
    let library = Library { in_place: in_place(&version), level };
    Ok(*LIBRARY.get_or_init(|| library))
}

/// The library's name and version, in one line.
fn version(_held: &Held) -> Result<String, Error> {
    // SAFETY: read only; a constant of the library.
    let room = unsafe { mpi::RSMPI_MAX_LIBRARY_VERSION_STRING };
    let mut text = vec![0u8; usize::try_from(room).unwrap_or(0) + 1];
    let mut length = 0;
    // SAFETY: the text has as much room as the library asks for.
    let code = unsafe { mpi::MPI_Get_library_version(text.as_mut_ptr().cast(), &mut length) };
    check("MPI_Get_library_version", code)?;
    text.truncate(usize::try_from(length).unwrap_or(0));
    Ok(String::from_utf8_lossy(&text).lines().next().unwrap_or_default().trim_end_matches('\0').to_owned())
}

/// `MPI_IN_PLACE` is a macro, which the bindings do not have. Its value is from the library's `mpi.h`. MPICH 4.0 takes its own,
/// -1, for an address in some blocking calls, and crashes.
fn in_place(version: &str) -> Option<usize> {
    version.starts_with("Open MPI").then_some(1)
}

impl Library {
    /// In the place of an input that is in the output.
    pub fn in_place(&self) -> Option<*const c_void> {
        self.in_place.map(ptr::without_provenance)
    }
}

/// Whether the program has not ended MPI.
pub(super) fn is_up(_held: &Held) -> bool {
    let mut down = 0;
    // SAFETY: it may be called at any time, and gets a place for a number.
    let code = unsafe { mpi::MPI_Finalized(&mut down) };
    code == mpi::MPI_SUCCESS as c_int && down == 0
}

/// Ends MPI, which waits for all ranks to do so. Where requests were given up, a rank may never come: Open MPI 4.1 crashes
/// at its end with a collective that is not done, and its launcher may hang when a process ends without.
pub(super) fn end(_held: &Held) {
    // SAFETY: MPI is up, as the caller has seen, and no thread of this process uses it any more.
    unsafe {
        if ABANDONED.load(Ordering::Relaxed) {
            eprintln!("bonfire: after a failure MPI cannot be ended in good order; ending the job with MPI_Abort");
            mpi::MPI_Abort(mpi::RSMPI_COMM_WORLD, 1);
        } else {
            mpi::MPI_Finalize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::in_place;

    #[test]
    fn libraries_are_known_by_what_they_say() {
        assert_eq!(in_place("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"), Some(1));
        assert_eq!(in_place("MPICH Version:\t4.0.2"), None);
        assert_eq!(in_place("Some MPI 1.0"), None);
    }
}
