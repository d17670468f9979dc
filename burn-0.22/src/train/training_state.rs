//! Everything that a training carries from step to step.
//!
//! A rank that takes over only a part of it, such as model and optimizer without the scheduler, trains differently from
//! then on, and nothing fails. So it is one value, and checkpoints know no parts.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};

/// Everything that a training carries from step to step.
///
/// It is the same on all ranks after each step. [`Checkpoints`](crate::Checkpoints) save and load it. What is not in
/// here, each rank keeps as it is: let nothing that changes during the training stay outside, except what belongs to
/// one rank, such as its metrics.
///
/// ```
/// # use bonfire::{DataParallel, Group, ShardedSampler, TrainingState};
/// # use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
/// # use burn::nn::LinearConfig;
/// # use burn::optim::AdamConfig;
/// # use burn::tensor::{Device, Tensor};
/// # let device = Device::flex().autodiff();
/// # let group = Group::threads(1)?.remove(0);
/// let (model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init(&device))?;
/// let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.99).init().expect("a valid schedule");
/// let mut state = TrainingState::new(model, AdamConfig::new().init(), schedule, ());
/// let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
/// while state.epoch < 2 {
///     for shard in sampler.epoch(state.epoch)?.after(state.samples) {
///         let input = Tensor::<2>::ones([shard.len(), 2], &device);
///         let gradients = ddp.run(&state.model, [input], |model, input| (model.forward(input).mean(), shard.len()))?;
///         state.step(gradients, 16);
///     }
///     state.next_epoch();
/// }
/// # Ok::<(), bonfire::Error>(())
/// ```
#[derive(Clone)]
pub struct TrainingState<M, U = ()> {
    /// The model.
    pub model: M,
    /// The model's optimizer. It stays new if a [`ShardedOptimizer`](crate::ShardedOptimizer) trains the model.
    pub optimizer: ModuleOptimizer,
    /// The learning rates.
    pub scheduler: ModuleLrScheduler,
    /// The running average of the model (EMA), if the training keeps one: a model without autodiff, as
    /// [`valid`](Module::valid) returns it. `None` at first.
    pub average: Option<M>,
    /// The number of completed epochs.
    pub epoch: usize,
    /// The samples of this epoch that were used, by all ranks together: a position that does not depend on the size of
    /// batches. It may be more than there are, behind a last batch that is smaller.
    pub samples: usize,
    /// All else: whatever serde can serialise. `()` for nothing.
    pub user: U,
}

impl<M: Module, U> TrainingState<M, U> {
    /// Makes the state at the start of a training. `scheduler` is a learning rate, or one of burn's schedulers.
    pub fn new(model: M, optimizer: ModuleOptimizer, scheduler: impl Into<ModuleLrScheduler>, user: U) -> Self {
        TrainingState { model, optimizer, scheduler: scheduler.into(), average: None, epoch: 0, samples: 0, user }
    }

    /// Updates the model with the gradients that a step has returned, at the scheduler's next learning rates. `samples`
    /// is what all ranks together have used of the epoch in it: the size of a batch, of all its passes.
    pub fn step(&mut self, grads: GradientsParams, samples: usize) {
        let rate = self.scheduler.step();
        self.model = self.optimizer.step(rate, self.model.clone(), grads);
        self.samples += samples;
    }

    /// Counts an epoch, and begins the next one with its first batch.
    pub fn next_epoch(&mut self) {
        self.epoch += 1;
        self.samples = 0;
    }
}
