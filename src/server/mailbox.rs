//! Messages between devices of one process. A mailbox is that of devices without a group: `send` leaves data here, and
//! `recv` waits for it.
//!
//! Neither call carries a number, and the two devices may run them in different orders if several threads copy at a
//! time. Messages are matched by stream: cubecl's client runs both halves of a copy on the caller's stream.

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};

use cubecl::device::DeviceId;
use cubecl::ir::ElemType;
use cubecl::stream_id::StreamId;

use super::download::PendingRead;
use super::engine::PeerBuffer;
use bonfire_core::internal::lock;
use bonfire_core::{Deadline, Error};

/// The data of a message.
pub(super) enum Payload {
    /// A device-to-host copy in flight.
    PendingRead(PendingRead),
    /// The device memory itself.
    PeerBuffer(PeerBuffer),
}

/// One transfer from one device to another.
pub(super) struct DeviceMessage {
    pub stream: StreamId,
    pub dtype: ElemType,
    /// In bytes.
    pub size: u64,
    pub data: Result<Payload, Error>,
}

/// The messages from one device to another that have not been received.
#[derive(Default)]
pub(super) struct Mailbox {
    state: Mutex<MailboxState>,
    arrived: Condvar,
}

#[derive(Default)]
struct MailboxState {
    messages: VecDeque<DeviceMessage>,
    /// The streams of receivers that timed out. The message that each waited for is discarded when it arrives, so that
    /// the next receiver does not mistake it for its own.
    abandoned: Vec<StreamId>,
}

/// A runtime, the sender and the receiver.
type Key = (TypeId, DeviceId, DeviceId);

static MAILBOXES: LazyLock<Mutex<HashMap<Key, Arc<Mailbox>>>> = LazyLock::new(Mutex::default);

impl Mailbox {
    /// Returns the mailbox from `source` to `destination`, devices of the runtime `R`.
    pub fn between<R: 'static>(source: DeviceId, destination: DeviceId) -> Arc<Mailbox> {
        lock(&MAILBOXES).entry((TypeId::of::<R>(), source, destination)).or_default().clone()
    }

    pub fn send(&self, message: DeviceMessage) {
        let mut state = lock(&self.state);
        if let Some(position) = state.abandoned.iter().position(|stream| *stream == message.stream) {
            state.abandoned.swap_remove(position);
            return;
        }
        state.messages.push_back(message);
        drop(state);
        self.arrived.notify_all();
    }

    /// Removes and returns the oldest message of this stream. Waits for one until the deadline.
    pub fn receive(&self, stream: StreamId, deadline: &Deadline) -> Result<DeviceMessage, Error> {
        let mut state = lock(&self.state);
        loop {
            let position = state.messages.iter().position(|message| message.stream == stream);
            if let Some(message) = position.and_then(|position| state.messages.remove(position)) {
                return Ok(message);
            }
            if deadline.passed() {
                let elapsed = deadline.elapsed();
                state.abandoned.push(stream);
                let reason = match state.messages.front() {
                    Some(other) => format!(
                        "nothing was sent on {stream} within {elapsed:.1?}, but something on {}; put both clients on \
                         one stream, or use `copy`",
                        other.stream
                    ),
                    None => format!("nothing was sent within {elapsed:.1?}"),
                };
                return Err(Error::io("recv", io::Error::new(io::ErrorKind::TimedOut, reason)));
            }
            let waited = self.arrived.wait_timeout(state, deadline.remaining());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Tensors that ranks of a group in one process have sent each other, and that no receiver has taken. What is left is
/// freed with the group.
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
