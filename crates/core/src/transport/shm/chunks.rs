//! Operations through the ranks' windows: a pipeline of chunks that stay in the cache.
//!
//! The whole is split into parts as in other algorithms, and every part into the same number of pieces. Chunk `i` is
//! piece `i` of every part. A buffer of a window has one block per part, for this rank's piece of that part.
//!
//! All ranks go through the same schedule, three steps in every turn `t`:
//!
//! 1. *stage* chunk `t`: copy into a buffer of its window what peers need, in a reduction (n - 1)/n of the chunk;
//! 2. *reduce* chunk `t - 1`: combine the piece of its own part, straight from its own input and the peers' blocks,
//!    into its output and into these blocks;
//! 3. *take* chunk `t - 2`: copy from its own window what the peers have written there. In operations without a
//!    reduction: take chunk `t - 1` from the peers' windows.
//!
//! So what a rank needs in a turn, its peers did in the turn before, and a rank that is a little late delays none of
//! them. A rank's progress is one number on a cache line of its own, counted over all operations. A step is done when
//! the number is at least the step's number. There is no barrier and no counting in or out.
//!
//! A rank waits only for steps of earlier turns: the turn before or, where it fills a buffer again, the turns of the
//! chunk that was in it, `BUFFERS` chunks before. So the rank that is furthest behind never waits, and no cycle of
//! waits exists.
//!
//! # Why results go back to the blocks of the inputs
//!
//! It took a quarter to a third off the time of every large all_reduce. The core that reduces has these cache lines.
//! Those of a separate window were read last by the peer and must be taken back from it before they can be filled. It
//! also halves the memory that must stay in the cache.
//!
//! # Cost of staging
//!
//! Operations of 64 KiB to 1 MiB take 2 to 3 times as long as between threads, larger ones 1.5 to 2 times, in a
//! benchmark in which the threads' inputs stay in both cores' caches because no thread writes them. As many bytes move
//! from core to core, but through cache lines that must be taken back from the other core.
//!
//! # Tried and left
//!
//! * Reading the peer's memory with `process_vm_readv` instead of staging it: 1.0 to 1.4 times slower than windows in a
//!   bare program, from 4 MiB on, in pages of 4 KiB.
//! * Staging past the cache: 1.1 to 1.2 times slower. Sending staged data to the third-level cache: 1.3 to 1.9 times
//!   slower.
//! * Reducing everything on both of two ranks, one hand-off instead of two: 1.1 to 1.3 times slower from 4 MiB on,
//!   because twice as much is staged. Up to 8 KiB it is faster, and `small` does it.
//! * Smaller buffers, and ordinary instead of streaming stores to the output: no difference beyond the noise of a busy
//!   machine.
//! * Not yet: fetching the input of the next chunk ahead, line by line in the loops that copy and reduce. It took 8 %
//!   off in the bare program.

use std::ops::Range;

use super::control::LentOffsets;
use super::segment::BUFFERS;
use super::{Phase, Shm};
use crate::sync::{Deadline, Ordering};
use crate::transport::Buffers;
use crate::transport::reduce::{self, Output};
use crate::types::{Call, Fault, Operation, Parts};

/// State that a rank carries from one large operation to the next. It is the same on all ranks, because it follows from
/// the calls, on which they agree.
#[derive(Default)]
pub(super) struct Flow {
    /// The last step of the operations so far.
    pub step: u64,
    /// Chunks so far. They use the buffers in turn.
    chunks: u64,
    /// By buffer: once all ranks have made this step, no rank reads the buffer any more.
    free: [u64; BUFFERS],
    /// What every rank lends in the current operation. Kept only to reuse the allocation.
    pub lent: Vec<LentOffsets>,
}

impl Shm {
    fn store(&self, step: u64) {
        // Release: a peer that sees the number sees what was written to the window before.
        self.control(self.rank).progress.0.store(step, Ordering::Release);
    }

    /// Publishes that this rank has made the step.
    pub(super) fn done(&self, step: u64) {
        self.store(step);
        self.ring();
    }

