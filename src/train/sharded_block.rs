//! Marks of blocks: the modules whose parameters are gathered together.

use burn::module::{
    AutodiffModule, Content, Devices, HasAutodiffModule, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::tensor::backend::{AutodiffBackend, Backend};

use bonfire_train::gather::marks::{BEGIN, END, Run, gathers_at_use};

/// A module whose parameters are gathered as one operation before its forward pass and freed after it, in the training
/// steps of a [`FullyShardedParallel`](crate::FullyShardedParallel).
///
/// Mark the repeated layers of a model, so that no rank ever holds all of them:
///
/// ```
/// use bonfire::ShardedBlock;
/// use burn::backend::Flex;
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Tensor, backend::Backend};
///
/// #[derive(Module, Debug)]
/// struct Model<B: Backend> {
///     layers: Vec<ShardedBlock<Linear<B>>>,
/// }
///
/// impl<B: Backend> Model<B> {
///     fn forward(&self, input: Tensor<B, 2>) -> Tensor<B, 2> {
///         self.layers.iter().fold(input, |x, layer| layer.run(|linear| linear.forward(x)))
///     }
/// }
///
/// let linear = || LinearConfig::new(8, 8).init(&Default::default());
/// let model = Model::<Flex> { layers: (0..4).map(|_| ShardedBlock::new(linear())).collect() };
/// assert_eq!(model.forward(Tensor::ones([2, 8], &Default::default())).dims(), [2, 8]);
/// ```
///
/// Outside of such steps it is the module itself: it changes neither paths of parameters nor records, so that records
/// of a model with and without marks are interchangeable. A block may contain blocks; a parameter belongs to the
/// innermost one.
#[derive(Clone, Debug)]
pub struct ShardedBlock<M> {
    module: M,
    /// Whether the parameters are gathered at their first use: in the model of a step.
    gathers: bool,
}

impl<M: Clone> ShardedBlock<M> {
    /// Marks a module.
    pub fn new(module: M) -> Self {
        ShardedBlock { module, gathers: false }
    }

    /// Runs a part of the forward pass with the module. Its gathered parameters are freed afterwards: `pass` must not
    /// keep them or the module, and uses the module on the calling thread.
    pub fn run<R>(&self, pass: impl FnOnce(&M) -> R) -> R {
        if !self.gathers {
            return pass(&self.module);
        }
        // What is gathered at its first use in a clone is dropped with the clone.
        let module = self.module.clone();
        let run = Run::begin();
        let result = pass(&module);
        drop(module);
        drop(run);
        result
    }

    /// Removes the mark.
    pub fn into_inner(self) -> M {
        self.module
    }
}

impl<B: Backend, M: Module<B>> Module<B> for ShardedBlock<M> {
    type Record = M::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        ShardedBlock::new(self.module.fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        ShardedBlock::new(self.module.to_device(device))
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        visitor.enter_module("", BEGIN);
        visitor.exit_module("", BEGIN);
        self.module.visit(visitor);
        visitor.enter_module("", END);
        visitor.exit_module("", END);
    }

    fn map<P: ModuleMapper<B>>(self, mapper: &mut P) -> Self {
        mapper.enter_module("", BEGIN);
        mapper.exit_module("", BEGIN);
        let module = self.module.map(mapper);
        mapper.enter_module("", END);
        mapper.exit_module("", END);
        ShardedBlock { module, gathers: gathers_at_use() }
    }

    fn load_record(self, record: Self::Record) -> Self {
        ShardedBlock::new(self.module.load_record(record))
    }

    fn into_record(self) -> Self::Record {
        self.module.into_record()
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> AutodiffModule<B> for ShardedBlock<M> {
    type InnerModule = ShardedBlock<M::InnerModule>;

    fn valid(&self) -> Self::InnerModule {
        ShardedBlock::new(self.module.valid())
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        ShardedBlock::new(M::from_inner(module.module))
    }
}

impl<B: AutodiffBackend, M: HasAutodiffModule<B>> HasAutodiffModule<B> for ShardedBlock<M> {
    type TrainModule = ShardedBlock<M::TrainModule>;
}

impl<M: ModuleDisplay> ModuleDisplayDefault for ShardedBlock<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.module.content(content)
    }

    fn num_params(&self) -> usize {
        ModuleDisplayDefault::num_params(&self.module)
    }
}

impl<M: ModuleDisplay> ModuleDisplay for ShardedBlock<M> {}
