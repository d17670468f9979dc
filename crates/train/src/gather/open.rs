//! The passes that a thread has open at a time, of several models.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::protocol::OPERATION;
use bonfire_core::Error;

thread_local! {
    static OPEN: RefCell<Vec<Weak<AtomicBool>>> = const { RefCell::new(Vec::new()) };
}

/// An open pass, until it is dropped. The value is whether it is *uneven*: the ranks do not all run it, or not all as
/// their last one.
///
/// At the end of an uneven pass a rank serves its model until the others have ended their step. If they have passes of
/// two models open at a time, they need it for the other model first: it would never come.
pub(super) struct OpenPass(Arc<AtomicBool>);

impl OpenPass {
    pub fn new() -> OpenPass {
        let pass = Arc::default();
        OPEN.with_borrow_mut(|open| {
            open.retain(|pass| pass.strong_count() > 0);
            open.push(Arc::downgrade(&pass));
        });
        OpenPass(pass)
    }

    pub fn set_uneven(&self) {
        // Relaxed, as below: read by the thread that runs both passes. If another thread does, their ranks wait for
        // each other until the deadline.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Fails if two passes are open, and one of them is uneven.
    pub fn check(&self) -> Result<(), Error> {
        let open: Vec<_> = OPEN.with_borrow(|open| open.iter().filter_map(Weak::upgrade).collect());
        if open.len() < 2 || !open.iter().any(|pass| pass.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let reason = "some ranks run a pass that others do not, with several sharded models at a time; run as many \
                      passes on all ranks, or those of one model after those of another";
        Err(Error::broken(OPERATION, reason))
    }
}
