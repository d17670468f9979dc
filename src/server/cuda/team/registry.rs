//! Which teams there are.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;

use super::Team;
use crate::server::cuda::choice::{ROUTE, Route};
use crate::server::cuda::control::MAX_RANKS;
use crate::server::cuda::driver::Gpu;
use crate::server::device::physical;
use crate::server::status::Status;
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// Where a list's team is, once it is made. Making one takes the driver's time, and must not keep other lists waiting.
pub(super) type Slot = Arc<Mutex<Option<Arc<Team>>>>;

static TEAMS: LazyLock<Mutex<HashMap<Vec<DeviceId>, Slot>>> = LazyLock::new(Mutex::default);
/// The teams of groups, by a number that the ranks of a group have agreed on.
static GROUPS: LazyLock<Mutex<HashMap<u64, Weak<Team>>>> = LazyLock::new(Mutex::default);
/// Whether kernels can work for a list of devices.
static FIT: LazyLock<Mutex<HashMap<Vec<DeviceId>, bool>>> = LazyLock::new(Mutex::default);

/// Whether kernels can work for these devices: whether each reaches the memory of all others.
pub(in crate::server::cuda) fn fit(devices: &[DeviceId]) -> bool {
    if *ROUTE == Route::Host || !(1..=MAX_RANKS).contains(&devices.len()) {
        return false;
    }
    if let Some(fit) = lock(&FIT).get(devices) {
        return *fit;
    }
    let reach = || -> Result<bool, Error> {
        let gpus = devices.iter().map(|id| Gpu::of(ordinal(*id))).collect::<Result<Vec<_>, _>>()?;
        for (one, other) in gpus.iter().flat_map(|one| gpus.iter().map(move |other| (one, other))) {
            if !one.reaches(other)? {
                log::warn!(
                    "GPU {} does not reach the memory of GPU {}; collectives between them go through host memory",
                    one.ordinal,
                    other.ordinal
                );
                return Ok(false);
            }
        }
        for gpu in &gpus {
            // Older ones lack the orders and scopes of `kernels/ptx.cuh`.
            if gpu.architecture < 70 || !gpu.orders_streams() {
                log::warn!(
                    "GPU {} cannot do what our kernels need; its collectives go through host memory",
                    gpu.ordinal
                );
                return Ok(false);
            }
        }
        Ok(true)
    };
    let fit = reach().unwrap_or_else(|error| {
        log::warn!("{error}; collectives between the devices go through host memory");
        false
    });
    // Another device may have found out meanwhile: all must act on one answer.
    *lock(&FIT).entry(devices.to_vec()).or_insert(fit)
}

/// Ends the team of these devices, if there is one: whatever there is, all of them are poisoned.
pub(in crate::server::cuda) fn fail(devices: &[DeviceId], error: &Error) {
    let slot = slot(devices);
    let present = lock(&slot);
    match &*present {
        Some(team) => {
            let team = team.clone();
            // `Team::fail` takes the slot after its own lock.
            drop(present);
            team.fail(error.clone());
        }
        None => devices.iter().for_each(|id| Status::of::<CudaRuntime>(*id).fail(error.clone())),
    }
}

/// The number of a logical device's GPU.
pub(in crate::server::cuda) fn ordinal(id: DeviceId) -> usize {
    usize::from(physical(id).0.index_id)
}

/// Where the team of these devices is.
pub(super) fn slot(devices: &[DeviceId]) -> Slot {
    lock(&TEAMS).entry(devices.to_vec()).or_default().clone()
}

impl Team {
    /// The team of these devices, which are sorted and fit.
    pub fn of(devices: Vec<DeviceId>) -> Result<Arc<Team>, Error> {
        let slot = slot(&devices);
        let mut team = lock(&slot);
        match &*team {
            Some(team) => Ok(team.clone()),
            None => Ok(team.insert(Arc::new(Team::new(devices, None)?)).clone()),
        }
    }

    /// The team of a group's ranks, whose devices these are by rank, and fit.
    pub fn of_group(number: u64, devices: &[DeviceId], limit: Duration) -> Result<Arc<Team>, Error> {
        let mut groups = lock(&GROUPS);
        if let Some(team) = groups.get(&number).and_then(Weak::upgrade) {
            return Ok(team);
        }
        groups.retain(|_, team| team.strong_count() > 0);
        let team = Arc::new(Team::new(devices.to_vec(), Some(limit))?);
        groups.insert(number, Arc::downgrade(&team));
        Ok(team)
    }
}
