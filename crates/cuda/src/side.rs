//! One rank's handle of a team: prepares calls on the device's thread.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::address::{Address, Copy};
use super::choice::Choice;
use super::order::ReadyCounter;
use super::rounds::BufferLayout;
use super::runtime::{Kept, Located, Runtime};
use super::team::{Prepared, Team};
use bonfire_core::internal::{Ranges, Rows, lock};
use bonfire_core::{Call, Error, Operation, partition};

/// A team, and the index of this rank in it.
pub(crate) struct TeamHandle<R: Runtime> {
    pub team: Arc<Team>,
    pub local: usize,
    /// The values that the rank's `READY` word was given.
    ready_counter: Mutex<ReadyCounter<R>>,
}

impl<R: Runtime> TeamHandle<R> {
    pub fn of(team: Arc<Team>, local: usize) -> TeamHandle<R> {
        TeamHandle { team, local, ready_counter: Mutex::new(ReadyCounter::new()) }
    }

    /// Prepares an operation on the memory as the work queued so far leaves it. Returns its rounds.
    pub fn prepare(
        &self,
        server: &mut R::Server,
        job: Located<R::Stream>,
        choice: Choice,
        timeout: Duration,
    ) -> Result<Vec<Prepared>, Error> {
        let loaded = self.team.prepare(self.local, choice)?;
        let (call, stream, streams) = (job.call, job.stream, job.streams.clone());
        let layout = BufferLayout::of::<R>(server, job, self.team.ranks(), choice == Choice::Nccl)?;
        let word = self.team.ready_word(self.local);
        let ready = lock(&self.ready_counter).signal(server, word, &streams, stream);
        let rounds = self.team.rounds(self.local, call, choice, layout).into_iter();
        Ok(rounds.map(|(call, layout)| Prepared { call, loaded: loaded.clone(), timeout, ready, layout }).collect())
    }
}

