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
mod pause;
mod reach;
mod remote;
mod route;
mod side;
mod team;

use std::collections::HashMap;
use std::sync::Arc;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;

use self::choice::{ROUTE, way};
use self::control::{Order, nanoseconds};
use self::lane::Lane;
use self::order::Server;
use self::side::Side;
use self::team::Team;
use super::DeviceTransport;
use super::engine::{Engine, Job, Loan, Route, Rows};
use super::memory::Span;
use super::pending::UNFINISHED;
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
    teams: HashMap<Vec<DeviceId>, Arc<Side>>,
    /// What `sync` has not ordered yet.
    pending: Vec<Pending>,
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
    side: Arc<Side>,
    number: u64,
    /// What it reads and what it writes.
    spans: [Span; 2],
    kept: Vec<Binding>,
}

impl Pending {
    /// Whether this call uses memory that the other one writes, or writes what that uses.
    fn meets(&self, [source, target]: &[Span; 2]) -> bool {
        let [read, written] = &self.spans;
        written.overlaps(source) || written.overlaps(target) || read.overlaps(target)
    }
}

impl CudaEngine {
    fn side(&mut self, devices: Vec<DeviceId>, rank: usize) -> Result<Arc<Side>, Error> {
        if let Some(side) = self.teams.get(&devices) {
            // One that failed stays until the failure is cleared: `forget` has to wait for it.
            return side.team.failure().map_or_else(|| Ok(side.clone()), Err);
        }
        let team = Team::of(devices.clone())?;
        team.watch(rank);
        let side = Arc::new(Side::of(team, rank));
        self.teams.insert(devices, side.clone());
        // If the one before has failed since the call was looked at, this call belongs to that one.
        self.status.failure().map_or(Ok(side), Err)
    }

    fn lane(&mut self) -> Result<&mut Lane, Error> {
        match &mut self.lane {
            Some(lane) => Ok(lane),
            lane => Ok(lane.insert(Lane::new(self.device)?)),
        }
    }

    fn submit(&mut self, server: &mut Server, side: &Arc<Side>, job: Job) -> Result<(), Error> {
        let (call, team) = (job.call, &side.team);
        let spans = [&job.sources, &job.targets].map(|memory| Span::of(&memory[0].0));
        let mut others = self.pending.iter().filter(|pending| !Arc::ptr_eq(&pending.side, side));
        if others.any(|pending| pending.meets(&spans)) {
            // Their streams do not wait for each other.
            return Err(Error::argument("all_reduce", UNFINISHED));
        }
        let way = way(*ROUTE, &call, team.topology(), false);
        let way = way.ok_or_else(|| Error::argument(call.operation, format!("no kernel does {call}")))?;
        let patience = team.patience();
        let ready = side.prepare(server, job, way, patience)?;
        let number = team.number(side.seat, call)?;
        let (site, kept) = (Site::new(call, number - 1), ready.layout.kept.clone());
        team.submit(side.seat, site, Deadline::after(patience), ready)?;
        self.pending.push(Pending { side: side.clone(), number, spans, kept });
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

    fn all_reduce(&mut self, server: &mut Server, devices: Vec<DeviceId>, job: Job) -> Result<(), Error> {
        self.enter(server, job.stream);
        let side = self.side(devices, job.rank)?;
        // The others would wait for this call.
        caught("all_reduce", || self.submit(server, &side, job)).inspect_err(|error| side.team.fail(error.clone()))
    }

    fn fail(&mut self, devices: &[DeviceId], error: &Error) {
        team::fail(devices, error);
    }

    fn sync(&mut self) -> Result<(), Error> {
        let deadline = Deadline::after(self.status.deadline());
        let mut orders: Vec<(&Arc<Side>, Order)> = Vec::new();
        let mut outcome = Ok(());
        for Pending { side, number, .. } in self.pending.iter().rev() {
            if orders.iter().any(|(other, _)| Arc::ptr_eq(other, side)) {
                continue;
            }
            let (team, seat) = (&side.team, side.seat);
            // What waits on the GPU for a call must be put there after it. Where one team fails, others may be sound.
            if let Err(error) = team.wait_launched(seat, *number, &deadline) {
                outcome = outcome.and(Err(error));
                continue;
            }
            // The call has its own patience, which begins later.
            let patience = nanoseconds(team.patience()) * 2;
            orders.push((side, Order { word: team.done(seat), value: *number, patience, host: team.host(seat) }));
        }
        let orders: Vec<Order> = orders.into_iter().map(|(_, order)| order).collect();
        orders.into_iter().for_each(|order| self.promise(order));
        // Those of a team that failed are kept until it is waited for.
        self.pending.retain(|pending| pending.side.team.failure().is_some());
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
        let failed = |side: &Arc<Side>| side.team.failure().is_some();
        let (ended, pending): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(|pending| failed(&pending.side));
        self.pending = pending;
        // What these words speak of is done after this.
        let mut words = Vec::new();
        for side in self.teams.values().filter(|side| failed(side)) {
            words.push(side.team.done(side.seat));
            if let Err(error) = side.team.quiesce() {
                // Then nobody may have the tensors' memory.
                log::error!("after a failure: {error}");
                std::mem::forget(ended.iter().map(|pending| pending.kept.clone()).collect::<Vec<_>>());
            }
        }
        if let Some(lane) = self.lane.take_if(|lane| lane.has_failed()) {
            words.push(lane.word());
            if let Err(error) = lane.end() {
                log::error!("after a failure: {error}");
            }
        }
        self.promised.retain(|(order, _)| !words.contains(&order.word));
        self.teams.retain(|_, side| !failed(side));
    }
}
