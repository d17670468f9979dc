//! CUDA: kernels that reduce over the devices' memory, on streams of our own beside cubecl's.
//!
//! cubecl does not show its streams, so two small kernels that it launches order them against ours: `kernels/order.cu`.
//! One tells, after what is on a tensor's stream, that the tensor is ready, which our stream waits for; the other waits,
//! before what follows on that stream, until our stream has written that a call is done.

#[doc(hidden)]
pub mod bench;
mod choice;
mod control;
mod driver;
mod kernel;
mod lane;
mod memory;
#[cfg(feature = "nccl")]
pub mod nccl;
mod order;
mod team;

use std::collections::HashMap;
use std::sync::Arc;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use self::control::Order;
use self::lane::{Lane, place};
use self::order::Server;
use self::team::{Ready, Team};
use super::DeviceTransport;
use super::communication::Span;
use super::engine::{Engine, Job, Loan, Rows};
use super::status::Status;
use crate::error::Error;
use crate::wait::Deadline;

impl DeviceTransport for CudaRuntime {
    fn engine(device: DeviceId) -> Option<Box<dyn Engine<Self>>> {
        let status = Status::of::<CudaRuntime>(device);
        let (teams, pending) = (HashMap::new(), Vec::new());
        Some(Box::new(CudaEngine { device, status, teams, pending, last: None, lane: None }))
    }
}

struct CudaEngine {
    device: DeviceId,
    status: Arc<Status>,
    /// The teams that this device is in, by their devices.
    teams: HashMap<Vec<DeviceId>, Arc<Team>>,
    /// What `sync` has not ordered yet.
    pending: Vec<Pending>,
    /// The stream from which the last call came: `ready` words only grow if each call comes after the one before.
    last: Option<StreamId>,
    /// Made when it is first used.
    lane: Option<Lane>,
}

/// A call that was submitted. It keeps its tensors' memory until what follows on their streams comes after it.
struct Pending {
    team: Arc<Team>,
    rank: usize,
    number: u64,
    source: Binding,
    target: Binding,
}

impl Pending {
    /// Whether this call uses memory that the other one writes, or writes what that uses.
    fn meets(&self, source: &Span, target: &Span) -> bool {
        let (read, written) = (Span::of(&self.source), Span::of(&self.target));
        written.overlaps(source) || written.overlaps(target) || read.overlaps(target)
    }
}

impl CudaEngine {
    fn team(&mut self, devices: Vec<DeviceId>, rank: usize) -> Result<Arc<Team>, Error> {
        match self.teams.get(&devices) {
            Some(team) if team.failure().is_none() => Ok(team.clone()),
            _ => {
                let team = Team::of(devices.clone())?;
                team.watch(rank);
                self.teams.insert(devices, team.clone());
                Ok(team)
            }
        }
    }

    fn lane(&mut self) -> Result<&mut Lane, Error> {
        match &mut self.lane {
            Some(lane) => Ok(lane),
            lane => Ok(lane.insert(Lane::new(self.device)?)),
        }
    }

    fn submit(&mut self, server: &mut Server, team: &Arc<Team>, job: Job) -> Result<(), Error> {
        let Job { call, rank, source, target, stream, .. } = job;
        let (launch, module) = team.prepare(rank, &call)?;
        let number = team.number(rank, call)?;
        let (from, to) = (place(server, &source, stream)?, place(server, &target, stream)?);
        let streams = [source.stream, target.stream, self.last.unwrap_or(stream)];
        let order = Order {
            word: team.ready(rank),
            value: number,
            patience: team.patience().as_nanos() as u64,
            host: team.host(rank),
        };
        order::tensors_ready(server, streams, order, stream);
        self.last = Some(stream);
        let (read, written) = (Span::of(&source), Span::of(&target));
        let mut after = Vec::new();
        for pending in self.pending.iter().filter(|p| !Arc::ptr_eq(&p.team, team) && p.meets(&read, &written)) {
            // Our stream may only wait for what is on a stream already.
            pending.team.wait_launched(pending.rank, pending.number, &Deadline::after(self.status.deadline()))?;
            after.push((pending.team.done(pending.rank), pending.number));
        }
        team.submit(rank, Ready { call, launch, module, source: from, target: to, after })?;
        self.pending.push(Pending { team: team.clone(), rank, number, source, target });
        Ok(())
    }
}

impl Engine<CudaRuntime> for CudaEngine {
    fn takes(&mut self, devices: &[DeviceId]) -> bool {
        self.teams.contains_key(devices) || team::fit(devices)
    }

    fn all_reduce(&mut self, server: &mut Server, job: Job) -> Result<(), Error> {
        let team = self.team(job.devices.clone(), job.rank)?;
        self.submit(server, &team, job)
    }

    fn fail(&mut self, devices: Vec<DeviceId>, error: &Error) {
        let team = match self.teams.get(&devices) {
            Some(team) => Ok(team.clone()),
            None => Team::of(devices),
        };
        match team {
            Ok(team) => team.fail(error.clone()),
            Err(other) => log::error!("the other devices are not told of a failure: {other}"),
        }
    }

    fn sync(&mut self, server: &mut Server, stream: StreamId) -> Result<(), Error> {
        let deadline = Deadline::after(self.status.deadline());
        let mut last: Vec<&Pending> = Vec::new();
        for pending in self.pending.iter().rev() {
            if !last.iter().any(|other| Arc::ptr_eq(&other.team, &pending.team)) {
                pending.team.wait_launched(pending.rank, pending.number, &deadline)?;
                last.push(pending);
            }
        }
        let mut streams = vec![stream];
        for tensor in self.pending.iter().flat_map(|pending| [&pending.source, &pending.target]) {
            if !streams.contains(&tensor.stream) {
                streams.push(tensor.stream);
            }
        }
        for pending in last {
            let order = Order {
                word: pending.team.done(pending.rank),
                value: pending.number,
                // The kernel has its own, which begins later.
                patience: pending.team.patience().as_nanos() as u64 * 2,
                host: pending.team.host(pending.rank),
            };
            streams.iter().for_each(|stream| order::await_done(server, order, *stream));
        }
        self.pending.clear();
        Ok(())
    }

    fn lend(&mut self, server: &mut Server, memory: Binding, stream: StreamId) -> Result<Loan, Error> {
        self.lane()?.lend(server, memory, stream)
    }

    fn copy(&mut self, server: &mut Server, loan: Loan, rows: Rows, target: Binding) -> Result<(), Error> {
        let patience = self.status.deadline();
        self.lane()?.copy(server, loan, rows, target, patience)
    }

    fn forget(&mut self) {
        let failed = |pending: &Pending| pending.team.failure().is_some();
        for pending in self.pending.iter().filter(|pending| failed(pending)) {
            if let Err(error) = pending.team.quiesce() {
                log::warn!("after a failure: {error}");
            }
        }
        self.pending.retain(|pending| !failed(pending));
    }
}
