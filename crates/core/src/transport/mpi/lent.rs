//! Memory of a caller that MPI has, and cannot be asked to give back.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::Mpi;
use super::library::abort;
use crate::sync::Deadline;
use crate::types::{Fault, Site};

/// How long an operation may go on after the group has failed: it can, where the rank that failed has done its part.
const GRACE: Duration = Duration::from_secs(5);

/// While this lives, MPI has the memory. Nobody may return to the caller before it ends: the job ends instead.
pub(super) struct Lent<'a> {
    group: &'a Mpi,
    site: Site,
    /// Of this step. All ranks have come to it, so it has all of the caller's time.
    deadline: Deadline,
    /// When the group was first seen to have failed.
    failed: Cell<Option<Instant>>,
}

impl<'a> Lent<'a> {
    pub fn begin(group: &'a Mpi, site: &Site, deadline: &Deadline) -> Lent<'a> {
        Lent { group, site: *site, deadline: deadline.again(), failed: Cell::new(None) }
    }

    /// Ends the job if it has to; else, when to look again.
    pub fn look(&self) -> Duration {
        let (site, elapsed) = (&self.site, self.deadline.elapsed());
        if self.deadline.passed() {
            abort(
                self.group.comm.rank,
                &format!("{site} stands still after {elapsed:.1?}, when MPI has the ranks' memory"),
            );
        }
        let tag = *site;
        if let Some(fault) = self.group.board.failure_in(&tag) {
            let since = self.failed.get().unwrap_or_else(Instant::now);
            self.failed.set(Some(since));
            if since.elapsed() > GRACE {
                let rank = self.group.comm.rank;
                abort(rank, &format!("{site} cannot end, when MPI has the ranks' memory, after a failure: {fault:?}"));
            }
        }
        self.deadline.remaining().min(Duration::from_millis(100))
    }

    /// MPI has given the memory back, if this is no error.
    pub fn end(self, outcome: Result<(), Fault>) -> Result<(), Fault> {
        if let Err(fault) = &outcome {
            abort(self.group.comm.rank, &format!("{}: {fault:?}, when MPI has the ranks' memory", self.site));
        }
        std::mem::forget(self);
        outcome
    }
}

impl Drop for Lent<'_> {
    /// A panic, such as one of the program's log.
    fn drop(&mut self) {
        abort(self.group.comm.rank, &format!("{} was left, when MPI has the ranks' memory", self.site));
    }
}
