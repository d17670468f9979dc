//! Device-to-host copies under way.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use cubecl::bytes::Bytes;
use cubecl::future::{DynFut, block_on};
use cubecl::server::ServerError;

use bonfire_core::Error;

type Copying = DynFut<Result<Vec<Bytes>, ServerError>>;

/// The data of the buffers, or why there is none.
type Outcome = Result<Vec<Bytes>, String>;

/// A device-to-host copy of some buffers that was started.
pub(super) struct Reading(Receiver<Outcome>);

impl Reading {
    /// Waits for the device; gives the buffers in their order.
    pub fn wait(self, operation: &str) -> Result<Vec<Bytes>, Error> {
        let outcome = self.0.recv().unwrap_or_else(|_| Err("the thread that reads from the device is gone".into()));
        outcome.map_err(|reason| Error::io(operation, io::Error::other(reason)))
    }

    /// Waits for the device to deliver a single buffer.
    pub fn wait_one(self, operation: &str) -> Result<Bytes, Error> {
        self.wait(operation)?.pop().ok_or_else(|| Error::broken(operation, "the device gave no data"))
    }
}

/// Ends copies as soon as the device has made them, on a thread of its own. With cubecl-wgpu 0.10 they must neither lie
/// around nor be dropped: a thread of it spins until the copy's future is done, and a staging buffer whose future is
/// dropped before goes back to its pool mapped, where its next user panics.
#[derive(Default)]
pub(super) struct Reader(Option<Sender<(Copying, SyncSender<Outcome>)>>);

impl Reader {
    pub fn start(&mut self, copying: Copying) -> Result<Reading, Error> {
        let sender = match &self.0 {
            Some(sender) => sender,
            None => self.0.insert(spawn()?),
        };
        let (outcome, reading) = sync_channel(1);
        sender.send((copying, outcome)).map_err(|e| Error::broken("reading from a device", e))?;
        Ok(Reading(reading))
    }
}

fn spawn() -> Result<Sender<(Copying, SyncSender<Outcome>)>, Error> {
    let (sender, receiver) = channel::<(Copying, SyncSender<Outcome>)>();
    let serve = move || {
        for (copying, outcome) in receiver {
            // Nobody waits for it any more where its call has failed.
            let _ = outcome.send(finish(copying));
        }
    };
    let thread = std::thread::Builder::new().name("bonfire-reader".into()).spawn(serve);
    thread.map(|_| sender).map_err(|e| Error::io("starting the thread that reads from a device", e))
}

fn finish(copying: Copying) -> Outcome {
    match catch_unwind(AssertUnwindSafe(|| block_on(copying))) {
        Ok(Ok(buffers)) => Ok(buffers),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(PANICKED.into()),
    }
}

const PANICKED: &str = "the runtime panicked; see its message above";

/// Calls the inner runtime. On a device's thread a panic would get lost, and its failure with it.
pub(super) fn caught<T>(operation: &str, call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(Error::io(operation, io::Error::other(PANICKED))))
}
