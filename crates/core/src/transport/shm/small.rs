//! Operations whose data fit the exchange slots: one hand-off, after which every rank computes its own result.

use std::ops::Range;

use super::control::INLINE;
use super::{Phase, Shm};
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::transport::reduce::{self, Output};
use crate::types::{Call, Fault, Operation, Parts};

/// Bytes that a rank reads at most from all slots to reduce everything itself. Beyond that it is faster if one rank
/// reduces each element and passes on the result.
const MAX_READ: usize = 64 << 10;

/// Whether a rank's contribution fits its slot. All ranks compute the same from the same call.
pub(super) fn fits(call: &Call, parts: Parts<'_>, world_size: usize) -> bool {
    let contribution = match call.operation {
        Operation::AllGather | Operation::Gather => parts.longest(call.count, world_size) * call.dtype.size(),
        _ => call.bytes(),
    };
    let read = match call.operation {
        Operation::AllReduce | Operation::Reduce => contribution.saturating_mul(world_size),
        _ => 0,
    };
    contribution <= INLINE && read <= MAX_READ
}

impl Shm {
    /// Runs an operation that [`fits`].
    pub(super) fn small(&self, phase: &Phase, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        self.write_contribution(phase, buffers);
        self.publish(phase);
        self.agree(phase, deadline)?;
        self.compute_result(phase, buffers);
        Ok(())
    }

    /// Copies this rank's contribution to its slot, before the slot is published.
    pub(super) fn write_contribution(&self, phase: &Phase, buffers: &Buffers<'_>) {
        let (call, rank) = (&phase.call, self.rank);
        let source: &[u8] = match (call.operation, buffers.input) {
            (Operation::Barrier, _) => &[],
            (Operation::Broadcast | Operation::Scatter, _) if call.root != Some(rank) => &[],
            (Operation::AllGather | Operation::Gather, None) => &buffers.output[self.part(call, buffers.parts, rank)],
            (_, Some(input)) => input,
            (_, None) => &*buffers.output,
        };
        assert!(source.len() <= INLINE, "{} bytes for a slot", source.len());
        let mine = self.slot(rank, phase).inline.writing().cast::<u8>();
        // SAFETY: the length fits, as just checked. No other rank accesses this slot now: see `Sync for Offer`.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), mine, source.len()) };
    }

    /// The part of rank `of` in the whole, in bytes.
    fn part(&self, call: &Call, parts: Parts<'_>, of: usize) -> Range<usize> {
        let (part, size) = (parts.part(call.count, self.world_size(), of), call.dtype.size());
        part.start * size..part.end * size
    }

    /// Computes this rank's result from all slots. Called once all ranks have published theirs and agree on the call.
    pub(super) fn compute_result(&self, phase: &Phase, buffers: &mut Buffers<'_>) {
        let (call, rank, n) = (&phase.call, self.rank, self.world_size());
        let size = call.dtype.size();
        let parts = buffers.parts;
        let part = |of: usize| self.part(call, parts, of);
        let inline = |of: usize| self.slot(of, phase).inline.reading().cast::<u8>();
        let in_place = buffers.input.is_none();
        let output = &mut *buffers.output;
        let mut copy = |from: usize, at: usize, range: Range<usize>| {
            let target = &mut output[range];
            assert!(at + target.len() <= INLINE, "{} bytes from {at} of a slot", target.len());
            // SAFETY: the range is within the slot, as just checked. The slot is complete and does not change now.
            unsafe { std::ptr::copy_nonoverlapping(inline(from).add(at), target.as_mut_ptr(), target.len()) };
        };
        match (call.operation, call.reduction) {
            (Operation::Broadcast, _) => call.root.into_iter().for_each(|root| copy(root, 0, 0..call.bytes())),
            (Operation::Gather, _) if call.root != Some(rank) => {}
            (Operation::AllGather | Operation::Gather, _) => (0..n).for_each(|from| copy(from, 0, part(from))),
            (Operation::Scatter, _) => {
                let own = part(rank);
                let target = if in_place { own.clone() } else { 0..own.len() };
                call.root.into_iter().for_each(|root| copy(root, own.start, target.clone()));
            }
            (Operation::AllToAll, _) => {
                // Rounded down: the buffer of a started operation may have changed its length since it was checked.
                let part = call.count / n * size;
                (0..n).for_each(|from| copy(from, rank * part, from * part..(from + 1) * part));
            }
            (Operation::Reduce, Some(_)) if call.root != Some(rank) => {}
            (Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter, Some(op)) => {
                let own = if call.operation == Operation::ReduceScatter { part(rank) } else { 0..call.bytes() };
                let scattered = call.operation == Operation::ReduceScatter && !in_place;
                let target = if scattered { output } else { &mut output[own.clone()] };
                assert!(target.len() == own.len() && own.end <= INLINE, "{own:?} of a slot");
                // SAFETY: the bytes from `own.start` on are within every slot and as many as the target has. The slots
                // are complete and do not change now.
                let inputs = (0..n).map(|of| unsafe { inline(of).add(own.start) });
                let result = std::iter::once(Output::cached(target.as_mut_ptr()));
                // SAFETY: as above. Inputs and target are aligned for the elements: the data in a slot and every part
                // of a buffer begin at multiples of the element's size.
                unsafe { reduce::reduce_to_all(call.dtype, op, own.len() / size, inputs, result) };
            }
            _ => {}
        }
    }
}
