//! Callers' memory that MPI has and that cannot be taken back.

use std::cell::Cell;
use std::time::{Duration, Instant};

use bonfire_core::error::Site;
use bonfire_core::{Deadline, Fault};

use super::Mpi;
use super::library::abort;

/// How long an operation may continue after the group has failed. It can complete if the failed rank has done its part.
/// It cannot if that rank gave up the first step just when the last rank began it: the others are in this step then.
const GRACE: Duration = Duration::from_secs(5);

/// While this exists, MPI has the caller's memory, so this rank must not return to its caller. If it cannot wait for
/// [`finish`](LentMemory::finish), it ends the job.
pub(super) struct LentMemory<'a> {
    group: &'a Mpi,
    site: Site,
    /// The deadline of this step. All ranks have begun it, so it gets the caller's full limit again.
    deadline: Deadline,
    /// When this rank first saw that the group had failed.
    failed: Cell<Option<Instant>>,
}

impl<'a> LentMemory<'a> {
    pub fn begin(group: &'a Mpi, site: &Site, deadline: &Deadline) -> LentMemory<'a> {
        LentMemory { group, site: *site, deadline: Deadline::after(deadline.limit()), failed: Cell::new(None) }
    }

    /// Ends the job if this rank cannot wait any longer. Otherwise returns the time until the next check.
    pub fn check(&self) -> Duration {
        let (site, elapsed) = (&self.site, self.deadline.elapsed());
        if self.deadline.passed() {
            abort(
                self.group.comm.rank,
                &format!("{site} has not completed after {elapsed:.1?}, while MPI has the ranks' memory"),
            );
        }
        if let Some(fault) = self.group.control.failure_in(site) {
            let since = self.failed.get().unwrap_or_else(Instant::now);
            self.failed.set(Some(since));
            if since.elapsed() > GRACE {
                let rank = self.group.comm.rank;
                abort(rank, &format!("{site} cannot end, while MPI has the ranks' memory, after a failure: {fault:?}"));
            }
        }
        self.deadline.remaining().min(Duration::from_millis(100))
    }

    /// Called when MPI is done with the memory. If `outcome` is an error, MPI may not be, so this ends the job.
    pub fn finish(self, outcome: Result<(), Fault>) -> Result<(), Fault> {
        if let Err(fault) = &outcome {
            abort(self.group.comm.rank, &format!("{}: {fault:?}, while MPI has the ranks' memory", self.site));
        }
        std::mem::forget(self);
        outcome
    }
}

impl Drop for LentMemory<'_> {
    /// Runs after an error, or in a panic, for example one in the program's logger.
    fn drop(&mut self) {
        abort(self.group.comm.rank, &format!("{} was left, while MPI has the ranks' memory", self.site));
    }
}
