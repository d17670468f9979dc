//! Hierarchical operations of ranks on several hosts: in shared memory on each host, as plans between hosts.
//!
//! Every operation has three phases. First the ranks of each host operate in shared memory and compare their calls.
//! Then one rank of each host, its *leader*, runs a plan with the leaders of the other hosts. Last the ranks of each
//! host operate again. So no rank ends before a chain of messages has reached it from every rank, as in a plan, and
//! what the ranks of a host contribute or receive crosses between hosts once. If all hosts have the same number of
//! ranks, all ranks are leaders in a large all_reduce, each for its own part (a *rail*).
//!
//! The plan runs on a [`Subset`] of the transport, so what plans are tested for holds between hosts too. The ranks of a
//! host need not be consecutive: all_gather and reduce_scatter go through a copy in host-major order where they are
//! not.
//!
//! # Phases
//! | operation | per host | cross-host | per host |
//! |---|---|---|---|
//! | all_reduce, all ranks leaders | reduce_scatter | all_reduce of each leader's part | all_gather |
//! | all_reduce otherwise | reduce | all_reduce | broadcast |
//! | reduce | reduce | reduce; the root leads | barrier |
//! | broadcast | barrier | broadcast; the root leads | broadcast |
//! | all_gather | all_gather | all_gather of the hosts' parts | broadcast |
//! | reduce_scatter | reduce | reduce_scatter of the hosts' parts | broadcast |
//! | barrier | barrier | barrier | barrier |
//!
//! # Why 16-bit floats cross as f32
//!
//! Partial sums cross between hosts in the type of their accumulator: f16 and bf16 as f32. The leader that has the
//! whole sum of a part rounds it once, and it crosses back as it is. In an all_reduce of S bytes over h hosts each host
//! sends 3S(h-1)/h bytes. A direct exchange between all ranks, which also rounds once, sends 2mS(h-1)/h with m ranks
//! per host. So this pays from two ranks per host on; if every rank is alone on its host, the direct exchange runs.

mod segments;

use std::ops::Range;

use self::segments::{Segment, Whole};
use super::execution::Execution;
use super::workspace::{PlanCache, Workspace};
use crate::plan;
use crate::reduce::{self, Kernel, Scratch};
use crate::sync::Deadline;
use crate::transport::hosts::Hosts;
use crate::transport::subset::Subset;
use crate::transport::{Buffers, Transport};
use crate::types::{Call, DType, Fault, Operation, Parts, ReduceOp, Site, part_start, partition};

/// From this many bytes on, all ranks of a host are leaders in an all_reduce. Below, fewer larger messages are faster.
const MIN_RAILS_BYTES: usize = 64 << 10;

/// Whether the operation runs here. Others run between all ranks over TCP: all_to_all, gather and scatter, in which
/// every rank has different data for every other; parts of sizes that callers give; and means of integers, whose
/// accumulators are up to eight times as wide as what crosses otherwise.
pub(super) fn supports(call: &Call) -> bool {
    let shared =
        !matches!(call.operation, Operation::AllToAll | Operation::AllToAllV | Operation::Gather | Operation::Scatter);
    shared && !call.is_sized() && call.reduction.is_none_or(|op| partial_dtype(call.dtype, op).is_some())
}

/// Returns the type of partial results, if there is one that is exact enough.
fn partial_dtype(dtype: DType, op: ReduceOp) -> Option<DType> {
    match dtype {
        DType::F16 | DType::BF16 => Some(DType::F32),
        _ => Some(dtype).filter(|dtype| !reduce::kernel(*dtype, op).wide),
    }
}

/// Runs an operation that [`supports`] accepts.
pub(super) fn run(
    transport: &dyn Transport,
    workspace: &mut Workspace,
    hosts: &Hosts,
    site: &Site,
    buffers: &mut Buffers<'_>,
    deadline: &Deadline,
) -> Result<(), Fault> {
    let call = &site.call;
    let Workspace { plans, scratch: [work, received, rounded], .. } = workspace;
    let rails =
        hosts.ranks_per_host().filter(|_| call.operation == Operation::AllReduce && call.bytes() >= MIN_RAILS_BYTES);
    // The root is the leader of its host.
    let root = call.root.and_then(|root| hosts.find(root));
    let place = |host| match root {
        Some((at, place)) if at == host => place,
        _ if rails.is_some() => hosts.local_rank(),
        _ => 0,
    };
    let leader = place(hosts.host());
    let rank_of = |host| hosts.members(host)[place(host)];
    let transport = &Subset { all: transport, rank: hosts.host(), world_size: hosts.count(), rank_of };
    let leaders = Leaders { transport, site, deadline, plans, received, ranks: hosts.world_size() };
    let operation = Hierarchical { hosts, site, deadline, rails, leader, root: root.map(|(host, _)| host) };
    match call.operation {
        Operation::AllReduce => operation.all_reduce(leaders, work, buffers),
        Operation::Reduce => operation.reduce(leaders, work, buffers),
        Operation::Broadcast => operation.broadcast(leaders, buffers),
        Operation::AllGather => operation.all_gather(leaders, work, buffers),
        Operation::ReduceScatter => operation.reduce_scatter(leaders, work, rounded, buffers),
        Operation::Barrier => operation.barrier(leaders),
        // `serves` rejects these.
        _ => Ok(()),
    }
}

