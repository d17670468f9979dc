//! Memory of our own that GPUs use.

use std::collections::BTreeMap;
use std::ops::Range;
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

/// Takes a zeroed word in GPU memory, which streams can wait for and write. It is never freed, like the words in host
/// memory.
pub(super) fn word(stream: &Stream) -> Result<u64, Error> {
    ON_GPU.take(&stream.gpu, 1, |gpu, bytes| {
        // Not from the pool, where the driver refuses these operations of streams.
        clear(stream, gpu.allocate("allocating words that streams wait for", bytes)?, bytes)
    })
}

fn cleared(stream: &Stream, bytes: usize) -> Result<u64, Error> {
    let address = stream.allocate(bytes)?;
    clear(stream, address, bytes).inspect_err(|_| stream.free(address))
}

/// Fills new memory with zeros, and returns its address once it has them: a peer must not see it before.
fn clear(stream: &Stream, address: u64, bytes: usize) -> Result<u64, Error> {
    stream.fill_with_zeros(address, bytes)?;
    stream.synchronize()?;
    Ok(address)
}

/// How many words are allocated at once: those of 512 ranks.
const AT_ONCE: usize = 8192;

/// The addresses of words that are yet to be used, by the GPU for which they were allocated. Allocating them changes
/// what all GPUs see, and a driver may wait for their work before that. A kernel there may be waiting for one that this
/// thread is about to launch. So words are allocated when the first are needed, before any launch, and seldom again.
struct Unused(Mutex<BTreeMap<usize, Range<u64>>>);

static ON_HOST: Unused = Unused(Mutex::new(BTreeMap::new()));
static ON_GPU: Unused = Unused(Mutex::new(BTreeMap::new()));

impl Unused {
    /// Takes words, which begin on a line of their own. `allocate` returns the address of so many zeroed bytes.
    fn take(
        &self,
        gpu: &Gpu,
        words: usize,
        allocate: impl FnOnce(&Gpu, usize) -> Result<u64, Error>,
    ) -> Result<u64, Error> {
        let bytes = |words: usize| size_of::<u64>() * words;
        let words = words.next_multiple_of(HOST_WORDS);
        let mut unused = lock(&self.0);
        let left = unused.get(&gpu.ordinal).filter(|left| left.end - left.start >= bytes(words) as u64).cloned();
        let left = match left {
            Some(left) => left,
            None => {
                let new = bytes(words.max(AT_ONCE));
                let address = allocate(gpu, new)?;
                address..address + new as u64
            }
        };
        unused.insert(gpu.ordinal, left.start + bytes(words) as u64..left.end);
        Ok(left.start)
    }
}

/// Words in host memory that GPUs access at the same address. They are never freed: a kernel that was queued on one of
/// cubecl's streams may read them at any later time.
#[derive(Clone)]
pub(super) struct HostWords {
    address: u64,
    count: usize,
}

impl HostWords {
    /// Takes words, which begin on a line of their own.
    pub fn zeroed(gpu: &Gpu, words: usize) -> Result<HostWords, Error> {
        let address = ON_HOST.take(gpu, words, |gpu, bytes| {
            let _entered = gpu.enter()?;
            // Every context may use it, at its host address.
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            // SAFETY: the memory is used through `HostWords` only.
            let start = unsafe { result::malloc_host(bytes, flags) };
            let start = start.map_err(|e| failure("allocating host memory", gpu.ordinal, e))?;
            // SAFETY: the memory has this many bytes, and is not shared yet.
            unsafe { start.cast::<u8>().write_bytes(0, bytes) };
            Ok(start.expose_provenance() as u64)
        })?;
        Ok(HostWords { address, count: words })
    }

    pub fn address(&self, index: usize) -> u64 {
        assert!(index < self.count, "a word outside of the allocation");
        self.address + (size_of::<u64>() * index) as u64
    }

    pub fn load(&self, index: usize) -> u64 {
        // Acquire: what the host does because of the value must not be reordered before the load.
        self.word(index).load(Ordering::Acquire)
    }

    pub fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        let word = std::ptr::with_exposed_provenance::<AtomicU64>(self.address(index) as usize);
        // SAFETY: in bounds of an allocation that was exposed, aligned, and alive as long as the process.
        unsafe { &*word }
    }
}
