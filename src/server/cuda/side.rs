//! One rank's handle of a team: prepares calls on the device's thread.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use super::choice::Choice;
use super::copy_stream::address_of;
use super::driver::Copy;
use super::order::{self, ReadyCounter, Server};
use super::rounds::BufferLayout;
use super::team::{Prepared, Team};
use crate::server::engine::{DeviceOperation, part};
use bonfire_core::internal::{Ranges, Rows, lock};
use bonfire_core::{Call, Error, Operation};

/// A team, and the index of this rank in it.
pub(super) struct TeamHandle {
    pub team: Arc<Team>,
    pub local: usize,
    /// The values that the rank's `READY` word was given.
    ready_counter: Mutex<ReadyCounter>,
}

impl TeamHandle {
    pub fn of(team: Arc<Team>, local: usize) -> TeamHandle {
        TeamHandle { team, local, ready_counter: Mutex::default() }
    }

    /// Prepares an operation on the memory as the work queued so far leaves it. Returns its rounds.
    pub fn prepare(
        &self,
        server: &mut Server,
        job: DeviceOperation,
        choice: Choice,
        timeout: Duration,
    ) -> Result<Vec<Prepared>, Error> {
        let loaded = self.team.prepare(self.local, choice)?;
        let mut streams: Vec<StreamId> =
            job.sources.iter().chain(&job.targets).map(|(memory, _)| memory.stream).collect();
        streams.sort_unstable_by_key(|stream| stream.value);
        streams.dedup();
        let (call, stream) = (job.call, job.stream);
        let layout = BufferLayout::of(server, job, self.team.ranks(), choice == Choice::Nccl)?;
        let ready = lock(&self.ready_counter).signal(server, self.team.ready_word(self.local), &streams, stream);
        let rounds = self.team.rounds(self.local, call, choice, layout).into_iter();
        Ok(rounds.map(|(call, layout)| Prepared { call, loaded: loaded.clone(), timeout, ready, layout }).collect())
    }
}

impl BufferLayout {
    /// Uses the operation's own memory if it can. Scratch memory, filled and emptied by copies on the team's stream,
    /// stands in for several tensors of one operation, for one in several ranges or shorter than its part, for memory
    /// that is not aligned for its elements, for a source that overlaps its target in a way that the operation does not
    /// allow, and for the results of a reduce elsewhere than on the root.
    fn of(server: &mut Server, job: DeviceOperation, ranks: usize, nccl: bool) -> Result<BufferLayout, Error> {
        let DeviceOperation { call, rank, sources, targets, stream, peers } = job;
        let bytes = |chunks: &[(Binding, Ranges)]| chunks.iter().map(|(_, ranges)| ranges.bytes()).sum();
        let (read, written) = match peers.is_message() {
            true => (0..bytes(&sources), 0..bytes(&targets)),
            false => used(&call, ranks, rank),
        };
        let mut find = |chunks: &[(Binding, Ranges)]| {
            let found = chunks.iter().map(|(memory, ranges)| Ok((address_of(server, memory, stream)?, ranges.clone())));
            found.collect::<Result<Vec<_>, Error>>()
        };
        let (from, to) = (find(&sources)?, find(&targets)?);
        let kept: Vec<Binding> = sources.into_iter().chain(targets).map(|(memory, _)| memory).collect();
        let incoming = written.len() / call.dtype.size();
        let mut layout = BufferLayout { kept, peers, incoming, ..BufferLayout::default() };
        match (single(&from, &read), single(&to, &written)) {
            (Some(source), Some(target)) => {
                (layout.source, layout.target) = (source, target);
                let in_place = match call.operation {
                    Operation::AllToAll => source == target && !nccl,
                    _ => source + written.start as u64 == target + read.start as u64,
                };
                let apart = source + read.len() as u64 <= target || target + written.len() as u64 <= source;
                let misaligned = |at: u64| call.reduction.is_some() && !at.is_multiple_of(call.dtype.size() as u64);
                if !in_place && !apart || misaligned(source) {
                    layout.source = layout.scratch(server, read.len(), stream)?;
                    layout.before.push(Copy::of(source, layout.source, read.len()));
                }
                if misaligned(target) {
                    layout.target = layout.scratch(server, written.len(), stream)?;
                    layout.after.push(Copy::of(layout.target, target, written.len()));
                }
            }
            // A broadcast and a message in one direction have one buffer on each rank. Of a gather and a scatter, the
            // other one is not used.
            (Some(memory), None) if to.is_empty() && call.reduction.is_none() => {
                (layout.source, layout.target) = (memory, memory);
            }
            (None, Some(memory)) if from.is_empty() => (layout.source, layout.target) = (memory, memory),
            _ => {
                // What this rank neither reads nor writes has no place in scratch memory.
                let used = match () {
                    () if to.is_empty() && call.reduction.is_none() => read.clone(),
                    () if from.is_empty() => written.clone(),
                    () => 0..call.bytes(),
                };
                let scratch = layout.scratch(server, used.len(), stream)?;
                // NCCL cannot work in place here.
                let received = match call.operation {
                    Operation::AllToAll if nccl => layout.scratch(server, used.len(), stream)?,
                    _ => scratch,
                };
                let into = |(memory, ranges): &(u64, Ranges)| spread(ranges, *memory, (scratch, used.start));
                let out_of = |(memory, ranges): &(u64, Ranges)| spread(ranges, *memory, (received, used.start));
                layout.before = from.iter().flat_map(into).collect();
                layout.after = to.iter().flat_map(out_of).map(reversed).collect();
                let at = |memory: u64, part: &Range<usize>| memory + part.start.saturating_sub(used.start) as u64;
                (layout.source, layout.target) = (at(scratch, &read), at(received, &written));
            }
        }
        Ok(layout)
    }

