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
use super::kernel::ORDER;
use bonfire_core::internal::hash;

pub(super) type Server = <CudaRuntime as Runtime>::Server;

/// An entry of `kernels/order.cu`, as cubecl compiles and launches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Entry {
    TensorsReady,
    AwaitDone,
}

/// What a word was told so far: how often tensors are ready.
#[derive(Default)]
pub(super) struct Told {
    value: u64,
    /// The stream that told it last: the word only grows if each comes after the one before.
    last: Option<StreamId>,
}

impl Told {
    /// Has the word told that the tensors on these streams are ready, once what is on them so far is done; gives the
    /// value that it has from then on.
    pub fn tell(&mut self, server: &mut Server, word: u64, streams: &[StreamId], stream: StreamId) -> u64 {
        self.value += 1;
        // What is left over is a stream that is waited for anyway.
        let mut pairs: Vec<_> = streams.chunks(2).map(|pair| [pair[0], *pair.last().unwrap_or(&stream)]).collect();
        let at_once = pairs.pop().unwrap_or([stream; 2]);
        let before = pairs.into_iter().map(|pair| (pair, self.value - 1));
        for ([one, other], value) in before.chain([(at_once, self.value)]) {
            let order = Order { word, value, patience: 0, host: 0 };
            let tokens = [one, other, self.last.unwrap_or(stream)].map(|stream| token(server, stream)).to_vec();
            launch(server, Entry::TensorsReady, tokens, order, stream);
            self.last = Some(stream);
        }
        self.value
    }
}

/// Lets the stream wait for the word.
pub(super) fn await_done(server: &mut Server, order: Order, stream: StreamId) {
    let token = token(server, stream);
    launch(server, Entry::AwaitDone, vec![token], order, stream);
}

/// New memory of a stream. cubecl lets the stream that uses it wait for all that is on the stream it is from: it does
/// so where memory was bound after the last such wait, and a tensor that was written again in place looks older.
fn token(server: &mut Server, stream: StreamId) -> Binding {
    fresh(server, 8, stream)
}

/// Memory of a stream that nobody else knows.
pub(super) fn fresh(server: &mut Server, bytes: usize, stream: StreamId) -> Binding {
    let handle = Handle::new(stream, bytes as u64);
    // cubecl panics where it is to make room for nothing.
    server.initialize_memory(handle.memory.clone(), (bytes as u64).max(1), stream);
    handle.binding()
}

fn launch(server: &mut Server, entry: Entry, tokens: Vec<Binding>, order: Order, stream: StreamId) {
    let data = order.words();
    // All of it is a parameter, and nothing is copied to memory.
    let info = MetadataBindingInfo { dynamic_metadata_offset: data.len(), data };
    let arguments = KernelArguments::new().with_buffers(tokens).with_info(info);
    // SAFETY: one thread, which writes to the word that `order` names, and to no tensor.
    unsafe { server.launch(Box::new(entry), CubeCount::Static(1, 1, 1), arguments, ExecutionMode::Unchecked, stream) }
}

impl KernelMetadata for Entry {
    fn id(&self) -> KernelId {
        // cubecl may keep what it compiled from one run of a program to the next.
        static SOURCE: LazyLock<u64> = LazyLock::new(|| hash(ORDER.bytes()));
        KernelId::new::<Entry>().info((*self, *SOURCE))
    }

    fn address_type(&self) -> StorageType {
        AddressType::U64.unsigned_type()
    }
}

impl CubeTask<CudaCompiler> for Entry {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        // The server asks the representation how much shared memory the kernel takes: an empty one takes none.
        let nothing = KernelDefinition {
            buffers: Vec::new(),
            tensor_maps: Vec::new(),
            scalars: Vec::new(),
            cube_dim: CubeDim::new_single(),
            body: Scope::root(false),
            options: Default::default(),
        };
        let name = match self {
            Entry::TensorsReady => "tensors_ready",
            Entry::AwaitDone => "await_done",
        };
        Ok(CompiledKernel {
            entrypoint_name: name.into(),
            debug_name: None,
            source: ORDER.clone(),
            repr: Some(compiler.compile(nothing, options, mode, address)?),
            cube_dim: CubeDim::new_single(),
            debug_info: None,
        })
    }
}
