//! Messages between the devices of one process: `send` leaves a snapshot here, `recv` waits for it.
//!
//! Neither call carries a number, and the two devices may run them in different orders where several threads copy at a
//! time. The stream tells them apart: cubecl's client runs both halves of a copy on the caller's stream.

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};

use cubecl::device::DeviceId;
use cubecl::ir::ElemType;
use cubecl::stream_id::StreamId;

use super::engine::Loan;
use super::reading::Reading;
use bonfire_core::internal::lock;
use bonfire_core::{Deadline, Error};

/// What a device gives another one to copy.
pub(super) enum Offer {
    /// The data, on its way to the host.
    Reading(Reading),
    /// The memory itself.
    Loan(Loan),
}

/// What one device sent another.
pub(super) struct Message {
    pub stream: StreamId,
    pub dtype: ElemType,
    /// In bytes.
    pub size: u64,
    pub data: Result<Offer, Error>,
}

/// The messages from one device to another that have not been received.
#[derive(Default)]
pub(super) struct Post {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    messages: VecDeque<Message>,
    /// The streams of receivers that gave up. The message that each waited for is thrown away when it comes: the next
    /// receiver must not take it for its own.
    abandoned: Vec<StreamId>,
}

/// A runtime, the sender and the receiver.
type Key = (TypeId, DeviceId, DeviceId);

static POSTS: LazyLock<Mutex<HashMap<Key, Arc<Post>>>> = LazyLock::new(Mutex::default);

impl Post {
    /// The messages from `source` to `destination`, devices of the runtime `R`.
    pub fn between<R: 'static>(source: DeviceId, destination: DeviceId) -> Arc<Post> {
        lock(&POSTS).entry((TypeId::of::<R>(), source, destination)).or_default().clone()
    }

    pub fn send(&self, message: Message) {
        let mut state = lock(&self.state);
        if let Some(position) = state.abandoned.iter().position(|stream| *stream == message.stream) {
            state.abandoned.swap_remove(position);
            return;
        }
        state.messages.push_back(message);
        drop(state);
        self.arrived.notify_all();
    }

    /// The oldest message of this stream.
    pub fn receive(&self, stream: StreamId, deadline: &Deadline) -> Result<Message, Error> {
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
