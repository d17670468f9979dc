//! Memory of our own that GPUs use.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::{result, sys};

use super::control::HOST_WORDS;
use super::driver::{Gpu, Stream, failure};
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// Zeroed GPU memory. It comes from the pool that cubecl allocates from, so a peer that can access tensors can access
/// it too, and freeing it does not wait.
pub(super) struct Memory {
    stream: Arc<Stream>,
    pub address: u64,
}

impl Memory {
    pub fn zeroed(stream: &Arc<Stream>, bytes: usize) -> Result<Memory, Error> {
        Ok(Memory { stream: stream.clone(), address: cleared(stream, bytes)? })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.stream.free(self.address);
    }
}

/// Allocates a zeroed word in GPU memory. It is never freed, like the words in host memory.
pub(super) fn word(stream: &Stream) -> Result<u64, Error> {
    cleared(stream, size_of::<u64>())
}

fn cleared(stream: &Stream, bytes: usize) -> Result<u64, Error> {
    let address = stream.allocate(bytes)?;
    // A peer must not see it before it is zero.
    let clear = stream.fill_with_zeros(address, bytes).and_then(|()| stream.synchronize());
    clear.inspect_err(|_| stream.free(address)).map(|()| address)
}

/// Words in host memory that GPUs access at the same address. They are never freed: a kernel that was queued on one of
/// cubecl's streams may read them at any later time.
#[derive(Clone)]
pub(super) struct HostWords(*const AtomicU64, usize);

// SAFETY: the words are atomic.
unsafe impl Send for HostWords {}
// SAFETY: as above.
unsafe impl Sync for HostWords {}

/// The words that are allocated at once: those of 512 ranks.
const AT_ONCE: usize = 8192;

/// Words that are yet to be used, by the GPU for which they were allocated. Allocating host memory changes what all
/// GPUs see, and a driver may wait for their work before that. A kernel there may be waiting for one that this thread
/// is about to launch. So words are allocated when the first are needed, before any launch, and seldom again.
static UNUSED: Mutex<BTreeMap<usize, HostWords>> = Mutex::new(BTreeMap::new());

impl HostWords {
    /// Takes words, which begin on a line of their own.
    pub fn zeroed(gpu: &Gpu, words: usize) -> Result<HostWords, Error> {
        let taken = words.next_multiple_of(HOST_WORDS);
        let mut unused = lock(&UNUSED);
        let HostWords(start, left) = match unused.remove(&gpu.ordinal).filter(|HostWords(_, left)| *left >= taken) {
            Some(enough) => enough,
            None => HostWords::allocate(gpu, taken.max(AT_ONCE))?,
        };
        // SAFETY: no more words are taken than are left.
        unused.insert(gpu.ordinal, HostWords(unsafe { start.add(taken) }, left - taken));
        Ok(HostWords(start, words))
    }

    fn allocate(gpu: &Gpu, words: usize) -> Result<HostWords, Error> {
        let _entered = gpu.enter()?;
        // Every context may use it, at its host address.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is used through `HostWords` only.
        let start = unsafe { result::malloc_host(8 * words, flags) };
        let start = start.map_err(|e| failure("allocating host memory", gpu.ordinal, e))?.cast::<AtomicU64>();
        // SAFETY: the memory has this many words, is aligned for them, and is not shared yet.
        unsafe { start.write_bytes(0, words) };
        Ok(HostWords(start, words))
    }

    pub fn address(&self, index: usize) -> u64 {
        self.word(index) as *const AtomicU64 as u64
    }

    pub fn load(&self, index: usize) -> u64 {
        // Acquire: what the host does because of the value must not be reordered before the load.
        self.word(index).load(Ordering::Acquire)
    }

    pub fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.1, "a word outside of the allocation");
        // SAFETY: in bounds, and alive as long as the process.
        unsafe { &*self.0.add(index) }
    }
}
