//! How a group waits for its calls in flight, and the memory that these keep.
//!
//! # When the host waits
//! A program that goes on with a gradient which a peer's death has cut short would learn of it later, and ranks that
//! continue without the lost one would have taken different steps. So an operation that `wait` has returned from is
//! done. Within a step the device's streams wait instead (`follow`), as after `sync_collective`, and the host waits at
//! the end of the step, before anything lasts. In both cases an error is the group's, and devices stay usable.
//!
//! While it waits, the host polls the kernels' reports, NCCL's asynchronous error, the group's failures and, seldom and
//! once the wait is long, the state of the streams: after a fault nothing on that GPU reports or ends, and its peers'
//! kernels would wait until the deadline.

use std::fmt::Display;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::group::KeptMemory;
use super::{Backend, Team};
use crate::backoff::Backoff;
use crate::control::{DONE, FAILURE, HOST_WORDS, Report};
use crate::runtime::Kept;
use bonfire_core::error::Site;
use bonfire_core::internal::lock;
use bonfire_core::{Deadline, Error};

/// How long a call may continue after a failure in the group: the call itself may be sound.
const GRACE: Duration = Duration::from_secs(1);
/// The same for a rank that left in order: it has begun all calls that the others have, and finished most of them.
const LEFT_GRACE: Duration = Duration::from_secs(30);

impl Team {
    /// Waits on the host until the call with this number is done on the rank's GPU. An error fails the team.
    pub fn wait_done(
        &self,
        local: usize,
        number: u64,
        site: Site,
        deadline: &Deadline,
        group_failure: &dyn Fn() -> Option<Error>,
    ) -> Result<(), Error> {
        let mut failed_since: Option<Instant> = None;
        let mut backoff = Backoff::default();
        loop {
            // In this order, because a stream continues after a failed call.
            let done = self.done_at(self.local_ranks[local].team_gpu) >= number;
            let query = !done && backoff.asks_driver();
            let outcome = match self.check_failure(local, number, site, deadline, query) {
                Ok(()) if done && self.valid_up_to() >= number => {
                    self.release_done();
                    return Ok(());
                }
                Ok(()) if deadline.passed() => Err(self.timeout_error(local, number, site, deadline)),
                Ok(()) => match group_failure() {
                    Some(error) => {
                        let grace = if matches!(error, Error::Left { .. }) { LEFT_GRACE } else { GRACE };
                        let since = failed_since.get_or_insert_with(Instant::now).elapsed();
                        if since > grace { Err(error) } else { Ok(()) }
                    }
                    None => Ok(()),
                },
                Err(_) if self.was_done(local, number) => return Ok(()),
                Err(error) => Err(root_cause(error, group_failure)),
            };
            if let Err(error) = outcome {
                self.fail(error);
                return Err(self.end_call(site));
            }
            backoff.wait();
        }
    }

    /// After a failure: waits, for [`GRACE`] at most, until the GPU cannot write to memory that the caller has back.
    fn end_call(&self, site: Site) -> Error {
        let (deadline, mut backoff) = (Deadline::after(GRACE), Backoff::default());
        while !self.is_idle() && !deadline.passed() {
            // Another thread may have been using the communicator.
            self.abort();
            backoff.wait();
        }
        self.failure().unwrap_or_else(|| Error::broken(site.to_string(), "it did not finish"))
    }

    /// Called before NCCL's abort, which frees memory: CUDA then waits until no kernel runs on the GPU. One that spins
    /// for a rank of the failed group would end only at its deadline. Those of other groups are not touched: they end,
    /// or their groups fail. As everywhere, a call that is sound has [`GRACE`] to finish.
    pub(super) fn end_kernels(&self, error: &Error) {
        let Some(kernels) = self.group.as_ref().and_then(|group_team| group_team.kernels.as_ref()) else { return };
        let (deadline, mut backoff) = (Deadline::after(GRACE), Backoff::default());
        while kernels.failure().is_none() && !kernels.is_idle() {
            if deadline.passed() {
                kernels.fail(error.clone());
            }
            backoff.wait();
        }
    }

    fn abort(&self) {
        if let Backend::Nccl(remote) = &self.backend {
            remote.abort();
        }
    }

