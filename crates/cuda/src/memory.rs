//! Memory of our own that GPUs use.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::{result, sys};

use super::address::{Address, Word};
use super::control::HOST_WORDS;
use super::driver::{Gpu, Stream, failure};
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// Zeroed GPU memory. It comes from the pool that tensors come from, so a peer that can access tensors can access it
/// too, and freeing it does not wait. What uses it must be on its stream, or have ended, when it is dropped.
pub(crate) struct Memory {
    stream: Arc<Stream>,
    pub address: Address,
    bytes: usize,
}

impl Memory {
    pub fn zeroed(stream: &Arc<Stream>, bytes: usize) -> Result<Memory, Error> {
        // From here on it is freed also if it cannot be cleared.
        let memory = Memory { stream: stream.clone(), address: stream.allocate(bytes)?, bytes };
        // SAFETY: it has this many bytes, and frees itself on the same stream, after this.
        unsafe { stream.fill_with_zeros(memory.address, bytes) }?;
        // A peer must not see it before.
        stream.synchronize()?;
        Ok(memory)
    }

    /// Fills as many words of 4 bytes as it has with `word`.
    pub fn fill(&self, word: u32) -> Result<(), Error> {
        // SAFETY: as in `zeroed`; allocations are aligned to more than 4 bytes.
        unsafe { self.stream.fill(self.address, word, self.bytes / 4) }
    }

    /// Reads words of 4 bytes from this one on, after all earlier work on the stream.
    pub fn read(&self, first: usize, words: usize) -> Result<Vec<u32>, Error> {
        assert!(4 * (first + words) <= self.bytes, "words outside of the memory");
        // SAFETY: it has these words.
        unsafe { self.stream.read(self.address + 4 * first, words) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `zeroed` got it from this stream. Its owner lets no work elsewhere use it any more.
        unsafe { self.stream.free(self.address) };
    }
}

/// Takes a zeroed word in GPU memory, which streams can wait for and write. It is never freed, like the words in host
/// memory.
pub(crate) fn word(stream: &Stream) -> Result<Word, Error> {
    let address = ON_GPU.take(&stream.gpu, 1, |gpu, bytes| {
        // Not from the pool, where the driver refuses these operations of streams.
        let address = gpu.allocate("allocating words that streams wait for", bytes)?;
        // SAFETY: it has this many bytes and is never freed.
        unsafe { stream.fill_with_zeros(address, bytes) }?;
        // A peer must not see it before.
        stream.synchronize()?;
        Ok(address)
    })?;
    // SAFETY: `take` returns places of whole lines in memory that is never freed.
    Ok(unsafe { Word::at(address) })
}

/// How many words are allocated at once: those of 512 ranks.
const AT_ONCE: usize = 8192;

/// The addresses of words that are yet to be used, by the GPU for which they were allocated. Allocating them changes
/// what all GPUs see, and a driver may wait for their work before that. A kernel there may be waiting for one that this
/// thread is about to launch. So words are allocated when the first are needed, before any launch, and seldom again.
struct Unused(Mutex<BTreeMap<usize, Range<Address>>>);

static ON_HOST: Unused = Unused(Mutex::new(BTreeMap::new()));
static ON_GPU: Unused = Unused(Mutex::new(BTreeMap::new()));

impl Unused {
    /// Takes words, which begin on a line of their own. `allocate` returns the address of so many zeroed bytes.
    fn take(
        &self,
        gpu: &Gpu,
        words: usize,
        allocate: impl FnOnce(&Gpu, usize) -> Result<Address, Error>,
    ) -> Result<Address, Error> {
        let bytes = |words: usize| size_of::<u64>() * words;
        let words = words.next_multiple_of(HOST_WORDS);
        let mut unused = lock(&self.0);
        let left = unused.get(&gpu.ordinal).filter(|left| left.start + bytes(words) <= left.end).cloned();
        let left = match left {
            Some(left) => left,
            None => {
                let new = bytes(words.max(AT_ONCE));
                let address = allocate(gpu, new)?;
                address..address + new
            }
        };
        unused.insert(gpu.ordinal, left.start + bytes(words)..left.end);
        Ok(left.start)
    }
}

/// Words in host memory that GPUs access at the same address. They are never freed: a kernel that was queued on a
/// stream of tensors may read them at any later time.
#[derive(Clone)]
pub(crate) struct HostWords {
    address: Address,
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
            Ok(Address::from(start.expose_provenance() as u64))
        })?;
        Ok(HostWords { address, count: words })
    }

    /// The word with this index, as GPUs and streams use it.
    pub fn word(&self, index: usize) -> Word {
        assert!(index < self.count, "a word outside of the allocation");
        // SAFETY: in bounds of an allocation that is aligned and alive as long as the process.
        unsafe { Word::at(self.address + size_of::<u64>() * index) }
    }

    pub fn load(&self, index: usize) -> u64 {
        // Acquire: what the host does because of the value must not be reordered before the load.
        self.atomic(index).load(Ordering::Acquire)
    }

    pub fn store(&self, index: usize, value: u64) {
        self.atomic(index).store(value, Ordering::Release);
    }

    fn atomic(&self, index: usize) -> &AtomicU64 {
        let word = std::ptr::with_exposed_provenance::<AtomicU64>(self.word(index).address().get() as usize);
        // SAFETY: in bounds of an allocation that was exposed, aligned, and alive as long as the process.
        unsafe { &*word }
    }
}
