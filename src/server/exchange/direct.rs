//! Device operations without host memory: the ranks agree over the group, the runtime moves the data.
//!
//! # Why the ranks agree first
//! A mismatch, a deadline, and a peer that died or left are then the group's typed errors, which name the ranks. NCCL
//! alone would hang. The price is a small operation of the group per call, an all-gather of 32 bytes from each rank, on
//! the group's progress thread; where ranks are in several processes, a second one orders the launches of all groups.
//! The memory and its stream order are recorded before, on the device's thread.

use std::sync::Arc;
use std::time::Duration;

use cubecl::device_handle::DeviceHandle;

use super::{Completion, Until, WaitFn, run_on_device};
use crate::server::DeviceTransport;
use crate::server::compute::CollectiveServer;
use crate::server::download::catch_panic;
use crate::server::engine::{DeviceOperation, End, InFlight, Launch, Route};
use crate::server::memory::Span;
use bonfire_core::error::Site;
use bonfire_core::internal::{Agreed, AgreedOperations, Started};
use bonfire_core::{Deadline, Error, Group};

/// Starts the operation. It is launched only after all ranks have called it: no device waits for a missing rank, which
/// the group reports. The returned function waits for this rank's device. An error ends the group.
pub(super) fn start<R: DeviceTransport>(
    device: DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    route: Arc<dyn Route<R>>,
    job: DeviceOperation,
) -> Result<WaitFn, Error> {
    let call = job.call;
    let launch = prepared(&device, group, route, job);
    let propose = |launch: &mut Launch| launch.propose.take().map(|propose| propose());
    let run = |launch: Launch, time, site: &Site, deadline: &Deadline| (launch.run)(time, site, deadline);
    let agreed = group.start_agreed(call, launch, propose, run)?;
    Ok(waiting(device, agreed))
}

/// Returns a function that waits for an operation on the device.
pub(super) fn waiting<R: DeviceTransport>(
    device: DeviceHandle<CollectiveServer<R>>,
    agreed: Agreed<InFlight>,
) -> WaitFn {
    Box::new(move |until| {
        let started = agreed.started()?;
        let wait = |started: Started<InFlight>| started.finish(|flight, group_failure| (flight.wait)(group_failure));
        if until == Until::Ended {
            return wait(started).map(|()| Completion::ended());
        }
        match (started.get().end)() {
            Ok(end) => {
                device.submit(move |server| server.follow(end));
                device.flush_queue();
                Ok(Completion { wait: Some(Box::new(move || wait(started))) })
            }
            // It has failed the team, and the wait finds out why.
            Err(_) => wait(started).map(|()| Completion::ended()),
        }
    })
}

/// Prepares the operation on the device's thread. Returns a function that waits for that.
pub(super) fn prepared<R: DeviceTransport>(
    device: &DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    route: Arc<dyn Route<R>>,
    job: DeviceOperation,
) -> impl FnOnce() -> Result<Launch, Error> + Send + use<R> {
    let (call, limit) = (job.call, group.deadline());
    run_on_device(device, call, move |server| {
        let prepared = server.prepare(&*route, job, limit);
        // Dropped while another reference exists: the last drop would wait for other ranks on this thread.
        drop(route);
        prepared
    })
}

impl<R: DeviceTransport> CollectiveServer<R> {
    fn follow(&mut self, end: End) {
        if let Some(engine) = &mut self.engine {
            engine.follow(end);
        }
    }

    fn prepare(&mut self, route: &dyn Route<R>, job: DeviceOperation, limit: Duration) -> Result<Launch, Error> {
        self.drop_failed_calls();
        if let Some(error) = self.status.failure() {
            return Err(error);
        }
        let used: Vec<_> = job.sources.iter().chain(&job.targets).map(|(memory, _)| Span::of(memory)).collect();
        // Checks for writes of all-reduces between devices that are still pending on either path.
        for direct in [false, true] {
            self.check_no_writes(job.call.operation, direct, &used)?;
        }
        let (operation, stream) = (job.call.operation.to_string(), job.stream);
        catch_panic(&operation, || route.prepare(self.inner_on(stream), job, limit))
    }
}
