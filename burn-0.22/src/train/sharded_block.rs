//! Marks of blocks: the modules whose parameters are gathered together.

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor};
use burn::tensor::Device;

use super::walk::Recipes;
use bonfire_train::gather::marks::{BEGIN, END, Run, gathers_at_use};

/// A module whose parameters are gathered as one operation before its forward pass and freed after it, in the training
/// steps of a [`FullyShardedParallel`](crate::FullyShardedParallel).
///
/// Mark the repeated layers of a model, so that no rank ever holds all of them:
///
/// ```
/// use bonfire::ShardedBlock;
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
///
/// #[derive(Module, Debug)]
/// struct Model {
///     layers: Vec<ShardedBlock<Linear>>,
/// }
///
/// impl Model {
///     fn forward(&self, input: Tensor<2>) -> Tensor<2> {
///         self.layers.iter().fold(input, |x, layer| layer.run(|linear| linear.forward(x)))
///     }
/// }
///
/// let device = Device::flex();
/// let linear = || LinearConfig::new(8, 8).init(&device);
/// let model = Model { layers: (0..4).map(|_| ShardedBlock::new(linear())).collect() };
/// assert_eq!(model.forward(Tensor::ones([2, 8], &device)).dims(), [2, 8]);
/// ```
///
/// Outside of such steps it is the module itself: it changes neither paths of parameters nor records, so that records
/// of a model with and without marks are interchangeable. A block may contain blocks; a parameter belongs to the
/// innermost one.
#[derive(Clone, Debug)]
pub struct ShardedBlock<M> {
    module: M,
    /// In the model of a step, whose parameters are gathered at their first use.
    gathered: Option<Recipes>,
}

impl<M> ShardedBlock<M> {
    /// Marks a module.
    pub fn new(module: M) -> Self {
        ShardedBlock { module, gathered: None }
    }

    /// Removes the mark.
    pub fn into_inner(self) -> M {
        self.module
    }
}

impl<M: Module> ShardedBlock<M> {
    /// Runs a part of the forward pass with the module. Its gathered parameters are freed afterwards: `pass` must not
    /// keep them or the module, and uses the module on the calling thread.
    pub fn run<R>(&self, pass: impl FnOnce(&M) -> R) -> R {
        let Some(recipes) = &self.gathered else {
            return pass(&self.module);
        };
        // What is gathered at its first use is dropped with the module.
        let module = recipes.anew(self.module.clone());
        let run = Run::begin();
        let result = pass(&module);
        drop(module);
        drop(run);
        result
    }
}

impl<M: Module> Module for ShardedBlock<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        ShardedBlock::new(self.module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        ShardedBlock::new(self.module.to_device(device))
    }

    fn train(self) -> Self {
        ShardedBlock::new(self.module.train())
    }

    fn valid(&self) -> Self {
        ShardedBlock::new(self.module.valid())
    }

    fn materialize(self) -> Self {
        ShardedBlock::new(self.module.materialize())
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("", BEGIN);
        visitor.exit_module("", BEGIN);
        self.module.visit(visitor);
        visitor.enter_module("", END);
        visitor.exit_module("", END);
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        mapper.enter_module("", BEGIN);
        mapper.exit_module("", BEGIN);
        let module = self.module.map(mapper);
        mapper.enter_module("", END);
        mapper.exit_module("", END);
        let gathers = gathers_at_use();
        ShardedBlock { module, gathered: Recipes::of_mapper().filter(|_| gathers) }
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for ShardedBlock<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.module.content(content)
    }
}

impl<M: ModuleDisplay> ModuleDisplay for ShardedBlock<M> {}
