//! One rank's part in a team: what is done for a call on the device's thread.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use super::choice::Way;
use super::lane::place;
use super::order::{self, Server, Told};
use super::team::{Copy, Layout, Ready, Team};
use crate::server::engine::Job;
use bonfire_core::internal::lock;
use bonfire_core::{Error, Operation, partition};

/// A team, and this rank's place in it.
pub(super) struct Side {
    pub team: Arc<Team>,
    pub seat: usize,
    /// What the seat's `READY` word was told.
    told: Mutex<Told>,
}

impl Side {
    pub fn of(team: Arc<Team>, seat: usize) -> Side {
        Side { team, seat, told: Mutex::default() }
    }

    /// Takes down what a job uses, as what was queued so far leaves it.
    pub fn prepare(&self, server: &mut Server, job: Job, way: Way, patience: Duration) -> Result<Ready, Error> {
        let means = self.team.prepare(self.seat, way)?;
        let mut streams: Vec<StreamId> =
            job.sources.iter().chain(&job.targets).map(|(memory, _)| memory.stream).collect();
        streams.sort_unstable_by_key(|stream| stream.value);
        streams.dedup();
        let stream = job.stream;
        let layout = Layout::of(server, job, self.team.ranks(), way == Way::Nccl)?;
        let ready = lock(&self.told).tell(server, self.team.ready(self.seat), &streams, stream);
        Ok(Ready { means, patience, ready, layout })
    }
}

impl Layout {
    fn of(server: &mut Server, job: Job, ranks: usize, nccl: bool) -> Result<Layout, Error> {
        let Job { call, rank, sources, targets, stream } = job;
        let mut find = |pieces: &[(Binding, Range<usize>)]| {
            let found = pieces.iter().map(|(memory, part)| Ok((place(server, memory, stream)?, part.clone())));
            found.collect::<Result<Vec<_>, Error>>()
        };
        let (from, to) = (find(&sources)?, find(&targets)?);
        let kept: Vec<Binding> = sources.into_iter().chain(targets).map(|(memory, _)| memory).collect();
        let mut layout = Layout { source: 0, target: 0, before: Vec::new(), after: Vec::new(), kept };
        match (&from[..], &to[..]) {
            // Root and others of a broadcast have one piece of memory.
            ([(memory, _)], []) | ([], [(memory, _)]) => (layout.source, layout.target) = (*memory, *memory),
            ([(source, read)], [(target, written)]) => {
                (layout.source, layout.target) = (*source, *target);
                let own = partition(call.count, ranks, rank).start * call.dtype.size();
                let in_place = match call.operation {
                    Operation::AllGather => *source == target + own as u64,
                    Operation::ReduceScatter => *target == source + own as u64,
                    Operation::AllToAll => source == target && !nccl,
                    _ => source == target,
                };
                let apart = source + read.len() as u64 <= *target || target + written.len() as u64 <= *source;
                let misaligned = |at: &u64| call.reduction.is_some() && !at.is_multiple_of(call.dtype.size() as u64);
                if !in_place && !apart || misaligned(source) {
                    layout.source = layout.scratch(server, read.len(), stream)?;
                    layout.before.push(Copy { from: *source, to: layout.source, bytes: read.len() });
                }
                if misaligned(target) {
                    layout.target = layout.scratch(server, written.len(), stream)?;
                    layout.after.push(Copy { from: layout.target, to: *target, bytes: written.len() });
                }
            }
            _ => {
                let whole = layout.scratch(server, call.bytes(), stream)?;
                let at = |part: &Range<usize>| whole + part.start as u64;
                layout.before =
                    from.iter().map(|(memory, part)| Copy { from: *memory, to: at(part), bytes: part.len() }).collect();
                layout.after =
                    to.iter().map(|(memory, part)| Copy { from: at(part), to: *memory, bytes: part.len() }).collect();
                (layout.source, layout.target) = (whole, whole);
            }
        }
        Ok(layout)
    }

    /// Memory that nobody else knows.
    fn scratch(&mut self, server: &mut Server, bytes: usize, stream: StreamId) -> Result<u64, Error> {
        let memory = order::fresh(server, bytes, stream);
        let address = place(server, &memory, stream)?;
        self.kept.push(memory);
        Ok(address)
    }
}
