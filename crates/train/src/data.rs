//! The samples of each rank, and the batches of them.

mod loader;
mod sampler;

pub use self::loader::{Batches, Loader, Make, Settings, at_epoch, for_rank};
pub use self::sampler::{Epoch, ShardedSampler, Tail};
