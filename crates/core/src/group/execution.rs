//! Executes one plan on one rank, on any transport.

use std::ops::Range;

use crate::plan::{Combine, Plan, Step};
use crate::reduce;
use crate::reduce::Scratch;
use crate::sync::Deadline;
use crate::transport::Transport;
use crate::types::{Call, Fault, Site};

/// Messages are split into chunks of this many bytes: one chunk is combined while it is in the cache and the next is in
/// flight. A power of two, so that no element is split. Each chunk is a message of its own.
///
/// Over TCP on loopback, chunks made all-reduces of 2 to 16 MiB two to three times as fast. Socket buffers of another
/// size made no difference.
const CHUNK: usize = 256 << 10;

/// The execution of one plan on one rank.
pub(super) struct Execution<'a> {
    pub transport: &'a dyn Transport,
    /// The group's operation, all or part of which the plan carries out. It tags the messages.
    pub site: &'a Site,
    pub deadline: &'a Deadline,
    /// The call that the plan carries out.
    pub call: &'a Call,
    /// Maps a part to its first element, and the number of parts to the end of the whole.
    pub parts: &'a dyn Fn(usize) -> usize,
    /// The number of ranks whose inputs make up a result.
    pub ranks: usize,
    pub whole: &'a mut [u8],
    pub received: &'a mut Scratch,
}

impl Execution<'_> {
    pub fn run(mut self, plan: &Plan, accumulator: &mut Scratch) -> Result<(), Fault> {
        for step in &plan.agree {
            self.step(step, None)?;
        }
        let owned = self.bytes(&plan.owned);
        match self.kernel() {
            Some(kernel) if kernel.wide => {
                let elements = owned.len() / self.call.dtype.size();
                let accumulator = accumulator.bytes(elements * kernel.accumulator)?;
                (kernel.load)(accumulator, &self.whole[owned.clone()]);
                for step in &plan.reduce {
                    self.step(step, Some(accumulator))?;
                }
                (kernel.store)(&mut self.whole[owned], accumulator, self.ranks);
            }
            Some(kernel) => {
                for step in &plan.reduce {
                    self.step(step, None)?;
                }
                if let Some(divide) = kernel.divide {
                    divide(&mut self.whole[owned.clone()], self.ranks);
                }
                // An addition of two NaNs returns either of them, depending on how the compiler ordered the operands.
                if let Some(unify_nan) = kernel.unify_nan.filter(|_| plan.replicated) {
                    unify_nan(&mut self.whole[owned]);
                }
            }
            None => {}
        }
        plan.distribute.iter().try_for_each(|step| self.step(step, None))
    }

    fn kernel(&self) -> Option<reduce::Kernel> {
        self.call.reduction.map(|op| reduce::kernel(self.call.dtype, op))
    }

    /// Runs one step, chunk by chunk: one message out, one in, or both at once. Incoming data is combined or stored.
    fn step(&mut self, step: &Step, mut accumulator: Option<&mut [u8]>) -> Result<(), Fault> {
        let outgoing = step.send.as_ref().map(|(to, parts)| (*to, self.bytes(parts)));
        let incoming = step.receive.as_ref().map(|(from, parts, combine)| (*from, self.bytes(parts), *combine));
        for i in 0.. {
            let outgoing = outgoing.as_ref().and_then(|(to, range)| Some((*to, chunk(range, i)?)));
            let incoming =
                incoming.as_ref().and_then(|(from, range, combine)| Some((*from, chunk(range, i)?, *combine)));
            if outgoing.is_none() && incoming.is_none() {
                break;
            }
            self.exchange(outgoing, incoming, accumulator.as_deref_mut().map(|accumulator| (accumulator, i * CHUNK)))?;
        }
        Ok(())
    }

    /// Transfers one chunk out, one in, or both. The accumulator comes with the chunk's offset in the data that it
    /// accumulates, in bytes of elements.
    fn exchange(
        &mut self,
        outgoing: Option<(usize, Range<usize>)>,
        incoming: Option<(usize, Range<usize>, Combine)>,
        accumulator: Option<(&mut [u8], usize)>,
    ) -> Result<(), Fault> {
        let tag = *self.site;
        let Some((from, range, combine)) = incoming else {
            return match outgoing {
                Some((to, range)) => self.transport.send(&tag, to, &self.whole[range], self.deadline),
                None => Ok(()),
            };
        };
        if combine == Combine::Replace {
            let (sent, kept) = disjoint(self.whole, outgoing.as_ref().map_or(0..0, |(_, range)| range.clone()), range);
            return transfer(self.transport, &tag, outgoing.map(|(to, _)| (to, sent)), (from, kept), self.deadline);
        }
        let (size, kernel) = (self.call.dtype.size(), self.kernel());
        let incoming = self.received.bytes(range.len())?;
        let sent = outgoing.map(|(to, range)| (to, &self.whole[range]));
        transfer(self.transport, &tag, sent, (from, &mut *incoming), self.deadline)?;
        let target = match (accumulator, kernel) {
            (Some((accumulator, at)), Some(kernel)) => {
                let wide = |bytes: usize| bytes / size * kernel.accumulator;
                &mut accumulator[wide(at)..][..wide(range.len())]
            }
            _ => &mut self.whole[range],
        };
        match (combine, kernel) {
            (Combine::Swap, _) => target.copy_from_slice(incoming),
            (Combine::FoldUnder, Some(kernel)) => (kernel.fold_under)(target, incoming),
            (_, Some(kernel)) => (kernel.fold)(target, incoming),
            (_, None) => {}
        }
        Ok(())
    }

    fn bytes(&self, parts: &Range<usize>) -> Range<usize> {
        let size = self.call.dtype.size();
        (self.parts)(parts.start) * size..(self.parts)(parts.end) * size
    }
}

/// Returns the `i`th chunk of a message. An empty message has one too: it shows that the rank has called.
fn chunk(message: &Range<usize>, i: usize) -> Option<Range<usize>> {
    let start = message.start + i * CHUNK;
    (i == 0 || start < message.end).then(|| start..message.end.min(start + CHUNK))
}

fn transfer(
    transport: &dyn Transport,
    tag: &Site,
    outgoing: Option<(usize, &[u8])>,
    (from, incoming): (usize, &mut [u8]),
    deadline: &Deadline,
) -> Result<(), Fault> {
    match outgoing {
        Some(outgoing) => transport.exchange(tag, outgoing, (from, incoming), deadline),
        None => transport.recv(tag, from, incoming, deadline),
    }
}

/// Borrows two ranges of the same bytes, one to read and one to write. Plans never overlap them, as tests check.
fn disjoint(bytes: &mut [u8], read: Range<usize>, write: Range<usize>) -> (&[u8], &mut [u8]) {
    if read.end <= write.start {
        let (low, high) = bytes.split_at_mut(write.start);
        (&low[read], &mut high[..write.end - write.start])
    } else {
        let (low, high) = bytes.split_at_mut(write.end);
        (&high[read.start - write.end..read.end - write.end], &mut low[write])
    }
}
