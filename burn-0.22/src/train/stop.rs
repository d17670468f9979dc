//! The end of a training that is asked to stop.

use super::DataParallel;

impl DataParallel {
    /// Whether the program should stop: some rank had been asked to before it ended its passes of the last step, or of
    /// one before. All ranks get the same answer after the same step, also those that skipped it. So they can save, and
    /// end:
    ///
    /// ```no_run
    /// # use bonfire::{Checkpoints, DataParallel, Error, Group, ShardedSampler, TrainingState};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::AdamConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # fn train(group: Group) -> Result<(), Error> {
    /// # let device = Device::flex().autodiff();
    /// # let (model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init(&device))?;
    /// # let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, ());
    /// # let mut checkpoints = Checkpoints::new(ddp.group(), "checkpoints")?;
    /// # let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
    /// for shard in sampler.epoch(state.epoch)?.after(state.samples) {
    ///     let batch = Tensor::<2>::ones([shard.len(), 2], &device); // the samples that `shard` lists
    ///     let grads = ddp.run(&state.model, [batch], |model, input| (model.forward(input).mean(), shard.len()))?;
    ///     state.step(grads, 16);
    ///     if ddp.should_stop() {
    ///         checkpoints.save(&state)?;
    ///         return Ok(());
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// What asks a rank is a signal to its process, [SIGTERM](crate::Builder::stop_signal) unless set otherwise, from
    /// the first call of this method on; before, the signal ends the process at once. It also does if no step ends
    /// within the [grace](crate::Builder::grace), or at a further signal. It costs no message: the ranks exchange a
    /// word with each step. Call it after each step, on all ranks. The steps of a
    /// [`ShardedOptimizer`](crate::ShardedOptimizer) count as those of its `DataParallel`. On a
    /// [mesh](crate::DeviceMesh) with further dimensions, ranks that train other models may get another answer.
    pub fn should_stop(&self) -> bool {
        self.replicas.steps.should_stop()
    }
}