impl BufferLayout {
    /// Uses the operation's own memory if it can. Scratch memory, filled and emptied by copies on the team's stream,
    /// stands in for several tensors of one operation, for one in several ranges or shorter than its part, for memory
    /// that is not aligned for its elements, for a source that overlaps its target in a way that the operation does not
    /// allow, and for the results of a reduce elsewhere than on the root.
    fn of<R: Runtime>(
        server: &mut R::Server,
        job: Located<R::Stream>,
        ranks: usize,
        nccl: bool,
    ) -> Result<BufferLayout, Error> {
        let Located { call, rank, sources: from, targets: to, stream, peers, kept, .. } = job;
        let bytes = |chunks: &[(Address, Ranges)]| chunks.iter().map(|(_, ranges)| ranges.bytes()).sum();
        let (read, written) = match peers.is_message() {
            true => (0..bytes(&from), 0..bytes(&to)),
            false => used(&call, ranks, rank),
        };
        let incoming = written.len() / call.dtype.size();
        let mut layout = BufferLayout { kept, peers, incoming, ..BufferLayout::default() };
        match (single(&from, &read), single(&to, &written)) {
            (Some(source), Some(target)) => {
                (layout.source, layout.target) = (source, target);
                let in_place = match call.operation {
                    Operation::AllToAll => source == target && !nccl,
                    _ => source + written.start == target + read.start,
                };
                let apart = source + read.len() <= target || target + written.len() <= source;
                let width = call.dtype.size() as u64;
                let misaligned = |at: Address| call.reduction.is_some() && !at.get().is_multiple_of(width);
                if !in_place && !apart || misaligned(source) {
                    layout.source = layout.scratch::<R>(server, read.len(), stream)?;
                    layout.before.push(Copy::of(source, layout.source, read.len()));
                }
                if misaligned(target) {
                    layout.target = layout.scratch::<R>(server, written.len(), stream)?;
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
                let scratch = layout.scratch::<R>(server, used.len(), stream)?;
                // NCCL cannot work in place here.
                let received = match call.operation {
                    Operation::AllToAll if nccl => layout.scratch::<R>(server, used.len(), stream)?,
                    _ => scratch,
                };
                let into = |(memory, ranges): &(Address, Ranges)| spread(ranges, *memory, (scratch, used.start));
                let out_of = |(memory, ranges): &(Address, Ranges)| spread(ranges, *memory, (received, used.start));
                layout.before = from.iter().flat_map(into).collect();
                layout.after = to.iter().flat_map(out_of).map(reversed).collect();
                let at = |memory: Address, part: &Range<usize>| memory + part.start.saturating_sub(used.start);
                (layout.source, layout.target) = (at(scratch, &read), at(received, &written));
            }
        }
        Ok(layout)
    }

    /// Allocates scratch memory for the call.
    fn scratch<R: Runtime>(
        &mut self,
        server: &mut R::Server,
        bytes: usize,
        stream: R::Stream,
    ) -> Result<Address, Error> {
        let memory = R::allocate(server, bytes, stream);
        let address = R::address(server, &memory, stream)?;
        self.kept.push(Arc::new(memory) as Kept);
        Ok(address)
    }
}

/// The bytes of the whole that the operation reads and writes on this rank.
fn used(call: &Call, ranks: usize, rank: usize) -> (Range<usize>, Range<usize>) {
    let part = partition(call.count, ranks, rank);
    let (whole, own) = (0..call.bytes(), part.start * call.dtype.size()..part.end * call.dtype.size());
    match call.operation {
        Operation::AllGather | Operation::Gather => (own, whole),
        Operation::ReduceScatter | Operation::Scatter => (whole, own),
        _ => (whole.clone(), whole),
    }
}

/// The address of the only tensor, if it is all of this range.
fn single(tensors: &[(Address, Ranges)], range: &Range<usize>) -> Option<Address> {
    match tensors {
        [(address, ranges)] if ranges.single().as_ref() == Some(range) => Some(*address),
        _ => None,
    }
}

/// Returns the copies from memory to its ranges of the whole, of which other memory holds the bytes from `first` on.
/// Ranges of one length at one distance are rows of one copy, such as the parts of a parameter on all ranks.
fn spread(ranges: &Ranges, memory: Address, (whole, first): (Address, usize)) -> Vec<Copy> {
    let mut copies: Vec<Copy> = Vec::new();
    for (at, range) in ranges.places() {
        let next = Copy::of(memory + at, whole + (range.start - first), range.len());
        if let Some(last) = copies.last_mut()
            && last.bytes == next.bytes
            && let Some(pitch) = next.to.get().checked_sub((last.to + last.pitches.1 * (last.rows - 1)).get())
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
        let at = Address::from;
        let copies = |ranges: &[Range<usize>]| spread(&ranges.iter().cloned().collect(), at(1000), (at(5000), 0));
        let rows = Copy { from: at(1000), to: at(5016), rows: 3, bytes: 8, pitches: (8, 40) };
        assert_eq!(copies(&[16..24, 56..64, 96..104]), std::slice::from_ref(&rows));
        // The last part is shorter.
        assert_eq!(copies(&[16..24, 56..64, 96..104, 136..140]), [rows.clone(), Copy::of(at(1024), at(5136), 4)]);
        let apart = Copy { from: at(1008), to: at(5056), rows: 2, bytes: 8, pitches: (8, 80) };
        assert_eq!(copies(&[96..104, 56..64, 136..144]), [Copy::of(at(1000), at(5096), 8), apart]);
        let far = Rows::MAX_PITCH + 17;
        assert_eq!(copies(&[16..24, far..far + 8]).len(), 2);
        assert_eq!(reversed(rows), Copy { from: at(5016), to: at(1000), rows: 3, bytes: 8, pitches: (40, 8) });
        assert_eq!(copies(&[]), []);
        // Only the bytes from 90 on have a place.
        assert_eq!(spread(&Ranges::from(96..104), at(1000), (at(5000), 90)), [Copy::of(at(1000), at(5006), 8)]);
    }
}
