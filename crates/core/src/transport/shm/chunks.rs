//! Operations through the ranks' windows, in chunks that stay in the cache.
//!
//! The whole is cut into parts as everywhere, and every part into the same number of pieces. Chunk `i` is piece `i` of
//! every part. A buffer of a window has a block for each part, with the piece that this rank brings for it. Where the
//! pieces are reduced, the result comes back in the same place: the core that reduces has these lines in its cache just
//! then, and to fill others that its peer has read last takes a quarter longer.
//!
//! Each rank goes through the same time-line, three steps for every turn `t`:
//!
//! 1. *stage* chunk `t`: copy into a buffer of its window what others need;
//! 2. *reduce* chunk `t - 1`: combine the own part's piece, straight from its own input and the others' blocks, into its
//!    output and into these blocks;
//! 3. *take* chunk `t - 2`: copy from its own window what the others have put there. Where nothing is reduced it takes
//!    chunk `t - 1` from the others' windows.
//!
//! So what a rank needs from another in a turn, the other did in the turn before, and a rank that is a little late
//! holds nobody up. How far a rank has come is one number on a line of its own, counted over all operations; a step is
//! done where the number is at least the step's. There is no barrier and no counting in or out.

use std::ops::Range;

use super::control::Lent;
use super::segment::BUFFERS;
use super::{Phase, Shm};
use crate::sync::{Deadline, Ordering};
use crate::transport::Buffers;
use crate::transport::reduce::{self, Output};
use crate::types::{Call, Fault, Operation, Parts};

/// What a rank remembers from one large operation to the next. It is the same on all ranks: all of it follows from the
/// calls, on which they agree.
#[derive(Default)]
pub(super) struct Flow {
    /// The last step of the operations so far.
    pub step: u64,
    /// Chunks so far: they use the buffers in turn.
    chunks: u64,
    /// When all ranks have made this step, nobody reads the buffer any more.
    free: [u64; BUFFERS],
    /// What every rank lends in the operation at hand, kept for its memory only.
    pub lent: Vec<Lent>,
}

impl Shm {
    fn store(&self, step: u64) {
        // Release: who sees the number sees what was written to the window before.
        self.control(self.rank).progress.0.store(step, Ordering::Release);
    }

    /// This rank has made the step.
    pub(super) fn done(&self, step: u64) {
        self.store(step);
        self.ring();
    }

    /// Waits until all ranks that `whom` names have made the step.
    pub(super) fn wait_for_step(
        &self,
        phase: &Phase,
        deadline: &Deadline,
        step: u64,
        whom: impl Fn(usize) -> bool,
    ) -> Result<(), Fault> {
        // Acquire pairs with the release in `store`: what the peer wrote is here, and what it read it needs no more.
        let reached = |rank| !whom(rank) || self.control(rank).progress.0.load(Ordering::Acquire) >= step;
        self.wait(phase, deadline, reached)
    }
}

/// One operation on one rank.
pub(super) struct Pass<'a> {
    shm: &'a Shm,
    phase: &'a Phase,
    deadline: &'a Deadline,
    pub flow: &'a mut Flow,
    call: &'a Call,
    parts: Parts<'a>,
    pub input: *const u8,
    pub output: *mut u8,
    /// The element of the whole with which the input and the output begin.
    origins: (usize, usize),
    in_place: bool,
    /// Whether what is written to the output has not been read just before.
    apart: bool,
    /// Elements of a piece, and pieces of a part.
    piece: usize,
    pieces: u64,
    /// Steps and chunks before this operation.
    first: (u64, u64),
}

impl<'a> Pass<'a> {
    /// Any operation but a barrier.
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
        let apart = buffers.input.is_some();
        let origin = |of: [Operation; 2]| if apart && of.contains(&call.operation) { own } else { 0 };
        let most = shm.segment.block_size() / call.dtype.size();
        let longest = parts.longest(call.count, n);
        // As even as can be, in whole cache lines.
        let line = 64 / call.dtype.size();
        let piece = longest.div_ceil(longest.div_ceil(most)).next_multiple_of(line);
        Pass {
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
            in_place: !apart,
            apart: apart || call.reduction.is_none() && call.operation != Operation::AllToAll,
            piece,
            pieces: longest.div_ceil(piece) as u64,
        }
    }
}

