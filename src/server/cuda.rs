//! CUDA: kernels that reduce over the devices' memory, on streams of our own beside cubecl's.
//!
//! cubecl does not show its streams, so two small kernels that it launches order them against ours: `kernels/order.cu`.
//! One tells, after what is on a tensor's stream, that the tensor is ready, which our stream waits for; the other waits,
//! before what follows on a stream, until our stream has written that a call is done.

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
mod remote;
mod route;
mod team;

use std::collections::HashMap;
use std::sync::Arc;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use self::choice::{ROUTE, way};
use self::control::{Order, nanoseconds};
use self::lane::{Lane, place};
use self::order::Server;
use self::team::{Ready, Team};
use super::DeviceTransport;
use super::communication::{Span, UNFINISHED};
use super::engine::{Engine, Job, Loan, Route, Rows};
use super::reading::caught;
use super::status::Status;
use bonfire_core::error::Site;
use bonfire_core::{Deadline, Error, Group};

impl DeviceTransport for CudaRuntime {
    fn engine(device: DeviceId) -> Option<Box<dyn Engine<Self>>> {
        Some(Box::new(CudaEngine {
            device,
            status: Status::of::<CudaRuntime>(device),
            teams: HashMap::new(),
            pending: Vec::new(),
            last: None,
            lane: None,
            promised: Vec::new(),
            promises: 0,
            entered: HashMap::new(),
        }))
    }

    fn route(group: &Group, device: DeviceId) -> Result<Option<Arc<dyn Route<Self>>>, Error> {
        route::of(group, device)
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
    /// What streams must wait for: the latest of each word, and as which promise it was made.
    promised: Vec<(Order, u64)>,
    promises: u64,
    /// Up to which promise a stream comes after them.
    entered: HashMap<StreamId, u64>,
}

/// A call that was submitted. It keeps its tensors' memory until whatever enters a stream comes after it.
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
        if let Some(team) = self.teams.get(&devices) {
            // One that failed stays until the failure is cleared: `forget` has to wait for it.
            return team.failure().map_or_else(|| Ok(team.clone()), Err);
        }
        let team = Team::of(devices.clone())?;
        team.watch(rank);
        self.teams.insert(devices, team.clone());
        // If the one before has failed since the call was looked at, this call belongs to that one.
        self.status.failure().map_or(Ok(team), Err)
    }

    fn lane(&mut self) -> Result<&mut Lane, Error> {
        match &mut self.lane {
            Some(lane) => Ok(lane),
            lane => Ok(lane.insert(Lane::new(self.device)?)),
        }
    }

    fn submit(&mut self, server: &mut Server, team: &Arc<Team>, job: Job) -> Result<(), Error> {
        let Job { call, rank, source, target, stream, .. } = job;
        let (read, written) = (Span::of(&source), Span::of(&target));
        let mut others = self.pending.iter().filter(|pending| !Arc::ptr_eq(&pending.team, team));
        if others.any(|pending| pending.meets(&read, &written)) {
            // Their streams do not wait for each other.
            return Err(Error::argument("all_reduce", UNFINISHED));
        }
        let way = way(*ROUTE, &call, team.topology(), false);
        let way = way.ok_or_else(|| Error::argument(call.operation, format!("no kernel does {call}")))?;
        let means = team.prepare(rank, way)?;
        let number = team.number(rank, call)?;
        let (source_at, target_at) = (place(server, &source, stream)?, place(server, &target, stream)?);
        let word = (team.ready(rank), number);
        order::tensors_ready(server, &[source.stream, target.stream], &mut self.last, word, stream);
        let (site, patience) = (Site::new(call, number - 1), team.patience());
        let ready = Ready {
            site,
            means,
            patience,
            deadline: Deadline::after(patience),
            ready: number,
            source: source_at,
            target: target_at,
            before: Vec::new(),
            after: Vec::new(),
            kept: None,
        };
        team.submit(rank, ready)?;
        self.pending.push(Pending { team: team.clone(), rank, number, source, target });
        Ok(())
    }

    fn promise(&mut self, order: Order) {
        self.promised.retain(|(other, _)| other.word != order.word);
        self.promises += 1;
        self.promised.push((order, self.promises));
    }
}

