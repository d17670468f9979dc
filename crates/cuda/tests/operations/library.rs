//! A tensor library that has memory from the GPU's pool, streams, and what `Runtime` asks for.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use bonfire_core::Error;
use bonfire_cuda::{Address, Check, DeviceId, Engine, Look, Order, OrderKernel, Runtime, Status};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use cudarc::driver::{DriverError, result};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};

pub struct Library;

/// What enqueues work on one GPU.
pub struct Server {
    /// Each is created on first use, and never destroyed.
    streams: HashMap<u32, sys::CUstream>,
    kernels: HashMap<OrderKernel, sys::CUfunction>,
    unused: Arc<Mutex<Vec<Unused>>>,
}

/// Memory without references: its stream and its address. The next work on that stream frees it, because the stream may
/// not be ordered after a collective before.
type Unused = (u32, u64);

/// Memory of a device.
#[derive(Clone)]
pub struct Memory(Arc<Allocation>);

struct Allocation {
    stream: u32,
    address: u64,
    bytes: usize,
    unused: Arc<Mutex<Vec<Unused>>>,
}

/// How many allocations there are.
static LIVE: AtomicUsize = AtomicUsize::new(0);

pub fn live_allocations() -> usize {
    LIVE.load(Ordering::SeqCst)
}

impl Drop for Allocation {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::SeqCst);
        self.unused.lock().unwrap().push((self.stream, self.address));
    }
}

#[derive(Default)]
struct DeviceStatus {
    failure: Mutex<Option<Error>>,
    checks: Mutex<Vec<Check>>,
}

static DEVICES: LazyLock<Mutex<HashMap<DeviceId, Arc<DeviceStatus>>>> = LazyLock::new(Mutex::default);

impl Status for DeviceStatus {
    fn deadline(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn failure(&self) -> Option<Error> {
        let checks = self.checks.lock().unwrap().clone();
        let ended: Vec<Check> = checks.into_iter().filter(|check| !check(Look::Faults)).collect();
        self.checks.lock().unwrap().retain(|check| !ended.iter().any(|ended| Arc::ptr_eq(check, ended)));
        self.failure.lock().unwrap().clone()
    }

    fn fail(&self, error: Error) {
        self.failure.lock().unwrap().get_or_insert(error);
    }

    fn add_check(&self, check: Check) {
        self.checks.lock().unwrap().push(check);
    }
}

impl Server {
    fn new(gpu: u16) -> Result<Server, DriverError> {
        let device = result::device::get(gpu.into())?;
        // SAFETY: the driver returned `device`. Nothing releases the context.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        // SAFETY: as above.
        unsafe { result::ctx::set_current(context) }?;
        // SAFETY: as above.
        let attribute = |which| unsafe { result::device::get_attribute(device, which) };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let options = vec![format!("--gpu-architecture=compute_{major}{minor}"), "--std=c++17".into()];
        let options = CompileOptions { options, ..CompileOptions::default() };
        let image = compile_ptx_with_opts(OrderKernel::source(), options).expect("the kernels compile");
        let image = CString::new(image.to_src()).unwrap();
        // SAFETY: the image is a C string of PTX.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }?;
        let kernels = [OrderKernel::TensorsReady, OrderKernel::AwaitDone].map(|kernel| {
            let name = CString::new(kernel.name()).unwrap();
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(module, name) }.map(|function| (kernel, function))
        });
        let kernels = kernels.into_iter().collect::<Result<_, _>>()?;
        Ok(Server { streams: HashMap::new(), kernels, unused: Arc::default() })
    }

    fn raw(&mut self, stream: u32) -> sys::CUstream {
        let create = || result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream");
        *self.streams.entry(stream).or_insert_with(create)
    }
}

// SAFETY: the driver allocates as many bytes as it is asked for. They are freed once no `Memory` refers to them, by
// work on the memory's stream, before which `Device::enter` calls the engine. `launch` passes kernel and order on.
unsafe impl Runtime for Library {
    type Server = Server;
    type Stream = u32;
    type Memory = Memory;

    const UNFINISHED: &'static str = "the memory is in use until `sync`";

    fn status(device: DeviceId) -> Arc<dyn Status> {
        DEVICES.lock().unwrap().entry(device).or_default().clone()
    }

    fn stream(memory: &Memory) -> u32 {
        memory.0.stream
    }

    fn bytes(memory: &Memory) -> usize {
        memory.0.bytes
    }