impl Pass<'_> {
    /// Stages the first chunk before the offer is published, which shows it as well: no one waits for it apart.
    pub fn begin(&mut self) -> Result<(), Fault> {
        self.stage(0)?;
        self.store(self.step(0, STAGE));
        Ok(())
    }

    /// Goes through the time-line. `begun` says whether this rank has staged the first chunk, and `late` whether some
    /// rank had not when it published its offer.
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
        // The streaming stores went to this rank's own output. Peers never read that, but the caller's other threads
        // may.
        reduce::fence_streams();
        Ok(())
    }

    /// How many turns after its staging a chunk is taken.
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

    fn wait(&self, step: u64, whom: impl Fn(usize) -> bool) -> Result<(), Fault> {
        self.shm.wait_for_step(self.phase, self.deadline, step, whom)
    }

    fn buffer(&self, chunk: u64) -> usize {
        ((self.first.1 + chunk) % BUFFERS as u64) as usize
    }

    /// The elements of a part.
    fn part(&self, part: usize) -> Range<usize> {
        let n = self.shm.world_size();
        if self.call.operation == Operation::AllToAll {
            // Rounded down: the length of a started buffer may be no multiple any more.
            let each = self.call.count / n;
            return part * each..(part + 1) * each;
        }
        self.parts.part(self.call.count, n, part)
    }

    /// The elements of the part in the chunk: at most `piece`, and none where a shorter part has ended.
    fn span(&self, part: usize, chunk: u64) -> Range<usize> {
        let part = self.part(part);
        let start = part.start.saturating_add(chunk as usize * self.piece).min(part.end);
        start..start.saturating_add(self.piece).min(part.end)
    }

    /// Where the whole's element `at` is in the input.
    fn input(&self, at: usize) -> *const u8 {
        self.input.wrapping_add((at - self.origins.0) * self.call.dtype.size())
    }

    fn output(&self, at: usize) -> Output {
        let at = self.output.wrapping_add((at - self.origins.1) * self.call.dtype.size());
        Output::of(at, self.call.bytes(), self.apart)
    }

    fn block(&self, rank: usize, chunk: u64, part: usize) -> *mut u8 {
        self.shm.segment.block(rank, self.buffer(chunk), part)
    }

    /// Whether this rank brings something for the part.
    fn brings(&self, part: usize) -> bool {
        match self.call.operation {
            Operation::Broadcast => self.call.root == Some(self.shm.rank),
            Operation::AllGather => part == self.shm.rank,
            Operation::Gather => part == self.shm.rank && self.call.root != Some(part),
            Operation::Scatter => part != self.shm.rank && self.call.root == Some(self.shm.rank),
            _ => part != self.shm.rank,
        }
    }

    /// Whether the rank gets the other ranks' parts of a result.
    fn gets(&self, rank: usize) -> bool {
        match self.call.operation {
            Operation::Reduce => self.call.root == Some(rank),
            operation => operation == Operation::AllReduce,
        }
    }

    /// Whose window has what this rank takes for the part, and in which block.
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
            _ => Some((rank, part)).filter(|_| part != rank && self.gets(rank)),
        }
    }

    fn stage(&mut self, chunk: u64) -> Result<(), Fault> {
        let (n, size, buffer) = (self.shm.world_size(), self.call.dtype.size(), self.buffer(chunk));
        // What was in the buffer before is `BUFFERS` chunks old, or from an operation before.
        if (0..n).any(|part| self.brings(part)) {
            self.wait(self.flow.free[buffer], |_| true)?;
        }
        // Peers are done with what they reduce when they have reduced it; what comes back only this rank reads.
        self.flow.free[buffer] = match self.call.reduction {
            Some(_) => self.step(chunk + 1, REDUCE),
            None => self.step(chunk + self.lag(), TAKE),
        };
        for part in (0..n).filter(|part| self.brings(*part)) {
            let span = self.span(part, chunk);
            // SAFETY: the span is within the input: the group checked that buffers have the lengths that `Buffers`
            // lists, and a rank brings its own part only or has the whole. It is at most a block long, and nobody reads
            // the block before the next step, nor any more since all have made the step that was waited for.
            unsafe {
                let block = Output::cached(self.block(self.shm.rank, chunk, part));
                block.copy(self.input(span.start), span.len() * size);
            }
        }
        // What this rank has for itself. Reductions need it where it is.
        let whole = self.call.operation == Operation::Broadcast && self.brings(0);
        let own = match self.call.operation {
            Operation::AllGather | Operation::AllToAll => true,
            Operation::Gather | Operation::Scatter => self.call.root == Some(self.shm.rank),
            _ => false,
        };
        for part in (0..n).filter(|part| !self.in_place && (whole || own && *part == self.shm.rank)) {
            let span = self.span(part, chunk);
            // SAFETY: as above for the input, and the output holds the whole; the two are apart.
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
        let here = self.call.operation == Operation::ReduceScatter || self.gets(rank);
        let back = (0..n).filter(|to| *to != rank && self.gets(*to));
        let back = back.map(|to| Output::cached(self.block(to, chunk, rank)));
        let outputs = here.then(|| self.output(span.start)).into_iter().chain(back);
        // SAFETY: all peers have staged the chunk, so their blocks hold this rank's piece, of as many elements as the
        // span has, and they leave these to this rank until it is further. The span is within the input and, where the
        // result stays here, within the output.
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
            // SAFETY: the block is filled, and whoever writes it next waits until this rank is further. The span is at
            // most a block long and within the output, which holds the whole wherever something is taken.
            unsafe { self.output(span.start).copy(self.block(from, chunk, block), span.len() * size) };
        }
        Ok(())
    }
}

/// The steps of a turn.
const STAGE: u64 = 1;
const REDUCE: u64 = 2;
const TAKE: u64 = 3;
