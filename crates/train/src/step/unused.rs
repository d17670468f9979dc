//! Notices a training that exchanges no gradients.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};

/// Whether a training has been used for more than the first broadcast. If it is dropped before, the rank has trained
/// alone, or not at all. Only the program knows which, so what has launched the rank returns an error, even if the rank
/// succeeds. Where nothing has, the error is logged.
pub struct Unused {
    group: Group,
    // Relaxed: it is read when no other thread has a reference any more.
    used: AtomicBool,
}

impl Unused {
    /// The training of a group, which has exchanged nothing yet. A single rank need not.
    pub fn new(group: &Group) -> Unused {
        Unused { group: group.clone(), used: AtomicBool::new(group.world_size() == 1) }
    }

    /// A call exchanges gradients, compares models, or takes over a state.
    pub fn end(&self) {
        self.used.store(true, Ordering::Relaxed);
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        // A failure has its own error.
        if *self.used.get_mut() || thread::panicking() || self.group.failure().is_some() {
            return;
        }
        let reason = "the model was distributed, but its gradients were never exchanged: if it was trained, each rank \
                      has other weights now. Make every step with `run`, passes or `sync`. If it was not trained, say \
                      so with `verify` or `average_states`, which compare the ranks' models";
        let error = Error::argument("DataParallel", reason);
        if !self.group.object(error.clone()) {
            log::warn!("{error}");
        }
    }
}
