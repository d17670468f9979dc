//! Device-to-host copies in flight.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use cubecl::bytes::Bytes;
use cubecl::future::{DynFut, block_on};
use cubecl::server::ServerError;

use bonfire_core::Error;

type ReadFuture = DynFut<Result<Vec<Bytes>, ServerError>>;

/// The data of the buffers, or the reason for which there is none.
type Outcome = Result<Vec<Bytes>, String>;

/// A started device-to-host copy of some buffers.
pub(super) struct PendingRead(Receiver<Outcome>);

impl PendingRead {
    /// Waits for the device. Returns the buffers in the order in which they were requested.
    pub fn wait(self, operation: &str) -> Result<Vec<Bytes>, Error> {
        let outcome = self.0.recv().unwrap_or_else(|_| Err("the thread that reads from the device is gone".into()));
        outcome.map_err(|reason| Error::io(operation, io::Error::other(reason)))
    }

    /// As [`wait`](Self::wait), for a single buffer.
    pub fn wait_one(self, operation: &str) -> Result<Bytes, Error> {
        self.wait(operation)?.pop().ok_or_else(|| Error::broken(operation, "the device returned no data"))
    }
}

/// Drives device-to-host copies to completion on a thread of its own. With cubecl-wgpu 0.10 their futures must neither
/// be left pending nor be dropped: one of its threads spins until the future is done, and the staging buffer of a
/// dropped future returns to its pool still mapped, where its next user panics.
#[derive(Default)]
pub(super) struct Reader(Option<Sender<(ReadFuture, SyncSender<Outcome>)>>);

impl Reader {
    pub fn start(&mut self, copying: ReadFuture) -> Result<PendingRead, Error> {
        let sender = match &self.0 {
            Some(sender) => sender,
            None => self.0.insert(spawn()?),
        };
        let (outcome, reading) = sync_channel(1);
        sender.send((copying, outcome)).map_err(|e| Error::broken("reading from a device", e))?;
        Ok(PendingRead(reading))
    }
}

fn spawn() -> Result<Sender<(ReadFuture, SyncSender<Outcome>)>, Error> {
    let (sender, receiver) = channel::<(ReadFuture, SyncSender<Outcome>)>();
    let serve = move || {
        for (copying, outcome) in receiver {
            // The receiver is gone if its call has failed.
            let _ = outcome.send(finish(copying));
        }
    };
    let thread = std::thread::Builder::new().name("bonfire-reader".into()).spawn(serve);
    thread.map(|_| sender).map_err(|e| Error::io("starting the thread that reads from a device", e))
}

fn finish(copying: ReadFuture) -> Outcome {
    match catch_unwind(AssertUnwindSafe(|| block_on(copying))) {
        Ok(Ok(buffers)) => Ok(buffers),
        Ok(Err(error)) => Err(error.to_string()),
        Err(payload) => Err(panicked(&*payload)),
    }
}

/// What cubecl's `IoError::BufferTooBig` prints. Its runtimes panic with this error where they cannot allocate.
const NO_MEMORY: &str = "can't allocate buffer";

/// Calls the inner runtime and turns a panic into an error: on a device's thread a panic would be lost.
///
/// # Errors
/// Those of `call`; [`Error::OutOfMemory`] or [`Error::Io`] if it panics.
pub(super) fn catch_panic<T>(operation: &str, call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        let reason = panicked(&*payload);
        match reason.contains(NO_MEMORY) {
            true => {
                let (operation, device) = (operation.into(), "the device".into());
                Err(Error::OutOfMemory { operation, device, reason })
            }
            false => Err(Error::io(operation, io::Error::other(reason))),
        }
    })
}

/// The first line of a panic's message, which `log` and standard error have in full.
fn panicked(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref().copied());
    let first = text.and_then(|text| text.lines().next()).unwrap_or("see its message above");
    format!("the runtime panicked: {first}")
}

#[cfg(test)]
mod tests {
    use cubecl::server::IoError;
    use cubecl_common::backtrace::BackTrace;

    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        let refused = || Err::<u8, _>(IoError::BufferTooBig { size: 7 << 30, backtrace: BackTrace::capture() });
        let error = catch_panic("all_reduce", || Ok(refused().unwrap())).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::OutOfMemory { .. }) && text.starts_with("all_reduce: the device is out"),
            "{text}"
        );
        assert!(text.contains("7516192768") && text.lines().count() == 1, "{text}");
        let error = catch_panic("read", || -> Result<(), Error> { panic!("no such memory") }).unwrap_err();
        assert_eq!(error.to_string(), "read: the runtime panicked: no such memory");
    }
}
