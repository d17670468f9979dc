//! cubecl 0.10 as `bonfire-cuda` sees it: its memory, and the kernels that it launches to order its streams.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use cubecl::cuda::{CudaCompiler, CudaRuntime};
use cubecl::device::DeviceId;
use cubecl::ir::{Scope, StorageType};
use cubecl::prelude::{
    AddressType, CompiledKernel, CubeCount, CubeDim, ExecutionMode, KernelDefinition, KernelId, KernelMetadata,
};
use cubecl::server::{Binding, ComputeServer, Handle, KernelArguments, MetadataBindingInfo};
use cubecl::stream_id::StreamId;
use cubecl::{CompilationError, Compiler, CubeTask, Runtime};

use crate::server::download::catch_panic;
use crate::server::engine::DeviceOperation;
use crate::server::pending::UNFINISHED;
use crate::server::status::Status;
use bonfire_core::Error;
use bonfire_core::internal::hash;
use bonfire_cuda::{Address, Order, OrderKernel};

pub(super) type Server = <CudaRuntime as Runtime>::Server;

/// cubecl's CUDA runtime.
pub(super) struct Cubecl;

/// The device with this id.
pub(super) fn id(device: DeviceId) -> bonfire_cuda::DeviceId {
    bonfire_cuda::DeviceId { gpu: device.index_id, number: device.type_id }
}

/// The inverse of [`id`].
pub(super) fn device(id: bonfire_cuda::DeviceId) -> DeviceId {
    DeviceId::new(id.number, id.gpu)
}

pub(super) fn operation(job: DeviceOperation) -> bonfire_cuda::DeviceOperation<Cubecl> {
    let DeviceOperation { call, rank, sources, targets, stream, peers } = job;
    bonfire_cuda::DeviceOperation { call, rank, sources, targets, stream, peers }
}

// SAFETY: cubecl neither frees nor reuses memory to which a `Binding` exists. It allocates from the GPU's current pool,
// whole bindings, and `get_resource` returns where one begins. `launch` passes the kernel and the order on.
unsafe impl bonfire_cuda::Runtime for Cubecl {
    type Server = Server;
    type Stream = StreamId;
    type Memory = Binding;

    const UNFINISHED: &'static str = UNFINISHED;

    fn status(id: bonfire_cuda::DeviceId) -> Arc<dyn bonfire_cuda::Status> {
        Status::of::<CudaRuntime>(device(id))
    }

    fn stream(memory: &Binding) -> StreamId {
        memory.stream
    }

    fn bytes(memory: &Binding) -> usize {
        memory.size_in_used() as usize
    }

    fn allocate(server: &mut Server, bytes: usize, stream: StreamId) -> Binding {
        let handle = Handle::new(stream, bytes as u64);
        // cubecl panics on an allocation of 0 bytes.
        server.initialize_memory(handle.memory.clone(), (bytes as u64).max(1), stream);
        handle.binding()
    }

    fn address(server: &mut Server, memory: &Binding, stream: StreamId) -> Result<Address, Error> {
        let resource = server.get_resource(memory.clone(), stream);
        let address = resource.map(|resource| Address::from(resource.resource().ptr));
        address.map_err(|e| Error::io("finding a tensor's memory", e))
    }

    /// cubecl orders the stream after all work on the other streams of the tokens, because it has not waited for these
    /// since the tokens were allocated.
    fn launch(server: &mut Server, kernel: OrderKernel, tokens: Vec<Binding>, order: Order, stream: StreamId) {
        // All of it is a kernel parameter; nothing is copied to memory.
        let data = order.words().to_vec();
        let info = MetadataBindingInfo { dynamic_metadata_offset: data.len(), data };
        let arguments = KernelArguments::new().with_buffers(tokens).with_info(info);
        let (task, one) = (Box::new(OrderTask(kernel)), CubeCount::Static(1, 1, 1));
        // SAFETY: one thread, which accesses the words that `order` names, and no tensor.
        unsafe { server.launch(task, one, arguments, ExecutionMode::Unchecked, stream) }
    }

    /// Its server panics, above all after a fault of the GPU.
    fn guard<T>(operation: &str, call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        catch_panic(operation, call)
    }
}

impl bonfire_cuda::Status for Status {
    fn deadline(&self) -> Duration {
        self.deadline()
    }

    fn failure(&self) -> Option<Error> {
        self.failure()
    }

    fn fail(&self, error: Error) {
        self.fail(error);
    }

    fn add_check(&self, check: bonfire_cuda::Check) {
        self.add_check(check);
    }
}

/// A kernel that orders streams, as cubecl compiles and launches it.
#[derive(Clone, Copy, Debug)]
struct OrderTask(OrderKernel);

impl KernelMetadata for OrderTask {
    fn id(&self) -> KernelId {
        // The id contains the source's hash, because cubecl may cache compiled kernels across runs of a program.
        static SOURCE: LazyLock<u64> = LazyLock::new(|| hash(OrderKernel::source().bytes()));
        KernelId::new::<OrderTask>().info((self.0, *SOURCE))
    }

    fn address_type(&self) -> StorageType {
        AddressType::U64.unsigned_type()
    }
}

impl CubeTask<CudaCompiler> for OrderTask {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        // The server reads the size of shared memory from the representation; an empty one needs none.
        let nothing = KernelDefinition {
            buffers: Vec::new(),
            tensor_maps: Vec::new(),
            scalars: Vec::new(),
            cube_dim: CubeDim::new_single(),
            body: Scope::root(false),
            options: Default::default(),
        };
        Ok(CompiledKernel {
            entrypoint_name: self.0.name().into(),
            debug_name: None,
            source: OrderKernel::source().into(),
            repr: Some(compiler.compile(nothing, options, mode, address)?),
            cube_dim: CubeDim::new_single(),
            debug_info: None,
        })
    }
}
