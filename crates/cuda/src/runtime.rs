//! The seam: what collectives on CUDA need of the library that tensors belong to.

use std::any::Any;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::address::Address;
use super::control::Order;
use super::kernel::OrderKernel;
use bonfire_core::internal::{Peers, Ranges};
use bonfire_core::{Call, Error};

/// A library whose devices have servers: each allocates memory on one GPU and enqueues work on streams there. A server
/// and its memory belong to one thread, which also makes the calls here.
///
/// Before it enqueues work on a stream, a server calls [`Engine::enter`](crate::Engine::enter), or else for all its
/// streams after [`Engine::follow`](crate::Engine::follow): later work then waits for collectives.
///
/// # Safety
/// Collectives access what these functions return, from GPUs and after they have returned:
/// * Memory is neither freed nor used for something else while a [`Memory`](Self::Memory) of it lives, and then only by
///   work before which the server has called `enter`: streams may not have been ordered after a collective before.
/// * There are [`bytes`](Self::bytes) bytes at its [`address`](Self::address), which kernels on its GPU can access, and
///   those on GPUs that can access the GPU's current memory pool.
/// * [`launch`](Self::launch) launches the kernel that it is asked for, with this order.
pub unsafe trait Runtime: 'static {
    /// The server of a device, as its thread has it.
    type Server;
    /// The name of one of its streams.
    type Stream: Copy + Ord + Hash + Send + 'static;
    /// A reference to memory of a device, which keeps it.
    type Memory: Clone + Send + Sync + 'static;

    /// What an error says about memory that an all-reduce of [`Engine`](crate::Engine) still uses.
    const UNFINISHED: &'static str;

    /// Returns what all threads know of a device.
    fn status(device: DeviceId) -> Arc<dyn Status>;

    /// Returns the stream that the memory was allocated for.
    fn stream(memory: &Self::Memory) -> Self::Stream;

    /// Returns the size of the memory in bytes.
    fn bytes(memory: &Self::Memory) -> usize;

    /// Allocates memory for a stream, where no other code knows it. It may have no bytes.
    fn allocate(server: &mut Self::Server, bytes: usize, stream: Self::Stream) -> Self::Memory;

    /// Returns the address of the memory for work on this stream.
    ///
    /// # Errors
    /// If the server cannot find it.
    fn address(server: &mut Self::Server, memory: &Self::Memory, stream: Self::Stream) -> Result<Address, Error>;

    /// Launches a kernel of one thread on the stream. It runs after all work so far on that stream and on those that
    /// the tokens were allocated for: just before this call, or earlier if for the same stream. The addresses of the
    /// tokens are its first parameters; one may be given several times.
    fn launch(
        server: &mut Self::Server,
        kernel: OrderKernel,
        tokens: Vec<Self::Memory>,
        order: Order,
        stream: Self::Stream,
    );

    /// Makes calls of a server, and returns the error that it reports in another way, such as by a panic.
    ///
    /// # Errors
    /// Those of `call`, and what the server reports, as an error of `operation`.
    fn guard<T>(operation: &str, call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let _ = operation;
        call()
    }
}

/// What all threads of the process know of a device.
pub trait Status: Send + Sync {
    /// Returns how long the device waits for others.
    fn deadline(&self) -> Duration;

    /// Returns the error that has made the device unusable, if there is one and it was not cleared.
    fn failure(&self) -> Option<Error>;

    /// Makes the device unusable: what it has in memory may be wrong. The first error counts.
    fn fail(&self, error: Error);

    /// Adds a check that is made before the device's memory is read and whenever [`failure`](Self::failure) is asked
    /// for, until it returns false. It calls [`fail`](Self::fail) for what GPUs have reported.
    fn add_check(&self, check: Check);
}

/// Fails a device for what GPUs have reported. Returns whether to call it again.
pub type Check = Arc<dyn Fn(Look) -> bool + Send + Sync>;

/// Where a check looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// In host memory, for what kernels report. That is enough before work is enqueued: the driver refuses it after a
    /// fault.
    Reports,
    /// There, and at the driver's state of all streams with work in flight, which shows faults.
    Faults,
}

/// A logical device: several on one GPU have servers of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceId {
    /// The GPU's ordinal in this process.
    pub gpu: u16,
    /// What tells the logical devices of a GPU apart.
    pub number: u16,
}

impl DeviceId {
    pub(crate) fn ordinal(self) -> usize {
        usize::from(self.gpu)
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceId(type={}, index={})", self.number, self.gpu)
    }
}

/// A collective or a message, as one rank calls it on memory of its device.
pub struct DeviceOperation<R: Runtime> {
    /// The call, which is the same on all ranks.
    pub call: Call,
    /// This rank.
    pub rank: usize,
    /// The memory that is read, each with its bytes of the whole.
    pub sources: Vec<(R::Memory, Ranges)>,
    /// The memory that is written.
    pub targets: Vec<(R::Memory, Ranges)>,
    /// The stream on which the sources' content was queued.
    pub stream: R::Stream,
    /// The ranks of a message.
    pub peers: Peers,
}

/// Memory that lives as long as this.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

/// An operation whose memory was found.
pub(crate) struct Located<S> {
    pub call: Call,
    pub rank: usize,
    pub sources: Vec<(Address, Ranges)>,
    pub targets: Vec<(Address, Ranges)>,
    pub stream: S,
    /// The streams of all its memory, sorted.
    pub streams: Vec<S>,
    pub peers: Peers,
    pub kept: Vec<Kept>,
}

impl<R: Runtime> DeviceOperation<R> {
    /// Finds the memory. The server is the rank's.
    pub(crate) fn locate(self, server: &mut R::Server) -> Result<Located<R::Stream>, Error> {
        let DeviceOperation { call, rank, sources, targets, stream, peers } = self;
        let mut find = |chunks: &[(R::Memory, Ranges)]| {
            let found = chunks.iter().map(|(memory, ranges)| {
                let (used, there) = (ranges.bytes(), R::bytes(memory));
                if used > there {
                    let reason = format!("memory of {there} bytes was given for {used} bytes");
                    return Err(Error::argument(call.operation, reason));
                }
                Ok((R::address(server, memory, stream)?, ranges.clone()))
            });
            found.collect::<Result<Vec<_>, Error>>()
        };
        let found = (find(&sources)?, find(&targets)?);
        let memories: Vec<R::Memory> = sources.into_iter().chain(targets).map(|(memory, _)| memory).collect();
        let mut streams: Vec<R::Stream> = memories.iter().map(R::stream).collect();
        streams.sort_unstable();
        streams.dedup();
        let kept = memories.into_iter().map(|memory| Arc::new(memory) as Kept).collect();
        Ok(Located { call, rank, sources: found.0, targets: found.1, stream, streams, peers, kept })
    }
}
