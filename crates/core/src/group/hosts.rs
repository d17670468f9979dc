//! Operations of ranks on several hosts: in the memory that the ranks of a host share, and as plans between the hosts.
//!
//! Every operation begins on the hosts, where all ranks of each compare their calls; then one rank of each host, its
//! *speaker*, runs a plan with those of the other hosts; and it ends on the hosts. So every rank has heard from every
//! rank before it ends, as in a plan, and what the ranks of a host bring or take crosses to other hosts once. Where all
//! hosts have as many ranks, a large all_reduce has as many speakers on each, every one with its own part (a *rail*).
//!
//! Partial sums cross between hosts as wide as they are accumulated: f16 and bf16 as f32, rounded once at the end.

mod pieces;

use std::ops::Range;

use self::pieces::{Piece, Whole};
use super::execution::Execution;
use super::lane::{Lane, Plans};
use crate::plan;
use crate::reduce::{self, Kernel, Scratch};
use crate::sync::Deadline;
use crate::transport::hosts::Hosts;
use crate::transport::subset::Subset;
use crate::transport::{Buffers, Transport};
use crate::types::{Call, DType, Fault, Operation, Parts, ReduceOp, Site, part_start, partition};

/// From how many bytes on all ranks of a host speak in an all_reduce. Below it, fewer and larger messages are faster.
const RAILS: usize = 64 << 10;

/// Whether the operation runs here. Between all ranks over TCP remain all_to_all, gather and scatter, in which every rank has
/// something else for another, parts of sizes that callers give, and means of integers, whose accumulators are up to eight
/// times as wide as what crosses then.
pub(super) fn serves(call: &Call) -> bool {
    let shared =
        !matches!(call.operation, Operation::AllToAll | Operation::AllToAllV | Operation::Gather | Operation::Scatter);
    shared && !call.is_sized() && call.reduction.is_none_or(|op| carrier(call.dtype, op).is_some())
}

/// The type of partial results, where there is one that is exact enough.
fn carrier(dtype: DType, op: ReduceOp) -> Option<DType> {
    match dtype {
        DType::F16 | DType::BF16 => Some(DType::F32),
        _ => Some(dtype).filter(|dtype| !reduce::kernel(*dtype, op).wide),
    }
}

/// Runs an operation that is served here.
pub(super) fn run(
    transport: &dyn Transport,
    lane: &mut Lane,
    hosts: &Hosts,
    site: &Site,
    buffers: &mut Buffers<'_>,
    deadline: &Deadline,
) -> Result<(), Fault> {
    let call = &site.call;
    let Lane { plans, scratch: [work, received, narrow], .. } = lane;
    let rails = hosts.even().filter(|_| call.operation == Operation::AllReduce && call.bytes() >= RAILS);
    // A root speaks for its host.
    let root = call.root.and_then(|root| hosts.find(root));
    let place = |host| match root {
        Some((at, place)) if at == host => place,
        _ if rails.is_some() => hosts.place(),
        _ => 0,
    };
    let speaker = place(hosts.host());
    let rank_of = |host| hosts.members(host)[place(host)];
    let transport = &Subset { all: transport, rank: hosts.host(), world_size: hosts.count(), rank_of };
    let far = Far { transport, site, deadline, plans, received, ranks: hosts.world_size() };
    let run = Run { hosts, site, deadline, rails, speaker, root: root.map(|(host, _)| host) };
    match call.operation {
        Operation::AllReduce => run.all_reduce(far, work, buffers),
        Operation::Reduce => run.reduce(far, work, buffers),
        Operation::Broadcast => run.broadcast(far, buffers),
        Operation::AllGather => run.all_gather(far, work, buffers),
        Operation::ReduceScatter => run.reduce_scatter(far, work, narrow, buffers),
        Operation::Barrier => run.barrier(far),
        // Neither is served here.
        _ => Ok(()),
    }
}

/// One operation on one rank.
struct Run<'a> {
    hosts: &'a Hosts,
    site: &'a Site,
    deadline: &'a Deadline,
    /// The number of speakers on each host, where all ranks speak.
    rails: Option<usize>,
    /// The place of the rank that speaks for this host, or of this rank where all do.
    speaker: usize,
    /// The root's host.
    root: Option<usize>,
}

