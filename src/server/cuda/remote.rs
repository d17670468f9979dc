//! GPUs of other processes and hosts, which NCCL reaches: one rank's communicator as a team uses it.

use super::driver::Stream;
use bonfire_core::error::Site;
use bonfire_core::{Deadline, Error};

#[cfg(feature = "nccl")]
pub(super) use self::nccl::{available, connect, serves};
#[cfg(not(feature = "nccl"))]
pub(super) use self::none::{available, connect, serves};

/// A communicator of all ranks of a group.
pub(super) trait Remote: Send + Sync {
    /// Puts a call on the stream, behind what is there. In the first calls NCCL waits for the other ranks meanwhile.
    fn submit(&self, site: Site, memory: (u64, u64), stream: &Stream, deadline: &Deadline) -> Result<(), Error>;

    fn ranks(&self) -> usize;

    /// Whether what comes after its calls on a stream may no longer mean that they are done.
    fn has_ended(&self) -> bool;

    /// What NCCL has found in the background, if nobody is at work on it.
    fn poll(&self) -> Result<(), Error>;

    /// Ends it, if nobody is at work on it.
    fn abort(&self);
}

#[cfg(feature = "nccl")]
mod nccl {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use super::Remote;
    use crate::server::cuda::driver::{Gpu, Stream};
    use crate::server::cuda::nccl::{self, Action, Communicator, Scalar, Work};
    use bonfire_core::error::Site;
    use bonfire_core::internal::lock;
    use bonfire_core::{Call, Deadline, Error, Group, Operation};

    struct Nccl {
        communicator: Mutex<Communicator>,
        ended: Arc<AtomicBool>,
        ranks: usize,
    }

    /// Whether the library is found, and the GPU is one that it can be told of.
    pub fn available(gpu: usize) -> Result<(), Error> {
        nccl::Gpu::of(gpu)?;
        nccl::version().map(drop)
    }

    /// Whether NCCL does this call as we promise it.
    pub fn serves(call: &Call) -> bool {
        !call.is_sized() && action(call).is_some() && call.reduction.is_none_or(|op| nccl::reduces(call.dtype, op))
    }

    fn action(call: &Call) -> Option<Action> {
        Some(match (call.operation, call.reduction, call.root) {
            (Operation::AllReduce, Some(op), _) => Action::AllReduce(op),
            (Operation::ReduceScatter, Some(op), _) => Action::ReduceScatter(op),
            (Operation::AllGather, ..) => Action::AllGather,
            (Operation::AllToAll, ..) => Action::AllToAll,
            (Operation::Broadcast, _, Some(root)) => Action::Broadcast(root),
            _ => return None,
        })
    }

    /// A communicator of all ranks of the group, of which this one has this GPU. All ranks call it.
    pub fn connect(group: &Group, gpu: &Gpu, deadline: &Deadline) -> Result<Box<dyn Remote>, Error> {
        let _entered = gpu.enter()?;
        let communicator = Communicator::connect(group, nccl::Gpu::of(gpu.ordinal)?, deadline)?;
        let (ended, ranks) = (communicator.ended.clone(), communicator.world_size());
        Ok(Box::new(Nccl { communicator: Mutex::new(communicator), ended, ranks }))
    }

    impl Remote for Nccl {
        fn submit(
            &self,
            site: Site,
            (source, target): (u64, u64),
            stream: &Stream,
            deadline: &Deadline,
        ) -> Result<(), Error> {
            let call = site.call;
            let action = action(&call);
            let action = action.ok_or_else(|| Error::argument(call.operation, format!("NCCL does not do {call}")))?;
            let scalar = Scalar::Of(call.dtype);
            let work = Work { action, scalar, count: call.count, sizes: None, input: source, output: target };
            let mut communicator = lock(&self.communicator);
            stream.with_raw(|raw| {
                // SAFETY: `Team::submit` keeps both tensors until the stream is past this, or past its end after an abort;
                // they have the sizes that the call says, which `exchange` has compared.
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

/// Without the feature there is none.
#[cfg(not(feature = "nccl"))]
mod none {
    use super::Remote;
    use crate::server::cuda::driver::Gpu;
    use bonfire_core::{Call, Deadline, Error, Group};

    fn absent() -> Error {
        let reason = "this program was built without it: add the feature `nccl`";
        Error::Library { library: "NCCL".into(), reason: reason.into() }
    }

    pub fn available(_gpu: usize) -> Result<(), Error> {
        Err(absent())
    }

    pub fn serves(_call: &Call) -> bool {
        false
    }

    pub fn connect(_group: &Group, _gpu: &Gpu, _deadline: &Deadline) -> Result<Box<dyn Remote>, Error> {
        Err(absent())
    }
}