    /// Waits until all ranks that `selected` selects have made the step.
    pub(super) fn wait_for_step(
        &self,
        phase: &Phase,
        deadline: &Deadline,
        step: u64,
        selected: impl Fn(usize) -> bool,
    ) -> Result<(), Fault> {
        // Acquire pairs with the release in `store`: the peer's writes are visible, and its reads are done.
        let reached = |rank| !selected(rank) || self.control(rank).progress.0.load(Ordering::Acquire) >= step;
        self.wait(phase, deadline, reached)
    }
}

/// One operation through the windows on one rank.
pub(super) struct WindowOperation<'a> {
    shm: &'a Shm,
    phase: &'a Phase,
    deadline: &'a Deadline,
    pub flow: &'a mut Flow,
    call: &'a Call,
    parts: Parts<'a>,
    pub input: *const u8,
    pub output: *mut u8,
    /// The index in the whole of the first element of the input, and of the output.
    origins: (usize, usize),
    in_place: bool,
    /// Whether outputs are written to memory that was not read just before, so that large ones may bypass the cache.
    cold_output: bool,
    /// Elements per piece, and pieces per part.
    piece: usize,
    pieces: u64,
    /// Steps and chunks before this operation.
    first: (u64, u64),
}

impl<'a> WindowOperation<'a> {
    /// Prepares any operation except a barrier.
    pub fn new<'b: 'a>(
        shm: &'a Shm,
        phase: &'a Phase,
        buffers: &mut Buffers<'b>,
        deadline: &'a Deadline,
        flow: &'a mut Flow,
    ) -> Self {
        let (call, parts, n) = (&phase.call, buffers.parts, shm.world_size());
        let own = parts.start(call.count, n, shm.rank);
        let output = buffers.output.as_mut_ptr();
        let out_of_place = buffers.input.is_some();
        let origin = |of: [Operation; 2]| if out_of_place && of.contains(&call.operation) { own } else { 0 };
        let most = shm.segment.block_size() / call.dtype.size();
        let longest = parts.longest(call.count, n);
        // As even as possible, in whole cache lines.
        let line = 64 / call.dtype.size();
        let piece = longest.div_ceil(longest.div_ceil(most)).next_multiple_of(line);
        WindowOperation {
            shm,
            phase,
            deadline,
            first: (flow.step, flow.chunks),
            flow,
            call,
            parts,
            input: buffers.input.map_or(output.cast_const(), <[u8]>::as_ptr),
            output,
            origins: (
                origin([Operation::AllGather, Operation::Gather]),
                origin([Operation::ReduceScatter, Operation::Scatter]),
            ),
            in_place: !out_of_place,
            cold_output: out_of_place || call.reduction.is_none() && call.operation != Operation::AllToAll,
            piece,
            pieces: longest.div_ceil(piece) as u64,
        }
    }
}

