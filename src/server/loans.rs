//! Memory that the ranks of a group have lent each other for messages, if all are of one process.

use std::collections::HashMap;
use std::sync::Mutex;

use cubecl::device::DeviceId;

use super::mailbox::Payload;
use bonfire_core::internal::lock;

/// The messages of one group that no receiver has taken. What is left is freed with the group.
pub struct Loans {
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

impl Loans {
    /// Creates the loans of ranks with these devices.
    pub(super) fn of(devices: Vec<DeviceId>) -> Loans {
        Loans { devices, lent: Mutex::default() }
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