    /// `query` is whether to ask the driver for faults of the team's GPUs.
    fn check_failure(
        &self,
        local: usize,
        number: u64,
        site: Site,
        deadline: &Deadline,
        query: bool,
    ) -> Result<(), Error> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let report = Report::of(self.host.load(HOST_WORDS * local + FAILURE));
        // A later failure belongs to a later call.
        if let Some(report) = report.filter(|report| report.number <= number) {
            return Err(report.error(site, self.local_ranks[local].rank, Vec::new(), deadline.elapsed()));
        }
        if query && let Some(error) = self.gpu_fault(site, deadline.elapsed()) {
            return Err(error);
        }
        match &self.backend {
            Backend::Kernels(..) => Ok(()),
            // NCCL reports a fault only as an error of CUDA.
            Backend::Nccl(remote) => {
                remote.poll().map_err(|error| self.gpu_fault(site, deadline.elapsed()).unwrap_or(error))
            }
        }
    }

    /// Returns the error of an operation that works on the team's GPUs, if one of them has a fault.
    pub fn gpu_fault(&self, operation: impl Display, elapsed: Duration) -> Option<Error> {
        self.team_gpus.iter().find_map(|team_gpu| {
            let fault = team_gpu.stream.is_idle().err()?;
            let ranks = team_gpu.local_ranks.iter().map(|local| self.local_ranks[*local].rank).collect();
            Some(fault.error(&operation, ranks, elapsed))
        })
    }

    /// The number up to which finished calls are valid: no failure has ended them. A stream continues after a call that
    /// was ended, so its word alone does not tell. Reports carry their call's number, and a communicator sets
    /// `has_ended` before it aborts.
    fn valid_up_to(&self) -> u64 {
        if matches!(&self.backend, Backend::Nccl(remote) if remote.has_ended()) {
            return 0;
        }
        let reports =
            (0..self.local_ranks.len()).filter_map(|local| Report::of(self.host.load(HOST_WORDS * local + FAILURE)));
        reports.map(|report| report.number.saturating_sub(1)).min().unwrap_or(u64::MAX)
    }

    /// Called before the team fails: calls that are done by then stay done, and their callers get `Ok`.
    pub(super) fn record_completed(&self) {
        if let Some(group_team) = &self.group {
            let done: Vec<_> = (0..self.team_gpus.len()).map(|team_gpu| self.done_at(team_gpu)).collect();
            let valid_up_to = self.valid_up_to();
            let _ = group_team.completed.set(done.into_iter().map(|done| done.min(valid_up_to)).collect());
        }
    }

    fn was_done(&self, local: usize, number: u64) -> bool {
        let completed = self.group.as_ref().and_then(|group_team| group_team.completed.get());
        completed.is_some_and(|completed| completed[self.local_ranks[local].team_gpu] >= number)
    }

    fn timeout_error(&self, local: usize, number: u64, site: Site, deadline: &Deadline) -> Error {
        let rank = self.local_ranks[local].rank;
        let mut missing = lock(&self.calls).missing(number);
        if missing.is_empty() {
            missing = (0..self.ranks()).filter(|other| *other != rank).collect();
        }
        Error::Timeout { site, rank, missing, elapsed: deadline.elapsed(), whereabouts: Box::default() }
    }

    fn done_at(&self, team_gpu: usize) -> u64 {
        self.host.load(HOST_WORDS * self.team_gpus[team_gpu].local_ranks[0] + DONE)
    }

    /// Keeps memory until the call with this number is done on the GPU, which implies that all peers are done with it.
    pub(super) fn keep_until_done(&self, team_gpu: usize, number: u64, memory: impl Iterator<Item = Vec<Kept>>) {
        if let Some(group_team) = &self.group {
            lock(&group_team.kept).extend(memory.map(|memory| (team_gpu, number, memory)));
        }
    }

    /// Releases the memory of calls that are done. After a failure peers may still write to it.
    pub(super) fn release_done(&self) {
        let Some(group_team) = &self.group else { return };
        // In this order, as in `wait_done`.
        let done: Vec<_> = (0..self.team_gpus.len()).map(|team_gpu| self.done_at(team_gpu)).collect();
        let valid_up_to = self.valid_up_to();
        if self.failure().is_none() {
            let over = |(team_gpu, number, _): &mut KeptMemory| *number <= done[*team_gpu].min(valid_up_to);
            let over: Vec<_> = lock(&group_team.kept).extract_if(.., over).collect();
            drop(over);
        }
    }

    /// Called before a group's team is dropped: waits until the calls in flight have ended, or fails them.
    pub(super) fn drain(&self) {
        let Some(group_team) = &self.group else { return };
        let group_failed = || group_team.group_failed.load(Ordering::Relaxed);
        let (deadline, mut backoff) = (Deadline::after(group_team.limit), Backoff::default());
        while self.failure().is_none() && !self.is_idle() {
            if let Some(error) = self.gpu_fault("dropping a group", deadline.elapsed()) {
                self.fail(error);
            } else if deadline.passed() || group_failed() && deadline.elapsed() > GRACE {
                self.fail(Error::broken("dropping a group", "calls in flight on the GPU did not finish"));
            }
            backoff.wait();
        }
        if group_failed() || self.failure().is_some() {
            // A graceful shutdown would wait for all ranks. No other thread uses the communicator any more.
            let failed = || Error::broken("dropping a group", "the group has failed");
            self.end_kernels(&self.failure().unwrap_or_else(failed));
            self.abort();
        }
    }
}

/// Prefers a peer's failure as the group has detected it: it says more than NCCL's error, or than a kernel that ended
/// because a peer's did, which may be before this rank's group has noticed why.
fn root_cause(error: Error, group_failure: &dyn Fn() -> Option<Error>) -> Error {
    let (deadline, mut backoff) = (Deadline::after(GRACE), Backoff::default());
    while matches!(error, Error::Nccl { .. } | Error::Broken { .. }) && !deadline.passed() {
        if let Some(cause) = group_failure() {
            return cause;
        }
        backoff.wait();
    }
    error
}
