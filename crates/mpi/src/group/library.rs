//! The MPI library: initialized with the first group, finalized with the process, used by one thread at a time.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use bonfire_core::Error;
use bonfire_core::internal::lock;
use mpi_sys as mpi;

/// The MPI lock. Every call into MPI is made under it, as `MPI_THREAD_SERIALIZED` requires.
static LOCK: Mutex<()> = Mutex::new(());

/// Whether requests were abandoned that MPI still works on.
static ABANDONED: AtomicBool = AtomicBool::new(false);

/// A guard of the MPI lock: proof that this thread may call MPI.
pub(super) struct Held(#[expect(dead_code, reason = "held until this is dropped")] MutexGuard<'static, ()>);

/// Takes the MPI lock.
pub(super) fn hold() -> Held {
    Held(lock(&LOCK))
}

/// Takes the MPI lock, unless another thread holds it for longer than `limit`.
pub(super) fn try_hold(limit: Duration) -> Option<Held> {
    let until = Instant::now() + limit;
    loop {
        match LOCK.try_lock() {
            Ok(guard) => return Some(Held(guard)),
            Err(TryLockError::Poisoned(guard)) => return Some(Held(guard.into_inner())),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Err(TryLockError::WouldBlock) => return None,
        }
    }
}

/// Records that a request was abandoned. The memory that MPI accesses for it must never be freed.
pub(super) fn abandon() {
    ABANDONED.store(true, Ordering::Relaxed);
}

/// Ends the whole job, because this rank can neither continue nor return: MPI has its caller's memory.
pub(super) fn abort(rank: usize, why: &str) -> ! {
    // Printed too: the log may be off, and the process ends here.
    eprintln!("bonfire: rank {rank}: {why}; ending the job with MPI_Abort");
    log::error!("rank {rank}: {why}; ending the job with MPI_Abort");
    // SAFETY: MPI is initialized, because there is a group. Another thread may be in a call, but this function is meant
    // for processes that cannot continue.
    unsafe { mpi::MPI_Abort(mpi::RSMPI_COMM_WORLD, 1) };
    std::process::abort()
}

/// Converts the return code of an MPI function to a result.
pub(super) fn check(function: &str, code: c_int) -> Result<(), Error> {
    if code == mpi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; mpi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: the buffer has space for the longest message and its terminator. The caller holds the MPI lock.
    unsafe { mpi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let text = &text[..usize::try_from(length).unwrap_or(0).min(text.len())];
    Err(Error::Mpi { function: function.into(), code, reason: String::from_utf8_lossy(text).trim().to_owned() })
}

/// Properties of the initialized library.
#[derive(Clone, Copy)]
pub(super) struct Library {
    /// The value of `MPI_IN_PLACE`, if it is known for this library.
    pub in_place: Option<usize>,
    /// The thread level that the library provides.
    level: c_int,
}

/// Rejects a thread level below `MPI_THREAD_SERIALIZED` for non-blocking groups, whose threads take turns.
fn check_thread_level(level: c_int, blocking: bool) -> Result<(), Error> {
    // SAFETY: a constant of the library.
    if blocking || level >= unsafe { mpi::RSMPI_THREAD_SERIALIZED } {
        return Ok(());
    }
    let reason = "MPI does not allow threads to take turns, which groups on 'mpi' need: initialize it with \
                  MPI_THREAD_SERIALIZED or more, make the first group of the process one on 'mpi' and not on \
                  'mpi-blocking', or give this one 'mpi-blocking'";
    Err(Error::Config(reason.into()))
}

/// Initializes MPI, unless this function or the program has done so already. If this call does, `finalize` is called at
/// the end of the process.
///
/// For blocking groups MPI is initialized as by `MPI_Init`, with `MPI_THREAD_SINGLE`. Open MPI 4.1 takes 0.42 µs for an
/// all_reduce of 8 bytes then, 0.58 with `MPI_THREAD_FUNNELED` and 0.74 with `MPI_THREAD_SERIALIZED` (medians of four
/// runs). The standard allows one thread at this level, but under the lock a library cannot tell several from one.
pub(super) fn start(held: &Held, blocking: bool, finalize: extern "C" fn()) -> Result<Library, Error> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if !is_up(held) {
        return Err(Error::Config("the program has called MPI_Finalize, and MPI cannot be started again".into()));
    }
    if let Some(library) = LIBRARY.get() {
        check_thread_level(library.level, blocking)?;
        return Ok(*library);
    }
    let (mut initialized, mut level) = (0, 0);
    // SAFETY: the function may be called before MPI is initialized, and gets the address of an integer.
    unsafe { check("MPI_Initialized", mpi::MPI_Initialized(&mut initialized))? };
    // SAFETY: MPI is initialized only if it is not yet, without arguments. Otherwise it is only queried.
    unsafe {
        if initialized == 0 {
            let wanted = if blocking { mpi::RSMPI_THREAD_SINGLE } else { mpi::RSMPI_THREAD_SERIALIZED };
            check("MPI_Init_thread", mpi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), wanted, &mut level))?;
            // Only here: a program that has initialized MPI also finalizes it.
            if libc::atexit(finalize) != 0 {
                log::warn!("MPI will not be finalized with the process, and its launcher may complain");
            }
            // Makes calls without a communicator return errors too. A program that initialized MPI made its own choice.
            for comm in [mpi::RSMPI_COMM_WORLD, mpi::RSMPI_COMM_SELF] {
                check("MPI_Comm_set_errhandler", mpi::MPI_Comm_set_errhandler(comm, mpi::RSMPI_ERRORS_RETURN))?;
            }
        } else {
            check("MPI_Query_thread", mpi::MPI_Query_thread(&mut level))?;
        }
    }
    check_thread_level(level, blocking)?;
    let version = version(held)?;
    log::info!("{version}");
    let library = Library { in_place: in_place(&version), level };
    Ok(*LIBRARY.get_or_init(|| library))
}