impl WindowOperation<'_> {
    /// Stages the first chunk before the slot is published, which publishes the chunk too: no rank waits for this step.
    pub fn begin(&mut self) -> Result<(), Fault> {
        self.stage(0)?;
        self.store(self.step(0, STAGE));
        Ok(())
    }

    /// Goes through the schedule. `begun`: this rank has staged the first chunk already. `late`: some rank had not when
    /// it published its slot.
    pub fn run(mut self, begun: bool, late: bool) -> Result<(), Fault> {
        let (pieces, lag) = (self.pieces, self.lag());
        for turn in 0..pieces + lag {
            if turn < pieces && (turn > 0 || !begun) {
                self.stage(turn)?;
                self.done(self.step(turn, STAGE));
            }
            if self.call.reduction.is_some() && turn > 0 && turn <= pieces {
                self.reduce(turn - 1, late)?;
                self.done(self.step(turn, REDUCE));
            }
            if turn >= lag {
                self.take(turn - lag, late)?;
            }
        }
        self.flow.step = self.step(pieces + lag, 0);
        self.flow.chunks += pieces;
        self.done(self.flow.step);
        // The streaming stores went to this rank's own output. Peers never read it, but the caller's threads may.
        reduce::fence_streams();
        Ok(())
    }

    /// The number of turns from staging a chunk to taking it.
    fn lag(&self) -> u64 {
        if self.call.reduction.is_some() { 2 } else { 1 }
    }

    /// The number of a step.
    fn step(&self, turn: u64, kind: u64) -> u64 {
        self.first.0 + 3 * turn + kind
    }

    fn store(&self, step: u64) {
        self.shm.store(step);
    }

    fn done(&self, step: u64) {
        self.shm.done(step);
    }

    fn wait(&self, step: u64, selected: impl Fn(usize) -> bool) -> Result<(), Fault> {
        self.shm.wait_for_step(self.phase, self.deadline, step, selected)
    }

    fn buffer(&self, chunk: u64) -> usize {
        ((self.first.1 + chunk) % BUFFERS as u64) as usize
    }

    /// The elements of a part of the whole.
    fn part(&self, part: usize) -> Range<usize> {
        let n = self.shm.world_size();
        if self.call.operation == Operation::AllToAll {
            // Rounded down: the buffer of a started operation may have changed its length since it was checked.
            let each = self.call.count / n;
            return part * each..(part + 1) * each;
        }
        self.parts.part(self.call.count, n, part)
    }

    /// The elements of the part that are in the chunk: at most `piece`, and none if the part has ended.
    fn span(&self, part: usize, chunk: u64) -> Range<usize> {
        let part = self.part(part);
        let start = part.start.saturating_add(chunk as usize * self.piece).min(part.end);
        start..start.saturating_add(self.piece).min(part.end)
    }

    /// The address in the input of element `at` of the whole.
    fn input(&self, at: usize) -> *const u8 {
        self.input.wrapping_add((at - self.origins.0) * self.call.dtype.size())
    }

    fn output(&self, at: usize) -> Output {
        let at = self.output.wrapping_add((at - self.origins.1) * self.call.dtype.size());
        Output::of(at, self.call.bytes(), self.cold_output)
    }

    fn block(&self, rank: usize, chunk: u64, part: usize) -> *mut u8 {
        self.shm.segment.block(rank, self.buffer(chunk), part)
    }

    /// Whether this rank contributes to the part through its window.
    fn contributes(&self, part: usize) -> bool {
        match self.call.operation {
            Operation::Broadcast => self.call.root == Some(self.shm.rank),
            Operation::AllGather => part == self.shm.rank,
            Operation::Gather => part == self.shm.rank && self.call.root != Some(part),
            Operation::Scatter => part != self.shm.rank && self.call.root == Some(self.shm.rank),
            _ => part != self.shm.rank,
        }
    }

    /// Whether the rank gets the parts of a reduction's result that its peers compute.
    fn receives_result(&self, rank: usize) -> bool {
        match self.call.operation {
            Operation::Reduce => self.call.root == Some(rank),
            operation => operation == Operation::AllReduce,
        }
    }

    /// The rank whose window has what this rank takes for the part, and the block in it.
    fn source(&self, part: usize) -> Option<(usize, usize)> {
        let rank = self.shm.rank;
        match self.call.operation {
            Operation::Broadcast => self.call.root.map(|root| (root, part)).filter(|(root, _)| *root != rank),
            Operation::AllToAll => Some((part, rank)).filter(|_| part != rank),
            Operation::AllGather => Some((part, part)).filter(|_| part != rank),
            Operation::Gather => Some((part, part)).filter(|_| part != rank && self.call.root == Some(rank)),
            Operation::Scatter => {
                self.call.root.map(|root| (root, rank)).filter(|(root, _)| part == rank && *root != rank)
            }
            _ => Some((rank, part)).filter(|_| part != rank && self.receives_result(rank)),
        }
    }

    fn stage(&mut self, chunk: u64) -> Result<(), Fault> {
        let (n, size, buffer) = (self.shm.world_size(), self.call.dtype.size(), self.buffer(chunk));
        // The previous contents of the buffer are `BUFFERS` chunks old, or from an earlier operation.
        if (0..n).any(|part| self.contributes(part)) {
            self.wait(self.flow.free[buffer], |_| true)?;
        }
        // Peers do not read the buffer after they have reduced it: only this rank reads the results.
        self.flow.free[buffer] = match self.call.reduction {
            Some(_) => self.step(chunk + 1, REDUCE),
            None => self.step(chunk + self.lag(), TAKE),
        };
        for part in (0..n).filter(|part| self.contributes(*part)) {
            let span = self.span(part, chunk);
            // SAFETY: the span is within the input: the group checked that buffers have the lengths that `Buffers`
            // lists, and a rank contributes only its own part or has the whole. The span is at most a block long. All
            // ranks have made the awaited step: none reads the old contents, nor the new ones before the next step.
            unsafe {
                let block = Output::cached(self.block(self.shm.rank, chunk, part));
                block.copy(self.input(span.start), span.len() * size);
            }
        }
        // This rank's data for itself. Reductions read them from the input.
        let whole = self.call.operation == Operation::Broadcast && self.contributes(0);
        let own = match self.call.operation {
            Operation::AllGather | Operation::AllToAll => true,
            Operation::Gather | Operation::Scatter => self.call.root == Some(self.shm.rank),
            _ => false,
        };
        for part in (0..n).filter(|part| !self.in_place && (whole || own && *part == self.shm.rank)) {
            let span = self.span(part, chunk);
            // SAFETY: as above for the input. The output holds the whole, and does not overlap the input.
            unsafe { self.output(span.start).copy(self.input(span.start), span.len() * size) };
        }
        Ok(())
    }

    fn reduce(&mut self, chunk: u64, late: bool) -> Result<(), Fault> {
        let (rank, n) = (self.shm.rank, self.shm.world_size());
        let Some(op) = self.call.reduction else { return Ok(()) };
        if chunk > 0 || late {
            self.wait(self.step(chunk, STAGE), |_| true)?;
        }
        let span = self.span(rank, chunk);
        let input =
            |from| if from == rank { self.input(span.start) } else { self.block(from, chunk, rank).cast_const() };
        let keeps_result = self.call.operation == Operation::ReduceScatter || self.receives_result(rank);
        let back = (0..n).filter(|to| *to != rank && self.receives_result(*to));
        let back = back.map(|to| Output::cached(self.block(to, chunk, rank)));
        let outputs = keeps_result.then(|| self.output(span.start)).into_iter().chain(back);
        // SAFETY: all peers have staged the chunk, so their blocks for this rank's part hold as many elements as the
        // span has. Only this rank accesses these blocks until it makes the next step. The span is within the input
        // and, where this rank keeps the result, within the output.
        unsafe { reduce::reduce_to_all(self.call.dtype, op, span.len(), (0..n).map(input), outputs) };
        Ok(())
    }

    fn take(&mut self, chunk: u64, late: bool) -> Result<(), Fault> {
        let (n, size) = (self.shm.world_size(), self.call.dtype.size());
        if (0..n).all(|part| self.source(part).is_none()) {
            return Ok(());
        }
        let ready = if self.call.reduction.is_some() { self.step(chunk + 1, REDUCE) } else { self.step(chunk, STAGE) };
        if ready > self.step(0, STAGE) || late {
            let rooted = matches!(self.call.operation, Operation::Broadcast | Operation::Scatter);
            self.wait(ready, |rank| !rooted || self.call.root == Some(rank))?;
        }
        for part in 0..n {
            let Some((from, block)) = self.source(part) else { continue };
            let span = self.span(part, chunk);
            // SAFETY: the block is filled, and the rank that writes it next waits for this rank's next step. The span
            // is at most a block long and within the output, which holds the whole wherever something is taken.
            unsafe { self.output(span.start).copy(self.block(from, chunk, block), span.len() * size) };
        }
        Ok(())
    }
}

/// The steps of a turn, in order.
const STAGE: u64 = 1;
const REDUCE: u64 = 2;
const TAKE: u64 = 3;
