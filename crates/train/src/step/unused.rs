//! Notices a training that exchanges no gradients.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bonfire_core::Group;
use bonfire_core::internal::warn;

/// Whether a training has been used for more than the first broadcast. If it is dropped before, the rank may have
/// trained alone. Only the program knows, and its results count: the suspicion is a warning in the log.
pub struct Unused {
    group: Group,
    // Relaxed: it is read when no other thread has a reference any more.
    used: AtomicBool,
}

impl Unused {
    /// The training of a group, which has exchanged nothing yet. A single rank need not, nor one without parameters to
    /// train.
    pub fn new(group: &Group, trains: bool) -> Unused {
        Unused { group: group.clone(), used: AtomicBool::new(group.world_size() == 1 || !trains) }
    }

    /// A call exchanges gradients or metrics, compares models, or takes over a state.
    pub fn end(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// Returns a warning if the training ends now, unless it was used.
    fn warning(&self) -> Option<&'static str> {
        // A failure has its own error.
        let is_fine = self.used.load(Ordering::Relaxed) || thread::panicking() || self.group.failure().is_some();
        (!is_fine).then_some(
            "a model was distributed, but its gradients were never exchanged: if it was trained, each rank has other \
             weights now. Make every step with `run`, passes or `sync`; `verify` compares the ranks' models",
        )
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        if let Some(warning) = self.warning() {
            warn(format_args!("rank {}: {warning}", self.group.rank()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::Error;
    use bonfire_core::internal::AgreedOperations;

    #[test]
    fn only_ranks_that_may_have_trained_alone_are_warned() {
        let warning = |ranks, trains, used: fn(&Unused)| {
            let unused = Unused::new(&Group::threads(ranks).unwrap()[0], trains);
            used(&unused);
            unused.warning().is_some()
        };
        assert!(warning(2, true, |_| ()));
        assert!(!warning(2, true, Unused::end));
        assert!(!warning(2, false, |_| ()));
        assert!(!warning(1, true, |_| ()));
        assert!(!warning(2, true, |unused| drop(unused.group.abandon(Error::argument("test", "on purpose")))));
    }
}
