//! What is asked of CUDA's driver, with errors in our terms.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::kernel::{Kernel, Module};
use super::memory::Memory;
use crate::server::engine::Rows;
use bonfire_core::internal::lock;
use bonfire_core::{Deadline, Error};

/// A physical GPU, in the context that cubecl uses too: the device's primary one.
pub(super) struct Gpu {
    pub ordinal: usize,
    pub multiprocessors: u32,
    /// Ten times the major number of its compute capability, and the minor one.
    pub architecture: u32,
    context: sys::CUcontext,
    modules: Mutex<HashMap<Kernel, Arc<Module>>>,
    orders: OnceLock<bool>,
    /// Which other GPUs it was found to reach.
    reached: Mutex<HashMap<usize, bool>>,
}

// SAFETY: any thread may use a context; `modules` is behind a lock.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

static GPUS: LazyLock<Mutex<HashMap<usize, Arc<Gpu>>>> = LazyLock::new(Mutex::default);

/// The thread works on a GPU until this is dropped.
pub(super) struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let mut left = std::ptr::null_mut();
        // SAFETY: takes back what `Gpu::enter` pushed on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut left) };
    }
}

impl Gpu {
    pub fn of(ordinal: usize) -> Result<Arc<Gpu>, Error> {
        let mut gpus = lock(&GPUS);
        if let Some(gpu) = gpus.get(&ordinal) {
            return Ok(gpu.clone());
        }
        let failed = |e| failure("finding the device", ordinal, e);
        result::init().map_err(failed)?;
        let device = result::device::get(ordinal as i32).map_err(failed)?;
        // SAFETY: `device` was just given by the driver.
        let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map_err(failed);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: as above. It is never released: cubecl does not release it either.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed)?;
        let gpu = Arc::new(Gpu {
            ordinal,
            multiprocessors: multiprocessors as u32,
            architecture: (10 * major + minor) as u32,
            context,
            modules: Mutex::default(),
            orders: OnceLock::new(),
            reached: Mutex::default(),
        });
        gpus.insert(ordinal, gpu.clone());
        Ok(gpu)
    }

    pub fn enter(&self) -> Result<Entered, Error> {
        // SAFETY: the context lives as long as the process.
        let entered = unsafe { sys::cuCtxPushCurrent_v2(self.context) };
        self.check("entering the context", entered)?;
        Ok(Entered)
    }

    /// A kernel, ready to be launched: compiled and loaded when it is first asked for.
    ///
    /// Loading may wait for all that runs on the GPU. So a call's kernel is asked for before the call takes part in anything
    /// that others wait for.
    pub fn module(&self, kernel: Kernel) -> Result<Arc<Module>, Error> {
        if let Some(module) = lock(&self.modules).get(&kernel) {
            return Ok(module.clone());
        }
        let image = kernel.compiled(self.architecture)?;
        let module = {
            let _entered = self.enter()?;
            Arc::new(Module::load(&image, &kernel).map_err(|e| failure("loading a kernel", self.ordinal, e))?)
        };
        // Two threads may have loaded it; either will do.
        Ok(lock(&self.modules).entry(kernel).or_insert(module).clone())
    }

    /// Whether kernels on this GPU reach the memory of `other`, which is then made possible.
    pub fn reaches(&self, other: &Gpu) -> Result<bool, Error> {
        if self.ordinal == other.ordinal {
            return Ok(true);
        }
        let mut reached = lock(&self.reached);
        if let Some(reached) = reached.get(&other.ordinal) {
            return Ok(*reached);
        }
        let found = self.reach(other)?;
        reached.insert(other.ordinal, found);
        Ok(found)
    }

    fn reach(&self, other: &Gpu) -> Result<bool, Error> {
        let mut can = 0;
        // SAFETY: ordinals are devices: `of` got both.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.ordinal as i32, other.ordinal as i32) };
        self.check("asking for peer access", asked)?;
        if can == 0 {
            return Ok(false);
        }
        let _entered = self.enter()?;
        // SAFETY: the context lives as long as the process.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            enabled => self.check("enabling peer access", enabled)?,
        }
        self.share_pool(other)?;
        self.proven(other)
    }

    /// Whether its driver has streams that wait for words and write them, and memory in their order.
    pub fn orders_streams(&self) -> bool {
        let try_out = || -> Result<(), Error> {
            let stream = Arc::new(Stream::new(self)?);
            let word = Memory::zeroed(&stream, size_of::<u64>())?;
            stream.write(word.address, 1)?;
            stream.wait_for(word.address, 1)?;
            stream.synchronize()
        };
        *self.orders.get_or_init(|| try_out().inspect_err(|error| log::warn!("{error}")).is_ok())
    }

    /// Lets this GPU use what cubecl allocates on `other`, from the device's default memory pool.
    fn share_pool(&self, other: &Gpu) -> Result<(), Error> {
        /// The driver's CUmemAccessDesc, whose declaration differs between versions of its header, and its layout does not.
        #[repr(C)]
        struct Access {
            kind: i32,
            device: i32,
            flags: i32,
        }
        let access = Access {
            kind: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE as i32,
            device: self.ordinal as i32,
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as i32,
        };
        let mut pool = std::ptr::null_mut();
        // SAFETY: a device's default pool lives as long as the process, and `access` for the call.
        let shared = unsafe {
            let found = sys::cuDeviceGetDefaultMemPool(&mut pool, other.ordinal as i32);
            other.check("finding the memory pool", found)?;
            sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1)
        };
        other.check("sharing the memory pool", shared)
    }

    /// Whether a word that this GPU writes to pool memory of `other` arrives: drivers have claimed access that did not work.
    fn proven(&self, other: &Gpu) -> Result<bool, Error> {
        const WORD: u32 = 0x600d_c0de;
        let (theirs, ours) = (Arc::new(Stream::new(other)?), Stream::new(self)?);
        let word = Memory::zeroed(&theirs, 4)?;
        let outcome = ours.fill(word.address, WORD, 1).and_then(|()| ours.synchronize());
        let read = theirs.read(word.address, 1)?;
        let proven = outcome.is_ok() && read[0] == WORD;
        if !proven {
            log::warn!("GPU {} says that it reaches GPU {}, and does not: {outcome:?}", self.ordinal, other.ordinal);
        }
        Ok(proven)
    }

    pub fn check(&self, what: &str, code: sys::CUresult) -> Result<(), Error> {
        code.result().map_err(|e| failure(what, self.ordinal, e))
    }
}