/// One operation on one rank.
struct Hierarchical<'a> {
    hosts: &'a Hosts,
    site: &'a Site,
    deadline: &'a Deadline,
    /// The number of leaders on each host, if all ranks are leaders.
    rails: Option<usize>,
    /// The local rank of this host's leader, or of this rank if all ranks are leaders.
    leader: usize,
    /// The root's host.
    root: Option<usize>,
}

/// The leaders of all hosts, as one of them sees them: runs plans between hosts.
struct Leaders<'a> {
    /// Connects the leaders, numbered as their hosts.
    transport: &'a dyn Transport,
    site: &'a Site,
    deadline: &'a Deadline,
    plans: &'a mut PlanCache,
    received: &'a mut Scratch,
    /// The number of ranks whose inputs make up a result.
    ranks: usize,
}

impl Leaders<'_> {
    /// Runs `call` between the leaders, in place, in even parts.
    fn run(&mut self, call: Call, whole: &mut [u8]) -> Result<(), Fault> {
        let hosts = self.transport.world_size();
        self.run_in(call, &|host| part_start(call.count, hosts, host), whole)
    }

    /// As [`run`](Self::run), where the part of host `i` begins with element `parts(i)`.
    fn run_in(&mut self, call: Call, parts: &dyn Fn(usize) -> usize, whole: &mut [u8]) -> Result<(), Fault> {
        let (rank, world_size) = (self.transport.rank(), self.transport.world_size());
        let (algorithm, root) = (plan::by_default(call.operation, call.bytes(), world_size), call.root.unwrap_or(0));
        let plan = self.plans.get(call.operation, algorithm, rank, world_size, root);
        let Leaders { transport, site, deadline, ranks, .. } = *self;
        let received = &mut *self.received;
        let execution = Execution { transport, site, deadline, call: &call, parts, ranks, whole, received };
        // Partial results have the type of their accumulators already.
        execution.run(&plan, &mut Scratch::default())
    }
}

impl<'r> Hierarchical<'r> {
    /// Runs `call` among the ranks of this host.
    fn on_host(&self, call: Call, input: Option<&[u8]>, output: &mut [u8]) -> Result<(), Fault> {
        if let Some(shm) = self.hosts.shm() {
            return shm.phase(self.site, call, &mut Buffers { input, output, parts: Parts::Even }, self.deadline);
        }
        // A rank that is alone on its host receives what it contributes.
        if let Some(input) = input {
            output.copy_from_slice(input);
        }
        Ok(())
    }

    /// Returns the call of one phase.
    fn phase(&self, operation: Operation, count: usize) -> Call {
        Call { operation, count, reduction: None, root: None, ..self.site.call }
    }

    /// As [`phase`](Self::phase), for a phase that combines partial results.
    fn partial_phase(&self, operation: Operation, count: usize) -> Call {
        let (dtype, op) = (self.site.call.dtype, self.site.call.reduction.unwrap_or(ReduceOp::Sum));
        let op = if op == ReduceOp::Mean { ReduceOp::Sum } else { op };
        let dtype = partial_dtype(dtype, op).unwrap_or(dtype);
        Call { dtype, reduction: Some(op), ..self.phase(operation, count) }
    }

    /// Makes the leader the root of a phase.
    fn at_leader(&self, call: Call) -> Call {
        Call { root: Some(self.leader), ..call }
    }

    fn is_leader(&self) -> bool {
        self.leader == self.hosts.local_rank()
    }

    fn size(&self) -> usize {
        self.site.call.dtype.size()
    }

    /// Returns the reduction's kernel if partial results are wider than elements.
    fn wide(&self) -> Option<Kernel> {
        let kernel = self.site.call.reduction.map(|op| reduce::kernel(self.site.call.dtype, op));
        kernel.filter(|kernel| kernel.wide)
    }

    fn whole<'a>(&self, buffers: &'a mut Buffers<'_>) -> Whole<'a> {
        Whole { count: self.site.call.count, size: self.size(), input: buffers.input, output: &mut *buffers.output }
    }

    fn barrier(&self, mut leaders: Leaders<'_>) -> Result<(), Fault> {
        let barrier = self.phase(Operation::Barrier, 0);
        self.on_host(barrier, None, &mut [])?;
        if self.is_leader() {
            leaders.run(barrier, &mut [])?;
        }
        self.on_host(barrier, None, &mut [])
    }

