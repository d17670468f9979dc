//! How threads of a group come to another.

use std::collections::HashMap;
use std::time::Instant;

use super::Local;
use crate::control::invitation::{Door, Invitation, Invitations};
use crate::sync::{Deadline, Mutex, MutexGuard, lock};
use crate::types::{Error, Fault};

pub(super) struct Meeting {
    /// By rank of the old group.
    seats: Mutex<Vec<Seat>>,
    /// To subgroups, by rank that gets them.
    invitations: Mutex<Vec<Invitations>>,
    /// Ends of subgroups that were not taken yet, by the numbers of the groups and then by rank.
    ends: Mutex<HashMap<u64, Vec<Option<Local>>>>,
}

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
        Meeting {
            seats: Mutex::new((0..ranks).map(|_| Seat::default()).collect()),
            invitations: Mutex::new((0..ranks).map(|_| Invitations::new(ranks)).collect()),
            ends: Mutex::default(),
        }
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
        lock(&self.shared.meeting.seats)
    }

    /// Tells the other members of a subgroup to be of it, and gives the doors of all in their order.
    pub fn invite(&self, own: &Invitation, deadline: &Deadline) -> Result<Vec<Door>, Fault> {
        let (rank, shared) = (self.rank, &self.shared);
        let all = || lock(&shared.meeting.invitations);
        for to in own.members.iter().filter(|member| **member != rank) {
            if !all()[*to].put(rank, own.clone()) {
                let reason = format!("rank {to} has not answered so many before: have it call subgroup too");
                return Err(Fault::Failed(Error::argument("subgroup", reason)));
            }
        }
        shared.bell.ring();
        let mut outcome = Ok(None);
        shared.bell.sleep(Instant::now() + deadline.remaining(), || {
            let invitations = &mut all()[rank];
            let absence = invitations.missing(rank, &own.members).find_map(|peer| shared.absence(peer));
            outcome = match absence {
                _ if shared.failed() => Err(shared.cause()),
                Some(fault) => Err(fault),
                None => invitations.take(rank, own),
            };
            !matches!(outcome, Ok(None))
        });
        outcome?.ok_or_else(|| Fault::Timeout { missing: all()[rank].missing(rank, &own.members).collect() })
    }

    /// The end of rank `place` of the group with this number. The first of its ranks to ask makes the ends of all.
    pub fn end(&self, number: u64, ranks: usize, place: usize) -> Option<Local> {
        let mut groups = lock(&self.shared.meeting.ends);
        let ends = groups.entry(number).or_insert_with(|| Local::group(ranks).into_iter().map(Some).collect());
        let end = ends.get_mut(place).and_then(Option::take);
        if ends.iter().all(Option::is_none) {
            groups.remove(&number);
        }
        end
    }
}
