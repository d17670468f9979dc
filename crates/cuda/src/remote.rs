//! NCCL as a team's backend: one rank's communicator, which reaches GPUs of other processes and hosts.

use super::address::Address;
use super::driver::Stream;
use bonfire_core::error::Site;
use bonfire_core::internal::Peers;
use bonfire_core::{Deadline, Error};

/// The memory of a call.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "communicators do not exist"))]
pub(crate) struct Memory {
    pub source: Address,
    pub target: Address,
    /// Of a message.
    pub peers: Peers,
    /// Elements that a message brings. Its call counts what is sent, if anything is.
    pub incoming: usize,
}

#[cfg(feature = "nccl")]
pub(crate) use self::nccl::{available, connect, supports};
#[cfg(not(feature = "nccl"))]
pub(crate) use self::none::{available, connect, supports};

/// A communicator of all ranks of a group.
pub(crate) trait Remote: Send + Sync {
    /// Enqueues a call on the stream. The first calls also wait while NCCL connects the ranks. That wait does not look
    /// at the group's failures: if a peer dies in these moments, this is noticed at the deadline at the latest.
    ///
    /// # Safety
    /// The memory must have the sizes that the call says, and stay until the stream is past the call, or past its end
    /// after an abort. The stream must be of the communicator's GPU.
    unsafe fn submit(&self, site: Site, memory: Memory, stream: &Stream, deadline: &Deadline) -> Result<(), Error>;

    fn ranks(&self) -> usize;

    /// Whether the communicator has ended: later work on a stream then no longer implies that its calls are done.
    fn has_ended(&self) -> bool;

    /// Returns an error that NCCL found in the background, unless another thread uses the communicator.
    fn poll(&self) -> Result<(), Error>;

    /// Aborts the communicator, unless another thread uses it.
    fn abort(&self);
}

#[cfg(feature = "nccl")]
mod nccl {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use super::{Memory, Remote};
    use crate::driver::{Gpu, Stream};
    use crate::nccl::{self, Action, Communicator, Scalar, Work};
    use bonfire_core::error::Site;
    use bonfire_core::internal::lock;
    use bonfire_core::{Call, Deadline, Error, Group, Operation};

    struct Nccl {
        communicator: Mutex<Communicator>,
        ended: Arc<AtomicBool>,
        ranks: usize,
    }

    /// Whether the library is found, and the GPU can be identified to it.
    pub fn available(gpu: usize) -> Result<(), Error> {
        nccl::Gpu::of(gpu)?;
        nccl::version().map(drop)
    }

    /// Whether NCCL executes this call with the results that we promise.
    pub fn supports(call: &Call) -> bool {
        !call.is_sized() && action(call).is_some() && call.reduction.is_none_or(|op| nccl::reduces(call.dtype, op))
    }

    fn action_on(call: &Call, Memory { peers, incoming, .. }: Memory) -> Option<Action> {
        match (peers.to, peers.from) {
            (Some(to), Some(from)) => Some(Action::Exchange { to, from, incoming }),
            (Some(to), None) => Some(Action::Send(to)),
            (None, Some(from)) => Some(Action::Recv(from)),
            (None, None) => action(call),
        }
    }

    fn action(call: &Call) -> Option<Action> {
        Some(match (call.operation, call.reduction, call.root) {
            (Operation::AllReduce, Some(op), _) => Action::AllReduce(op),
            (Operation::ReduceScatter, Some(op), _) => Action::ReduceScatter(op),
            (Operation::AllGather, ..) => Action::AllGather,
            (Operation::AllToAll, ..) => Action::AllToAll,
            (Operation::Broadcast, _, Some(root)) => Action::Broadcast(root),
            (Operation::Reduce, Some(op), Some(root)) => Action::Reduce(op, root),
            (Operation::Gather, _, Some(root)) => Action::Gather(root),
            (Operation::Scatter, _, Some(root)) => Action::Scatter(root),
            _ => return None,
        })
    }

    /// Connects a communicator of all ranks of the group, of which this one uses `gpu`. All ranks call it.
    pub fn connect(group: &Group, gpu: &Gpu, deadline: &Deadline) -> Result<Box<dyn Remote>, Error> {
        let _entered = gpu.enter()?;
        let communicator = Communicator::connect(group, nccl::Gpu::of(gpu.ordinal)?, deadline)?;
        let (ended, ranks) = (communicator.ended.clone(), communicator.world_size());
        Ok(Box::new(Nccl { communicator: Mutex::new(communicator), ended, ranks }))
    }

    impl Remote for Nccl {
        unsafe fn submit(&self, site: Site, memory: Memory, stream: &Stream, deadline: &Deadline) -> Result<(), Error> {
            let call = site.call;
            let action = action_on(&call, memory);
            let action =
                action.ok_or_else(|| Error::argument(call.operation, format!("NCCL does not support {call}")))?;
            let (scalar, input, output) = (Scalar::Of(call.dtype), memory.source.get(), memory.target.get());
            let work = Work { action, scalar, count: call.count, sizes: None, input, output };
            let mut communicator = lock(&self.communicator);
            stream.with_raw(|raw| {
                // SAFETY: guaranteed by the caller.
                unsafe { communicator.submit(&work, raw) }?.settle(site, deadline)
            })
        }

        fn ranks(&self) -> usize {
            self.ranks
        }

        fn has_ended(&self) -> bool {
            self.ended.load(Ordering::Acquire)
        }

        fn poll(&self) -> Result<(), Error> {
            self.communicator.try_lock().map_or(Ok(()), |mut communicator| communicator.poll())
        }

        fn abort(&self) {
            if let Ok(mut communicator) = self.communicator.try_lock() {
                communicator.abort();
            }
        }
    }
}

/// Without the feature `nccl`, communicators do not exist.
#[cfg(not(feature = "nccl"))]
mod none {
    use super::Remote;
    use crate::driver::Gpu;
    use bonfire_core::{Call, Deadline, Error, Group};

    fn absent() -> Error {
        let reason = "this program was built without it: add the feature `nccl`";
        Error::Library { library: "NCCL".into(), reason: reason.into() }
    }

    pub fn available(_gpu: usize) -> Result<(), Error> {
        Err(absent())
    }

    pub fn supports(_call: &Call) -> bool {
        false
    }

    pub fn connect(_group: &Group, _gpu: &Gpu, _deadline: &Deadline) -> Result<Box<dyn Remote>, Error> {
        Err(absent())
    }
}
