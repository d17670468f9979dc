//! The routes of groups on CUDA, for operations on cubecl's memory.

use std::sync::Arc;
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::device_handle::DeviceHandle;

use super::runtime::{Cubecl, device, id, operation};
use crate::server::compute::CollectiveServer;
use crate::server::download::catch_panic;
use crate::server::engine::DeviceOperation;
use crate::server::exchange::{Completion, Direction, Messages, Route, Until, WaitFn, run_on_device};
use crate::server::mailbox::SentTensors;
use crate::server::memory::Span;
use bonfire_core::internal::{AgreedOperations, Attachment};
use bonfire_core::{Call, Error, Group};
use bonfire_cuda::{End, Launch, RankRoute, Shared, Transfer};

type Device = DeviceHandle<CollectiveServer<CudaRuntime>>;

/// What this rank keeps with a group.
struct Kept {
    agreed: RankRoute<Cubecl>,
    route: Option<Arc<GroupRoute>>,
}

impl Attachment for Kept {
    fn part(&self) {
        self.agreed.part();
    }
}

struct GroupRoute {
    route: Arc<bonfire_cuda::Route<Cubecl>>,
    /// Messages between the ranks, if all are of one process.
    sent: Option<Arc<SentTensors>>,
}

/// The messages that the ranks of a group have lent each other.
static SENT: Shared<SentTensors> = Shared::new();

/// Returns this rank's route in the group for its device, if there is one.
pub(super) fn of(group: &Group, device: DeviceId) -> Result<Option<Arc<dyn Route<CudaRuntime>>>, Error> {
    let kept = group.keep(|| {
        let agreed = RankRoute::agree(group, id(device))?;
        let route = agreed.route().map(|route| GroupRoute::of(route.clone())).transpose()?;
        Ok(Kept { agreed, route })
    })?;
    kept.agreed.check_device(group.rank(), id(device))?;
    Ok(kept.route.clone().map(|route| route as Arc<dyn Route<CudaRuntime>>))
}

/// Returns this rank's route in the group, if the ranks have agreed on one.
pub(super) fn agreed(group: &Group) -> Option<Arc<dyn Route<CudaRuntime>>> {
    let kept = group.kept::<Kept>()?;
    kept.route.clone().map(|route| route as Arc<dyn Route<CudaRuntime>>)
}

impl GroupRoute {
    fn of(route: Arc<bonfire_cuda::Route<Cubecl>>) -> Result<Arc<GroupRoute>, Error> {
        let sent = route.in_process().map(|(group, devices)| {
            SENT.of(group, || Ok(SentTensors::of(devices.iter().map(|id| device(*id)).collect())))
        });
        let sent = sent.transpose()?;
        Ok(Arc::new(GroupRoute { route, sent }))
    }
}

impl Route<CudaRuntime> for GroupRoute {
    fn supports(&self, call: &Call) -> bool {
        self.route.supports(call)
    }

    fn messages(&self) -> Option<Messages> {
        Some(match (self.route.messages()?, &self.sent) {
            (bonfire_cuda::Messages::Lent, Some(sent)) => Messages::Lent(sent.clone()),
            _ => Messages::Carried,
        })
    }

    fn start(self: Arc<Self>, device: Device, group: &Group, job: DeviceOperation) -> Result<WaitFn, Error> {
        let (call, launch) = (job.call, self.prepared(&device, group, job));
        Ok(waiting(device, bonfire_cuda::start(group, call, launch)?))
    }

    fn carry(
        self: Arc<Self>,
        device: Device,
        group: &Group,
        (outgoing, incoming): (Direction, Direction),
        job: DeviceOperation,
    ) -> Result<WaitFn, Error> {
        let launch = self.prepared(&device, group, job);
        Ok(waiting(device, bonfire_cuda::start_message(group, outgoing, incoming, launch)?))
    }
}

impl GroupRoute {
    /// Prepares the operation on the device's thread. Returns a function that waits for that.
    fn prepared(
        self: Arc<Self>,
        device: &Device,
        group: &Group,
        job: DeviceOperation,
    ) -> impl FnOnce() -> Result<Launch, Error> + Send + use<> {
        let (call, limit) = (job.call, group.deadline());
        run_on_device(device, call, move |server| {
            let prepared = server.prepare(&self.route, job, limit);
            // Dropped while another reference exists: the last drop would wait for other ranks on this thread.
            drop(self);
            prepared
        })
    }
}

/// Returns a function that waits for an operation on the device.
fn waiting(device: Device, transfer: Transfer) -> WaitFn {
    Box::new(move |until| {
        let launched = transfer.launched()?;
        if until == Until::Ended {
            return launched.wait().map(|()| Completion::ended());
        }
        match launched.end() {
            Ok(end) => {
                device.submit(move |server| server.follow(end));
                device.flush_queue();
                Ok(Completion::of(move || launched.wait()))
            }
            // It has failed the team, and the wait finds out why.
            Err(_) => launched.wait().map(|()| Completion::ended()),
        }
    })
}

impl CollectiveServer<CudaRuntime> {
    fn follow(&mut self, end: End) {
        if let Some(engine) = &mut self.engine {
            engine.follow(end);
        }
    }

    fn prepare(
        &mut self,
        route: &bonfire_cuda::Route<Cubecl>,
        job: DeviceOperation,
        limit: Duration,
    ) -> Result<Launch, Error> {
        self.drop_failed_calls();
        if let Some(error) = self.status.reported() {
            return Err(error);
        }
        let used: Vec<_> = job.sources.iter().chain(&job.targets).map(|(memory, _)| Span::of(memory)).collect();
        // Checks for writes of all-reduces between devices that are still pending on either path.
        for direct in [false, true] {
            self.check_no_writes(job.call.operation, direct, &used)?;
        }
        let (name, stream) = (job.call.operation.to_string(), job.stream);
        catch_panic(&name, || route.prepare(self.inner_on(stream), operation(job), limit))
    }
}
