//! Point-to-point messages.

use bytemuck::{cast_slice, cast_slice_mut};

use super::super::bytes::ByteOperations;
use super::super::check;
use super::super::execute::Task;
use super::super::handle::Group;
use super::super::journal::call_site;
use super::super::progress::Work;
use super::super::request::Request;
use crate::sync::Deadline;
use crate::types::{Call, Element, Error, Operation};

/// # Point to point
///
/// Messages between two ranks arrive in the order in which they were sent. They take their turn among all operations of
/// a rank, so sender and receiver must place a message between the same two collectives. Other ranks need not call
/// anything. A `send` may return before the receiver takes the message, or block until then; use
/// [`exchange`](Group::exchange) or a [`batch`](Group::batch) where two ranks send to each other.
impl Group {
    /// Sends `data` to rank `to`, which calls [`recv`](Group::recv) with a slice of the same type and length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `to` is this rank or not a rank. [`Error::Mismatch`] if the receiver expects
    /// another type or length; the receiver detects it, and this call or a later one returns it. Otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn send<T: Element>(&self, data: &[T], to: usize) -> Result<(), Error> {
        self.operate_send(Request::of::<T>(Operation::Send), cast_slice(data), to)
    }

    /// Fills `data` with the message of rank `from`, which calls [`send`](Group::send) with a slice of the same type
    /// and length.
    ///
    /// # Errors
    /// See [`send`](Group::send).
    #[track_caller]
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize) -> Result<(), Error> {
        self.operate_recv(Request::of::<T>(Operation::Send), cast_slice_mut(data), from)
    }

    /// Starts [`send`](Group::send).
    ///
    /// Started operations run one after the other, in the order of their calls, and a message waits for its receiver
    /// (always between threads, elsewhere if it is large). So ranks that each start a send and then a receive, around a
    /// ring or in a pair, wait for each other until the deadline. Use [`exchange`](Group::exchange) for one such pair
    /// of messages and a [`batch`](Group::batch) for several: both send and receive at the same time.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `to` is this rank or not a rank. [`Work::wait`] returns later errors.
    #[track_caller]
    pub fn start_send<T: Element, B>(&self, buffer: B, to: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start_message("send", buffer, to, true)
    }

    /// Starts [`recv`](Group::recv). Operations that are started later wait for it: see
    /// [`start_send`](Group::start_send) for ranks that both send and receive.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `from` is this rank or not a rank. [`Work::wait`] returns later errors.
    #[track_caller]
    pub fn start_recv<T: Element, B>(&self, buffer: B, from: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start_message("recv", buffer, from, false)
    }

    #[track_caller]
    fn start_message<T: Element, B>(
        &self,
        operation: &str,
        mut buffer: B,
        peer: usize,
        sends: bool,
    ) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        check::peer(operation, peer, self.rank_and_size())?;
        let (deadline, at) = (Deadline::after(self.deadline()), call_site());
        let call = Request::of::<T>(Operation::Send).call(buffer.as_mut().len());
        Ok(self.progress()?.start(&self.core, call, deadline, buffer, move |core, turn, buffer| {
            let data = buffer.as_mut();
            // The peer reports another length than it expects.
            let call = Call { count: data.len(), ..call };
            let task = match sends {
                true => Task::Message { outgoing: Some((peer, cast_slice(data))), incoming: None },
                false => Task::Message { outgoing: None, incoming: Some((peer, cast_slice_mut(data))) },
            };
            core.run(turn, call, task, &deadline, at).map(drop)
        }))
    }
}
