//! What the shared tests of data loaders need of burn 0.21. `burn-0.22/tests/common/loader_version.rs` has the same
//! names for burn 0.22.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use burn::data::dataloader::DataLoader;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;

use crate::burn_version::{Device, Training};

pub type Builder<I, O> = bonfire::ShardedDataLoaderBuilder<Training, I, O>;
pub type Loader<I, O> = bonfire::ShardedDataLoader<Training, I, O>;
pub type AnyLoader<O> = Arc<dyn DataLoader<Training, O>>;

/// A batcher that is a function.
pub struct Batching<F>(pub F);

impl<I, O, F: Fn(Vec<I>, &Device) -> O + Send + Sync> Batcher<Training, I, O> for Batching<F> {
    fn batch(&self, items: Vec<I>, device: &Device) -> O {
        self.0(items, device)
    }
}

/// A data set that is a function, with a length that may change.
pub struct Items<F>(pub Arc<AtomicUsize>, pub F);

impl<I, F: Fn(usize) -> Option<I> + Send + Sync> Dataset<I> for Items<F> {
    fn get(&self, index: usize) -> Option<I> {
        self.1(index)
    }

    fn len(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// What `Items` has no sample for is an error with this text.
pub const MISSING: &str = "has no sample";

/// Iterates as burn does. Returns the batches, the progress after each of them, and the text of an error.
pub fn iterate<O>(loader: &dyn DataLoader<Training, O>) -> (Vec<O>, Vec<[usize; 2]>, Option<String>) {
    let mut iterator = loader.iter();
    let (mut batches, mut progress) = (Vec::new(), Vec::new());
    loop {
        match catch_unwind(AssertUnwindSafe(|| iterator.next())) {
            Ok(Some(batch)) => batches.push(batch),
            Ok(None) => return (batches, progress, None),
            Err(panic) => return (batches, progress, panic.downcast_ref::<String>().cloned()),
        }
        let now = iterator.progress();
        progress.push([now.items_processed, now.items_total]);
    }
}
