//! The kernels that cubecl launches, to order its streams against ours.

use std::sync::LazyLock;

use cubecl::cuda::{CudaCompiler, CudaRuntime};
use cubecl::ir::{Scope, StorageType};
use cubecl::prelude::{
    AddressType, CompiledKernel, CubeCount, CubeDim, ExecutionMode, KernelDefinition, KernelId, KernelMetadata,
};
use cubecl::server::{Binding, ComputeServer, Handle, KernelArguments, MetadataBindingInfo};
use cubecl::stream_id::StreamId;
use cubecl::{CompilationError, Compiler, CubeTask, Runtime};

use super::control::Order;
use super::kernel::ORDER_SOURCE;
use bonfire_core::internal::hash;

pub(super) type Server = <CudaRuntime as Runtime>::Server;

/// A kernel of `kernels/order.cu`, as cubecl compiles and launches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum OrderKernel {
    TensorsReady,
    AwaitDone,
}

/// The values that were given to one `READY` word: how often tensors became ready.
#[derive(Default)]
pub(super) struct ReadyCounter {
    value: u64,
    /// The stream of the last signal: the word only grows if each signal is ordered after the one before.
    last: Option<StreamId>,
}

impl ReadyCounter {
    /// Makes the word grow once the work queued so far on these streams is done: the tensors on them are then ready.
    /// Returns the value that the word has from then on.
    pub fn signal(&mut self, server: &mut Server, word: u64, streams: &[StreamId], stream: StreamId) -> u64 {
        self.value += 1;
        // A stream without a partner is paired with itself.
        let mut pairs: Vec<_> = streams.chunks(2).map(|pair| [pair[0], *pair.last().unwrap_or(&stream)]).collect();
        let at_once = pairs.pop().unwrap_or([stream; 2]);
        let before = pairs.into_iter().map(|pair| (pair, self.value - 1));
        for ([one, other], value) in before.chain([(at_once, self.value)]) {
            let order = Order { word, value, timeout: 0, host: 0 };
            let tokens = [one, other, self.last.unwrap_or(stream)].map(|stream| token(server, stream)).to_vec();
            launch(server, OrderKernel::TensorsReady, tokens, order, stream);
            self.last = Some(stream);
        }
        self.value
    }
}

/// Makes the stream wait for the word.
pub(super) fn await_done(server: &mut Server, order: Order, stream: StreamId) {
    let token = token(server, stream);
    launch(server, OrderKernel::AwaitDone, vec![token], order, stream);
}

/// New memory of a stream. It makes cubecl order the stream that uses it after all work on the stream that it is from.
/// cubecl does so for memory that was bound after the last such wait; a tensor that was rewritten in place looks older.
fn token(server: &mut Server, stream: StreamId) -> Binding {
    allocate(server, 8, stream)
}

/// Allocates memory on a stream. No other code knows it.
pub(super) fn allocate(server: &mut Server, bytes: usize, stream: StreamId) -> Binding {
    let handle = Handle::new(stream, bytes as u64);
    // cubecl panics on an allocation of 0 bytes.
    server.initialize_memory(handle.memory.clone(), (bytes as u64).max(1), stream);
    handle.binding()
}

fn launch(server: &mut Server, entry: OrderKernel, tokens: Vec<Binding>, order: Order, stream: StreamId) {
    let data = order.words();
    // All of it is a kernel parameter; nothing is copied to memory.
    let info = MetadataBindingInfo { dynamic_metadata_offset: data.len(), data };
    let arguments = KernelArguments::new().with_buffers(tokens).with_info(info);
    // SAFETY: one thread, which writes to the word that `order` names, and to no tensor.
    unsafe { server.launch(Box::new(entry), CubeCount::Static(1, 1, 1), arguments, ExecutionMode::Unchecked, stream) }
}

impl KernelMetadata for OrderKernel {
    fn id(&self) -> KernelId {
        // The id contains the source's hash, because cubecl may cache compiled kernels across runs of a program.
        static SOURCE: LazyLock<u64> = LazyLock::new(|| hash(ORDER_SOURCE.bytes()));
        KernelId::new::<OrderKernel>().info((*self, *SOURCE))
    }

    fn address_type(&self) -> StorageType {
        AddressType::U64.unsigned_type()
    }
}

impl CubeTask<CudaCompiler> for OrderKernel {
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
        let name = match self {
            OrderKernel::TensorsReady => "tensors_ready",
            OrderKernel::AwaitDone => "await_done",
        };
        Ok(CompiledKernel {
            entrypoint_name: name.into(),
            debug_name: None,
            source: ORDER_SOURCE.clone(),
            repr: Some(compiler.compile(nothing, options, mode, address)?),
            cube_dim: CubeDim::new_single(),
            debug_info: None,
        })
    }
}
