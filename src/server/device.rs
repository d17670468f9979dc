//! Logical devices.

use std::fmt;
use std::time::Duration;

use burn::tensor::backend::DeviceOps;
use cubecl::device::{Device, DeviceId};

use super::DeviceTransport;
use super::status::{Counters, Status};
use bonfire_core::Error;

/// A logical device: one of up to 256 on a physical device of the runtime `R`, with a server of its own.
///
/// ```
/// # #[cfg(feature = "wgpu")] {
/// use bonfire::WgpuDevice;
///
/// let devices: Vec<WgpuDevice> = (0..4).map(|replica| WgpuDevice::new(Default::default(), replica)).collect();
/// # assert_ne!(devices[0], devices[3]);
/// # }
/// ```
pub struct CollectiveDevice<R: DeviceTransport> {
    physical: R::Device,
    replica: u8,
}

/// Position of the replica in a device id's `type_id`. Runtimes use only the low byte. cubecl starts a server and a
/// thread for each id, so replicas share nothing but the physical device.
const REPLICA_SHIFT: u32 = 8;

impl<R: DeviceTransport> CollectiveDevice<R> {
    /// Returns the logical device with number `replica` on a physical one. Equal numbers are the same device.
    pub fn new(physical: R::Device, replica: u8) -> Self {
        CollectiveDevice { physical, replica }
    }

    /// Returns the device that does the work.
    pub fn physical(&self) -> &R::Device {
        &self.physical
    }

    /// Returns the number of this logical device on its physical one.
    pub fn replica(&self) -> u8 {
        self.replica
    }

    /// Returns the failure that poisoned the device, if any, and clears it: see [the module's
    /// page](crate::server#errors). Clear it on all devices that took part before you use any of them again.
    pub fn failure(&self) -> Option<Error> {
        self.status().take_failure()
    }

    /// Sets how long `sync_collective`, `recv` and the receiving half of a copy wait for other devices. The default is
    /// 300 s, or `BONFIRE_DEADLINE` (in seconds). Applies to all values for this logical device. Operations of a
    /// [`Group`](crate::Group) have the group's deadline instead.
    pub fn set_deadline(&self, deadline: Duration) {
        self.status().set_deadline(deadline);
    }

    /// Returns what the device has moved through host memory so far.
    pub fn counters(&self) -> Counters {
        self.status().counters()
    }

    fn status(&self) -> std::sync::Arc<Status> {
        Status::of::<R>(self.to_id())
    }
}

/// The logical device's id.
pub(super) fn logical(physical: DeviceId, replica: u8) -> DeviceId {
    DeviceId::new(physical.type_id | u16::from(replica) << REPLICA_SHIFT, physical.index_id)
}

/// The inverse of [`logical`].
pub(super) fn physical(logical: DeviceId) -> (DeviceId, u8) {
    let replica = (logical.type_id >> REPLICA_SHIFT) as u8;
    (DeviceId::new(logical.type_id & ((1 << REPLICA_SHIFT) - 1), logical.index_id), replica)
}

impl<R: DeviceTransport> Device for CollectiveDevice<R> {
    fn from_id(id: DeviceId) -> Self {
        let (id, replica) = physical(id);
        CollectiveDevice { physical: R::Device::from_id(id), replica }
    }

    fn to_id(&self) -> DeviceId {
        logical(self.physical.to_id(), self.replica)
    }
}

impl<R: DeviceTransport> DeviceOps for CollectiveDevice<R> {}

impl<R: DeviceTransport> Default for CollectiveDevice<R> {
    fn default() -> Self {
        CollectiveDevice::new(R::Device::default(), 0)
    }
}

impl<R: DeviceTransport> Clone for CollectiveDevice<R> {
    fn clone(&self) -> Self {
        CollectiveDevice::new(self.physical.clone(), self.replica)
    }
}

impl<R: DeviceTransport> PartialEq for CollectiveDevice<R> {
    fn eq(&self, other: &Self) -> bool {
        self.to_id() == other.to_id()
    }
}

impl<R: DeviceTransport> Eq for CollectiveDevice<R> {}

impl<R: DeviceTransport> fmt::Debug for CollectiveDevice<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}#{}", self.physical, self.replica)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logical_id_contains_the_physical_one_and_the_replica() {
        let wgpu = DeviceId::new(4, 7);
        for replica in [0, 1, 255] {
            assert_eq!(physical(logical(wgpu, replica)), (wgpu, replica));
        }
        assert_eq!(logical(wgpu, 0), wgpu);
    }
}
