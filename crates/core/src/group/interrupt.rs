//! Leaves groups gracefully on SIGINT (Ctrl-C) and SIGTERM.
//!
//! A signal with another action than the default is the program's: one that is ignored, as in background jobs of a
//! shell, or that has a handler, whether the program installed it before or after its first group. So this module
//! installs a handler of its own and looks, when a signal arrives, whether it is still the one that the system calls.
//! Libraries for handlers that share signals (signal-hook, tokio) call the handler that they replaced.

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use libc::{SA_RESTART, SIG_DFL, SIGINT, SIGTERM, c_int, sigaction, sighandler_t};
use rustix::net::{SendFlags, send};
use rustix::process::getpid;

use super::core::Core;
use crate::sync::{Mutex, lock};
use crate::types::Error;

static REGISTERED: OnceLock<Mutex<Registered>> = OnceLock::new();

/// The socket to the thread that waits, open until the process ends, and the process that has the thread.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static PROCESS: AtomicI32 = AtomicI32::new(0);

#[derive(Default)]
struct Registered {
    /// The groups to leave.
    groups: Vec<Weak<Core>>,
    /// Whether a thread waits for the signals.
    watched: bool,
}

/// Registers `new` if `old` is registered.
pub(super) fn inherit(old: &Arc<Core>, new: &Arc<Core>) {
    let Some(registered) = REGISTERED.get() else { return };
    let mut registered = lock(registered);
    if registered.groups.iter().any(|core| std::ptr::eq(core.as_ptr(), Arc::as_ptr(old))) {
        registered.groups.push(Arc::downgrade(new));
    }
}

/// Registers `core` to be left when SIGINT or SIGTERM arrives. The signal then takes its default action.
pub(super) fn leave_on_interrupt(core: &Arc<Core>) -> Result<(), Error> {
    let shared = REGISTERED.get_or_init(Mutex::default);
    let mut registered = lock(shared);
    if !registered.watched {
        // It may fail for lack of descriptors, and is tried again for the next group.
        watch(shared).map_err(|e| Error::io("watching for SIGINT and SIGTERM", e))?;
        registered.watched = true;
    }
    registered.groups.retain(|core| core.strong_count() > 0);
    registered.groups.push(Arc::downgrade(core));
    Ok(())
}

/// Leaves all groups side by side: each waits until its last bytes have arrived. Meanwhile the traces are saved: the
/// job may hang, and be interrupted for that reason.
fn leave(groups: &[Arc<Core>]) {
    std::thread::scope(|scope| {
        for core in groups {
            let leave = || core.executor.transport.leave();
            if std::thread::Builder::new().name("bonfire-leave".into()).spawn_scoped(scope, leave).is_err() {
                leave();
            }
        }
        groups.iter().for_each(|core| core.save_trace());
    });
}

/// Starts the thread that waits for the signals, and installs the handlers.
fn watch(registered: &'static Mutex<Registered>) -> io::Result<()> {
    let (signals, socket) = UnixStream::pair()?;
    std::thread::Builder::new().name("bonfire-signals".into()).spawn(move || wait(signals, registered))?;
    // Release: a handler that is installed below, on any thread, sees both. Pairs with the loads there.
    PROCESS.store(getpid().as_raw_pid(), Ordering::Release);
    SOCKET.store(socket.into_raw_fd(), Ordering::Release);
    for signal in [SIGINT, SIGTERM] {
        install(signal)?;
    }
    Ok(())
}

/// Leaves the groups when a signal arrives that is not the program's own.
fn wait(mut signals: UnixStream, registered: &Mutex<Registered>) {
    let mut signal = [0];
    // The other end is never closed.
    while signals.read_exact(&mut signal).is_ok() {
        let signal = c_int::from(signal[0]);
        if !action(signal).is_ok_and(|action| action.sa_sigaction == on_signal_address()) {
            log::info!("the program handles signal {signal} itself: its groups stay as they are");
            continue;
        }
        let groups = std::mem::take(&mut lock(registered).groups);
        let groups: Vec<_> = groups.iter().filter_map(Weak::upgrade).collect();
        leave(&groups);
        if let Err(error) = signal_hook::low_level::emulate_default_handler(signal) {
            log::error!("could not run the default action of signal {signal}: {error}");
        }
    }
}

/// Passes the signal to the thread. In a forked child, which has no such thread, the signal takes its default action.
extern "C" fn on_signal(signal: c_int) {
    // Acquire: pairs with the stores in `watch`, before which no handler is installed.
    if getpid().as_raw_pid() != PROCESS.load(Ordering::Acquire) {
        // SAFETY: both calls are async-signal-safe, and take numbers only. The signal is raised when this handler
        // returns, as it is blocked until then.
        unsafe {
            libc::signal(signal, SIG_DFL);
            libc::raise(signal);
        }
        return;
    }
    // SAFETY: the socket is open until the process ends, as `watch` gave up its ownership.
    let socket = unsafe { BorrowedFd::borrow_raw(SOCKET.load(Ordering::Acquire)) };
    // Async-signal-safe: one system call, which does not wait. It fails if hundreds of signals wait for the thread.
    let _ = send(socket, &[signal as u8], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

fn on_signal_address() -> sighandler_t {
    on_signal as *const () as sighandler_t
}

/// Installs the handler if the signal has its default action.
fn install(signal: c_int) -> io::Result<()> {
    if action(signal)?.sa_sigaction != SIG_DFL {
        log::debug!("signal {signal} is ignored or has a handler already: it is left to the program");
        return Ok(());
    }
    // SAFETY: zeros are a valid `sigaction`: numbers, a set of signals, and no function.
    let mut new: sigaction = unsafe { std::mem::zeroed() };
    (new.sa_sigaction, new.sa_flags) = (on_signal_address(), SA_RESTART);
    // SAFETY: the pointer is that of a whole `sigaction`, and the handler is async-signal-safe and takes one number.
    check(unsafe { sigaction(signal, &new, ptr::null_mut()) })
}

/// Returns what happens when the signal arrives.
fn action(signal: c_int) -> io::Result<sigaction> {
    let mut now = MaybeUninit::<sigaction>::uninit();
    // SAFETY: the pointer is that of memory for a `sigaction`, which a call that succeeds fills; nothing is changed.
    unsafe {
        check(sigaction(signal, ptr::null(), now.as_mut_ptr()))?;
        Ok(now.assume_init())
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
