//! How a rank leaves a group, and how MPI ends.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use super::library::{self, Held, abort, try_hold};
use super::{LINGER, Mpi, NAP};
use crate::control::Outgoing;
use crate::sync::lock;
use crate::transport::Transport;
use crate::types::{Error, Fault};

/// How long a process that ends waits for the others to leave their groups, too.
const PATIENCE: Duration = Duration::from_secs(5);

/// Groups that this rank is in: it leaves them where the process ends first.
static LIVE: Mutex<Vec<Weak<Mpi>>> = Mutex::new(Vec::new());

/// Notes a group.
pub(super) fn live(group: &Arc<Mpi>) {
    let mut live = lock(&LIVE);
    live.retain(|group| group.strong_count() > 0);
    live.push(Arc::downgrade(group));
}

/// Groups that this rank has left, where other ranks may not have: their communicators are kept until nothing can come
/// there any more, since the next one may get the same number.
static LEFT: Mutex<Vec<Arc<Mpi>>> = Mutex::new(Vec::new());

/// Ends the groups that all ranks have left; whether there are no others.
pub(super) fn sweep(held: &Held) -> bool {
    let mut left = lock(&LEFT);
    left.retain(|group| match group.over(held) {
        Ok(over) => !over,
        Err(error) => {
            log::warn!("a group that this rank has left cannot be ended: {error}");
            false
        }
    });
    left.is_empty()
}

impl Mpi {
    /// Says farewell, once.
    pub(super) fn say_farewell(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        if try_hold(LINGER).is_some_and(|held| !library::is_up(&held)) {
            return;
        }
        // As in `fail`, for a cause that came between two operations.
        if let Some((Fault::Failed(error), completed)) = self.board.failure() {
            let _ = self.control.send(Outgoing::Failed(error, completed));
        }
        // So that who is still in it does not take this rank for missing there.
        if let Some(site) = *lock(&self.last) {
            let others = (0..self.comm.size).filter(|peer| *peer != self.comm.rank);
            others.for_each(|peer| drop(self.control.send(Outgoing::Called(peer, site))));
        }
        let _ = self.control.send(Outgoing::Farewell { panicked: std::thread::panicking() });
        let until = Instant::now() + LINGER;
        loop {
            // Without a turn, another thread of this rank is in a call that does not return.
            let Some(held) = try_hold(until.saturating_duration_since(Instant::now())) else { return };
            self.pump(&held);
            if lock(&self.plane).sent(&held).unwrap_or(true) || Instant::now() >= until {
                break;
            }
            drop(held);
            std::thread::sleep(NAP);
        }
        lock(&LEFT).extend(self.own.upgrade());
    }

    /// Whether all ranks have left and nothing is on its way; then the communicator is gone.
    fn over(&self, held: &Held) -> Result<bool, Error> {
        self.pump(held);
        let plane = &mut *lock(&self.plane);
        let Some(begun) = plane.over() else { return Ok(false) };
        // Who left for a signal may be in an operation still, and waits for the turn that this thread has.
        let Ok(mut arrival) = self.arrival.try_lock() else { return Ok(false) };
        // Groups that block do not meet.
        let over = (self.watchdog.is_some() || arrival.join(begun, held)?) && plane.sent(held)?;
        if over {
            self.comm.free(held);
        }
        Ok(over)
    }
}

/// Ends MPI with the process, as it wants to be, once nothing is on its way any more; unless that cannot be done.
pub(super) extern "C" fn finalize() {
    // Groups of other threads, or that the program ends without dropping.
    let live: Vec<_> = std::mem::take(&mut *lock(&LIVE)).iter().filter_map(Weak::upgrade).collect();
    live.iter().for_each(|group| group.leave());
    let Some(held) = try_hold(LINGER) else {
        let rank = live.first().map_or(0, |group| group.comm.rank);
        abort(rank, "the process ends while a thread of it is in a call of MPI that does not return");
    };
    if !library::is_up(&held) {
        return;
    }
    let until = Instant::now() + PATIENCE;
    while !sweep(&held) && Instant::now() < until {
        std::thread::sleep(NAP);
    }
    // The program may hold groups to the end.
    if lock(&LEFT).iter().any(|group| group.arrival.try_lock().is_ok_and(|arrival| arrival.is_pending())) {
        library::abandon();
    }
    library::end(&held);
}
