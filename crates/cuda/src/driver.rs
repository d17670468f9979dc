//! Wrappers of the CUDA driver's functions, with this crate's errors.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::fmt::Display;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use cudarc::driver::DriverError;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::address::{Address, Copy, Word};
use super::context::ContextGuard;
use super::kernel::{Kernel, Module};
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// A physical GPU in its primary context, which the tensors' library uses too.
pub(crate) struct Gpu {
    pub ordinal: usize,
    pub multiprocessors: u32,
    /// Ten times the major compute capability, plus the minor one.
    pub architecture: u32,
    pub context: sys::CUcontext,
    modules: Mutex<HashMap<Kernel, Arc<Module>>>,
    pub stream_ordering: OnceLock<bool>,
    /// Whether each other GPU, by ordinal, was found to be accessible.
    pub reached: Mutex<HashMap<usize, bool>>,
}

// SAFETY: any thread may use a context; `modules` is behind a lock.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

static GPUS: LazyLock<Mutex<HashMap<usize, Arc<Gpu>>>> = LazyLock::new(Mutex::default);

/// The oldest version of CUDA whose driver has all functions that are called: cubecl-cuda 0.10 shares the driver, and
/// calls cuTensorMapEncodeTiled.
const OLDEST: i32 = 12_000;

/// Starts the driver.
///
/// # Errors
/// [`Error::Library`] if it is missing, does not start, or is too old.
pub(crate) fn start() -> Result<(), Error> {
    static STARTED: LazyLock<Result<(), Error>> = LazyLock::new(|| {
        let unusable = |reason: String| Error::Library { library: "NVIDIA's driver".into(), reason };
        // SAFETY: the call looks for the driver's library, whose initialisers have no requirements.
        if !unsafe { sys::is_culib_present() } {
            return Err(unusable(
                "libcuda.so is not found: install it, in a container let it in (`--gpus all`), or name its folder in \
                 LD_LIBRARY_PATH"
                    .into(),
            ));
        }
        let mut version = 0;
        // SAFETY: `version` receives the result. The driver need not be started for it.
        let asked = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
        let started = asked.and_then(|()| if version < OLDEST { Ok(()) } else { result::init() });
        started.map_err(|error| unusable(format!("it does not start: {error}; see nvidia-smi")))?;
        if version < OLDEST {
            let supported = format!("{}.{}", version / 1000, version % 1000 / 10);
            return Err(unusable(format!("it supports CUDA {supported}; install 525 or newer, which supports 12.0")));
        }
        Ok(())
    });
    STARTED.clone()
}

/// Returns the number of GPUs that this process sees, which is at least 1.
///
/// # Errors
/// [`Error::Library`] if the driver is missing, does not start, or is too old; [`Error::Io`] if there is no GPU.
pub fn gpus() -> Result<usize, Error> {
    start()?;
    match result::device::get_count() {
        Ok(gpus @ 1..) => Ok(gpus as usize),
        Ok(_) => {
            let none = "the driver finds none: see nvidia-smi, and CUDA_VISIBLE_DEVICES";
            Err(Error::io("looking for GPUs", std::io::Error::other(none)))
        }
        Err(error) => Err(Error::io("looking for GPUs", error)),
    }
}

