//! Deadlines of calls that block in MPI, and cannot return before all ranks have come: the watchdog ends the job.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::library::abort;
use crate::error::{Error, Site};
use crate::wait::{Deadline, lock};

/// How often it looks.
const LOOK: Duration = Duration::from_millis(100);

/// Looks after one group's calls.
pub(super) struct Watchdog(Mutex<Option<(Site, Deadline)>>);

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
            if let Some((site, deadline)) = late {
                let elapsed = deadline.elapsed();
                abort(rank, &format!("{site} has blocked for {elapsed:.1?}, longer than its deadline"));
            }
            drop(watchdog);
            std::thread::sleep(LOOK);
        }
    }

    /// Watches `call`.
    pub fn watch<T>(&self, site: &Site, deadline: &Deadline, call: impl FnOnce() -> T) -> T {
        *lock(&self.0) = Some((*site, *deadline));
        let result = call();
        *lock(&self.0) = None;
        result
    }
}
