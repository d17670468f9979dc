//! Point to point.

use std::panic::Location;

use bytemuck::{cast_slice, cast_slice_mut};

use super::super::bytes::ByteOperations;
use super::super::check;
use super::super::execute::Task;
use super::super::handle::Group;
use super::super::progress::Work;
use super::super::request::Request;
use crate::sync::Deadline;
use crate::types::{Element, Error, Operation};

/// # Point to point
///
/// Messages between two ranks arrive in the order in which they were sent. They take their place in the order of
/// operations like everything else, so what one rank does between two collectives the other does there too. A `send` may
/// return before the receiver takes the message, or wait for it.
impl Group {
    /// Sends `data` to rank `to`, which receives it with [`recv`](Group::recv).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where `to` is no other rank; [`Error::Mismatch`] where the receiver expects another
    /// type or length (found by the receiver, and reported here by this or a later call); else as
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn send<T: Element>(&self, data: &[T], to: usize) -> Result<(), Error> {
        self.operate_send(Request::of::<T>(Operation::Send), cast_slice(data), to)
    }

    /// Fills `data` with what rank `from` sends with [`send`](Group::send): the same type and length.
    ///
    /// # Errors
    /// As [`send`](Group::send).
    #[track_caller]
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize) -> Result<(), Error> {
        self.operate_recv(Request::of::<T>(Operation::Send), cast_slice_mut(data), from)
    }

    /// Starts [`send`](Group::send).
    ///
    /// # Errors
    /// Wrong arguments; whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_send<T: Element, B>(&self, buffer: B, to: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start_message("send", buffer, to, true)
    }

    /// Starts [`recv`](Group::recv).
    ///
    /// # Errors
    /// Wrong arguments; whatever comes later is returned by [`Work::wait`].
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
        buffer: B,
        peer: usize,
        sends: bool,
    ) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        check::peer(operation, peer, self.place())?;
        let (limit, at) = (self.deadline(), Location::caller());
        Ok(self.progress()?.start(&self.core, buffer, move |core, buffer| {
            let data = buffer.as_mut();
            let call = Request::of::<T>(Operation::Send).call(data.len());
            let task = match sends {
                true => Task::Message { outgoing: Some((peer, cast_slice(data))), incoming: None },
                false => Task::Message { outgoing: None, incoming: Some((peer, cast_slice_mut(data))) },
            };
            core.run(call, task, &Deadline::after(limit), at).map(drop)
        }))
    }
}