pub(super) fn failure(what: &str, ordinal: usize, error: cudarc::driver::DriverError) -> Error {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    Error::broken(format!("{what} on GPU {ordinal}"), text.unwrap_or_else(|_| format!("{:?}", error.0)))
}

/// Waits until streams are idle, after a failure. What is on them waits for words, which kernels write that were launched
/// before; where such a launch failed, which cubecl does not say, nobody does, so in the end they are released.
pub(super) fn settle(idle: impl Fn() -> bool, release: impl Fn()) -> Result<(), Error> {
    const GRACE: Duration = Duration::from_secs(10);
    let deadline = Deadline::after(2 * GRACE);
    while !idle() {
        if deadline.passed() {
            let reason = format!("it goes on after {:.0?}; its memory is not given back", deadline.elapsed());
            return Err(Error::broken("waiting for what failed on the GPU", reason));
        }
        if deadline.elapsed() > GRACE {
            // Again and again: a kernel that is late may write the word after this.
            release();
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// A stream of our own. What is put on it runs in order.
pub(super) struct Stream {
    gpu: Arc<Gpu>,
    raw: sys::CUstream,
}

// SAFETY: any thread may use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver takes care of several at a time.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(gpu: &Gpu) -> Result<Stream, Error> {
        let shared = Gpu::of(gpu.ordinal)?;
        let _entered = gpu.enter()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(Stream { raw: raw.map_err(|e| failure("making a stream", gpu.ordinal, e))?, gpu: shared })
    }

    /// Waits until the word at `address` is `value` or more, by the sign of the difference.
    pub fn wait_for(&self, address: u64, value: u64) -> Result<(), Error> {
        let _entered = self.gpu.enter()?;
        let flags = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: callers pass addresses of words in `Memory` or `HostWords`, which are aligned.
        let queued = unsafe { sys::cuStreamWaitValue64_v2(self.raw, address, value, flags) };
        self.gpu.check("waiting for a word", queued)
    }

    /// Writes `value` to the word at `address` once all before it is done and visible.
    pub fn write(&self, address: u64, value: u64) -> Result<(), Error> {
        let _entered = self.gpu.enter()?;
        let flags = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: as in `wait_for`.
        let queued = unsafe { sys::cuStreamWriteValue64_v2(self.raw, address, value, flags) };
        self.gpu.check("writing a word", queued)
    }

    /// Launches a kernel whose only parameter is `parameter`.
    pub fn launch<P: bytemuck::Pod>(
        &self,
        module: &Module,
        (members, blocks): (u32, u32),
        threads: u32,
        mut parameter: P,
    ) -> Result<(), Error> {
        let _entered = self.gpu.enter()?;
        let mut parameters = [(&raw mut parameter).cast::<c_void>()];
        // SAFETY: the function belongs to this GPU's context, and takes one parameter of this type, which the driver copies
        // before it returns.
        let launched = unsafe {
            let (grid, block) = ((members, blocks, 1), (threads, 1, 1));
            result::launch_kernel(module.function(), grid, block, 0, self.raw, &mut parameters)
        };
        launched.map_err(|e| failure("launching a kernel", self.gpu.ordinal, e))
    }

    /// Lets another library put something on the stream.
    #[cfg(feature = "nccl")]
    pub fn with_raw<T>(&self, put: impl FnOnce(sys::CUstream) -> Result<T, Error>) -> Result<T, Error> {
        let _entered = self.gpu.enter()?;
        put(self.raw)
    }

    /// Copies rows between addresses that this GPU reaches; at the target they follow each other.
    pub fn copy(&self, from: u64, to: u64, rows: Rows) -> Result<(), Error> {
        let _entered = self.gpu.enter()?;
        // SAFETY: both tensors have so many rows, and are alive until `keep` lets go of them.
        let queued = unsafe {
            match rows {
                Rows { count: 0, .. } | Rows { bytes: 0, .. } => return Ok(()),
                Rows { count, bytes, pitch } if pitch == bytes => {
                    sys::cuMemcpyDtoDAsync_v2(to, from, count * bytes, self.raw)
                }
                Rows { count, bytes, pitch } => {
                    let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
                    let copy = sys::CUDA_MEMCPY2D_st {
                        srcXInBytes: 0,
                        srcY: 0,
                        srcMemoryType: device,
                        srcHost: std::ptr::null(),
                        srcDevice: from,
                        srcArray: std::ptr::null_mut(),
                        srcPitch: pitch,
                        dstXInBytes: 0,
                        dstY: 0,
                        dstMemoryType: device,
                        dstHost: std::ptr::null_mut(),
                        dstDevice: to,
                        dstArray: std::ptr::null_mut(),
                        dstPitch: bytes,
                        WidthInBytes: bytes,
                        Height: count,
                    };
                    sys::cuMemcpy2DAsync_v2(&copy, self.raw)
                }
            }
        };
        self.gpu.check("copying", queued)
    }

    /// Keeps something until all that is on the stream so far is done.
    pub fn keep<T: Send + 'static>(&self, kept: T) -> Result<(), Error> {
        /// # Safety
        /// `kept` came from `Box::into_raw`.
        unsafe extern "C" fn release<T>(kept: *mut c_void) {
            // SAFETY: as said above; the driver calls this once.
            drop(unsafe { Box::from_raw(kept.cast::<T>()) });
        }
        let _entered = self.gpu.enter()?;
        let kept = Box::into_raw(Box::new(kept));
        // SAFETY: the function gets what it expects. What it drops must not call the driver: bindings only count down.
        let queued = unsafe { result::stream::launch_host_function(self.raw, release::<T>, kept.cast()) };
        queued.map_err(|e| failure("keeping a tensor", self.gpu.ordinal, e))
    }

    pub fn allocate(&self, bytes: usize) -> Result<u64, Error> {
        let _entered = self.gpu.enter()?;
        // SAFETY: `Memory` owns what comes of it, and frees it.
        let address = unsafe { result::malloc_async(self.raw, bytes) };
        address.map_err(|e| failure("allocating", self.gpu.ordinal, e))
    }

    /// Gives back what `allocate` gave, once all that is on the stream is done.
    pub fn free(&self, address: u64) {
        let Ok(_entered) = self.gpu.enter() else { return };
        // SAFETY: `Memory` calls this once, when it is dropped.
        let _ = unsafe { result::free_async(address, self.raw) };
    }

    pub fn fill_with_zeros(&self, address: u64, bytes: usize) -> Result<(), Error> {
        let _entered = self.gpu.enter()?;
        // SAFETY: `Memory` has so many bytes there.
        let set = unsafe { result::memset_d8_async(address, 0, bytes, self.raw) };
        set.map_err(|e| failure("clearing memory", self.gpu.ordinal, e))
    }

    /// Fills words of 4 bytes.
    pub fn fill(&self, address: u64, word: u32, words: usize) -> Result<(), Error> {
        if words == 0 {
            return Ok(());
        }
        let _entered = self.gpu.enter()?;
        // SAFETY: the memory at `address` has so many words: callers pass their own `Memory`.
        let filled = unsafe { sys::cuMemsetD32Async(address, word, words, self.raw) };
        self.gpu.check("filling memory", filled)
    }

    /// Reads words of 4 bytes, after all that is on the stream.
    pub fn read(&self, address: u64, words: usize) -> Result<Vec<u32>, Error> {
        self.synchronize()?;
        let mut read = vec![0; words];
        let _entered = self.gpu.enter()?;
        // SAFETY: as in `fill`; the copy ends before this returns.
        let copied = unsafe { result::memcpy_dtoh_sync(&mut read, address) };
        copied.map_err(|e| failure("reading memory", self.gpu.ordinal, e))?;
        Ok(read)
    }

    /// Seconds on the GPU from the beginning to the end of what is put on the stream.
    pub fn seconds(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
        let _entered = self.gpu.enter()?;
        let failed = |e| failure("measuring time", self.gpu.ordinal, e);
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(failed);
        let (begin, end) = (event()?, event()?);
        // SAFETY: both events live until they are destroyed below, after the stream has passed them.
        unsafe {
            result::event::record(begin, self.raw).map_err(failed)?;
            work()?;
            result::event::record(end, self.raw).map_err(failed)?;
            result::event::synchronize(end).map_err(failed)?;
            let milliseconds = result::event::elapsed(begin, end).map_err(failed)?;
            let _ = (result::event::destroy(begin), result::event::destroy(end));
            Ok(f64::from(milliseconds) / 1e3)
        }
    }

    /// Whether all that was put on the stream is done, or has failed.
    pub fn is_idle(&self) -> bool {
        let Ok(_entered) = self.gpu.enter() else { return true };
        // SAFETY: the stream lives until `drop`.
        let state = unsafe { sys::cuStreamQuery(self.raw) };
        state != sys::CUresult::CUDA_ERROR_NOT_READY
    }

    /// Waits on the host for all that was put on the stream.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the stream lives until `drop`.
        let waited = unsafe { result::stream::synchronize(self.raw) };
        waited.map_err(|e| failure("waiting for a stream", self.gpu.ordinal, e))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        // SAFETY: nobody uses it any more; the driver lets what is on it come to its end.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}
