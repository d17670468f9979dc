//! What the shared tests of data loaders need of burn 0.22. `tests/common/loader_version.rs` of the root package has
//! the same names for burn 0.21, and says what they are for.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bonfire::Error;
pub use burn::data::dataloader::DataLoader;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::Device;

pub use bonfire::{ShardedDataLoader as Loader, ShardedDataLoaderBuilder as Builder};

pub type AnyLoader<O> = Arc<dyn DataLoader<O>>;

pub struct Batching<F>(pub F);

impl<I, O, F: Fn(Vec<I>, &Device) -> O + Send + Sync> Batcher<I, O> for Batching<F> {
    fn batch(&self, items: Vec<I>, device: &Device) -> O {
        self.0(items, device)
    }
}

pub struct Items<F>(pub Arc<AtomicUsize>, pub F);

impl<I, F: Fn(usize) -> Option<I> + Send + Sync> Dataset<I> for Items<F> {
    fn get(&self, index: usize) -> Result<I, DatasetError> {
        self.1(index).ok_or_else(|| DatasetError::new(io::Error::other("there is no such file")))
    }

    fn len(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

pub const MISSING: &str = "there is no such file";

/// The error is Bonfire's own, and has the same text.
pub fn iterate<O>(loader: &dyn DataLoader<O>) -> (Vec<O>, Vec<[usize; 2]>, Option<String>) {
    let mut iterator = loader.iter();
    let (mut batches, mut progress) = (Vec::new(), Vec::new());
    while let Some(batch) = iterator.next() {
        match batch {
            Ok(batch) => batches.push(batch),
            Err(error) => {
                let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<Error>());
                assert_eq!(source.map(Error::to_string), Some(error.to_string()));
                return (batches, progress, Some(error.to_string()));
            }
        }
        let now = iterator.progress();
        progress.push([now.items_processed, now.items_total]);
    }
    (batches, progress, None)
}