/// What a speaker needs.
struct Far<'a> {
    /// Between the speakers, numbered as the hosts.
    transport: &'a dyn Transport,
    site: &'a Site,
    deadline: &'a Deadline,
    plans: &'a mut Plans,
    received: &'a mut Scratch,
    /// How many ranks' inputs a result is made of.
    ranks: usize,
}

impl Far<'_> {
    /// Runs `call` between the speakers, in place, in even parts.
    fn run(&mut self, call: Call, whole: &mut [u8]) -> Result<(), Fault> {
        let hosts = self.transport.world_size();
        self.run_in(call, &|host| part_start(call.count, hosts, host), whole)
    }

    /// As [`run`](Self::run), where host `i`'s part begins with element `parts(i)`.
    fn run_in(&mut self, call: Call, parts: &dyn Fn(usize) -> usize, whole: &mut [u8]) -> Result<(), Fault> {
        let (rank, world_size) = (self.transport.rank(), self.transport.world_size());
        let (algorithm, root) = (plan::by_default(call.operation, call.bytes(), world_size), call.root.unwrap_or(0));
        let plan = self.plans.plan(call.operation, algorithm, rank, world_size, root);
        let Far { transport, site, deadline, ranks, .. } = *self;
        let received = &mut *self.received;
        let execution = Execution { transport, site, deadline, call: &call, parts, ranks, whole, received };
        // Partial results are as wide as their accumulators already.
        execution.run(&plan, &mut Scratch::default())
    }
}

impl<'r> Run<'r> {
    /// Runs `call` among the ranks of this host.
    fn near(&self, call: Call, input: Option<&[u8]>, output: &mut [u8]) -> Result<(), Fault> {
        if let Some(shm) = self.hosts.shm() {
            return shm.phase(self.site, call, &mut Buffers { input, output, parts: Parts::Even }, self.deadline);
        }
        // What a rank that is alone gets from all is what it has.
        if let Some(input) = input {
            output.copy_from_slice(input);
        }
        Ok(())
    }

    /// As the group's call, for a part of the operation.
    fn part(&self, operation: Operation, count: usize) -> Call {
        Call { operation, count, reduction: None, root: None, ..self.site.call }
    }

    /// As [`part`](Self::part), where partial results are combined.
    fn partial(&self, operation: Operation, count: usize) -> Call {
        let (dtype, op) = (self.site.call.dtype, self.site.call.reduction.unwrap_or(ReduceOp::Sum));
        let op = if op == ReduceOp::Mean { ReduceOp::Sum } else { op };
        let dtype = carrier(dtype, op).unwrap_or(dtype);
        Call { dtype, reduction: Some(op), ..self.part(operation, count) }
    }

    /// The speaker gets or gives.
    fn by_speaker(&self, call: Call) -> Call {
        Call { root: Some(self.speaker), ..call }
    }

    fn speaks(&self) -> bool {
        self.speaker == self.hosts.place()
    }

    fn size(&self) -> usize {
        self.site.call.dtype.size()
    }

    /// The reduction's kernel, where partial results are wider than elements.
    fn wide(&self) -> Option<Kernel> {
        let kernel = self.site.call.reduction.map(|op| reduce::kernel(self.site.call.dtype, op));
        kernel.filter(|kernel| kernel.wide)
    }

    fn whole<'a>(&self, buffers: &'a mut Buffers<'_>) -> Whole<'a> {
        Whole { count: self.site.call.count, size: self.size(), input: buffers.input, output: &mut *buffers.output }
    }

    fn barrier(&self, mut far: Far<'_>) -> Result<(), Fault> {
        let barrier = self.part(Operation::Barrier, 0);
        self.near(barrier, None, &mut [])?;
        if self.speaks() {
            far.run(barrier, &mut [])?;
        }
        self.near(barrier, None, &mut [])
    }

