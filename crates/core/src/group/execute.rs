//! Executes operations: on the engine, in the memory of each host and between hosts, as a plan, or as messages.

use std::sync::Arc;

use super::execution::Execution;
#[cfg(all(feature = "shm", target_os = "linux"))]
use super::hosts;
use super::workspace::Workspace;
use crate::plan::{self, Algorithm, Selection};
use crate::reduce;
use crate::sync::Deadline;
use crate::transport::{Buffers, Engines, Transport};
use crate::types::{Fault, Operation, Parts, Site};

/// The data that one operation moves on this rank.
pub(super) enum Task<'a> {
    /// A collective.
    Collective(Buffers<'a>),
    /// A collective in which each pair of ranks has its own sizes.
    Pairs(Pairs<'a>),
    /// A message to one rank, from one, or both at once.
    Message { outgoing: Option<(usize, &'a [u8])>, incoming: Option<(usize, &'a mut [u8])> },
}

/// The buffers of an `all_to_all_v`, with the number of elements to and from each rank.
pub(super) struct Pairs<'a> {
    pub input: &'a [u8],
    pub send: &'a [usize],
    pub output: &'a mut [u8],
    pub recv: &'a [usize],
}

impl Task<'_> {
    /// Returns the peer of a message, and whether this rank sends.
    #[inline]
    pub fn message(&self) -> Option<(usize, bool)> {
        match self {
            Task::Message { outgoing: Some((to, _)), .. } => Some((*to, true)),
            Task::Message { incoming: Some((from, _)), .. } => Some((*from, false)),
            _ => None,
        }
    }
}

/// Executes a group's operations on its transport.
pub(super) struct Executor {
    pub transport: Arc<dyn Transport>,
    pub engines: Engines,
    pub algorithms: Selection,
}

impl Executor {
    #[inline]
    pub fn run(
        &self,
        workspace: &mut Workspace,
        site: &Site,
        task: Task<'_>,
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        let tag = *site;
        match task {
            Task::Collective(buffers) => self.collective(workspace, site, buffers, deadline),
            Task::Pairs(pairs) => {
                // No engine runs this operation: only the two ranks of a pair know the sizes between them.
                self.begin(site)?;
                self.agree_before_plan(site, deadline)?;
                self.pairs(&tag, pairs, deadline)
            }
            Task::Message { outgoing: Some(outgoing), incoming: Some(incoming) } => {
                self.transport.exchange(&tag, outgoing, incoming, deadline)
            }
            Task::Message { outgoing: Some((to, bytes)), .. } => self.transport.send(&tag, to, bytes, deadline),
            Task::Message { incoming: Some((from, bytes)), .. } => self.transport.recv(&tag, from, bytes, deadline),
            Task::Message { .. } => Ok(()),
        }
    }

    /// Begins an operation. Returns the algorithm that the table selects, or none if it selects the engine.
    #[inline]
    fn begin(&self, site: &Site) -> Result<Option<Algorithm>, Fault> {
        self.transport.begin(site)?;
        Ok(self.algorithms.plan(&site.call, self.transport.world_size(), self.engines.is_some()))
    }

    /// Lets an engine compare the calls of an operation that runs without it.
    #[inline]
    fn agree_before_plan(&self, site: &Site, deadline: &Deadline) -> Result<(), Fault> {
        if let Engines::AllRanks(engine) = &self.engines {
            engine.agree_before_plan(site, deadline)?;
        }
        Ok(())
    }

    /// Runs a collective: on the engine, if there is one and the table leaves this size to it; else in the hosts'
    /// memory and between hosts, where ranks of a host share memory; else as a plan.
    #[inline]
    fn collective(
        &self,
        workspace: &mut Workspace,
        site: &Site,
        mut buffers: Buffers<'_>,
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        let algorithm = self.begin(site)?;
        if let (Engines::AllRanks(engine), None) = (&self.engines, algorithm)
            && engine.supports(&site.call)
        {
            return engine.run(site, &mut buffers, deadline);
        }
        self.agree_before_plan(site, deadline)?;
        #[cfg(all(feature = "shm", target_os = "linux"))]
        if let (Engines::PerHost(hosts), None) = (&self.engines, algorithm)
            && hosts::supports(&site.call)
        {
            return hosts::run(&*self.transport, workspace, hosts, site, &mut buffers, deadline);
        }
        self.plan(workspace, site, &mut buffers, deadline, algorithm)
    }

