//! One GPU of a team: the stream that runs its calls, each for all ranks on the GPU at once.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::address::{Copy, Word};
use crate::choice::{Choice, LaunchConfig};
use crate::driver::{Gpu, Stream};
use crate::kernel::Module;
use crate::memory::word;
use crate::rounds::BufferLayout;
use bonfire_core::error::Site;
use bonfire_core::{Call, Deadline, Error};

pub(super) struct TeamGpu {
    pub gpu: Arc<Gpu>,
    pub stream: Arc<Stream>,
    /// The ranks on this GPU, as indices in `Team::local_ranks`.
    pub local_ranks: Vec<usize>,
    /// The word in GPU memory that holds the number of the last call that is done. Streams wait for it.
    pub done: Option<Word>,
    pub queue: Mutex<Queue>,
    pub launched: Condvar,
}

/// The calls that wait for other ranks on the same GPU.
pub(super) struct Queue {
    /// By position in `TeamGpu::local_ranks`.
    pub calls: Vec<VecDeque<QueuedCall>>,
    pub launched: u64,
}

/// A call of one rank. It must be on its stream by the deadline.
pub(super) struct QueuedCall {
    pub site: Site,
    pub deadline: Deadline,
    pub ready: Prepared,
}

/// A call of one rank, or a round of it, prepared for its launch: the tensors' streams will signal that they are ready.
pub(crate) struct Prepared {
    pub call: Call,
    pub loaded: LoadedChoice,
    /// How long a kernel may wait for other ranks.
    pub timeout: Duration,
    /// The value of the rank's `READY` word from which on the tensors may be used.
    pub ready: u64,
    pub layout: BufferLayout,
}

/// A [`Choice`] that is ready to run.
#[derive(Clone)]
pub(crate) enum LoadedChoice {
    Kernel(LaunchConfig, Arc<Module>),
    Nccl,
}

impl TeamGpu {
    pub fn new(gpu: Arc<Gpu>, for_group: bool) -> Result<TeamGpu, Error> {
        let stream = Arc::new(Stream::new(&gpu)?);
        let done = if for_group { None } else { Some(word(&stream)?) };
        let queue = Mutex::new(Queue { calls: Vec::new(), launched: 0 });
        Ok(TeamGpu { gpu, stream, local_ranks: Vec::new(), done, queue, launched: Condvar::new() })
    }

    pub fn load(&self, choice: Choice) -> Result<LoadedChoice, Error> {
        Ok(match choice {
            Choice::Kernel(config) => LoadedChoice::Kernel(config, self.gpu.module(config.kernel)?),
            Choice::Nccl => LoadedChoice::Nccl,
        })
    }

    /// Copies, once all earlier work on the stream is done.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for each copy.
    pub unsafe fn copy(&self, copies: &[Copy]) -> Result<(), Error> {
        // SAFETY: guaranteed by the caller.
        copies.iter().try_for_each(|copy| unsafe { self.stream.copy(copy) })
    }
}
