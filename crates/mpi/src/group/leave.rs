//! Leaving a group, and finalizing MPI with the process.
//!
//! If Bonfire has initialized MPI, it finalizes it on every exit that runs exit handlers. A program that does both
//! itself must drop its groups before it calls `MPI_Finalize`.
//!
//! Two assumptions go beyond MPI's standard: `MPI_Comm_free` does not wait for other ranks, which call it at other
//! times, and another thread than the one that initialized MPI may call `MPI_Finalize`.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use bonfire_core::internal::lock;
use bonfire_core::{Error, Transport};

use super::library::{self, Held, abort, try_hold};
use super::{LINGER, Mpi, POLL_INTERVAL};

/// How long an ending process waits until its peers have left their groups too.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Groups that this rank is in. It leaves them if the process ends first.
static LIVE: Mutex<Vec<Weak<Mpi>>> = Mutex::new(Vec::new());

/// Adds a group to `LIVE`.
pub(super) fn register(group: &Arc<Mpi>) {
    let mut live = lock(&LIVE);
    live.retain(|group| group.strong_count() > 0);
    live.push(Arc::downgrade(group));
}

/// Groups that this rank has left, but peers may not have. Their communicators are kept until nothing can arrive on
/// them any more, because the next communicator may get the same number.
static LEFT: Mutex<Vec<Arc<Mpi>>> = Mutex::new(Vec::new());

/// Frees the groups that all ranks have left. Returns whether there are no others in `LEFT`.
pub(super) fn free_finished(held: &Held) -> bool {
    let mut left = lock(&LEFT);
    left.retain(|group| match group.try_free(held) {
        Ok(freed) => !freed,
        Err(error) => {
            log::warn!("cannot free a group that this rank has left: {error}");
            false
        }
    });
    left.is_empty()
}

impl Mpi {
    /// Sends the goodbye message, once.
    pub(super) fn send_goodbye(&self) {
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        if try_hold(LINGER).is_some_and(|held| !library::is_up(&held)) {
            return;
        }
        self.control.leave();
        let until = Instant::now() + LINGER;
        loop {
            // If the lock is not available, another thread of this rank is in a call that does not return.
            let Some(held) = try_hold(until.saturating_duration_since(Instant::now())) else { return };
            self.pump(&held);
            if lock(&self.plane).flush(&held).unwrap_or(true) || Instant::now() >= until {
                break;
            }
            drop(held);
            std::thread::sleep(POLL_INTERVAL);
        }
        lock(&LEFT).extend(self.own.upgrade());
    }

    /// Frees the communicator if all ranks have left and nothing is in flight. Returns whether it has.
    fn try_free(&self, held: &Held) -> Result<bool, Error> {
        self.pump(held);
        let plane = &mut *lock(&self.plane);
        let Some(begun) = plane.all_left() else { return Ok(false) };
        // A rank that left because of a signal may still be in an operation, and wait for the lock of this thread.
        let Ok(mut agreement) = self.agreement.try_lock() else { return Ok(false) };
        // Blocking groups do not agree on calls.
        let finished = (self.watchdog.is_some() || agreement.catch_up(begun, held)?) && plane.flush(held)?;
        if finished {
            self.comm.free(held);
        }
        Ok(finished)
    }
}

/// Finalizes MPI at the end of the process, once nothing is in flight any more. Ends the job if that is not possible.
pub(super) extern "C" fn finalize() {
    // Groups of other threads, and groups that the program did not drop.
    let live: Vec<_> = std::mem::take(&mut *lock(&LIVE)).iter().filter_map(Weak::upgrade).collect();
    live.iter().for_each(|group| group.leave());
    let Some(held) = try_hold(LINGER) else {
        let rank = live.first().map_or(0, |group| group.comm.rank);
        abort(rank, "the process ends while a thread of it is in a call of MPI that does not return");
    };
    if !library::is_up(&held) {
        return;
    }
    let until = Instant::now() + LEAVE_TIMEOUT;
    while !free_finished(&held) && Instant::now() < until {
        std::thread::sleep(POLL_INTERVAL);
    }
    // The program may hold groups to the end. They are not dropped, so their pending requests are counted here.
    if lock(&LEFT).iter().any(|group| group.agreement.try_lock().is_ok_and(|agreement| agreement.is_pending())) {
        library::abandon();
    }
    library::end(&held);
}