    /// Allocates scratch memory for the call.
    fn scratch(&mut self, server: &mut Server, bytes: usize, stream: StreamId) -> Result<u64, Error> {
        let memory = order::allocate(server, bytes, stream);
        let address = address_of(server, &memory, stream)?;
        self.kept.push(memory);
        Ok(address)
    }
}

/// The bytes of the whole that the operation reads and writes on this rank.
fn used(call: &Call, ranks: usize, rank: usize) -> (Range<usize>, Range<usize>) {
    let (whole, own) = (0..call.bytes(), part(call, ranks, rank));
    match call.operation {
        Operation::AllGather | Operation::Gather => (own, whole),
        Operation::ReduceScatter | Operation::Scatter => (whole, own),
        _ => (whole.clone(), whole),
    }
}

/// The address of the only tensor, if it is all of this range.
fn single(tensors: &[(u64, Ranges)], range: &Range<usize>) -> Option<u64> {
    match tensors {
        [(address, ranges)] if ranges.single().as_ref() == Some(range) => Some(*address),
        _ => None,
    }
}

/// Returns the copies from memory to its ranges of the whole, of which other memory holds the bytes from `first` on.
/// Ranges of one length at one distance are rows of one copy, such as the parts of a parameter on all ranks.
fn spread(ranges: &Ranges, memory: u64, (whole, first): (u64, usize)) -> Vec<Copy> {
    let mut copies: Vec<Copy> = Vec::new();
    for (at, range) in ranges.places() {
        let next = Copy::of(memory + at as u64, whole + (range.start - first) as u64, range.len());
        if let Some(last) = copies.last_mut()
            && last.bytes == next.bytes
            && let Some(pitch) = next.to.checked_sub(last.to + (last.pitches.1 * (last.rows - 1)) as u64)
            && (last.rows == 1 || pitch == last.pitches.1 as u64)
            && (next.bytes as u64..=Rows::MAX_PITCH as u64).contains(&pitch)
        {
            last.pitches.1 = pitch as usize;
            last.rows += 1;
        } else {
            copies.push(next);
        }
    }
    copies
}

/// Returns the copy in the other direction.
fn reversed(copy: Copy) -> Copy {
    Copy { from: copy.to, to: copy.from, pitches: (copy.pitches.1, copy.pitches.0), ..copy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_at_one_distance_are_rows_of_one_copy() {
        let copies = |ranges: &[Range<usize>]| spread(&ranges.iter().cloned().collect(), 1000, (5000, 0));
        let rows = Copy { from: 1000, to: 5016, rows: 3, bytes: 8, pitches: (8, 40) };
        assert_eq!(copies(&[16..24, 56..64, 96..104]), std::slice::from_ref(&rows));
        // The last part is shorter.
        assert_eq!(copies(&[16..24, 56..64, 96..104, 136..140]), [rows.clone(), Copy::of(1024, 5136, 4)]);
        let apart = Copy { from: 1008, to: 5056, rows: 2, bytes: 8, pitches: (8, 80) };
        assert_eq!(copies(&[96..104, 56..64, 136..144]), [Copy::of(1000, 5096, 8), apart]);
        let far = Rows::MAX_PITCH + 17;
        assert_eq!(copies(&[16..24, far..far + 8]).len(), 2);
        assert_eq!(reversed(rows), Copy { from: 5016, to: 1000, rows: 3, bytes: 8, pitches: (40, 8) });
        assert_eq!(copies(&[]), []);
        // Only the bytes from 90 on have a place.
        assert_eq!(spread(&Ranges::from(96..104), 1000, (5000, 90)), [Copy::of(1000, 5006, 8)]);
    }
}
