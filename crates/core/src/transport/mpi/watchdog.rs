//! Deadlines of calls that block in MPI, and cannot return before all ranks have come: the watchdog ends the job.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::arrival::{tag_of, words};
use super::library::abort;
use crate::sync::Deadline;
use crate::types::{Error, Site};

/// How often it looks.
const LOOK: Duration = Duration::from_millis(100);

/// What blocks in MPI.
#[derive(Clone, Copy)]
pub(super) enum Work {
    Operation(Site),
    Connect,
    Subgroup,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Operation(site) => site.fmt(f),
            Work::Connect => f.write_str("making a group"),
            Work::Subgroup => f.write_str("making a subgroup"),
        }
    }
}

/// Looks after one group's calls, of which there is one at a time. A lock would cost as much as the rest of a small call.
pub(super) struct Watchdog {
    made: Instant,
    /// In nanoseconds since then, when the call began, and when it ends at the latest; that is 0 where there is none.
    began: AtomicU64,
    ends: AtomicU64,
    /// What it is: its tag, or one of the others.
    tag: [AtomicU64; Site::BYTES / 8],
    other: AtomicU64,
}

impl Watchdog {
    pub fn start(rank: usize) -> Result<Arc<Watchdog>, Error> {
        let watchdog = Arc::new(Watchdog {
            made: Instant::now(),
            began: AtomicU64::new(0),
            ends: AtomicU64::new(0),
            tag: Default::default(),
            other: AtomicU64::new(0),
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
            // Acquire pairs with the release in `watch`: what is read of the call is of this one, which has blocked for long.
            let ends = watchdog.ends.load(Ordering::Acquire);
            if ends != 0 && now > ends {
                let elapsed = Duration::from_nanos(now - watchdog.began.load(Ordering::Relaxed));
                abort(rank, &format!("{} has blocked for {elapsed:.1?}, longer than its deadline", watchdog.work()));
            }
            drop(watchdog);
            std::thread::sleep(LOOK);
        }
    }

    fn nanoseconds(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.made).as_nanos() as u64
    }

    fn work(&self) -> String {
        let tag = tag_of(&self.tag.each_ref().map(|word| word.load(Ordering::Relaxed)));
        let site = tag.map(|tag| Work::Operation(Site { call: tag.call, sequence: tag.sequence }));
        match (self.other.load(Ordering::Relaxed), site) {
            (0, Some(work)) => work,
            (1, _) => Work::Connect,
            _ => Work::Subgroup,
        }
        .to_string()
    }

    /// Watches `call`.
    pub fn watch<T>(&self, work: Work, deadline: &Deadline, call: impl FnOnce() -> T) -> T {
        let other = match work {
            Work::Operation(site) => {
                let tag = site;
                self.tag.iter().zip(words(&tag)).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
                0
            }
            Work::Connect => 1,
            Work::Subgroup => 2,
        };
        self.other.store(other, Ordering::Relaxed);
        let began = self.nanoseconds(deadline.start());
        self.began.store(began, Ordering::Relaxed);
        self.ends.store(began.saturating_add(deadline.nanoseconds()).max(1), Ordering::Release);
        let result = call();
        self.ends.store(0, Ordering::Release);
        result
    }
}