    fn all_reduce(&self, mut leaders: Leaders<'_>, work: &mut Scratch, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let (size, wide) = (self.size(), self.wide());
        // The elements of a segment that this rank exchanges with other hosts.
        let own = |count| self.rails.map_or(0..count, |rails| partition(count, rails, self.leader));
        let to_leaders = |segment: &mut Segment<'_>| {
            let call = match self.rails {
                Some(_) => self.partial_phase(Operation::ReduceScatter, segment.count),
                None => self.at_leader(self.partial_phase(Operation::Reduce, segment.count)),
            };
            if let Some(kernel) = wide {
                (kernel.load)(segment.partials, segment.input.unwrap_or(segment.output));
                return self.on_host(call, None, segment.partials);
            }
            let target = match segment.input {
                Some(_) if !self.is_leader() => 0..0,
                Some(_) => bytes(&own(segment.count), size),
                None => 0..segment.output.len(),
            };
            self.on_host(call, segment.input, &mut segment.output[target])
        };
        let cross = |segment: &mut Segment<'_>| {
            let own = own(segment.count);
            let result = &mut segment.output[bytes(&own, size)];
            let Some(kernel) = wide else {
                let reduction = self.site.call.reduction;
                return leaders.run(Call { reduction, ..self.phase(Operation::AllReduce, own.len()) }, result);
            };
            let partials = &mut segment.partials[bytes(&own, kernel.accumulator)];
            leaders.run(self.partial_phase(Operation::ReduceScatter, own.len()), partials)?;
            let done = partition(own.len(), self.hosts.count(), self.hosts.host());
            (kernel.store)(&mut result[bytes(&done, size)], &partials[bytes(&done, kernel.accumulator)], leaders.ranks);
            leaders.run(self.phase(Operation::AllGather, own.len()), result)
        };
        let from_leaders = |segment: &mut Segment<'_>| {
            let call = match self.rails {
                Some(_) => self.phase(Operation::AllGather, segment.count),
                None => self.at_leader(self.phase(Operation::Broadcast, segment.count)),
            };
            self.on_host(call, None, segment.output)
        };
        let partials = (work, wide.map_or(0, |kernel| kernel.accumulator));
        segments::run(self.whole(buffers), partials, self.is_leader(), to_leaders, cross, from_leaders)
    }

    fn reduce(&self, mut leaders: Leaders<'_>, work: &mut Scratch, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let (wide, barrier) = (self.wide(), self.phase(Operation::Barrier, 0));
        // The root is the leader of its host.
        let root = self.is_leader() && self.root == Some(self.hosts.host());
        let needs_partials = wide.is_some() || self.is_leader() && !root;
        let to_leaders = |segment: &mut Segment<'_>| {
            let call = self.at_leader(self.partial_phase(Operation::Reduce, segment.count));
            match wide {
                Some(kernel) => {
                    (kernel.load)(segment.partials, segment.input.unwrap_or(segment.output));
                    self.on_host(call, None, segment.partials)
                }
                None if root => self.on_host(call, segment.input, segment.output),
                // Only the root's output is written.
                None => self.on_host(call, Some(segment.input.unwrap_or(segment.output)), segment.partials),
            }
        };
        let cross = |segment: &mut Segment<'_>| {
            let partial = Call { root: self.root, ..self.partial_phase(Operation::Reduce, segment.count) };
            if wide.is_some() {
                return leaders.run(partial, segment.partials);
            }
            let call = Call { reduction: self.site.call.reduction, ..partial };
            leaders.run(call, if root { segment.output } else { segment.partials })
        };
        let from_leaders = |segment: &mut Segment<'_>| {
            if let Some(kernel) = wide.filter(|_| root) {
                (kernel.store)(segment.output, segment.partials, self.hosts.world_size());
            }
            // The leader has received from all other hosts, and this barrier tells the ranks of this host.
            if segment.last { self.on_host(barrier, None, &mut []) } else { Ok(()) }
        };
        let width = wide.map_or(self.size(), |kernel| kernel.accumulator);
        let partials = (work, if needs_partials { width } else { 0 });
        segments::run(self.whole(buffers), partials, self.is_leader(), to_leaders, cross, from_leaders)
    }

    fn broadcast(&self, mut leaders: Leaders<'_>, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let to_leaders = |segment: &mut Segment<'_>| {
            if let Some(input) = segment.input {
                segment.output.copy_from_slice(input);
            }
            if segment.first { self.on_host(self.phase(Operation::Barrier, 0), None, &mut []) } else { Ok(()) }
        };
        let cross = |segment: &mut Segment<'_>| {
            leaders.run(Call { root: self.root, ..self.phase(Operation::Broadcast, segment.count) }, segment.output)
        };
        let from_leaders = |segment: &mut Segment<'_>| {
            self.on_host(self.at_leader(self.phase(Operation::Broadcast, segment.count)), None, segment.output)
        };
        let partials = (&mut Scratch::default(), 0);
        segments::run(self.whole(buffers), partials, self.is_leader(), to_leaders, cross, from_leaders)
    }

    fn all_gather(&self, mut leaders: Leaders<'_>, work: &mut Scratch, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let (call, hosts, size) = (&self.site.call, self.hosts, self.size());
        let block = self.block();
        let gather = self.phase(Operation::AllGather, block.len());
        let host_major = if hosts.contiguous() {
            self.on_host(gather, buffers.input, &mut buffers.output[bytes(&block, size)])?;
            &mut *buffers.output
        } else {
            let host_major = work.bytes(call.bytes())?;
            let own = buffers.input.unwrap_or_else(|| &buffers.output[bytes(&self.own(), size)]);
            self.on_host(gather, Some(own), &mut host_major[bytes(&block, size)])?;
            host_major
        };
        if self.is_leader() {
            let parts = |host| hosts.start(call.count, host);
            leaders.run_in(self.phase(Operation::AllGather, call.count), &parts, host_major)?;
        }
        for others in [0..block.start, block.end..call.count] {
            let broadcast = self.at_leader(self.phase(Operation::Broadcast, others.len()));
            self.on_host(broadcast, None, &mut host_major[bytes(&others, size)])?;
        }
        if !hosts.contiguous() {
            let host_major = work.bytes(call.bytes())?;
            self.for_each_part(|here, part| {
                buffers.output[bytes(&part, size)].copy_from_slice(&host_major[bytes(&here, size)]);
            });
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        mut leaders: Leaders<'_>,
        work: &mut Scratch,
        rounded: &mut Scratch,
        buffers: &mut Buffers<'_>,
    ) -> Result<(), Fault> {
        let (call, hosts, size, wide) = (&self.site.call, self.hosts, self.size(), self.wide());
        let (block, width) = (self.block(), wide.map_or(size, |kernel| kernel.accumulator));
        let input = buffers.input.unwrap_or(&*buffers.output);
        let partials = work.bytes(call.count * width)?;
        let reduce = self.at_leader(self.partial_phase(Operation::Reduce, call.count));
        if wide.is_none() && hosts.contiguous() {
            let target = if self.is_leader() { partials.len() } else { 0 };
            self.on_host(reduce, Some(input), &mut partials[..target])?;
        } else {
            self.for_each_part(|here, part| {
                let (target, source) = (&mut partials[bytes(&here, width)], &input[bytes(&part, size)]);
                match wide {
                    Some(kernel) => (kernel.load)(target, source),
                    None => target.copy_from_slice(source),
                }
            });
            self.on_host(reduce, None, partials)?;
        }
        let partials_of_block = bytes(&block, width);
        let results = if wide.is_some() { rounded.bytes(block.len() * size)? } else { &mut [] };
        if self.is_leader() {
            let parts = |host| hosts.start(call.count, host);
            let scatter = self.partial_phase(Operation::ReduceScatter, call.count);
            let reduction = if wide.is_some() { scatter.reduction } else { call.reduction };
            leaders.run_in(Call { reduction, ..scatter }, &parts, partials)?;
            if let Some(kernel) = wide {
                (kernel.store)(results, &partials[partials_of_block.clone()], leaders.ranks);
            }
        }
        let results = if wide.is_some() { results } else { &mut partials[partials_of_block] };
        self.on_host(self.at_leader(self.phase(Operation::Broadcast, block.len())), None, results)?;
        let own = self.own();
        let earlier = hosts.members(hosts.host())[..hosts.local_rank()].iter();
        let before: usize = earlier.map(|rank| partition(call.count, hosts.world_size(), *rank).len()).sum();
        let target = if buffers.input.is_some() { 0..own.len() } else { own.clone() };
        let source = bytes(&(before..before + own.len()), size);
        buffers.output[bytes(&target, size)].copy_from_slice(&results[source]);
        Ok(())
    }

    /// Returns the elements of this host's ranks in host-major order.
    fn block(&self) -> Range<usize> {
        let start = |host| self.hosts.start(self.site.call.count, host);
        start(self.hosts.host())..start(self.hosts.host() + 1)
    }

    /// Returns this rank's elements of the whole.
    fn own(&self) -> Range<usize> {
        let rank = self.hosts.members(self.hosts.host())[self.hosts.local_rank()];
        partition(self.site.call.count, self.hosts.world_size(), rank)
    }

    /// Calls `each` with every rank's elements, first their range in host-major order, then in rank order.
    fn for_each_part(&self, mut each: impl FnMut(Range<usize>, Range<usize>)) {
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
