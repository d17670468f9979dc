//! State of each logical device outside its server's thread: its failure, its deadline and its counters.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use cubecl::device::DeviceId;

use bonfire_core::Error;
use bonfire_core::internal::{DEADLINE, deadline_from_env, lock};
#[cfg(feature = "cuda")]
use bonfire_cuda::Look;

/// State of one logical device, shared by servers, clients and other devices.
pub(super) struct Status {
    /// Whether `failure` is set: checked before every read.
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    deadline: Mutex<Duration>,
    checks: Mutex<Vec<Check>>,
    /// How many failures were cleared.
    cleared: AtomicU64,
    counters: Mutex<Counters>,
}

/// Poisons the device if a failure happened that no call returns. Returns whether to call the check again.
type Check = Arc<dyn Fn(Look) -> bool + Send + Sync>;

/// Where a check looks. No runtime of this build has checks.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Copy)]
enum Look {
    Reports,
    Faults,
}

/// What a device has moved through host memory for collectives and copies since the program started. Data that stays on
/// GPUs is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Exchanges with other devices for cubecl's `all_reduce`. Pending calls are fused, so there are fewer exchanges
    /// than calls. Operations of a [`Group`](crate::Group) are not counted here.
    pub rounds: u64,
    /// Buffers that were copied from the device to the host.
    pub downloads: u64,
    /// Buffers that were copied from the host to the device.
    pub uploads: u64,
}

type Table = HashMap<(TypeId, DeviceId), Arc<Status>>;

static DEVICES: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

impl Status {
    /// Returns the state of a device of the runtime `R`.
    pub fn of<R: 'static>(id: DeviceId) -> Arc<Status> {
        lock(&DEVICES).entry((TypeId::of::<R>(), id)).or_insert_with(|| Arc::new(Status::new())).clone()
    }

    fn new() -> Status {
        Status {
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            deadline: Mutex::new(default_deadline()),
            checks: Mutex::default(),
            cleared: AtomicU64::new(0),
            counters: Mutex::default(),
        }
    }

    /// Poisons the device. The first failure is kept.
    pub fn fail(&self, error: Error) {
        let mut failure = lock(&self.failure);
        if failure.is_none() {
            log::error!("a device's collective failed: {error}");
            *failure = Some(error);
            // Release: pairs with the load in `failure`. A thread that sees the flag finds the failure.
            self.failed.store(true, Ordering::Release);
        }
    }

    /// Poisons the device if `result` is an error.
    pub fn record(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Adds a check that runs at every call of [`failure`](Self::failure) and [`reported`](Self::reported).
    #[cfg(feature = "cuda")]
    pub fn add_check(&self, check: Check) {
        lock(&self.checks).push(check);
    }

    /// Returns the failure that poisoned the device, if any.
    pub fn failure(&self) -> Option<Error> {
        self.look(Look::Faults)
    }

    /// Returns the same, before work is enqueued: without asking the driver for faults, after which it refuses work.
    pub fn reported(&self) -> Option<Error> {
        self.look(Look::Reports)
    }

    fn look(&self, look: Look) -> Option<Error> {
        // Not under the lock: a check that finds a failure may cause another call of this function.
        let checks = lock(&self.checks).clone();
        let ended: Vec<&Check> = checks.iter().filter(|check| !check(look)).collect();
        if !ended.is_empty() {
            lock(&self.checks).retain(|check| !ended.iter().any(|ended| Arc::ptr_eq(check, ended)));
        }
        if self.failed.load(Ordering::Acquire) { lock(&self.failure).clone() } else { None }
    }

    /// Returns the failure that poisoned the device, and clears it.
    pub fn take_failure(&self) -> Option<Error> {
        // Also clears a failure that no check has found yet.
        let _ = self.failure();
        let mut failure = lock(&self.failure);
        if failure.is_some() {
            // Release: pairs with `cleared`. A thread that sees the device sound also sees that a failure was cleared.
            self.cleared.fetch_add(1, Ordering::Release);
        }
        self.failed.store(false, Ordering::Release);
        failure.take()
    }

    /// How many failures were cleared so far.
    pub fn cleared(&self) -> u64 {
        self.cleared.load(Ordering::Acquire)
    }

    pub fn deadline(&self) -> Duration {
        *lock(&self.deadline)
    }

    pub fn set_deadline(&self, deadline: Duration) {
        *lock(&self.deadline) = deadline;
    }

    pub fn counters(&self) -> Counters {
        *lock(&self.counters)
    }

    pub fn count(&self, count: impl FnOnce(&mut Counters)) {
        count(&mut lock(&self.counters));
    }
}

/// A device has no caller to return an error to, so a malformed setting is logged.
fn default_deadline() -> Duration {
    let set = deadline_from_env();
    set.inspect_err(|error| log::warn!("{error}; taking {DEADLINE:?}")).ok().flatten().unwrap_or(DEADLINE)
}
