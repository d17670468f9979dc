//! Leaves groups gracefully on SIGINT (Ctrl-C) and SIGTERM.

use std::sync::{Arc, OnceLock, Weak};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::core::Core;
use crate::sync::{Mutex, lock};
use crate::types::Error;

/// The groups to leave.
static REGISTERED: OnceLock<Mutex<Vec<Weak<Core>>>> = OnceLock::new();

/// Registers `new` if `old` is registered.
pub(super) fn inherit(old: &Arc<Core>, new: &Arc<Core>) {
    let Some(registered) = REGISTERED.get() else { return };
    let mut registered = lock(registered);
    if registered.iter().any(|core| std::ptr::eq(core.as_ptr(), Arc::as_ptr(old))) {
        registered.push(Arc::downgrade(new));
    }
}

/// Registers `core` to be left when SIGINT or SIGTERM arrives. The signal then takes its default action.
pub(super) fn leave_on_interrupt(core: &Arc<Core>) -> Result<(), Error> {
    let mut first = false;
    let registered = REGISTERED.get_or_init(|| {
        first = true;
        Mutex::default()
    });
    {
        let mut registered = lock(registered);
        registered.retain(|core| core.strong_count() > 0);
        registered.push(Arc::downgrade(core));
    }
    if !first {
        return Ok(());
    }
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(|e| Error::io("watching for SIGINT and SIGTERM", e))?;
    let watch = move || {
        for signal in signals.forever() {
            let groups = std::mem::take(&mut *lock(registered));
            let groups: Vec<_> = groups.iter().filter_map(Weak::upgrade).collect();
            groups.iter().for_each(|core| core.executor.transport.leave());
            // The job may hang, and be interrupted for that reason.
            groups.iter().for_each(|core| core.save_trace());
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
