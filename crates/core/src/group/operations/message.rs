//! Point to point.

use std::panic::Location;

use bytemuck::{cast_slice, cast_slice_mut};

use super::call;
use crate::group::{Group, Work};
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
        self.check_peer("send", to)?;
        let at = Location::caller();
        let _turn = self.turn();
        let call = self.stamp(call::<T>(Operation::Send, data.len(), None, None));
        self.core.message(call, to, true, self.deadline(), at, |t, tag, deadline| {
            t.send(tag, to, cast_slice(data), deadline)
        })
    }

    /// Fills `data` with what rank `from` sends with [`send`](Group::send): the same type and length.
    ///
    /// # Errors
    /// As [`send`](Group::send).
    #[track_caller]
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize) -> Result<(), Error> {
        self.check_peer("recv", from)?;
        let at = Location::caller();
        let _turn = self.turn();
        let call = self.stamp(call::<T>(Operation::Send, data.len(), None, None));
        self.core.message(call, from, false, self.deadline(), at, |t, tag, deadline| {
            t.receive(tag, from, cast_slice_mut(data), deadline)
        })
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
        self.check_peer(operation, peer)?;
        let (limit, at) = (self.deadline(), Location::caller());
        Ok(self.progress()?.start(&self.core, buffer, move |core, buffer| {
            let data = buffer.as_mut();
            let call = call::<T>(Operation::Send, data.len(), None, None);
            core.message(call, peer, sends, limit, at, |t, tag, deadline| match sends {
                true => t.send(tag, peer, cast_slice(data), deadline),
                false => t.receive(tag, peer, cast_slice_mut(data), deadline),
            })
        }))
    }

    pub(super) fn check_peer(&self, operation: &str, peer: usize) -> Result<(), Error> {
        self.check_rank(operation, "peer", peer)?;
        if peer == self.rank() {
            return Err(Error::argument(operation, format!("rank {peer} is the caller itself: give another rank")));
        }
        Ok(())
    }
}
