//! A watchdog for calls that block in MPI until all ranks have made them. It ends the job at their deadlines.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bonfire_core::error::Site;
use bonfire_core::{Deadline, Error};

use super::agreement::{tag_of, words};
use super::library::abort;

/// Time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A call that blocks in MPI.
#[derive(Clone, Copy)]
pub(super) enum WatchedCall {
    Operation(Site),
    Connect,
    Subgroup,
}

impl fmt::Display for WatchedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WatchedCall::Operation(site) => site.fmt(f),
            WatchedCall::Connect => f.write_str("making a group"),
            WatchedCall::Subgroup => f.write_str("making a subgroup"),
        }
    }
}

/// Monitors one group's calls, of which there is one at a time. It uses atomics, because a lock would cost as much as
/// the rest of a small call.
pub(super) struct Watchdog {
    epoch: Instant,
    /// The start and the deadline of the call, in nanoseconds since `epoch`. The deadline is 0 between calls.
    began: AtomicU64,
    ends: AtomicU64,
    /// The call: the words of an operation's tag, valid if `kind` is 0; else the number of another kind.
    tag: [AtomicU64; Site::BYTES / 8],
    kind: AtomicU64,
}

impl Watchdog {
    pub fn start(rank: usize) -> Result<Arc<Watchdog>, Error> {
        let watchdog = Arc::new(Watchdog {
            epoch: Instant::now(),
            began: AtomicU64::new(0),
            ends: AtomicU64::new(0),
            tag: Default::default(),
            kind: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&watchdog);
        std::thread::Builder::new()
            .name(format!("bonfire-watchdog-{rank}"))
            .spawn(move || Watchdog::run(&weak, rank))
            .map_err(|e| Error::io("starting the watchdog", e))?;
        Ok(watchdog)
    }

    fn run(watchdog: &Weak<Watchdog>, rank: usize) {
        while let Some(watchdog) = watchdog.upgrade() {
            let now = watchdog.nanoseconds(Instant::now());
            // Acquire pairs with the release in `watch`: the other fields describe this call, which has blocked for
            // long.
            let ends = watchdog.ends.load(Ordering::Acquire);
            if ends != 0 && now > ends {
                let elapsed = Duration::from_nanos(now - watchdog.began.load(Ordering::Relaxed));
                abort(rank, &format!("{} has blocked for {elapsed:.1?}, longer than its deadline", watchdog.label()));
            }
            drop(watchdog);
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    fn nanoseconds(&self, instant: Instant) -> u64 {
        nanoseconds(instant.saturating_duration_since(self.epoch))
    }

    fn label(&self) -> String {
        let tag = tag_of(&self.tag.each_ref().map(|word| word.load(Ordering::Relaxed)));
        let site = tag.map(WatchedCall::Operation);
        match (self.kind.load(Ordering::Relaxed), site) {
            (0, Some(work)) => work,
            (1, _) => WatchedCall::Connect,
            _ => WatchedCall::Subgroup,
        }
        .to_string()
    }

    /// Runs `call`, and ends the job if it has not returned by its deadline.
    pub fn watch<T>(&self, watched: WatchedCall, deadline: &Deadline, call: impl FnOnce() -> T) -> T {
        let kind = match watched {
            WatchedCall::Operation(site) => {
                self.tag.iter().zip(words(&site)).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
                0
            }
            WatchedCall::Connect => 1,
            WatchedCall::Subgroup => 2,
        };
        self.kind.store(kind, Ordering::Relaxed);
        let began = self.nanoseconds(deadline.start());
        self.began.store(began, Ordering::Relaxed);
        self.ends.store(began.saturating_add(nanoseconds(deadline.limit())).max(1), Ordering::Release);
        let result = call();
        self.ends.store(0, Ordering::Release);
        result
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
