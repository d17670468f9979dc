//! One GPU's part of a team: the stream on which its calls run, for all ranks there at once.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cubecl::server::Binding;

use crate::server::cuda::choice::{Launch, Way};
use crate::server::cuda::driver::{Gpu, Stream};
use crate::server::cuda::kernel::Module;
use crate::server::cuda::memory::word;
use crate::server::engine::Rows;
use bonfire_core::error::Site;
use bonfire_core::{Deadline, Error};

pub(super) struct Place {
    pub gpu: Arc<Gpu>,
    pub stream: Arc<Stream>,
    /// The seats of the ranks on this GPU.
    pub seats: Vec<usize>,
    /// The number of the last call that is done, in GPU memory, where streams wait for it.
    pub done: Option<u64>,
    pub queue: Mutex<Queue>,
    pub launched: Condvar,
}

/// The calls that wait for other ranks on the same GPU.
pub(super) struct Queue {
    /// By position in `Place::seats`.
    pub calls: Vec<VecDeque<Called>>,
    pub launched: u64,
}

/// A call of one rank, which must be on its stream by the deadline.
pub(super) struct Called {
    pub site: Site,
    pub deadline: Deadline,
    pub ready: Ready,
}

/// What a call of one rank takes, whose tensors' streams have been told.
pub(in crate::server::cuda) struct Ready {
    pub means: Means,
    /// How long a kernel may wait for other ranks.
    pub patience: Duration,
    /// What the rank's `READY` word is from when on the tensors may be used.
    pub ready: u64,
    pub layout: Layout,
}

/// Where a call's data is for what does it, and how it gets there.
pub(in crate::server::cuda) struct Layout {
    pub source: u64,
    pub target: u64,
    /// What is copied to the source before, and from the target after.
    pub before: Vec<Copy>,
    pub after: Vec<Copy>,
    /// All memory that is used, which lives until the call is done.
    pub kept: Vec<Binding>,
}

/// Addresses and a number of bytes.
pub(in crate::server::cuda) struct Copy {
    pub from: u64,
    pub to: u64,
    pub bytes: usize,
}

/// A [`Way`] that can be gone at once.
pub(in crate::server::cuda) enum Means {
    Kernel(Launch, Arc<Module>),
    Nccl,
}

impl Place {
    pub fn new(gpu: Arc<Gpu>, for_group: bool) -> Result<Place, Error> {
        let stream = Arc::new(Stream::new(&gpu)?);
        let done = if for_group { None } else { Some(word(&stream)?) };
        let queue = Mutex::new(Queue { calls: Vec::new(), launched: 0 });
        Ok(Place { gpu, stream, seats: Vec::new(), done, queue, launched: Condvar::new() })
    }

    pub fn means(&self, way: Way) -> Result<Means, Error> {
        Ok(match way {
            Way::Kernel(launch) => Means::Kernel(launch, self.gpu.module(launch.kernel)?),
            Way::Nccl => Means::Nccl,
        })
    }

    pub fn copy(&self, copies: &[Copy]) -> Result<(), Error> {
        copies.iter().try_for_each(|Copy { from, to, bytes }| {
            self.stream.copy(*from, *to, Rows { count: 1, bytes: *bytes, pitch: *bytes })
        })
    }
}
