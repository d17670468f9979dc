//! What is known of each logical device outside its server's thread: whether it failed, and what it has moved.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use cubecl::device::DeviceId;

use bonfire_core::Error;
use bonfire_core::internal::{DEADLINE, deadline_from_env, lock};

/// The state of one logical device that servers, clients and other devices share.
pub(super) struct Status {
    /// Whether `failure` is set, to be looked at before every read.
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    deadline: Mutex<Duration>,
    watches: Mutex<Vec<Watch>>,
    /// How many failures were cleared.
    cleared: AtomicU64,
    counters: Mutex<Counters>,
}

/// Poisons the device if something has failed that reports it to nobody; whether it is to be called again.
type Watch = Arc<dyn Fn() -> bool + Send + Sync>;

/// What a device has moved for collectives and copies since the program began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Exchanges with other devices: pending all-reduces are fused, so there are fewer than calls.
    pub rounds: u64,
    /// Buffers that were copied from the device to the host.
    pub downloads: u64,
    /// Buffers that were copied from the host to the device.
    pub uploads: u64,
}

type Table = HashMap<(TypeId, DeviceId), Arc<Status>>;

static DEVICES: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

impl Status {
    /// The state of a device of the runtime `R`.
    pub fn of<R: 'static>(id: DeviceId) -> Arc<Status> {
        lock(&DEVICES).entry((TypeId::of::<R>(), id)).or_insert_with(|| Arc::new(Status::new())).clone()
    }

    fn new() -> Status {
        Status {
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            deadline: Mutex::new(default_deadline()),
            watches: Mutex::default(),
            cleared: AtomicU64::new(0),
            counters: Mutex::default(),
        }
    }

    /// Poisons the device; the first failure stays.
    pub fn fail(&self, error: Error) {
        let mut failure = lock(&self.failure);
        if failure.is_none() {
            log::error!("a device's collective failed: {error}");
            *failure = Some(error);
            // Release: who sees the flag finds the failure.
            self.failed.store(true, Ordering::Release);
        }
    }

    /// Poisons the device if this has failed.
    pub fn record(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Has this called whenever somebody asks whether the device is sound.
    pub fn watch(&self, watch: Watch) {
        lock(&self.watches).push(watch);
    }

    /// What poisoned the device.
    pub fn failure(&self) -> Option<Error> {
        // Not under the lock: a watch that finds a failure may make others look here.
        let watches = lock(&self.watches).clone();
        let ended: Vec<&Watch> = watches.iter().filter(|watch| !watch()).collect();
        if !ended.is_empty() {
            lock(&self.watches).retain(|watch| !ended.iter().any(|ended| Arc::ptr_eq(watch, ended)));
        }
        if self.failed.load(Ordering::Acquire) { lock(&self.failure).clone() } else { None }
    }

    /// What poisoned the device, which is sound afterwards.
    pub fn take_failure(&self) -> Option<Error> {
        // What nobody has looked for yet is cleared, too.
        let _ = self.failure();
        let mut failure = lock(&self.failure);
        if failure.is_some() {
            // Release: who sees the device sound also sees that something was cleared.
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

/// A device has nobody to return an error to, so a malformed setting is told to the log.
fn default_deadline() -> Duration {
    let set = deadline_from_env(|name| std::env::var(name).ok());
    set.inspect_err(|error| log::warn!("{error}; taking {DEADLINE:?}")).ok().flatten().unwrap_or(DEADLINE)
}
