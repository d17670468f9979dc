//! How a group waits for what its team has under way, and what lives meanwhile.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cubecl::server::Binding;

use super::{Kept, Team, Workers};
use crate::server::cuda::control::{DONE, FAILURE, HOST_WORDS, Report};
use crate::server::cuda::pause::Pause;
use bonfire_core::error::Site;
use bonfire_core::internal::lock;
use bonfire_core::{Deadline, Error};

/// How long a call may go on when something has happened in the group: it may be sound itself.
const GRACE: Duration = Duration::from_secs(1);
/// As long as this where a rank has left in order: it has begun all that the others have, and mostly ended it.
const LEFT: Duration = Duration::from_secs(30);

impl Team {
    /// Waits on the host until the call with this number is done on the seat's GPU. An error ends the team.
    pub fn land(
        &self,
        seat: usize,
        number: u64,
        site: Site,
        deadline: &Deadline,
        trouble: &dyn Fn() -> Option<Error>,
    ) -> Result<(), Error> {
        let mut troubled: Option<Instant> = None;
        let mut pause = Pause::default();
        loop {
            // In this order: a stream goes on after a call that has failed.
            let done = self.done_at(self.seats[seat].place) >= number;
            let outcome = match self.failed(seat, number, site, deadline) {
                Ok(()) if done && self.sound_to() >= number => {
                    self.let_go();
                    return Ok(());
                }
                Ok(()) if deadline.passed() => Err(self.late(seat, number, site, deadline)),
                Ok(()) => match trouble() {
                    Some(error) => {
                        let grace = if matches!(error, Error::Left { .. }) { LEFT } else { GRACE };
                        let since = troubled.get_or_insert_with(Instant::now).elapsed();
                        if since > grace { Err(error) } else { Ok(()) }
                    }
                    None => Ok(()),
                },
                Err(_) if self.was_done(seat, number) => return Ok(()),
                Err(error) => Err(named(error, trouble)),
            };
            if let Err(error) = outcome {
                self.fail(error);
                return Err(self.end_call(site));
            }
            pause.once();
        }
    }

    /// After a failure: what was called does not go on writing to memory that its caller has back, if that is to be had.
    fn end_call(&self, site: Site) -> Error {
        let (deadline, mut pause) = (Deadline::after(GRACE), Pause::default());
        while !self.is_idle() && !deadline.passed() {
            // Somebody else may have been at work on the communicator.
            self.abort();
            pause.once();
        }
        self.failure().unwrap_or_else(|| Error::broken(site.to_string(), "it did not end"))
    }

    fn abort(&self) {
        if let Workers::Nccl(remote) = &self.workers {
            remote.abort();
        }
    }

    fn failed(&self, seat: usize, number: u64, site: Site, deadline: &Deadline) -> Result<(), Error> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let report = Report::of(self.host.load(HOST_WORDS * seat + FAILURE));
        // What failed later is the next one's.
        if let Some(report) = report.filter(|report| report.number <= number) {
            return Err(report.error(site, self.seats[seat].rank, Vec::new(), deadline.elapsed()));
        }
        match &self.workers {
            Workers::Kernels(..) => Ok(()),
            Workers::Nccl(remote) => remote.poll(),
        }
    }

    /// Up to which number calls that are over are done: nothing has ended them.
    fn sound_to(&self) -> u64 {
        if matches!(&self.workers, Workers::Nccl(remote) if remote.has_ended()) {
            return 0;
        }
        let reports = (0..self.seats.len()).filter_map(|seat| Report::of(self.host.load(HOST_WORDS * seat + FAILURE)));
        reports.map(|report| report.number.saturating_sub(1)).min().unwrap_or(u64::MAX)
    }

    /// Before the team fails: what is done by then is done, and its callers are told so.
    pub(super) fn note_completed(&self) {
        if let Some(ours) = &self.group {
            let done: Vec<_> = (0..self.places.len()).map(|place| self.done_at(place)).collect();
            let sound_to = self.sound_to();
            let _ = ours.completed.set(done.into_iter().map(|done| done.min(sound_to)).collect());
        }
    }

    fn was_done(&self, seat: usize, number: u64) -> bool {
        let completed = self.group.as_ref().and_then(|ours| ours.completed.get());
        completed.is_some_and(|completed| completed[self.seats[seat].place] >= number)
    }

    fn late(&self, seat: usize, number: u64, site: Site, deadline: &Deadline) -> Error {
        let rank = self.seats[seat].rank;
        let mut missing = lock(&self.calls).missing(number);
        if missing.is_empty() {
            missing = (0..self.ranks()).filter(|other| *other != rank).collect();
        }
        Error::Timeout { site, rank, missing, elapsed: deadline.elapsed() }
    }

    fn done_at(&self, place: usize) -> u64 {
        self.host.load(HOST_WORDS * self.places[place].seats[0] + DONE)
    }

    /// Keeps memory until the call with this number is done. A GPU that is done with it has heard so from all others.
    pub(super) fn keep(&self, place: usize, number: u64, memory: impl Iterator<Item = Vec<Binding>>) {
        if let Some(ours) = &self.group {
            lock(&ours.kept).extend(memory.map(|memory| (place, number, memory)));
        }
    }

    /// Lets go of what is done with. After a failure others may still write to it.
    pub(super) fn let_go(&self) {
        let Some(ours) = &self.group else { return };
        // In this order, as in `land`.
        let done: Vec<_> = (0..self.places.len()).map(|place| self.done_at(place)).collect();
        let sound_to = self.sound_to();
        if self.failure().is_none() {
            let over = |(place, number, _): &mut Kept| *number <= done[*place].min(sound_to);
            let over: Vec<_> = lock(&ours.kept).extract_if(.., over).collect();
            drop(over);
        }
    }

    /// Before a group's team is dropped: what is under way comes to its end, or is ended.
    pub(super) fn come_to_rest(&self) {
        let Some(ours) = &self.group else { return };
        let parted = || ours.parted.load(Ordering::Relaxed);
        let (deadline, mut pause) = (Deadline::after(ours.limit), Pause::default());
        while self.failure().is_none() && !self.is_idle() {
            if deadline.passed() || parted() && deadline.elapsed() > GRACE {
                self.fail(Error::broken("the end of a group", "what was under way on the GPU did not end"));
            }
            pause.once();
        }
        if parted() || self.failure().is_some() {
            // Its end in good order would wait for all ranks. Nobody else is at work on it any more.
            self.abort();
        }
    }
}

/// A peer's end as the group has seen it, which says more than what NCCL makes of it.
fn named(error: Error, trouble: &dyn Fn() -> Option<Error>) -> Error {
    let (deadline, mut pause) = (Deadline::after(GRACE), Pause::default());
    while matches!(error, Error::Nccl { .. }) && !deadline.passed() {
        if let Some(cause) = trouble() {
            return cause;
        }
        pause.once();
    }
    error
}
