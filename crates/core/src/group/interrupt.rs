//! Leaves groups gracefully on SIGINT (Ctrl-C), SIGTERM and the stop signal.
//!
//! A signal with another action than the default is the program's: one that is ignored, as in background jobs of a
//! shell, or that has a handler, whether the program installed it before or after its first group. So this module
//! installs a handler of its own and looks, when a signal arrives, whether it is still the one that the system calls.
//! Libraries for handlers that share signals (signal-hook, tokio) call the handler that they replaced.
//!
//! In a program that asks whether it should stop, the first stop signal does not end the process: it waits until the
//! ranks have agreed on a step, and the program has heard of it (`stop`). The process ends as without that if this
//! takes too long, or at a further signal.

use std::io::{self, ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use std::{process, ptr, thread};

use libc::{SA_RESTART, SIG_DFL, SIGINT, SIGTERM, c_int, sigaction, sighandler_t};
use rustix::net::{SendFlags, send};
use rustix::process::getpid;

use super::core::Core;
use super::stop;
use crate::rendezvous::StopSettings;
use crate::report;
use crate::sync::{Mutex, lock};
use crate::types::Error;

/// How long a process that was asked to stop has: as long as `bonfire run` gives its ranks.
const GRACE: Duration = Duration::from_secs(10);
/// Signals within this time are one request: some systems signal all processes of a job, of which the launcher passes
/// its own signal on.
const SAME_REQUEST: Duration = Duration::from_secs(1);
/// How long a line that nothing reads may delay the end of the process.
const LONGEST_WRITE: Duration = Duration::from_secs(1);

static REGISTERED: OnceLock<Mutex<Registered>> = OnceLock::new();
/// Whether the program asks if it should stop, so that the stop signal waits for it.
static ASKS: AtomicBool = AtomicBool::new(false);

/// The socket to the thread that waits, open until the process ends, and the process that has the thread.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static PROCESS: AtomicI32 = AtomicI32::new(0);

#[derive(Default)]
struct Registered {
    /// The groups to leave.
    groups: Vec<Weak<Core>>,
    /// Whether a thread waits for the signals.
    watched: bool,
    /// The signals for which handlers were installed, or which were left to the program.
    seen: Vec<c_int>,
    stop: StopSettings,
}

impl Registered {
    fn stop_signal(&self) -> c_int {
        self.stop.signal.unwrap_or_default().as_raw()
    }

    /// Whether a signal asks the program to stop in order, and it can: no step ends if all groups have failed.
    fn can_stop_at(&self, signal: c_int) -> bool {
        let failed = |core: &Arc<Core>| core.failure().is_some() || core.executor.transport.known_failure().is_some();
        let groups: Vec<_> = self.groups.iter().filter_map(Weak::upgrade).collect();
        let have_failed = !groups.is_empty() && groups.iter().all(failed);
        signal == self.stop_signal() && (stop::is_heard() || !have_failed)
    }

    /// Catches signals from now on. It may fail for lack of descriptors, and can then be tried again.
    fn catch(&mut self, signals: &[c_int]) -> Result<(), Error> {
        let failed = |e| Error::io("watching for signals that end the process", e);
        if !self.watched {
            watch().map_err(failed)?;
            self.watched = true;
        }
        for signal in signals {
            if !self.seen.contains(signal) {
                install(*signal).map_err(failed)?;
                self.seen.push(*signal);
            }
        }
        Ok(())
    }
}

fn registered() -> &'static Mutex<Registered> {
    REGISTERED.get_or_init(Mutex::default)
}

/// Registers `new` if `old` is registered.
pub(super) fn inherit(old: &Arc<Core>, new: &Arc<Core>) {
    let Some(registered) = REGISTERED.get() else { return };
    let mut registered = lock(registered);
    if registered.groups.iter().any(|core| ptr::eq(core.as_ptr(), Arc::as_ptr(old))) {
        registered.groups.push(Arc::downgrade(new));
    }
}

/// Sets how this process is asked to stop. Of several groups, the last that sets it counts.
pub(super) fn set_stop(StopSettings { signal, grace }: StopSettings) {
    if signal.is_none() && grace.is_none() {
        return;
    }
    let mut registered = lock(registered());
    let (old, before) = (registered.stop, registered.stop_signal());
    registered.stop = StopSettings { signal: signal.or(old.signal), grace: grace.or(old.grace) };
    if registered.stop_signal() != before {
        // The program's next question catches the new signal.
        ASKS.store(false, Ordering::Relaxed);
    }
}

/// Says that the program of a rank, after so many steps, asks whether it should stop, and what it hears. From the first
/// call on, the stop signal waits for the end of a step.
pub fn answer_stop(steps: u64, stop: bool) {
    if stop::answer(steps, stop) {
        report::stops(steps);
    }
    // Relaxed, as in `set_stop` and `wait`: the handler is installed by a system call before the signal can arrive.
    if ASKS.load(Ordering::Relaxed) {
        return;
    }
    let mut registered = lock(registered());
    let signal = registered.stop_signal();
    match registered.catch(&[signal]) {
        Ok(()) => ASKS.store(true, Ordering::Relaxed),
        Err(error) => log::warn!("a signal ends this process at once, and not after a step: {error}"),
    }
}

/// Registers `core` to be left when SIGINT, SIGTERM or the stop signal arrives and ends the process.
pub(super) fn leave_on_interrupt(core: &Arc<Core>) -> Result<(), Error> {
    let mut registered = lock(registered());
    let stop = registered.stop_signal();
    registered.catch(&[SIGINT, SIGTERM, stop])?;
    registered.groups.retain(|core| core.strong_count() > 0);
    registered.groups.push(Arc::downgrade(core));
    Ok(())
}

