//! Operations of a group: the ranks agree over the group, then each launches, and its GPU moves the data.
//!
//! # Why the ranks agree first
//! A mismatch, a deadline, and a peer that died or left are then the group's typed errors, which name the ranks. NCCL
//! alone would hang. The price is a small operation of the group per call, an all-gather of 32 bytes from each rank, on
//! the group's progress thread; where ranks are in several processes, a second one orders the launches of all groups.
//! The memory and its stream order are recorded before, on the device's thread.

use super::order::End;
use bonfire_core::error::Site;
use bonfire_core::internal::{Agreed, AgreedOperations, Started};
use bonfire_core::{Call, Deadline, Error, Group};

/// A prepared operation, which is launched once all ranks have called it, on any thread.
pub struct Launch {
    /// Proposes a time, if ranks in several processes order their launches. The latest of all ranks' is the launch's.
    pub(crate) propose: Option<Box<dyn FnOnce() -> u64 + Send>>,
    pub(crate) run: LaunchFn,
}

/// Launches an operation at the time that the ranks have agreed on, if they have. Returns when it is in flight here.
pub(crate) type LaunchFn = Box<dyn FnOnce(Option<u64>, &Site, &Deadline) -> Result<InFlight, Error> + Send>;

/// An in-flight operation.
pub(crate) struct InFlight {
    /// Waits until the operation is on the device's stream, and returns its end there.
    pub end: Box<dyn Fn() -> Result<End, Error> + Send>,
    pub wait: WaitFn,
}

/// Waits until a device is done with an operation. The argument returns the group's failure, if there is one.
type WaitFn = Box<dyn FnOnce(&dyn Fn() -> Option<Error>) -> Result<(), Error> + Send>;

/// A started operation. It runs whether or not it is waited for.
#[must_use = "only a wait tells whether the operation works"]
pub struct Transfer(Agreed<InFlight>);

/// Starts a collective. `prepared` returns its launch on this rank, from [`Route::prepare`](crate::Route::prepare). It
/// is launched only after all ranks have called this: no device waits for a missing rank, which the group reports.
///
/// # Errors
/// If the group has failed, or the operation cannot be started.
pub fn start(
    group: &Group,
    call: Call,
    prepared: impl FnOnce() -> Result<Launch, Error> + Send + 'static,
) -> Result<Transfer, Error> {
    let propose = |launch: &mut Launch| launch.propose.take().map(|propose| propose());
    let run = |launch: Launch, time, site: &Site, deadline: &Deadline| (launch.run)(time, site, deadline);
    group.start_agreed(call, prepared, propose, run).map(Transfer)
}

/// Starts a message, given with the peers that it goes to and comes from. It is launched only after these have, too.
///
/// # Errors
/// As [`start`], and if a peer is not a rank.
pub fn start_message(
    group: &Group,
    outgoing: Option<(usize, Call)>,
    incoming: Option<(usize, Call)>,
    prepared: impl FnOnce() -> Result<Launch, Error> + Send + 'static,
) -> Result<Transfer, Error> {
    let run = |launch: Launch, _, site: &Site, deadline: &Deadline| (launch.run)(None, site, deadline);
    group.start_agreed_message(outgoing, incoming, || Ok((prepared()?, 0)), run).map(Transfer)
}

impl Transfer {
    /// Waits until all ranks have called the operation and it is launched here.
    ///
    /// # Errors
    /// Those of the group's operation.
    pub fn launched(self) -> Result<Launched, Error> {
        self.0.started().map(Launched)
    }
}

/// An operation that is launched on this rank.
#[must_use = "only a wait tells whether the operation works"]
pub struct Launched(Started<InFlight>);

impl Launched {
    /// Waits until the operation is on the device's stream, and returns its end, for
    /// [`Engine::follow`](crate::Engine::follow).
    ///
    /// # Errors
    /// If it cannot be put there: [`wait`](Self::wait) then returns why.
    pub fn end(&self) -> Result<End, Error> {
        (self.0.get().end)()
    }

    /// Waits until the device is done with the operation.
    ///
    /// # Errors
    /// Those of the group, of the GPU and of NCCL. Each poisons the group.
    pub fn wait(self) -> Result<(), Error> {
        self.0.finish(|flight, group_failure| (flight.wait)(group_failure))
    }
}
