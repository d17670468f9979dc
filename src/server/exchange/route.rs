//! The interface to a runtime's own way between the devices of a group's ranks, without host memory.

use std::sync::Arc;

use cubecl::device_handle::DeviceHandle;

use super::{Completion, WaitFn};
use crate::server::DeviceTransport;
use crate::server::compute::CollectiveServer;
use crate::server::engine::DeviceOperation;
use crate::server::mailbox::SentTensors;
use bonfire_core::{Call, Error, Group};

/// How a route carries messages between two ranks.
pub enum Messages {
    /// The sender lends its memory to the receiver, whose device is of the same process.
    Lent(Arc<SentTensors>),
    /// As it does collectives.
    Carried,
}

/// A peer, and what goes to it or comes from it.
pub type Direction = Option<(usize, Call)>;

/// How the ranks of a group exchange data without host memory. A rank has one for its device.
pub trait Route<R: DeviceTransport>: Send + Sync {
    /// Whether the route supports this call. The answer is the same on all ranks.
    fn supports(&self, call: &Call) -> bool;

    /// How messages between the ranks go, if not through host memory. The answer is the same on all ranks.
    fn messages(&self) -> Option<Messages>;

    /// Starts a collective on the memory as the work queued so far leaves it. It runs only after all ranks have called
    /// it: no device waits for a missing rank, which the group reports. The returned function waits for this rank's
    /// device. An error ends the group.
    fn start(
        self: Arc<Self>,
        device: DeviceHandle<CollectiveServer<R>>,
        group: &Group,
        job: DeviceOperation,
    ) -> Result<WaitFn, Error>;

    /// As [`start`](Self::start), for a message that is sent, received, or both.
    fn carry(
        self: Arc<Self>,
        device: DeviceHandle<CollectiveServer<R>>,
        group: &Group,
        directions: (Direction, Direction),
        job: DeviceOperation,
    ) -> Result<WaitFn, Error>;
}

impl Completion {
    /// The end of an operation for which `wait` waits.
    pub(in crate::server) fn of(wait: impl FnOnce() -> Result<(), Error> + Send + 'static) -> Completion {
        Completion { wait: Some(Box::new(wait)) }
    }
}
