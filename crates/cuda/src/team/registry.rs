//! The registry of teams in this process.

use std::any::TypeId;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use super::{GroupTeam, Team};
use crate::choice::{Mode, settings};
use crate::control::MAX_RANKS;
use crate::driver::Gpu;
use crate::reach::KERNELS_NEED;
use crate::runtime::{DeviceId, Runtime};
use crate::shared::Shared;
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// The team of a device list, once it is created. Creation takes the driver's time and must not block other lists.
pub(super) type Slot = Arc<Mutex<Option<Arc<Team>>>>;

/// A library, and devices of it.
pub(super) type Key = (TypeId, Vec<DeviceId>);

static TEAMS: LazyLock<Mutex<HashMap<Key, Slot>>> = LazyLock::new(Mutex::default);
/// The teams of groups, by a number that the group's ranks have agreed on. A group's team is shared neither with the
/// all-reduces of `Engine` between the same devices nor with another group: nothing orders the calls of the two.
static GROUPS: Shared<Team> = Shared::new();
/// Whether kernels can serve a device list.
static KERNELS_SUPPORTED: LazyLock<Mutex<HashMap<Vec<DeviceId>, bool>>> = LazyLock::new(Mutex::default);

/// Whether kernels can serve these devices: each must be able to access the memory of all others.
pub(crate) fn kernels_supported(devices: &[DeviceId]) -> bool {
    let host_only = settings().is_ok_and(|settings| settings.by_size.paths().all(|mode| mode == Mode::Host));
    if host_only || !(1..=MAX_RANKS).contains(&devices.len()) {
        return false;
    }
    if let Some(kernels_supported) = lock(&KERNELS_SUPPORTED).get(devices) {
        return *kernels_supported;
    }
    let reach = || -> Result<bool, Error> {
        let gpus = devices.iter().map(|id| Gpu::of(id.ordinal())).collect::<Result<Vec<_>, _>>()?;
        for (one, other) in gpus.iter().flat_map(|one| gpus.iter().map(move |other| (one, other))) {
            if !one.reaches(other)? {
                log::warn!(
                    "GPU {} cannot access the memory of GPU {}; collectives between them go through host memory",
                    one.ordinal,
                    other.ordinal
                );
                return Ok(false);
            }
        }
        for gpu in &gpus {
            if !gpu.runs_kernels()? {
                let gpu = gpu.ordinal;
                log::warn!("GPU {gpu} lacks {KERNELS_NEED}; its collectives go through host memory");
                return Ok(false);
            }
        }
        Ok(true)
    };
    let kernels_supported = reach().unwrap_or_else(|error| {
        log::warn!("{error}; collectives between the devices go through host memory");
        false
    });
    // Another device may have found out meanwhile: all must act on the same answer.
    *lock(&KERNELS_SUPPORTED).entry(devices.to_vec()).or_insert(kernels_supported)
}

/// Fails the team of these devices, if there is one. Poisons all of them in any case.
pub(crate) fn fail<R: Runtime>(devices: &[DeviceId], error: &Error) {
    let slot = slot(&(TypeId::of::<R>(), devices.to_vec()));
    let present = lock(&slot);
    match &*present {
        Some(team) => {
            let team = team.clone();
            // `Team::fail` locks the slot after its own lock.
            drop(present);
            team.fail(error.clone());
        }
        None => devices.iter().for_each(|id| R::status(*id).fail(error.clone())),
    }
}

/// The slot for the team of these devices.
pub(super) fn slot(key: &Key) -> Slot {
    lock(&TEAMS).entry(key.clone()).or_default().clone()
}

impl Team {
    /// Returns the team of these devices, which are sorted and supported by kernels.
    pub fn of<R: Runtime>(devices: Vec<DeviceId>) -> Result<Arc<Team>, Error> {
        let slot = slot(&(TypeId::of::<R>(), devices.clone()));
        let mut team = lock(&slot);
        match &*team {
            Some(team) => Ok(team.clone()),
            None => Ok(team.insert(Arc::new(Team::new::<R>(devices, None)?)).clone()),
        }
    }

    /// Returns the team of a group's ranks, whose devices are given by rank and supported by kernels.
    pub fn of_group<R: Runtime>(number: u64, devices: &[DeviceId], group: GroupTeam) -> Result<Arc<Team>, Error> {
        GROUPS.of(number, || Team::new::<R>(devices.to_vec(), Some(group)))
    }
}
