//! Deadlines of calls that block in MPI, and cannot return before all ranks have come: the watchdog ends the job.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::library::abort;
use crate::error::{Error, Site};
use crate::wait::{Deadline, lock};

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

/// Looks after one group's calls.
pub(super) struct Watchdog(Mutex<Option<(Work, Deadline)>>);

impl Watchdog {
    pub fn start(rank: usize) -> Result<Arc<Watchdog>, Error> {
        let watchdog = Arc::new(Watchdog(Mutex::new(None)));
        let weak = Arc::downgrade(&watchdog);
        std::thread::Builder::new()
            .name(format!("bonfire-watchdog-{rank}"))
            .spawn(move || Watchdog::run(&weak, rank))
            .map_err(|e| Error::io("starting the watchdog", e))?;
        Ok(watchdog)
    }

    fn run(watchdog: &Weak<Watchdog>, rank: usize) {
        while let Some(watchdog) = watchdog.upgrade() {
            let late = lock(&watchdog.0).filter(|(_, deadline)| deadline.passed());
            if let Some((work, deadline)) = late {
                let elapsed = deadline.elapsed();
                abort(rank, &format!("{work} has blocked for {elapsed:.1?}, longer than its deadline"));
            }
            drop(watchdog);
            std::thread::sleep(LOOK);
        }
    }

    /// Watches `call`.
    pub fn watch<T>(&self, work: Work, deadline: &Deadline, call: impl FnOnce() -> T) -> T {
        *lock(&self.0) = Some((work, *deadline));
        let result = call();
        *lock(&self.0) = None;
        result
    }
}
