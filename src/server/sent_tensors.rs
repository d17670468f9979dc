//! Tensors that ranks of one process have sent each other, and that no receiver has taken.

use std::collections::HashMap;
use std::sync::Mutex;

use cubecl::device::DeviceId;

use super::mailbox::Payload;
use bonfire_core::internal::lock;

/// Those of one group. What is left is freed with the group.
pub struct SentTensors {
    /// Of the ranks.
    devices: Vec<DeviceId>,
    lent: Mutex<Lent>,
}

#[derive(Default)]
struct Lent {
    /// The ticket of the last message. No ticket is 0.
    last: u64,
    payloads: HashMap<u64, Payload>,
}

impl SentTensors {
    /// Creates those of ranks with these devices.
    pub(super) fn of(devices: Vec<DeviceId>) -> SentTensors {
        SentTensors { devices, lent: Mutex::default() }
    }

    pub(super) fn device(&self, rank: usize) -> DeviceId {
        self.devices[rank]
    }

    /// Leaves a message for the rank that gets the ticket.
    pub(super) fn lend(&self, payload: Payload) -> u64 {
        let mut lent = lock(&self.lent);
        lent.last += 1;
        let ticket = lent.last;
        lent.payloads.insert(ticket, payload);
        ticket
    }

    /// Takes the message with this ticket.
    pub(super) fn take(&self, ticket: u64) -> Option<Payload> {
        lock(&self.lent).payloads.remove(&ticket)
    }
}