    /// Runs a collective as a plan of this algorithm, or of the default algorithm.
    fn plan(
        &self,
        workspace: &mut Workspace,
        site: &Site,
        buffers: &mut Buffers<'_>,
        deadline: &Deadline,
        algorithm: Option<Algorithm>,
    ) -> Result<(), Fault> {
        let call = &site.call;
        let transport = &*self.transport;
        let (rank, world_size) = (transport.rank(), transport.world_size());
        let wide = call.reduction.is_some_and(|op| reduce::kernel(call.dtype, op).wide);
        let algorithm = algorithm.unwrap_or_else(|| plan::by_default(call.operation, call.bytes(), world_size));
        // Only the direct exchange keeps a wide accumulator until the end.
        let algorithm = if wide { Algorithm::Direct } else { algorithm };
        let root = call.root.unwrap_or(0);
        let plan = workspace.plans.get(call.operation, algorithm, rank, world_size, root);

        let size = call.dtype.size();
        let parts = buffers.parts;
        let element = |index| parts.start(call.count, world_size, index);
        let elements = element(rank)..element(rank + 1);
        let own = elements.start * size..elements.end * size;
        let [work, received, accumulator] = &mut workspace.scratch;
        // The plan works in place on the whole, which is the output if that may hold the whole.
        let has_input = buffers.input.is_some();
        let in_scratch = match call.operation {
            Operation::Reduce => rank != root,
            Operation::ReduceScatter => has_input,
            Operation::Gather => has_input && rank != root,
            Operation::Scatter => has_input && rank == root,
            _ => false,
        };
        let whole: &mut [u8] = if in_scratch {
            let source = buffers.input.unwrap_or(buffers.output);
            let whole = work.bytes(source.len())?;
            whole.copy_from_slice(source);
            whole
        } else {
            if let Some(input) = buffers.input {
                let gathers = matches!(call.operation, Operation::AllGather | Operation::Gather);
                buffers.output[if gathers { own.clone() } else { 0..input.len() }].copy_from_slice(input);
            }
            &mut *buffers.output
        };
        // A rank other than the root has only its own part.
        let part_only = has_input && rank != root && matches!(call.operation, Operation::Gather | Operation::Scatter);
        let within_own = |index| element(index).clamp(elements.start, elements.end) - elements.start;
        let part_starts: &dyn Fn(usize) -> usize = if part_only { &within_own } else { &element };
        let execution =
            Execution { transport, site, deadline, call, parts: part_starts, ranks: world_size, whole, received };
        execution.run(&plan, accumulator)?;
        if in_scratch && matches!(call.operation, Operation::ReduceScatter | Operation::Scatter) {
            buffers.output.copy_from_slice(&work.bytes(call.bytes())?[own]);
        }
        Ok(())
    }

    /// Runs an `all_to_all_v`. Every rank receives from every other, even if there is no data for it.
    fn pairs(&self, tag: &Site, pairs: Pairs<'_>, deadline: &Deadline) -> Result<(), Fault> {
        let (rank, n) = (self.transport.rank(), self.transport.world_size());
        let Pairs { input, send, output, recv } = pairs;
        let size = tag.call.dtype.size();
        let part = |sizes, index| {
            let part = Parts::Sizes(sizes).part(0, n, index);
            part.start * size..part.end * size
        };
        output[part(recv, rank)].copy_from_slice(&input[part(send, rank)]);
        for distance in 1..n {
            let (to, from) = ((rank + distance) % n, (rank + n - distance) % n);
            let (outgoing, incoming) = (&input[part(send, to)], &mut output[part(recv, from)]);
            self.transport.exchange(tag, (to, outgoing), (from, incoming), deadline)?;
        }
        Ok(())
    }
}
