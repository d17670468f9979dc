//! A data loader of burn's for a rank of a group.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::{Dataset, transform::PartialDataset};
use burn::tensor::backend::Backend;

use bonfire_core::{Error, Group};
use bonfire_train::Tail;
use bonfire_train::data::{Batches, Loader, Make, Settings};
use bonfire_train::step::layers::fail;

/// Builds a [`ShardedDataLoader`], as burn's `DataLoaderBuilder` does a loader for one device.
pub struct ShardedDataLoaderBuilder<B: Backend, I, O> {
    group: Group,
    batcher: Arc<dyn Batcher<B, I, O>>,
    settings: Settings,
    device: B::Device,
}

impl<B, I, O> ShardedDataLoaderBuilder<B, I, O>
where
    B: Backend,
    I: Clone + Send + Sync + 'static,
    O: Send + 'static,
{
    /// Begins to build the loader of this rank of `group`, which makes batches with `batcher`. It has batches of one
    /// sample, no workers, and the order of the data set, until other methods say otherwise.
    pub fn new(group: &Group, batcher: impl Batcher<B, I, O> + 'static) -> Self {
        let settings = Settings { batch: 1, workers: 0, shuffle: None, tail: Tail::Keep };
        ShardedDataLoaderBuilder {
            group: group.clone(),
            batcher: Arc::new(batcher),
            settings,
            device: B::Device::default(),
        }
    }

    /// Sets the number of samples in a batch of *all ranks together*. Each rank gets its part of each batch.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.settings.batch = batch_size;
        self
    }

    /// Shuffles the samples by this seed, differently in each epoch and the same on all ranks.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.settings.shuffle = Some(seed);
        self
    }

    /// Sets the number of threads that make batches ahead: at most two each. With 0, the thread that iterates makes
    /// them. The batches and their order are the same.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.settings.workers = num_workers;
        self
    }

    /// Leaves out the samples that do not fill a batch. Replaces an earlier [`pad`](Self::pad).
    pub fn drop_last(mut self) -> Self {
        self.settings.tail = Tail::Drop;
        self
    }

    /// Fills the last batch with samples from the start of the epoch. Replaces an earlier
    /// [`drop_last`](Self::drop_last).
    pub fn pad(mut self) -> Self {
        self.settings.tail = Tail::Pad;
        self
    }

    /// Sets the device of the batches. Default: the backend's default device.
    pub fn set_device(mut self, device: B::Device) -> Self {
        self.device = device;
        self
    }

    /// Builds the loader, over the whole data set. It does not communicate: [`epoch`](ShardedDataLoader::epoch) finds
    /// what is wrong with the settings or the data set, on all ranks.
    pub fn build<D>(self, dataset: D) -> Arc<ShardedDataLoader<B, I, O>>
    where
        D: Dataset<I> + 'static,
    {
        let loader = Loader::new(&self.group, dataset.len(), self.settings);
        let (batcher, device) = (self.batcher, self.device);
        Arc::new(ShardedDataLoader { loader, dataset: Arc::new(dataset), batcher, device })
    }
}

/// A [`DataLoader`] of a rank's part of each batch, in the order of a [`ShardedSampler`](crate::ShardedSampler).
///
/// The batches of all ranks together are the same on any number of ranks and with any number of workers, so ranks that
/// use it train what one rank would. [`ShardedDataLoaderBuilder`] makes one:
///
/// ```
/// use bonfire::{Group, ShardedDataLoaderBuilder};
/// use burn::backend::Flex;
/// use burn::data::dataloader::batcher::Batcher;
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::{Device, Tensor};
///
/// #[derive(Clone)]
/// struct Rows;
///
/// impl Batcher<Flex, f32, Tensor<Flex, 1>> for Rows {
///     fn batch(&self, items: Vec<f32>, device: &Device<Flex>) -> Tensor<Flex, 1> {
///         Tensor::from_floats(&items[..], device)
///     }
/// }
///
/// # let group = Group::threads(1)?.remove(0);
/// let dataset = InMemDataset::new((0..100u8).map(f32::from).collect());
/// let loader = ShardedDataLoaderBuilder::new(&group, Rows).batch_size(16).shuffle(7).num_workers(2).build(dataset);
/// for epoch in 0..2 {
///     for batch in loader.epoch(epoch)? {
///         let batch = batch?;
/// #       assert!([16, 4].contains(&batch.dims()[0]));
///     }
/// }
/// // As burn's loader, without its trait.
/// assert_eq!(loader.iter().count(), loader.num_batches());
/// assert_eq!(loader.num_items(), 100);
/// # Ok::<(), bonfire::Error>(())
/// ```
///
/// # As burn's `DataLoader`
/// Each `iter()` is the next epoch, and all ranks must call it. The iterator of burn 0.21 has no place for an error: it
/// panics with the text of the one that [`epoch`](Self::epoch) and its iterator would return. `num_items` counts this
/// rank's samples of an epoch. Loaders that `to_device` makes count epochs together with this one; one that `slice`
/// makes shards the batches of its slice.
///
/// `DataParallelStrategy` does not slice it, and each of its ranks gets the batches of its rank.
///
/// A loader belongs to its group: after `shrink`, build one for the new group.
pub struct ShardedDataLoader<B: Backend, I, O> {
    loader: Loader,
    dataset: Arc<dyn Dataset<I>>,
    batcher: Arc<dyn Batcher<B, I, O>>,
    device: B::Device,
}