/// The library's name and version, in one line.
fn version(_held: &Held) -> Result<String, Error> {
    // SAFETY: a constant of the library, which is only read.
    let max_length = unsafe { mpi::RSMPI_MAX_LIBRARY_VERSION_STRING };
    let mut text = vec![0u8; usize::try_from(max_length).unwrap_or(0) + 1];
    let mut length = 0;
    // SAFETY: the buffer has as much space as the library requires.
    let code = unsafe { mpi::MPI_Get_library_version(text.as_mut_ptr().cast(), &mut length) };
    check("MPI_Get_library_version", code)?;
    text.truncate(usize::try_from(length).unwrap_or(0));
    Ok(String::from_utf8_lossy(&text).lines().next().unwrap_or_default().trim_end_matches('\0').to_owned())
}

/// The value of `MPI_IN_PLACE`, a macro that the bindings lack. It is known for Open MPI, from its `mpi.h`. MPICH 4.0
/// takes its own value, -1, for an address in some blocking calls, and crashes.
fn in_place(version: &str) -> Option<usize> {
    version.starts_with("Open MPI").then_some(1)
}

impl Library {
    /// The address to pass as the input of an in-place operation, if it is known.
    pub fn in_place(&self) -> Option<*const c_void> {
        self.in_place.map(ptr::without_provenance)
    }
}

/// Whether MPI has not been finalized.
pub(super) fn is_up(_held: &Held) -> bool {
    let mut finalized = 0;
    // SAFETY: the function may be called at any time, and gets the address of an integer.
    let code = unsafe { mpi::MPI_Finalized(&mut finalized) };
    code == mpi::MPI_SUCCESS as c_int && finalized == 0
}

/// Finalizes MPI, which waits until all ranks do so. If requests were abandoned, this ends the job instead: a rank may
/// be missing forever, Open MPI 4.1 crashes when it is finalized with a pending collective, and its launcher may hang
/// (in `PMIx_server_finalize`) when a process ends without finalizing.
pub(super) fn end(_held: &Held) {
    // SAFETY: MPI is not finalized, as the caller has checked, and no thread of this process uses it any more.
    unsafe {
        if ABANDONED.load(Ordering::Relaxed) {
            eprintln!("bonfire: MPI cannot be finalized after a failure; ending the job with MPI_Abort");
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
    fn libraries_are_recognized_by_their_version_text() {
        assert_eq!(in_place("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"), Some(1));
        assert_eq!(in_place("MPICH Version:\t4.0.2"), None);
        assert_eq!(in_place("Some MPI 1.0"), None);
    }
}