    fn all_reduce(&self, mut far: Far<'_>, work: &mut Scratch, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let (size, wide) = (self.size(), self.wide());
        // The elements of a piece with which this rank goes to the other hosts.
        let own = |count| self.rails.map_or(0..count, |rails| partition(count, rails, self.speaker));
        let inward = |piece: &mut Piece<'_>| {
            let call = match self.rails {
                Some(_) => self.partial(Operation::ReduceScatter, piece.count),
                None => self.by_speaker(self.partial(Operation::Reduce, piece.count)),
            };
            if let Some(kernel) = wide {
                (kernel.load)(piece.carrier, piece.input.unwrap_or(piece.output));
                return self.near(call, None, piece.carrier);
            }
            let target = match piece.input {
                Some(_) if !self.speaks() => 0..0,
                Some(_) => bytes(&own(piece.count), size),
                None => 0..piece.output.len(),
            };
            self.near(call, piece.input, &mut piece.output[target])
        };
        let across = |piece: &mut Piece<'_>| {
            let own = own(piece.count);
            let result = &mut piece.output[bytes(&own, size)];
            let Some(kernel) = wide else {
                let reduction = self.site.call.reduction;
                return far.run(Call { reduction, ..self.part(Operation::AllReduce, own.len()) }, result);
            };
            let carrier = &mut piece.carrier[bytes(&own, kernel.accumulator)];
            far.run(self.partial(Operation::ReduceScatter, own.len()), carrier)?;
            let done = partition(own.len(), self.hosts.count(), self.hosts.host());
            (kernel.store)(&mut result[bytes(&done, size)], &carrier[bytes(&done, kernel.accumulator)], far.ranks);
            far.run(self.part(Operation::AllGather, own.len()), result)
        };
        let outward = |piece: &mut Piece<'_>| {
            let call = match self.rails {
                Some(_) => self.part(Operation::AllGather, piece.count),
                None => self.by_speaker(self.part(Operation::Broadcast, piece.count)),
            };
            self.near(call, None, piece.output)
        };
        let carrier = (work, wide.map_or(0, |kernel| kernel.accumulator));
        pieces::run(self.whole(buffers), carrier, self.speaks(), inward, across, outward)
    }

    fn reduce(&self, mut far: Far<'_>, work: &mut Scratch, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let (wide, barrier) = (self.wide(), self.part(Operation::Barrier, 0));
        // The root speaks for its host.
        let root = self.speaks() && self.root == Some(self.hosts.host());
        let carried = wide.is_some() || self.speaks() && !root;
        let inward = |piece: &mut Piece<'_>| {
            let call = self.by_speaker(self.partial(Operation::Reduce, piece.count));
            match wide {
                Some(kernel) => {
                    (kernel.load)(piece.carrier, piece.input.unwrap_or(piece.output));
                    self.near(call, None, piece.carrier)
                }
                None if root => self.near(call, piece.input, piece.output),
                // Only the root's output is written.
                None => self.near(call, Some(piece.input.unwrap_or(piece.output)), piece.carrier),
            }
        };
        let across = |piece: &mut Piece<'_>| {
            let partial = Call { root: self.root, ..self.partial(Operation::Reduce, piece.count) };
            if wide.is_some() {
                return far.run(partial, piece.carrier);
            }
            let call = Call { reduction: self.site.call.reduction, ..partial };
            far.run(call, if root { piece.output } else { piece.carrier })
        };
        let outward = |piece: &mut Piece<'_>| {
            if let Some(kernel) = wide.filter(|_| root) {
                (kernel.store)(piece.output, piece.carrier, self.hosts.world_size());
            }
            // Its speaker has heard from all the others, and this host hears it from the speaker.
            if piece.last { self.near(barrier, None, &mut []) } else { Ok(()) }
        };
        let width = wide.map_or(self.size(), |kernel| kernel.accumulator);
        let carrier = (work, if carried { width } else { 0 });
        pieces::run(self.whole(buffers), carrier, self.speaks(), inward, across, outward)
    }

    fn broadcast(&self, mut far: Far<'_>, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let inward = |piece: &mut Piece<'_>| {
            if let Some(input) = piece.input {
                piece.output.copy_from_slice(input);
            }
            if piece.first { self.near(self.part(Operation::Barrier, 0), None, &mut []) } else { Ok(()) }
        };
        let across = |piece: &mut Piece<'_>| {
            far.run(Call { root: self.root, ..self.part(Operation::Broadcast, piece.count) }, piece.output)
        };
        let outward = |piece: &mut Piece<'_>| {
            self.near(self.by_speaker(self.part(Operation::Broadcast, piece.count)), None, piece.output)
        };
        let carrier = (&mut Scratch::default(), 0);
        pieces::run(self.whole(buffers), carrier, self.speaks(), inward, across, outward)
    }

    fn all_gather(&self, mut far: Far<'_>, work: &mut Scratch, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let (call, hosts, size) = (&self.site.call, self.hosts, self.size());
        let block = self.block();
        let gather = self.part(Operation::AllGather, block.len());
        let host_by_host = if hosts.contiguous() {
            self.near(gather, buffers.input, &mut buffers.output[bytes(&block, size)])?;
            &mut *buffers.output
        } else {
            let host_by_host = work.bytes(call.bytes());
            let own = buffers.input.unwrap_or_else(|| &buffers.output[bytes(&self.own(), size)]);
            self.near(gather, Some(own), &mut host_by_host[bytes(&block, size)])?;
            host_by_host
        };
        if self.speaks() {
            let parts = |host| hosts.start(call.count, host);
            far.run_in(self.part(Operation::AllGather, call.count), &parts, host_by_host)?;
        }
        for others in [0..block.start, block.end..call.count] {
            let hand_out = self.by_speaker(self.part(Operation::Broadcast, others.len()));
            self.near(hand_out, None, &mut host_by_host[bytes(&others, size)])?;
        }
        if !hosts.contiguous() {
            let host_by_host = work.bytes(call.bytes());
            self.each_part(|here, part| {
                buffers.output[bytes(&part, size)].copy_from_slice(&host_by_host[bytes(&here, size)]);
            });
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        mut far: Far<'_>,
        work: &mut Scratch,
        narrow: &mut Scratch,
        buffers: &mut Buffers<'_>,
    ) -> Result<(), Fault> {
        let (call, hosts, size, wide) = (&self.site.call, self.hosts, self.size(), self.wide());
        let (block, width) = (self.block(), wide.map_or(size, |kernel| kernel.accumulator));
        let input = buffers.input.unwrap_or(&*buffers.output);
        let partials = work.bytes(call.count * width);
        let reduce = self.by_speaker(self.partial(Operation::Reduce, call.count));
        if wide.is_none() && hosts.contiguous() {
            let target = if self.speaks() { partials.len() } else { 0 };
            self.near(reduce, Some(input), &mut partials[..target])?;
        } else {
            self.each_part(|here, part| {
                let (target, source) = (&mut partials[bytes(&here, width)], &input[bytes(&part, size)]);
                match wide {
                    Some(kernel) => (kernel.load)(target, source),
                    None => target.copy_from_slice(source),
                }
            });
            self.near(reduce, None, partials)?;
        }
        let partials_of_block = bytes(&block, width);
        let results = if wide.is_some() { narrow.bytes(block.len() * size) } else { &mut [] };
        if self.speaks() {
            let parts = |host| hosts.start(call.count, host);
            let scatter = self.partial(Operation::ReduceScatter, call.count);
            let reduction = if wide.is_some() { scatter.reduction } else { call.reduction };
            far.run_in(Call { reduction, ..scatter }, &parts, partials)?;
            if let Some(kernel) = wide {
                (kernel.store)(results, &partials[partials_of_block.clone()], far.ranks);
            }
        }
        let results = if wide.is_some() { results } else { &mut partials[partials_of_block] };
        self.near(self.by_speaker(self.part(Operation::Broadcast, block.len())), None, results)?;
        let own = self.own();
        let earlier = hosts.members(hosts.host())[..hosts.place()].iter();
        let before: usize = earlier.map(|rank| partition(call.count, hosts.world_size(), *rank).len()).sum();
        let target = if buffers.input.is_some() { 0..own.len() } else { own.clone() };
        let source = bytes(&(before..before + own.len()), size);
        buffers.output[bytes(&target, size)].copy_from_slice(&results[source]);
        Ok(())
    }

    /// The elements of this host's ranks, where the whole is put host by host.
    fn block(&self) -> Range<usize> {
        let start = |host| self.hosts.start(self.site.call.count, host);
        start(self.hosts.host())..start(self.hosts.host() + 1)
    }

    /// This rank's elements of the whole.
    fn own(&self) -> Range<usize> {
        let rank = self.hosts.members(self.hosts.host())[self.hosts.place()];
        partition(self.site.call.count, self.hosts.world_size(), rank)
    }

    /// Calls `each` with every rank's elements, where the whole is put host by host and where it is in the order of
    /// ranks.
    fn each_part(&self, mut each: impl FnMut(Range<usize>, Range<usize>)) {
        let mut at = 0;
        for rank in (0..self.hosts.count()).flat_map(|host| self.hosts.members(host)) {
            let part = partition(self.site.call.count, self.hosts.world_size(), *rank);
            each(at..at + part.len(), part.clone());
            at += part.len();
        }
    }
}

fn bytes(elements: &Range<usize>, size: usize) -> Range<usize> {
    elements.start * size..elements.end * size
}
