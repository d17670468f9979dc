//! Data-parallel training of burn models: every rank holds the same model and works on its part of each batch.
//!
//! [`DataParallel`] makes the ranks' models equal at the start and their gradients equal in every step, so the models
//! stay bit-identical. Gradients are exchanged while the backward pass still runs. [`ShardedSampler`] distributes the
//! batches over the ranks: together, `n` ranks see the same global batches as a single rank would, and train the same
//! model. [`ShardedOptimizer`] partitions the optimizer state over the ranks (ZeRO-1), [`FullyShardedParallel`]
//! parameters and gradients too (ZeRO-3). [`SyncBatchNorm`] normalises with the statistics of the global batch.
//! [`seeded`] gives the same initial weights on any number of ranks. [`TrainingState`] is all that a training carries
//! from step to step, for going on without lost ranks and for [`Checkpoints`], which any number of ranks can load. With
//! the feature `learner`, `DataParallelStrategy` trains with burn-train's `Learner` instead of a loop of your own.
//!
//! ```
//! use bonfire::{DataParallel, Group, ShardedSampler};
//! use burn::backend::{Autodiff, Flex};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{Optimizer, SgdConfig};
//! use burn::tensor::Tensor;
//!
//! type B = Autodiff<Flex>;
//!
//! fn train(group: Group) -> Result<Linear<B>, bonfire::Error> {
//!     let device = Default::default();
//!     let (mut model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
//!     let mut optimizer = SgdConfig::new().init();
//!     let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
//!     for epoch in 0..2 {
//!         for shard in sampler.epoch(epoch)? {
//!             let input = Tensor::<B, 2>::ones([shard.len(), 2], &device); // the samples that `shard` lists
//!             let gradients = ddp.run(&model, [input], |model, input| (model.forward(input).mean(), shard.len()))?;
//!             model = optimizer.step(0.1, model, gradients);
//!         }
//!     }
//!     Ok(model)
//! }
//!
//! let models = bonfire::launch(2, train)?;
//! assert_eq!(models[0].weight.to_data(), models[1].weight.to_data());
//! # Ok::<(), bonfire::launch::Failed>(())
//! ```

mod adapter;
mod batch_norm;
pub mod checkpoint;
#[cfg(feature = "dataset")]
mod data_loader;
mod data_parallel;
mod embedding;
mod fully_sharded;
#[cfg(feature = "learner")]
mod learner;
mod model;
mod norm;
mod parts;
mod pass;
mod record;
mod replicas;
mod resume;
mod seeded;
mod sharded;
mod sharded_block;
mod states;
mod stop;
mod training_state;
mod verify;
mod walk;

pub use self::batch_norm::{SyncBatchNorm, SyncBatchNormConfig};
pub use self::checkpoint::Checkpoints;
#[cfg(feature = "dataset")]
pub use self::data_loader::{ShardedDataLoader, ShardedDataLoaderBuilder};
pub use self::data_parallel::DataParallel;
pub use self::embedding::embedding;
pub use self::fully_sharded::{FullyShardedParallel, GatherCounts};
#[cfg(feature = "learner")]
pub use self::learner::{Averaged, DataParallelStrategy};
pub use self::parts::Parts;
pub use self::pass::{Fault, LastPass, Pass};
pub use self::record::InnerRecord;
pub use self::seeded::seeded;
pub use self::sharded::ShardedOptimizer;
pub use self::sharded_block::ShardedBlock;
pub use self::training_state::{AnyState, TrainingState};
pub use bonfire_train::agree::longest;
#[cfg(feature = "dataset")]
pub use bonfire_train::data::Batches;
pub use bonfire_train::step::PassWeight;
pub use bonfire_train::{DeviceMesh, Epoch, ShardedSampler, Sharding, compression};
