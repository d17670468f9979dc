//! The connection to one peer: deadlines, turns, and the error that broke it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bonfire_core::internal::{Bell, lock};
use bonfire_core::{Deadline, Error};

/// A connection. One thread at a time uses each direction; the two directions are independent.
pub(super) struct Link {
    peer: usize,
    address: String,
    /// The stream, or the first error. After half a message the stream is unusable: its bytes would be misinterpreted.
    stream: Mutex<Result<Arc<TcpStream>, Error>>,
    sending: Turn,
    receiving: Turn,
}

/// Why a message failed.
pub(super) enum Failure {
    Io(io::Error),
    /// Returned unchanged.
    Known(Error),
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Failure::Io(e)
    }
}

impl Link {
    pub fn new(peer: usize, stream: TcpStream) -> Link {
        let address = stream.peer_addr().map_or_else(|_| "an unknown address".into(), |address| address.to_string());
        let stream = Mutex::new(Ok(Arc::new(stream)));
        Link { peer, address, stream, sending: Turn::default(), receiving: Turn::default() }
    }

    /// Writes a message with `act`.
    pub fn send(
        &self,
        operation: &str,
        deadline: &Deadline,
        act: impl FnOnce(&mut Timed<'_>) -> Result<(), Failure>,
    ) -> Result<(), Error> {
        self.run(&self.sending, operation, deadline, act)
    }

    /// Reads a message with `act`.
    pub fn receive<T>(
        &self,
        operation: &str,
        deadline: &Deadline,
        act: impl FnOnce(&mut Timed<'_>) -> Result<T, Failure>,
    ) -> Result<T, Error> {
        self.run(&self.receiving, operation, deadline, act)
    }

    fn run<T>(
        &self,
        turn: &Turn,
        operation: &str,
        deadline: &Deadline,
        act: impl FnOnce(&mut Timed<'_>) -> Result<T, Failure>,
    ) -> Result<T, Error> {
        let _turn = turn.take(deadline).ok_or_else(|| late(operation, deadline))?;
        let stream = self.sound()?;
        let mut timed = Timed { stream: &stream, deadline, moved: false, late: false };
        act(&mut timed).map_err(|failure| {
            let (moved, late) = (timed.moved, timed.late);
            let error = match failure {
                Failure::Io(e) => self.describe(operation, deadline, &e, (moved, late)),
                Failure::Known(error) => error,
            };
            // A timeout between two messages leaves the connection usable.
            if late && !moved { error } else { self.close(error) }
        })
    }

    /// Returns the stream, or the first error that broke it.
    pub fn sound(&self) -> Result<Arc<TcpStream>, Error> {
        lock(&self.stream).clone()
    }

    /// Closes the connection because of `error`. If it is already closed, returns the first error instead.
    ///
    /// The peer notices at once. Its bytes are refused once this end's threads have released the stream.
    pub fn close(&self, error: Error) -> Error {
        let mut state = lock(&self.stream);
        match std::mem::replace(&mut *state, Err(error.clone())) {
            Ok(stream) => {
                // Wakes this end's threads, which then find the error.
                let _ = stream.shutdown(Shutdown::Both);
                error
            }
            Err(first) => {
                *state = Err(first.clone());
                first
            }
        }
    }

    /// Returns the error of a message with peer, place and remedy. It is `Io` and not `Timeout` or `PeerLost`, because
    /// the texts of those name settings of a group and what a group can do next.
    fn describe(&self, operation: &str, deadline: &Deadline, e: &io::Error, (moved, late): (bool, bool)) -> Error {
        let Link { peer, address, .. } = self;
        let place = if moved { "in the middle of a message" } else { "before a message" };
        let what = match e.kind() {
            _ if late => {
                let elapsed = deadline.elapsed();
                format!(
                    "timed out after {elapsed:.1?} {place}; look at what delays that rank, or allow more time \
                     (TcpTransportBuilder::deadline)"
                )
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                let why = if *peer == 0 {
                    ": it does so to all when one rank fails, and to a rank that another one has or that is outside \
                     its world"
                } else {
                    ""
                };
                format!("it closed the connection {place}; look at that rank's own output{why}")
            }
            _ => format!("{e}, {place}"),
        };
        Error::io(operation, io::Error::new(e.kind(), format!("rank {peer} at {address}: {what}")))
    }
}

/// Returns the error of a thread that did not get its turn in time.
pub(super) fn late(operation: &str, deadline: &Deadline) -> Error {
    let elapsed = deadline.elapsed();
    let text = format!("timed out after {elapsed:.1?}, while another thread of this rank did the same");
    Error::io(operation, io::Error::new(io::ErrorKind::TimedOut, text))
}

/// A stream on which every read and write ends by a deadline, however slowly bytes trickle.
pub(super) struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: &'a Deadline,
    /// Whether any byte was moved.
    moved: bool,
    /// Whether the deadline passed.
    late: bool,
}

impl Timed<'_> {
    /// Returns the time left for the next step.
    fn left(&mut self) -> io::Result<Option<std::time::Duration>> {
        let left = self.deadline.remaining();
        // The system does not accept a timeout of zero.
        if left.is_zero() {
            self.late = true;
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }

    fn count(&mut self, result: io::Result<usize>) -> io::Result<usize> {
        match &result {
            Ok(count) => self.moved |= *count > 0,
            Err(e) => self.late |= e.kind() == io::ErrorKind::WouldBlock,
        }
        result
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.left()?;
        self.stream.set_read_timeout(left)?;
        let result = self.stream.read(bytes);
        self.count(result)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.left()?;
        self.stream.set_write_timeout(left)?;
        let result = self.stream.write(bytes);
        self.count(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A lock that one thread holds at a time. Waiting for it ends at a deadline, unlike for a mutex.
#[derive(Default)]
pub(super) struct Turn {
    taken: AtomicBool,
    bell: Bell,
}

impl Turn {
    pub fn take(&self, deadline: &Deadline) -> Option<Taken<'_>> {
        // Acquire pairs with the release store in `drop`: the holder sees all that the previous holder did.
        let free = || !self.taken.swap(true, Ordering::Acquire);
        (free() || self.bell.sleep(Instant::now() + deadline.remaining(), free)).then_some(Taken(self))
    }
}

pub(super) struct Taken<'a>(&'a Turn);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
        self.0.bell.ring();
    }
}
