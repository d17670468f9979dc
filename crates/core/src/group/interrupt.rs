//! Ctrl-C as a farewell.

use std::sync::{Arc, OnceLock, Weak};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::core::Core;
use crate::sync::{Mutex, lock};
use crate::types::Error;

/// The groups that say farewell.
static LIVE: OnceLock<Mutex<Vec<Weak<Core>>>> = OnceLock::new();

/// Says farewell for `new` too if it does for `old`.
pub(super) fn leave_as(old: &Arc<Core>, new: &Arc<Core>) {
    let Some(live) = LIVE.get() else { return };
    let mut live = lock(live);
    if live.iter().any(|core| std::ptr::eq(core.as_ptr(), Arc::as_ptr(old))) {
        live.push(Arc::downgrade(new));
    }
}

/// Says farewell for `core` when SIGINT or SIGTERM comes, then lets the signal do what it does by default.
pub(super) fn leave_on_interrupt(core: &Arc<Core>) -> Result<(), Error> {
    let mut fresh = false;
    let live = LIVE.get_or_init(|| {
        fresh = true;
        Mutex::default()
    });
    {
        let mut live = lock(live);
        live.retain(|core| core.strong_count() > 0);
        live.push(Arc::downgrade(core));
    }
    if !fresh {
        return Ok(());
    }
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(|e| Error::io("watching for SIGINT and SIGTERM", e))?;
    let watch = move || {
        for signal in signals.forever() {
            let groups = std::mem::take(&mut *lock(live));
            let groups: Vec<_> = groups.iter().filter_map(Weak::upgrade).collect();
            groups.iter().for_each(|core| core.executor.transport.leave());
            // A job that hangs may be ended this way.
            groups.iter().for_each(|core| core.leave_trace());
            if let Err(error) = signal_hook::low_level::emulate_default_handler(signal) {
                log::error!("signal {signal} could not be passed on: {error}");
            }
        }
    };
    std::thread::Builder::new()
        .name("bonfire-signals".into())
        .spawn(watch)
        .map(drop)
        .map_err(|e| Error::io("starting the signal thread", e))
}