/// Leaves all groups side by side: each waits until its last bytes have arrived. Meanwhile the traces are saved: the
/// job may hang, and be interrupted for that reason.
fn leave(groups: &[Arc<Core>]) {
    thread::scope(|scope| {
        for core in groups {
            let leave = || core.executor.transport.leave();
            if thread::Builder::new().name("bonfire-leave".into()).spawn_scoped(scope, leave).is_err() {
                leave();
            }
        }
        groups.iter().for_each(|core| core.save_trace());
    });
}

/// Starts the thread that waits for the signals.
fn watch() -> io::Result<()> {
    let (signals, socket) = UnixStream::pair()?;
    thread::Builder::new().name("bonfire-signals".into()).spawn(move || wait(signals))?;
    // Release: a handler that is installed afterwards, on any thread, sees both. Pairs with the loads there.
    PROCESS.store(getpid().as_raw_pid(), Ordering::Release);
    SOCKET.store(socket.into_raw_fd(), Ordering::Release);
    Ok(())
}

/// A request to stop that this process has got.
struct Request {
    signal: c_int,
    since: Instant,
    /// How long the ranks may take to agree. `None` once the program has heard that they have.
    limit: Option<Duration>,
}

impl Request {
    fn new(signal: c_int) -> Request {
        let grace = lock(registered()).stop.grace.unwrap_or(GRACE);
        // A launcher kills after the grace. What this process does then comes before.
        let limit = grace.mul_f64(0.9);
        Request { signal, since: Instant::now(), limit: (!stop::is_heard()).then_some(limit) }
    }

    /// Returns how long to wait for the next signal: at least 1 ms, because a read timeout of zero is an error.
    fn left(&self) -> Option<Duration> {
        let left = self.limit?.saturating_sub(self.since.elapsed());
        Some(left.max(Duration::from_millis(1)))
    }
}

/// Ends the process, or has it stop, when a signal arrives that is not the program's own.
fn wait(mut signals: UnixStream) {
    let mut request: Option<Request> = None;
    let mut number = [0];
    loop {
        // It is no error for such a socket and such a time.
        let _ = signals.set_read_timeout(request.as_ref().and_then(Request::left));
        match signals.read_exact(&mut number) {
            Ok(()) => on_arrival(number[0].into(), &mut request),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let Some(Request { signal, limit, .. }) = &mut request else { continue };
                let limit = limit.take().unwrap_or_default();
                if !stop::is_heard() {
                    let (name, step) = (name(*signal), stop::next_step());
                    end(
                        *signal,
                        Some(&|who| {
                            format!(
                                "{who} was asked to stop by {name}, but step {step} has not ended within {limit:.1?}"
                            )
                        }),
                    );
                }
            }
            // The other end is never closed.
            Err(_) => return,
        }
    }
}

fn on_arrival(signal: c_int, request: &mut Option<Request>) {
    if !action(signal).is_ok_and(|action| action.sa_sigaction == on_signal_address()) {
        log::info!("the program handles signal {signal} itself: its groups stay as they are");
        return;
    }
    match request {
        None if ASKS.load(Ordering::Relaxed) && lock(registered()).can_stop_at(signal) => {
            *request = Some(Request::new(signal));
            stop::request_stop();
            log::info!("{}: all ranks are asked to stop after a step", name(signal));
        }
        Some(request) if signal == request.signal && request.since.elapsed() < SAME_REQUEST => {}
        Some(_) => {
            let name = name(signal);
            end(signal, Some(&|who| format!("{who} got {name} after it was asked to stop")));
        }
        None => end(signal, None),
    }
}

/// Leaves the groups, and runs the default action of a signal, which ends the process. `why` gets a name of the process
/// and returns what to say before.
fn end(signal: c_int, why: Option<&dyn Fn(&str) -> String>) {
    let groups = std::mem::take(&mut lock(registered()).groups);
    let groups: Vec<_> = groups.iter().filter_map(Weak::upgrade).collect();
    let said = why.map(|why| say(format!("bonfire: {}: it ends at once", why(&who(&groups)))));
    leave(&groups);
    if let Some(said) = said {
        let _ = said.recv_timeout(LONGEST_WRITE);
    }
    if let Err(error) = signal_hook::low_level::emulate_default_handler(signal) {
        log::error!("could not run the default action of signal {signal}: {error}");
    }
}

/// Returns the name of this process as a rank, if it is one.
fn who(groups: &[Arc<Core>]) -> String {
    match groups {
        [first, others @ ..] if others.iter().all(|core| core.rank() == first.rank()) => {
            format!("rank {}", first.rank())
        }
        _ => format!("process {}", process::id()),
    }
}

/// Writes a line to standard error: the program may have no logger. What it returns is closed when the line is written.
fn say(line: String) -> Receiver<()> {
    let (sender, written) = channel();
    let write = move || {
        let _ = writeln!(io::stderr(), "{line}");
        drop(sender);
    };
    let _ = thread::Builder::new().name("bonfire-signals-say".into()).spawn(write);
    written
}

fn name(signal: c_int) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// How a handler sends. Apple's systems have no flag against SIGPIPE; the other end is open for as long as the process
/// lives, so there is none.
#[cfg(target_vendor = "apple")]
const DO_NOT_WAIT: SendFlags = SendFlags::DONTWAIT;
#[cfg(not(target_vendor = "apple"))]
const DO_NOT_WAIT: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

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
    let _ = send(socket, &[signal as u8], DO_NOT_WAIT);
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