impl Gpu {
    pub fn of(ordinal: usize) -> Result<Arc<Gpu>, Error> {
        let mut gpus = lock(&GPUS);
        if let Some(gpu) = gpus.get(&ordinal) {
            return Ok(gpu.clone());
        }
        let failed = |e| failure("finding the device", ordinal, e);
        start()?;
        let device = result::device::get(ordinal as i32).map_err(failed)?;
        // SAFETY: the driver returned `device`.
        let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map_err(failed);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: as above. The context is never released.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed)?;
        let gpu = Arc::new(Gpu {
            ordinal,
            multiprocessors: multiprocessors as u32,
            architecture: (10 * major + minor) as u32,
            context,
            modules: Mutex::default(),
            stream_ordering: OnceLock::new(),
            reached: Mutex::default(),
        });
        gpus.insert(ordinal, gpu.clone());
        Ok(gpu)
    }

    /// Makes the context current. Within an entered context that calls no driver, so code that makes several calls
    /// enters once before them.
    pub fn enter(&self) -> Result<ContextGuard, Error> {
        self.make_current().map_err(|e| failure("entering the context", self.ordinal, e))
    }

    fn make_current(&self) -> Result<ContextGuard, DriverError> {
        ContextGuard::enter(self.ordinal, self.context)
    }

    /// Allocates memory that does not come from a pool. Other processes can open it, and streams can wait for words in
    /// it. It is never freed. The driver may wait for all work on the GPU. `what` begins an error.
    pub fn allocate(&self, what: &str, bytes: usize) -> Result<Address, Error> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        let allocated = unsafe { result::malloc_sync(bytes) };
        allocated.map(Address::from).map_err(|e| failure(what, self.ordinal, e))
    }

    /// Returns a kernel that is ready to launch. Compiles and loads it on first use.
    ///
    /// Loading may wait for all work on the GPU. So a call loads its kernel before it takes part in anything that
    /// others wait for.
    pub fn module(&self, kernel: Kernel) -> Result<Arc<Module>, Error> {
        if let Some(module) = lock(&self.modules).get(&kernel) {
            return Ok(module.clone());
        }
        let image = kernel.compiled(self.architecture)?;
        let module = {
            let _entered = self.enter()?;
            Arc::new(Module::load(&image, &kernel).map_err(|e| failure("loading a kernel", self.ordinal, e))?)
        };
        // Two threads may have loaded it; either module works.
        Ok(lock(&self.modules).entry(kernel).or_insert(module).clone())
    }

    pub fn check(&self, what: &str, code: sys::CUresult) -> Result<(), Error> {
        code.result().map_err(|e| failure(what, self.ordinal, e))
    }
}

/// A number unique among all GPUs, and parts of GPUs, of all hosts. Ordinals differ between processes that see
/// different GPUs.
pub(crate) type Uuid = [u8; 16];