impl<B, I, O> ShardedDataLoader<B, I, O>
where
    B: Backend,
    I: Clone + Send + Sync + 'static,
    O: Send + 'static,
{
    /// Begins an epoch: returns an iterator over this rank's batches. All ranks must call it: it compares what they
    /// load. [`Batches::after`] continues in the middle of an epoch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if a rank's data set has no samples, or another number of them than when
    /// the loader was built; if a batch has fewer samples than there are ranks (if only the last one has, use
    /// [`drop_last`](ShardedDataLoaderBuilder::drop_last) or [`pad`](ShardedDataLoaderBuilder::pad)); or if ranks
    /// differ in the data set's length, the settings or the epoch. The group remains usable. Otherwise those of
    /// [`Group::all_gather`].
    #[track_caller]
    pub fn epoch(&self, epoch: usize) -> Result<Batches<O>, Error> {
        self.loader.epoch(epoch, self.dataset.len(), self.make())
    }

    /// Begins the next epoch, as burn's [`DataLoader::iter`]. All ranks must call it. The iterator panics with the text
    /// of the error that [`epoch`](Self::epoch) or its iterator would return.
    #[track_caller]
    pub fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(Iter(self.loader.next_epoch(self.dataset.len(), self.make())))
    }

    /// Returns the number of this rank's samples in an epoch, as burn's [`DataLoader::num_items`].
    pub fn num_items(&self) -> usize {
        self.loader.samples()
    }

    /// Returns the number of batches in an epoch, the same on all ranks.
    pub fn num_batches(&self) -> usize {
        self.loader.batches()
    }

    fn make(&self) -> Make<O> {
        let (loader, dataset) = (self.loader.clone(), self.dataset.clone());
        let (batcher, device) = (self.batcher.clone(), self.device.clone());
        Arc::new(move |samples| {
            let missing = |index| loader.wrong(&format!("has no sample {index}"));
            let items = samples.iter().map(|&index| dataset.get(index).ok_or_else(|| missing(index)));
            Ok(batcher.batch(items.collect::<Result<_, _>>()?, &device))
        })
    }

    fn with(&self, loader: Loader, dataset: Arc<dyn Dataset<I>>, device: B::Device) -> Arc<dyn DataLoader<B, O>> {
        Arc::new(ShardedDataLoader { loader, dataset, batcher: self.batcher.clone(), device })
    }
}

impl<B, I, O> DataLoader<B, O> for ShardedDataLoader<B, I, O>
where
    B: Backend,
    I: Clone + Send + Sync + 'static,
    O: Send + 'static,
{
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        self.iter()
    }

    fn num_items(&self) -> usize {
        self.num_items()
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, O>> {
        self.with(self.loader.clone(), self.dataset.clone(), device.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, O>> {
        if let Some(loader) = self.loader.for_strategy() {
            return self.with(loader, self.dataset.clone(), self.device.clone());
        }
        let end = end.min(self.dataset.len());
        let part = PartialDataset::new(self.dataset.clone(), start.min(end), end);
        self.with(self.loader.part(part.len()), Arc::new(part), self.device.clone())
    }
}

/// burn's iterator, which has no place for an error.
struct Iter<O>(Batches<O>);

impl<O: Send + 'static> Iterator for Iter<O> {
    type Item = O;

    fn next(&mut self) -> Option<O> {
        self.0.next().map(|batch| batch.unwrap_or_else(|error| fail(error)))
    }
}

impl<O: Send + 'static> DataLoaderIterator<O> for Iter<O> {
    fn progress(&self) -> Progress {
        let [processed, total] = self.0.progress();
        Progress::new(processed, total)
    }
}
