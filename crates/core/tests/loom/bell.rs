//! Models of `sync::Bell`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use loom::thread;

use super::check;
use crate::sync::{AtomicU64, Bell, Cell, Ordering};

/// A sleeper that misses its ring sleeps forever, which loom reports as a deadlock.
#[test]
fn no_ring_is_lost() {
    check(3, || {
        let shared = Arc::new((Bell::default(), AtomicU64::new(0), Cell::new(0u64)));
        let ringer = thread::spawn({
            let shared = shared.clone();
            move || {
                let (bell, changed, data) = &*shared;
                // SAFETY: the reader accesses `data` only after it has seen `changed`.
                unsafe { *data.writing() = 7 };
                changed.store(1, Ordering::Release);
                bell.ring();
            }
        });
        let (bell, changed, data) = &*shared;
        let far = Instant::now() + Duration::from_secs(1_000_000);
        assert!(bell.sleep(far, || changed.load(Ordering::Acquire) == 1));
        // SAFETY: `changed` is set, so the writer no longer accesses `data`.
        assert_eq!(unsafe { *data.reading() }, 7);
        ringer.join().unwrap();
    });
}
