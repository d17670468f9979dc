//! Distributed training.
//!
//! ```
//! use bonfire::{DataParallel, Group, ShardedSampler};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamConfig;
//! use burn::tensor::{Device, Tensor};
//!
//! fn train(group: Group) -> Result<Linear, bonfire::Error> {
//!     let device = Device::flex().autodiff();
//!     let (mut model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init(&device))?;
//!     let mut optimizer = AdamConfig::new().init();
//!     let sampler = ShardedSampler::new(ddp.group(), 100, 16)?.seed(7).drop_last();
//!     for shard in sampler.epoch(0)? {
//!         let batch = Tensor::<2>::ones([shard.len(), 2], &device);
//!         let gradients = ddp.run(&model, [batch], |model, input| (model.forward(input).mean(), shard.len()))?;
//!         model = optimizer.step(1e-3, model, gradients);
//!     }
//!     Ok(model)
//! }
//!
//! bonfire::launch(2, train)?;
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
mod replicas;
mod resume;
mod seeded;
mod sharded;
mod sharded_block;
mod slices;
mod stop;
mod training_state;
mod verify;
mod walk;

pub use bonfire_train::agree::longest;
pub use bonfire_train::compression;
#[cfg(feature = "dataset")]
pub use bonfire_train::data::Batches;
pub use bonfire_train::step::PassWeight;
pub use bonfire_train::{DeviceMesh, Epoch, ShardedSampler, Sharding};

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
pub use self::seeded::seeded;
pub use self::sharded::ShardedOptimizer;
pub use self::sharded_block::ShardedBlock;
pub use self::training_state::TrainingState;
