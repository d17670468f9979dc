//! Messages between the devices of two ranks, without host memory.
//!
//! The two ranks exchange their calls over the group, as all ranks of a collective do.
//! Between devices of one process, the sender first copies its tensor on its device and lends the copy, and the message
//! of the group carries a ticket for it. The receiver's device copies from there. Neither rank waits for a device: a
//! copy is ordered by events, as those of cubecl's clients are. Otherwise the route carries the message.

use std::sync::Arc;

use cubecl::device_handle::DeviceHandle;
use cubecl::server::Binding;

use super::route::{Direction, Messages, Route};
use super::{Completion, WaitFn, run_on_device};
use crate::server::DeviceTransport;
use crate::server::compute::CollectiveServer;
use crate::server::copy::TensorLayout;
use crate::server::engine::DeviceOperation;
use crate::server::mailbox::SentTensors;
use crate::server::memory::Span;
use bonfire_core::error::Site;
use bonfire_core::internal::{AgreedOperations, Ranges};
use bonfire_core::{Deadline, Error, Group};

/// Starts the message. The returned function waits until the ranks have agreed on it, and if the route carries it,
/// until this rank's device is done. An error ends the group.
pub(super) fn start<R: DeviceTransport>(
    device: DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    route: Arc<dyn Route<R>>,
    job: DeviceOperation,
) -> Result<WaitFn, Error> {
    let direction = |peer: Option<usize>, memory: &[(Binding, Ranges)]| {
        let bytes: usize = memory.iter().map(|(_, ranges)| ranges.bytes()).sum();
        let mut call = job.call;
        call.count = bytes / call.dtype.size();
        peer.map(|peer| (peer, call))
    };
    let directions = (direction(job.peers.to, &job.sources), direction(job.peers.from, &job.targets));
    match route.messages() {
        Some(Messages::Lent(sent)) => lend(device, group, sent, directions, job),
        Some(Messages::Carried) => route.carry(device, group, directions, job),
        None => Err(Error::broken(job.call.operation.to_string(), "the route carries no messages")),
    }
}

fn lend<R: DeviceTransport>(
    device: DeviceHandle<CollectiveServer<R>>,
    group: &Group,
    sent: Arc<SentTensors>,
    (outgoing, incoming): (Direction, Direction),
    job: DeviceOperation,
) -> Result<WaitFn, Error> {
    let DeviceOperation { call, mut sources, mut targets, stream, .. } = job;
    // An empty tensor has no memory to lend.
    let used = |(memory, ranges): (Binding, Ranges)| (ranges.bytes() > 0).then_some((memory, ranges.bytes()));
    let (source, target) = (sources.pop().and_then(used), targets.pop().and_then(used));
    let lending = source.zip(outgoing).map(|((memory, bytes), (to, _))| {
        let receiver = sent.device(to);
        run_on_device(&device, call, move |server| {
            // Writes of all-reduces between devices may still be pending on either path.
            for direct in [false, true] {
                server.check_no_writes(call.operation, direct, &[Span::of(&memory)])?;
            }
            server.payload(memory, bytes, true, stream, receiver)
        })
    });
    let lender = sent.clone();
    let prepare = move || Ok(((), lending.map_or(Ok(0), |payload| Ok(lender.lend(payload()?)))?));
    let run = move |(), ticket, _: &Site, _: &Deadline| {
        let Some((target, bytes)) = target else { return Ok(()) };
        let missing = || Error::broken(call.operation.to_string(), "the sender has lent no memory for its message");
        let payload = sent.take(ticket).ok_or_else(missing)?;
        device.submit(move |server| {
            let delivered = server.deliver("recv", payload, &TensorLayout::packed(bytes), target);
            server.status.record(delivered);
        });
        device.flush_queue();
        Ok(())
    };
    let agreed = group.start_agreed_message(outgoing, incoming, prepare, run)?;
    Ok(Box::new(move |_| agreed.wait(|(), _| Ok(())).map(|()| Completion::ended())))
}
