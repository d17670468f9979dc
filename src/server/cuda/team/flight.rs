//! How a group waits for what its team has under way, and what lives meanwhile.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Team, Workers};
use crate::error::{Error, Site};
use crate::server::cuda::control::{DONE, FAILURE, HOST_WORDS, Report};
use crate::wait::{Deadline, lock};

/// How long a call may go on when something has happened in the group: it may be sound itself.
const GRACE: Duration = Duration::from_secs(1);

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
            let done = self.is_done(self.seats[seat].place, number);
            let outcome = match self.failed(seat, number, site, deadline) {
                Err(error) => Err(error),
                Ok(()) if done => {
                    self.let_go();
                    return Ok(());
                }
                Ok(()) if deadline.passed() => Err(self.late(seat, number, site, deadline)),
                Ok(()) => match trouble() {
                    Some(error) if troubled.get_or_insert_with(Instant::now).elapsed() > GRACE => Err(error),
                    _ => Ok(()),
                },
            };
            if let Err(error) = outcome {
                self.fail(error.clone());
                return Err(self.failure().unwrap_or(error));
            }
            pause.once();
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

    fn late(&self, seat: usize, number: u64, site: Site, deadline: &Deadline) -> Error {
        let rank = self.seats[seat].rank;
        let (_, mut missing) = lock(&self.progress).made(number);
        if missing.is_empty() {
            let ranks = match &self.workers {
                Workers::Kernels(topology, _) => topology.ranks,
                Workers::Nccl(remote) => remote.ranks(),
            };
            missing = (0..ranks).filter(|other| *other != rank).collect();
        }
        Error::Timeout { site, rank, missing, elapsed: deadline.elapsed() }
    }

    fn is_done(&self, place: usize, number: u64) -> bool {
        self.host.load(HOST_WORDS * self.places[place].seats[0] + DONE) >= number
    }

    /// Keeps memory until the call with this number is done. A GPU that is done with it has heard so from all others.
    pub(super) fn keep(&self, place: usize, number: u64, memory: impl Iterator<Item = Box<dyn Send>>) {
        if let Some(ours) = &self.group {
            lock(&ours.kept).extend(memory.map(|memory| (place, number, memory)));
            self.let_go();
        }
    }

    /// Lets go of what is done with. After a failure others may still write to it.
    fn let_go(&self) {
        let Some(ours) = &self.group else { return };
        let mut kept = lock(&ours.kept);
        if self.failure().is_none() {
            let done = kept.extract_if(.., |(place, number, _)| self.is_done(*place, *number));
            let done: Vec<_> = done.collect();
            drop(kept);
            drop(done);
        }
    }

    /// Before a group's team is dropped: what is under way comes to its end, or is ended.
    pub(super) fn come_to_rest(&self) {
        let Some(ours) = &self.group else { return };
        let parted = ours.parted.load(Ordering::Relaxed);
        let deadline = Deadline::after(if parted { GRACE } else { ours.limit });
        while self.failure().is_none() && !self.is_idle() {
            if deadline.passed() {
                self.fail(Error::io("the end of a group", "what was under way on the GPU did not end"));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        if let (true, Workers::Nccl(remote)) = (parted, &self.workers) {
            // Its end in good order would wait for all ranks.
            remote.abort();
        }
    }
}

/// Between two looks at a word: at first a small call's time, then little work for the processor.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    fn once(&mut self) {
        self.0 += 1;
        match self.0 {
            0..500 => std::thread::yield_now(),
            looks => std::thread::sleep(Duration::from_micros(u64::from(looks / 10).min(500))),
        }
    }
}
