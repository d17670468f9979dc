//! Every operation on bytes, which the typed forms and those on tensors are made of.

use std::panic::Location;

use super::check;
use super::execute::{Pairs, Task};
use super::handle::Group;
use super::progress::Work;
use super::request::Request;
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Call, Error, Parts};

/// Operations on bytes that are aligned for their elements. The arguments are checked as those of the typed forms.
pub trait ByteOperations {
    /// Whether `rank` is one of the group's: `what` says in the error whose it is.
    fn check_rank(&self, operation: &str, what: &str, rank: usize) -> Result<(), Error>;

    /// A collective; without an input it is in place.
    fn operate(&self, request: Request<'_>, input: Option<&[u8]>, output: &mut [u8]) -> Result<(), Error>;

    /// An `all_to_all_v`, with the number of elements for each rank, and from each.
    fn operate_pairs(
        &self,
        request: Request<'_>,
        outgoing: (&[u8], &[usize]),
        incoming: (&mut [u8], &[usize]),
    ) -> Result<(), Error>;

    /// A message to one rank and one from one, at once.
    fn operate_exchange(
        &self,
        request: Request<'_>,
        outgoing: (&[u8], usize),
        incoming: (&mut [u8], usize),
    ) -> Result<(), Error>;

    /// A message to a rank.
    fn operate_send(&self, request: Request<'_>, data: &[u8], to: usize) -> Result<(), Error>;

    /// A message from a rank.
    fn operate_recv(&self, request: Request<'_>, data: &mut [u8], from: usize) -> Result<(), Error>;

    /// Starts a collective in place on the bytes that `bytes` gives when its turn has come. An error of it ends the group.
    fn start_operation<B: Send + 'static>(
        &self,
        request: Request<'static>,
        buffer: B,
        bytes: impl for<'a> FnOnce(&'a mut B) -> Result<&'a mut [u8], Error> + Send + 'static,
    ) -> Result<Work<B>, Error>;
}

impl ByteOperations for Group {
    fn check_rank(&self, operation: &str, what: &str, rank: usize) -> Result<(), Error> {
        check::rank(operation, what, rank, self.world_size())
    }

    #[track_caller]
    #[inline]
    fn operate(&self, request: Request<'_>, input: Option<&[u8]>, output: &mut [u8]) -> Result<(), Error> {
        let (call, buffers) = request.buffers(self.place(), input, output)?;
        self.perform(call, Task::Collective(buffers))
    }

    #[track_caller]
    fn operate_pairs(
        &self,
        request: Request<'_>,
        (input, send): (&[u8], &[usize]),
        (output, recv): (&mut [u8], &[usize]),
    ) -> Result<(), Error> {
        let (operation, (rank, n)) = ("all_to_all_v", self.place());
        let (sent, received) = (check::sizes(operation, send, n)?, check::sizes(operation, recv, n)?);
        check::len(operation, "input", request.len(input)?, sent)?;
        check::len(operation, "output", request.len(output)?, received)?;
        if send[rank] != recv[rank] {
            let reason = format!("{} elements for this rank itself, which expects {}", send[rank], recv[rank]);
            return Err(Error::argument(operation, reason));
        }
        self.perform(request.call(0), Task::Pairs(Pairs { input, send, output, recv }))
    }

    #[track_caller]
    fn operate_exchange(
        &self,
        request: Request<'_>,
        (outgoing, to): (&[u8], usize),
        (incoming, from): (&mut [u8], usize),
    ) -> Result<(), Error> {
        self.check_rank("exchange", "receiver", to)?;
        self.check_rank("exchange", "sender", from)?;
        let (len_out, len_in) = (request.len(outgoing)?, request.len(incoming)?);
        if (to == self.rank()) != (from == self.rank()) {
            let reason = "a rank that sends to itself receives from itself: give two other ranks, or none";
            return Err(Error::argument("exchange", reason));
        }
        if to == self.rank() {
            check::len("exchange", "incoming buffer", len_in, len_out)?;
            incoming.copy_from_slice(outgoing);
            return Ok(());
        }
        let task = Task::Message { outgoing: Some((to, outgoing)), incoming: Some((from, incoming)) };
        self.perform(request.call(0), task)
    }

    #[track_caller]
    fn operate_send(&self, request: Request<'_>, data: &[u8], to: usize) -> Result<(), Error> {
        check::peer("send", to, self.place())?;
        let call = request.call(request.len(data)?);
        self.perform(call, Task::Message { outgoing: Some((to, data)), incoming: None })
    }

    #[track_caller]
    fn operate_recv(&self, request: Request<'_>, data: &mut [u8], from: usize) -> Result<(), Error> {
        check::peer("recv", from, self.place())?;
        let call = request.call(request.len(data)?);
        self.perform(call, Task::Message { outgoing: None, incoming: Some((from, data)) })
    }

    #[track_caller]
    fn start_operation<B: Send + 'static>(
        &self,
        request: Request<'static>,
        buffer: B,
        bytes: impl for<'a> FnOnce(&'a mut B) -> Result<&'a mut [u8], Error> + Send + 'static,
    ) -> Result<Work<B>, Error> {
        request.check_root(self.world_size())?;
        let (limit, at) = (self.deadline(), Location::caller());
        Ok(self.progress()?.start(&self.core, buffer, move |core, buffer| {
            let output = bytes(buffer).map_err(|error| core.abandon(error))?;
            // Whether it can be cut was checked before; peers that find another length say so.
            let call = request.call(request.len(output).map_err(|error| core.abandon(error))?);
            let buffers = Buffers { input: None, output, parts: Parts::Even };
            core.run(call, Task::Collective(buffers), &Deadline::after(limit), at).map(drop)
        }))
    }
}

impl Group {
    /// Runs an operation when its turn comes.
    #[track_caller]
    #[inline]
    fn perform(&self, call: Call, task: Task<'_>) -> Result<(), Error> {
        let at = Location::caller();
        let _turn = self.turn();
        self.core.run(call, task, &Deadline::after(self.deadline()), at).map(drop)
    }
}