    fn allocate(server: &mut Server, bytes: usize, stream: u32) -> Memory {
        let raw = server.raw(stream);
        // SAFETY: the stream is never destroyed, and its context is current.
        let address = unsafe { result::malloc_async(raw, bytes.max(1)) }.expect("memory");
        LIVE.fetch_add(1, Ordering::SeqCst);
        Memory(Arc::new(Allocation { stream, address, bytes, unused: server.unused.clone() }))
    }

    fn address(_server: &mut Server, memory: &Memory, _stream: u32) -> Result<Address, Error> {
        Ok(memory.0.address.into())
    }

    fn launch(server: &mut Server, kernel: OrderKernel, tokens: Vec<Memory>, order: Order, stream: u32) {
        let (raw, function) = (server.raw(stream), server.kernels[&kernel]);
        let (mut addresses, mut order) =
            (tokens.iter().map(|token| token.0.address).collect::<Vec<_>>(), order.words());
        let mut parameters: Vec<*mut c_void> = addresses.iter_mut().map(|address| (&raw mut *address).cast()).collect();
        parameters.push((&raw mut order).cast());
        // SAFETY: streams are never destroyed, and their context is current. The kernel takes these parameters.
        let launched = unsafe {
            for token in tokens.iter().filter(|token| token.0.stream != stream) {
                let other = server.raw(token.0.stream);
                let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).expect("an event");
                result::event::record(event, other).expect("an event on a stream");
                let ordered = result::stream::wait_event(raw, event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
                ordered.expect("streams in order");
                result::event::destroy(event).expect("an event");
            }
            result::launch_kernel(function, (1, 1, 1), (1, 1, 1), 0, raw, &mut parameters)
        };
        launched.expect("a kernel");
    }
}

/// A device as a rank uses it, on one thread.
pub struct Device {
    pub id: DeviceId,
    pub engine: Engine<Library>,
    pub server: Server,
}

/// The device with this number, on one of the GPUs in turn.
pub fn device(number: usize) -> DeviceId {
    let gpus = bonfire_cuda::gpus().expect("a GPU");
    DeviceId { gpu: (number % gpus) as u16, number: (number / gpus) as u16 }
}

impl Device {
    /// Makes the device's GPU that of this thread.
    pub fn new(id: DeviceId) -> Device {
        Device { id, engine: Engine::new(id), server: Server::new(id.gpu).expect("a server") }
    }

    /// Called before all work on a stream.
    pub fn enter(&mut self, stream: u32) {
        self.engine.enter(&mut self.server, stream);
        let raw = self.server.raw(stream);
        for (_, address) in self.server.unused.lock().unwrap().extract_if(.., |(of, _)| *of == stream) {
            // SAFETY: `allocate` has allocated it, and nothing refers to it any more.
            unsafe { result::free_async(address, raw) }.expect("memory that is freed");
        }
    }

    /// Allocates memory and fills it, in the order of the stream.
    pub fn create(&mut self, data: &[i32], stream: u32) -> Memory {
        let bytes = size_of_val(data);
        let (memory, staging) = (self.empty(bytes, stream), Library::allocate(&mut self.server, bytes, stream));
        let raw = self.server.raw(stream);
        if bytes > 0 {
            // SAFETY: both have as many bytes, and are freed in the order of this stream.
            let copied = unsafe {
                result::stream::synchronize(raw).expect("an idle stream");
                result::memcpy_htod_sync(staging.0.address, data).expect("a copy");
                result::memcpy_dtod_async(memory.0.address, staging.0.address, bytes, raw)
            };
            copied.expect("a copy");
        }
        memory
    }

    pub fn empty(&mut self, bytes: usize, stream: u32) -> Memory {
        self.enter(stream);
        Library::allocate(&mut self.server, bytes, stream)
    }

    /// Reads memory, in the order of a stream.
    pub fn read(&mut self, memory: &Memory, stream: u32) -> Result<Vec<i32>, Error> {
        self.enter(stream);
        let mut data = vec![0; memory.0.bytes / 4];
        let raw = self.server.raw(stream);
        // SAFETY: the stream is never destroyed, and the memory has as many bytes.
        unsafe {
            result::stream::synchronize(raw).expect("an idle stream");
            if !data.is_empty() {
                result::memcpy_dtoh_sync(&mut data, memory.0.address).expect("a copy");
            }
        }
        Library::status(self.id).failure().map_or(Ok(data), Err)
    }
}
