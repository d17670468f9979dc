//! Operations on bytes, on which the typed operations and those on tensors are built.

use super::check;
use super::execute::{Pairs, Task};
use super::handle::Group;
use super::journal::call_site;
use super::progress::Work;
use super::request::Request;
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Call, Error, Parts};

/// Operations on bytes that are aligned for their elements. Arguments are checked as in the typed forms.
pub trait ByteOperations {
    /// Checks that `rank` is a rank of the group. `what` names the argument in the error.
    fn check_rank(&self, operation: &str, what: &str, rank: usize) -> Result<(), Error>;

    /// Runs a collective, in place if there is no input.
    fn operate(&self, request: Request<'_>, input: Option<&[u8]>, output: &mut [u8]) -> Result<(), Error>;

    /// Runs an `all_to_all_v`. Each side is a buffer and the number of elements per rank.
    fn operate_pairs(
        &self,
        request: Request<'_>,
        outgoing: (&[u8], &[usize]),
        incoming: (&mut [u8], &[usize]),
    ) -> Result<(), Error>;

    /// Whether both ranks of an exchange are this one. An error if one of them is, or is no rank.
    fn exchanges_with_itself(&self, to: usize, from: usize) -> Result<bool, Error>;

    /// Sends to one rank and receives from one at the same time.
    fn operate_exchange(
        &self,
        request: Request<'_>,
        outgoing: (&[u8], usize),
        incoming: (&mut [u8], usize),
    ) -> Result<(), Error>;

    /// Sends to a rank.
    fn operate_send(&self, request: Request<'_>, data: &[u8], to: usize) -> Result<(), Error>;

    /// Receives from a rank.
    fn operate_recv(&self, request: Request<'_>, data: &mut [u8], from: usize) -> Result<(), Error>;

    /// Starts a collective in place on `count` elements. When its turn comes, `bytes` returns the memory to operate on;
    /// its error, or another length, fails the group.
    fn start_operation<B: Send + 'static>(
        &self,
        request: Request<'static>,
        count: usize,
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
        let (call, buffers) = request.buffers(self.rank_and_size(), input, output)?;
        self.perform(call, Task::Collective(buffers))
    }

    #[track_caller]
    fn operate_pairs(
        &self,
        request: Request<'_>,
        (input, send): (&[u8], &[usize]),
        (output, recv): (&mut [u8], &[usize]),
    ) -> Result<(), Error> {
        let (operation, (rank, n)) = ("all_to_all_v", self.rank_and_size());
        let (sent, received) = (check::sizes(operation, send, n)?, check::sizes(operation, recv, n)?);
        check::len(operation, "input", request.len(input)?, sent)?;
        check::len(operation, "output", request.len(output)?, received)?;
        if send[rank] != recv[rank] {
            let reason = format!("rank {rank} sends {} elements to itself and expects {}", send[rank], recv[rank]);
            return Err(Error::argument(operation, reason));
        }
        self.perform(request.call(0), Task::Pairs(Pairs { input, send, output, recv }))
    }

    fn exchanges_with_itself(&self, to: usize, from: usize) -> Result<bool, Error> {
        self.check_rank("exchange", "receiver", to)?;
        self.check_rank("exchange", "sender", from)?;
        if (to == self.rank()) != (from == self.rank()) {
            let reason = "only one of the two ranks is the caller itself: give two other ranks, or the caller twice";
            return Err(Error::argument("exchange", reason));
        }
        Ok(to == self.rank())
    }

    #[track_caller]
    fn operate_exchange(
        &self,
        request: Request<'_>,
        (outgoing, to): (&[u8], usize),
        (incoming, from): (&mut [u8], usize),
    ) -> Result<(), Error> {
        let with_itself = self.exchanges_with_itself(to, from)?;
        let (len_out, len_in) = (request.len(outgoing)?, request.len(incoming)?);
        if with_itself {
            check::len("exchange", "incoming buffer", len_in, len_out)?;
            incoming.copy_from_slice(outgoing);
            return Ok(());
        }
        let task = Task::Message { outgoing: Some((to, outgoing)), incoming: Some((from, incoming)) };
        self.perform(request.call(0), task)
    }

    #[track_caller]
    fn operate_send(&self, request: Request<'_>, data: &[u8], to: usize) -> Result<(), Error> {
        check::peer("send", to, self.rank_and_size())?;
        let call = request.call(request.len(data)?);
        self.perform(call, Task::Message { outgoing: Some((to, data)), incoming: None })
    }

    #[track_caller]
    fn operate_recv(&self, request: Request<'_>, data: &mut [u8], from: usize) -> Result<(), Error> {
        check::peer("recv", from, self.rank_and_size())?;
        let call = request.call(request.len(data)?);
        self.perform(call, Task::Message { outgoing: None, incoming: Some((from, data)) })
    }

    #[track_caller]
    fn start_operation<B: Send + 'static>(
        &self,
        request: Request<'static>,
        count: usize,
        buffer: B,
        bytes: impl for<'a> FnOnce(&'a mut B) -> Result<&'a mut [u8], Error> + Send + 'static,
    ) -> Result<Work<B>, Error> {
        let call = request.in_place(self.world_size(), count)?;
        let (deadline, at) = (Deadline::after(self.deadline()), call_site());
        Ok(self.progress()?.start(&self.core, call, deadline, buffer, move |core, turn, buffer| {
            let output = bytes(buffer).and_then(|output| {
                let found = request.len(output)?;
                let reason = || format!("the buffer had {count} elements when it was started, and now has {found}");
                if found == count { Ok(output) } else { Err(Error::broken(call.to_string(), reason())) }
            });
            let output = output.map_err(|error| core.abort(error))?;
            let buffers = Buffers { input: None, output, parts: Parts::Even };
            core.run(turn, call, Task::Collective(buffers), &deadline, at).map(drop)
        }))
    }
}

impl Group {
    /// Runs an operation when its turn comes.
    #[track_caller]
    #[inline]
    fn perform(&self, call: Call, task: Task<'_>) -> Result<(), Error> {
        let (deadline, at) = (Deadline::after(self.deadline()), call_site());
        let turn = self.core.turn(call, &deadline)?;
        self.core.run(&turn, call, task, &deadline, at).map(drop)
    }
}
