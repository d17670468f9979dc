//! Operations of a group without host memory: the ranks agree over the group, the runtime moves the data.

use std::sync::Arc;
use std::sync::mpsc::channel;

use cubecl::device_handle::DeviceHandle;

use crate::error::Error;
use crate::group::{Group, Work};
use crate::server::DeviceTransport;
use crate::server::communication::Span;
use crate::server::compute::CollectiveServer;
use crate::server::engine::{Done, Errand, Launch, Route};
use crate::server::reading::caught;

/// An operation under way. It is launched only once all ranks have called it, so that no device waits for a rank that does
/// not come, and whoever does is told by the group.
pub(super) fn start<R: DeviceTransport>(
    device: &DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    route: Arc<dyn Route<R>>,
    errand: Errand,
) -> Result<Work<Option<Done>>, Error> {
    let call = errand.call;
    let (sender, launch) = channel();
    device.submit(move |server| {
        // The receiver is gone only if the group's thread is.
        let _ = sender.send(server.prepare(&*route, errand));
    });
    device.flush_queue();
    let gone = move |_| Error::io(call.operation.to_string(), "the device's server is gone");
    group.start_agreed(call, move || launch.recv().map_err(gone)?, |launch: Launch, deadline| launch(deadline))
}

impl<R: DeviceTransport> CollectiveServer<R> {
    fn prepare(&mut self, route: &dyn Route<R>, errand: Errand) -> Result<Launch, Error> {
        self.forget_failed();
        if let Some(error) = self.status.failure() {
            return Err(error);
        }
        let used: Vec<_> = errand.sources.iter().chain(&errand.targets).map(|(memory, _)| Span::of(memory)).collect();
        // Neither way's results are waited for here.
        for direct in [false, true] {
            self.apart(errand.call.operation, direct, &used)?;
        }
        let (operation, stream) = (errand.call.operation.to_string(), errand.stream);
        caught(&operation, || route.prepare(self.at(stream), errand))
    }

    /// Whatever enters a stream from now on comes after what a group has done.
    pub(super) fn follow(&mut self, done: Done) {
        if let Some(engine) = &mut self.engine {
            engine.follow(done);
        }
    }
}
