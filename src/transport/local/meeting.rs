//! How the threads that are left of a group come to another.

use std::time::Instant;

use super::Local;
use crate::sync::{Mutex, MutexGuard};
use crate::wait::{Deadline, lock};

/// By rank of the old group.
pub(super) struct Meeting(Mutex<Vec<Seat>>);

#[derive(Default)]
struct Seat {
    came: bool,
    gave_up: bool,
    /// The rank's end of the new group, and that group's number.
    end: Option<(Local, u64)>,
}

impl Seat {
    fn waits(&self) -> bool {
        self.came && !self.gave_up
    }
}

impl Meeting {
    pub fn new(ranks: usize) -> Meeting {
        Meeting(Mutex::new((0..ranks).map(|_| Seat::default()).collect()))
    }
}

impl Local {
    /// Waits until every other rank waits here or is gone, then gives this rank's end of a group of those that wait, and that
    /// group's number, which is the `number` of one of them. At the deadline gives who is missing. To be called once.
    pub fn meet(&self, number: u64, deadline: &Deadline) -> Result<(Local, u64), Vec<usize>> {
        self.seats()[self.rank].came = true;
        self.shared.bell.ring();
        self.shared.bell.sleep(Instant::now() + deadline.remaining(), || self.seated(number));
        let mut seats = self.seats();
        seats[self.rank].end.take().ok_or_else(|| {
            let mut missing: Vec<_> = self.present(|rank| !seats[rank].came).collect();
            if missing.is_empty() {
                missing = self.present(|rank| !seats[rank].waits()).collect();
            }
            // The others must not go on without a rank that gives up, unless it leaves.
            seats[self.rank].gave_up = true;
            missing
        })
    }

    /// Whether this rank has its end. The first to see that nobody is missing makes all of them.
    fn seated(&self, number: u64) -> bool {
        let mut seats = self.seats();
        if seats[self.rank].end.is_none() && self.present(|rank| !seats[rank].waits()).next().is_none() {
            let waiting = seats.iter().filter(|seat| seat.waits()).count();
            for (seat, end) in seats.iter_mut().filter(|seat| seat.waits()).zip(Local::group(waiting)) {
                seat.end = Some((end, number));
            }
        }
        seats[self.rank].end.is_some()
    }

    /// Who of those is not gone.
    fn present(&self, those: impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
        (0..self.shared.slots.len()).filter(move |rank| those(*rank) && self.shared.absence(*rank).is_none())
    }

    fn seats(&self) -> MutexGuard<'_, Vec<Seat>> {
        lock(&self.shared.meeting.0)
    }
}
