//! Operations of a group without host memory: the ranks agree over the group, the runtime moves the data.

use std::sync::Arc;
use std::time::Duration;

use cubecl::device_handle::DeviceHandle;

use super::{Waiting, ask};
use crate::server::DeviceTransport;
use crate::server::compute::CollectiveServer;
use crate::server::engine::{Job, Launch, Route};
use crate::server::memory::Span;
use crate::server::reading::caught;
use bonfire_core::error::Site;
use bonfire_core::internal::Agreement;
use bonfire_core::{Deadline, Error, Group};

/// It is launched only once all ranks have called it, so that no device waits for a rank that does not come, and whoever
/// does is told by the group. Waits then until this rank's device is done with it; an error ends the group.
pub(super) fn start<R: DeviceTransport>(
    device: &DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    route: Arc<dyn Route<R>>,
    job: Job,
) -> Result<Waiting, Error> {
    let (call, limit) = (job.call, group.deadline());
    let launch = ask(device, call, move |server| {
        let prepared = server.prepare(&*route, job, limit);
        // Not the last one of it, which would wait for other ranks here.
        drop(route);
        prepared
    });
    let run = |launch: Launch, site: &Site, deadline: &Deadline| launch(site, deadline);
    let agreed = group.start_agreed(call, launch, run)?;
    Ok(Box::new(move || agreed.wait(|flight, trouble| flight(trouble))))
}

impl<R: DeviceTransport> CollectiveServer<R> {
    fn prepare(&mut self, route: &dyn Route<R>, job: Job, limit: Duration) -> Result<Launch, Error> {
        self.forget_failed();
        if let Some(error) = self.status.failure() {
            return Err(error);
        }
        let used: Vec<_> = job.sources.iter().chain(&job.targets).map(|(memory, _)| Span::of(memory)).collect();
        // What an all-reduce between devices still writes to, by either way.
        for direct in [false, true] {
            self.apart(job.call.operation, direct, &used)?;
        }
        let (operation, stream) = (job.call.operation.to_string(), job.stream);
        caught(&operation, || route.prepare(self.at(stream), job, limit))
    }
}