/// Returns the number of the GPU with this ordinal.
pub(crate) fn uuid(ordinal: usize) -> Result<Uuid, DriverError> {
    let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` receives the number of an existing device. The first version does not tell parts of a GPU apart.
    unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) }.result()?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// The error of a request to the driver, such as "making a stream", for this GPU.
pub(crate) fn failure(what: &str, ordinal: usize, error: DriverError) -> Error {
    use sys::CUresult::{
        CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    };
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    let reason = text.unwrap_or_else(|_| format!("{:?}", error.0));
    match error.0 {
        CUDA_ERROR_OUT_OF_MEMORY => {
            Error::OutOfMemory { operation: what.into(), device: format!("GPU {ordinal}"), reason }
        }
        CUDA_ERROR_INVALID_IMAGE | CUDA_ERROR_NO_BINARY_FOR_GPU | CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            let reason = format!(
                "{what} on GPU {ordinal}: {reason}; the driver is probably older than the NVRTC that compiled the \
                 kernel: update it, or install an NVRTC of the CUDA version that nvidia-smi prints, or of an older one"
            );
            Error::Library { library: "NVIDIA's driver".into(), reason }
        }
        _ => Error::broken(format!("{what} on GPU {ordinal}"), reason),
    }
}

/// A fault of a GPU, as the driver reports it. See [`Error::Gpu`].
pub(crate) struct GpuFault {
    gpu: usize,
    error: DriverError,
}

impl GpuFault {
    /// The error of an operation that waited for the GPU, which these ranks use.
    pub fn error(self, operation: impl Display, ranks: Vec<usize>, elapsed: Duration) -> Error {
        let text = |found: Result<&CStr, DriverError>| found.map(|text| text.to_string_lossy().into_owned());
        let code = text(self.error.error_name()).unwrap_or_else(|_| format!("{:?}", self.error.0));
        let reason = format!("{code} ({})", text(self.error.error_string()).unwrap_or_default());
        Error::Gpu { operation: operation.to_string(), gpu: self.gpu, ranks, reason, elapsed }
    }
}

/// A stream of our own. Work on it runs in order.
///
/// It has the highest priority. Peers on other GPUs spin until a collective's blocks run, so these must not queue
/// behind the blocks of compute kernels that have not started. The streams of copies have it too: another device waits
/// for a copy, which is short and waits for nothing itself once it runs. Where the driver copies with a kernel,
/// priority makes that start at once; copy engines ignore it. Blocks that run already are never interrupted.
pub(crate) struct Stream {
    pub gpu: Arc<Gpu>,
    raw: sys::CUstream,
}

// SAFETY: any thread may use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver synchronises concurrent calls.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(gpu: &Gpu) -> Result<Stream, Error> {
        let shared = Gpu::of(gpu.ordinal)?;
        let _entered = gpu.enter()?;
        let (mut least, mut greatest, mut raw) = (0, 0, std::ptr::null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current, and all three places are valid.
        let made = unsafe {
            let range = sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest);
            range.result().and_then(|()| sys::cuStreamCreateWithPriority(&mut raw, flags, greatest).result())
        };
        made.map_err(|e| failure("making a stream", gpu.ordinal, e))?;
        Ok(Stream { raw, gpu: shared })
    }

    /// Calls the driver in the context of the stream's GPU.
    fn call<T>(&self, what: &str, call: impl FnOnce(sys::CUstream) -> Result<T, DriverError>) -> Result<T, Error> {
        let _entered = self.gpu.enter()?;
        call(self.raw).map_err(|e| failure(what, self.gpu.ordinal, e))
    }

    /// Makes the stream wait until the word is at least `value`, by the sign of the difference.
    pub fn wait_for(&self, word: Word, value: u64) -> Result<(), Error> {
        let flags = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the stream lives until `drop`, and a `Word` is aligned and never freed.
        let wait = |raw| unsafe { sys::cuStreamWaitValue64_v2(raw, word.address().get(), value, flags) };
        self.call("waiting for a word", |raw| wait(raw).result())
    }

    /// Makes the stream write `value` to the word after all earlier work is done and visible.
    pub fn write(&self, word: Word, value: u64) -> Result<(), Error> {
        let flags = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: as in `wait_for`.
        let write = |raw| unsafe { sys::cuStreamWriteValue64_v2(raw, word.address().get(), value, flags) };
        self.call("writing a word", |raw| write(raw).result())
    }

    /// Launches a kernel whose only parameter is `parameter`.
    ///
    /// # Safety
    /// The module must be of this GPU and its kernel take one parameter of this type. What the parameter points to must
    /// be as the kernel's file says, and stay until the stream is past the kernel.
    pub unsafe fn launch<P: bytemuck::Pod>(
        &self,
        module: &Module,
        (members, blocks): (u32, u32),
        threads: u32,
        mut parameter: P,
    ) -> Result<(), Error> {
        let mut parameters = [(&raw mut parameter).cast::<c_void>()];
        let (grid, block) = ((members, blocks, 1), (threads, 1, 1));
        // SAFETY: guaranteed by the caller. The driver copies the parameter before it returns.
        self.call("launching a kernel", |raw| unsafe {
            result::launch_kernel(module.function(), grid, block, 0, raw, &mut parameters)
        })
    }

    /// Lets another library enqueue work on the stream, in a context that it may replace.
    #[cfg(feature = "nccl")]
    pub fn with_raw<T>(&self, put: impl FnOnce(sys::CUstream) -> Result<T, Error>) -> Result<T, Error> {
        let entered = ContextGuard::push(self.gpu.ordinal, self.gpu.context);
        let _entered = entered.map_err(|e| failure("entering the context", self.gpu.ordinal, e))?;
        put(self.raw)
    }

    /// Copies rows, once all earlier work on the stream is done.
    ///
    /// # Safety
    /// The memory on both sides must have these rows, and stay until the stream is past the copy.
    pub unsafe fn copy(&self, copy: &Copy) -> Result<(), Error> {
        let &Copy { from, to, rows, bytes, pitches } = copy;
        let (from, to) = (from.get(), to.get());
        if rows == 0 || bytes == 0 {
            return Ok(());
        }
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let described = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            srcPitch: pitches.0,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitches.1,
            WidthInBytes: bytes,
            Height: rows,
        };
        // SAFETY: guaranteed by the caller; the stream lives until `drop`.
        let copied = |raw| unsafe {
            match rows == 1 || pitches == (bytes, bytes) {
                true => sys::cuMemcpyDtoDAsync_v2(to, from, rows * bytes, raw),
                false => sys::cuMemcpy2DAsync_v2(&described, raw),
            }
        };
        self.call("copying", |raw| copied(raw).result())
    }

    /// Allocates memory of the GPU's pool.
    pub fn allocate(&self, bytes: usize) -> Result<Address, Error> {
        // SAFETY: the stream lives until `drop`. Nothing else knows the memory.
        self.call("allocating", |raw| unsafe { result::malloc_async(raw, bytes) }).map(Address::from)
    }

    /// Frees memory, once all earlier work on the stream is done.
    ///
    /// # Safety
    /// `allocate` of a stream of this GPU must have returned the address, and nothing use that memory any more but
    /// earlier work on this stream.
    pub unsafe fn free(&self, address: Address) {
        let Ok(_entered) = self.gpu.enter() else { return };
        // SAFETY: guaranteed by the caller.
        let _ = unsafe { result::free_async(address.get(), self.raw) };
    }

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// There must be this many bytes, and stay until the stream is past this.
    pub unsafe fn fill_with_zeros(&self, address: Address, bytes: usize) -> Result<(), Error> {
        // SAFETY: guaranteed by the caller.
        self.call("clearing memory", |raw| unsafe { result::memset_d8_async(address.get(), 0, bytes, raw) })
    }

    /// Fills `words` words of 4 bytes.
    ///
    /// # Safety
    /// There must be this many words, aligned, and stay until the stream is past this.
    pub unsafe fn fill(&self, address: Address, word: u32, words: usize) -> Result<(), Error> {
        if words == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        let filled = |raw| unsafe { sys::cuMemsetD32Async(address.get(), word, words, raw) };
        self.call("filling memory", |raw| filled(raw).result())
    }

    /// Reads words of 4 bytes, after all earlier work on the stream.
    ///
    /// # Safety
    /// There must be this many words.
    pub unsafe fn read(&self, address: Address, words: usize) -> Result<Vec<u32>, Error> {
        self.synchronize()?;
        let mut read = vec![0; words];
        // SAFETY: guaranteed by the caller; the copy ends before this returns.
        self.call("reading memory", |_| unsafe { result::memcpy_dtoh_sync(&mut read, address.get()) })?;
        Ok(read)
    }

    /// Seconds on the GPU from the beginning to the end of what `work` enqueues on the stream.
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

    /// Whether all work on the stream is done.
    ///
    /// # Errors
    /// A fault that has ended the work. It may be of any kernel on the GPU: all work of a context ends with the first.
    pub fn is_idle(&self) -> Result<bool, GpuFault> {
        // SAFETY: the stream lives until `drop`.
        let query = || unsafe { sys::cuStreamQuery(self.raw) }.result();
        match self.gpu.make_current().and_then(|_entered| query()) {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(GpuFault { gpu: self.gpu.ordinal, error }),
        }
    }

    /// Waits on the host for all work on the stream.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the stream lives until `drop`.
        self.call("waiting for a stream", |raw| unsafe { result::stream::synchronize(raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        // SAFETY: no other reference exists; the driver lets the work on the stream finish.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}
