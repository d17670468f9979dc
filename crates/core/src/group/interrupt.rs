//! Leaves groups gracefully on SIGINT (Ctrl-C) and SIGTERM.

use std::sync::{Arc, OnceLock, Weak};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::core::Core;
use crate::sync::{Mutex, lock};
use crate::types::Error;

static REGISTERED: OnceLock<Mutex<Registered>> = OnceLock::new();

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
        watch(shared)?;
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

/// Starts the thread that waits for the signals.
fn watch(registered: &'static Mutex<Registered>) -> Result<(), Error> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(|e| Error::io("watching for SIGINT and SIGTERM", e))?;
    let watch = move || {
        for signal in signals.forever() {
            let groups = std::mem::take(&mut lock(registered).groups);
            let groups: Vec<_> = groups.iter().filter_map(Weak::upgrade).collect();
            leave(&groups);
            if let Err(error) = signal_hook::low_level::emulate_default_handler(signal) {
                log::error!("could not run the default action of signal {signal}: {error}");
            }
        }
    };
    std::thread::Builder::new()
        .name("bonfire-signals".into())
        .spawn(watch)
        .map(drop)
        .map_err(|e| Error::io("starting the signal thread", e))
}