impl Engine<CudaRuntime> for CudaEngine {
    fn takes(&mut self, devices: &[DeviceId]) -> bool {
        self.teams.contains_key(devices) || team::fit(devices)
    }

    fn enter(&mut self, server: &mut Server, stream: StreamId) {
        let before = self.entered.get(&stream).copied().unwrap_or(0);
        if before == self.promises {
            return;
        }
        for (order, _) in self.promised.iter().filter(|(_, number)| *number > before) {
            order::await_done(server, *order, stream);
        }
        // Threads that have ended leave their streams here; to wait once more does no harm.
        const STREAMS: usize = 4096;
        if self.entered.len() >= STREAMS {
            self.entered.clear();
        }
        self.entered.insert(stream, self.promises);
    }

    fn all_reduce(&mut self, server: &mut Server, job: Job) -> Result<(), Error> {
        self.enter(server, job.stream);
        let team = self.team(job.devices.clone(), job.rank)?;
        // The others would wait for this call.
        caught("all_reduce", || self.submit(server, &team, job)).inspect_err(|error| team.fail(error.clone()))
    }

    fn fail(&mut self, devices: &[DeviceId], error: &Error) {
        team::fail(devices, error);
    }

    fn sync(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(self.status.deadline());
        let mut orders: Vec<(&Arc<Team>, Order)> = Vec::new();
        let mut outcome = Ok(());
        for Pending { team, rank, number, .. } in self.pending.iter().rev() {
            if orders.iter().any(|(other, _)| Arc::ptr_eq(other, team)) {
                continue;
            }
            // What waits on the GPU for a call must be put there after it. Where one team fails, others may be sound.
            if let Err(error) = team.wait_launched(*rank, *number, &deadline) {
                outcome = outcome.and(Err(error));
                continue;
            }
            // The call has its own patience, which begins later.
            let patience = nanoseconds(team.patience()) * 2;
            orders.push((team, Order { word: team.done(*rank), value: *number, patience, host: team.host(*rank) }));
        }
        let orders: Vec<Order> = orders.into_iter().map(|(_, order)| order).collect();
        orders.into_iter().for_each(|order| self.promise(order));
        // Those of a team that failed are kept until it is waited for.
        self.pending.retain(|pending| pending.team.failure().is_some());
        outcome
    }

    fn lend(&mut self, server: &mut Server, memory: Binding, bytes: usize, stream: StreamId) -> Result<Loan, Error> {
        self.enter(server, stream);
        let patience = self.status.deadline();
        let (loan, order) = self.lane()?.lend(server, memory, bytes, stream, patience)?;
        self.promise(order);
        Ok(loan)
    }

    fn copy(&mut self, server: &mut Server, loan: Loan, rows: Rows, target: Binding) -> Result<(), Error> {
        self.enter(server, target.stream);
        let patience = self.status.deadline();
        let order = self.lane()?.copy(server, loan, rows, target, patience)?;
        self.promise(order);
        Ok(())
    }

    fn forget(&mut self) {
        let failed = |team: &Arc<Team>| team.failure().is_some();
        let (ended, pending): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(|pending| failed(&pending.team));
        self.pending = pending;
        // What these words speak of is done after this.
        let mut words = Vec::new();
        for (devices, team) in self.teams.iter().filter(|(_, team)| failed(team)) {
            words.extend(devices.binary_search(&self.device).map(|rank| team.done(rank)));
            if let Err(error) = team.quiesce() {
                // Then nobody may have the tensors' memory.
                log::error!("after a failure: {error}");
                std::mem::forget(
                    ended.iter().map(|pending| (pending.source.clone(), pending.target.clone())).collect::<Vec<_>>(),
                );
            }
        }
        if let Some(lane) = self.lane.take_if(|lane| lane.has_failed()) {
            words.push(lane.word());
            if let Err(error) = lane.end() {
                log::error!("after a failure: {error}");
            }
        }
        self.promised.retain(|(order, _)| !words.contains(&order.word));
        self.teams.retain(|_, team| !failed(team));
    }
}
