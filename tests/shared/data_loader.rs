//! The data loader: the sampler's batches with any number of workers, on any number of ranks.

mod errors;
mod training;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;

use bonfire::{Group, ShardedSampler};
use bonfire_testing::ranks;

use crate::burn_version::Device;
use crate::loader_version::*;

type Batch = Vec<usize>;

/// How the samples that do not fill a batch are handled, of a sampler and of a loader.
#[derive(Clone, Copy)]
enum Tail {
    Keep,
    Pad,
    Drop,
}

/// What the ranks load.
#[derive(Clone, Copy)]
struct Case {
    len: usize,
    batch: usize,
    /// The seed of a shuffle.
    seed: Option<u64>,
    tail: Tail,
    workers: usize,
}

impl Case {
    /// A loader of numbers. Batches take different times, so that workers do not end in the order of the batches.
    fn loader(self, group: &Group) -> Arc<Loader<usize, Batch>> {
        self.loader_of(group, numbers(self.len, Some as Get))
    }

    fn loader_of(self, group: &Group, items: Items<Get>) -> Arc<Loader<usize, Batch>> {
        let builder = builder(group, |items: Batch| {
            (0..items.iter().sum::<usize>() % 7 * 20).for_each(|_| thread::yield_now());
            items
        });
        let builder = builder.batch_size(self.batch).num_workers(self.workers);
        let builder = self.seed.into_iter().fold(builder, Builder::shuffle);
        let builder = match self.tail {
            Tail::Keep => builder,
            Tail::Pad => builder.pad(),
            Tail::Drop => builder.drop_last(),
        };
        builder.build(items)
    }

    /// The batches of an epoch after its first samples, as the sampler gives them to one rank.
    fn expected(self, epoch: usize, after: usize) -> Vec<Batch> {
        let sampler = ShardedSampler::new(&Group::threads(1).unwrap()[0], self.len, self.batch).unwrap();
        let sampler = match self.seed {
            Some(seed) => sampler.seed(seed),
            None => sampler.sequential(),
        };
        let sampler = match self.tail {
            Tail::Keep => sampler,
            Tail::Pad => sampler.pad(),
            Tail::Drop => sampler.drop_last(),
        };
        sampler.epoch(epoch).unwrap().after(after).collect()
    }
}

type Get = fn(usize) -> Option<usize>;

fn numbers<F>(len: usize, get: F) -> Items<F> {
    Items(Arc::new(AtomicUsize::new(len)), get)
}

fn builder<O: Send + 'static>(group: &Group, batch: impl Fn(Batch) -> O + Send + Sync + 'static) -> Builder<usize, O> {
    Builder::new(group, Batching(move |items: Batch, _: &Device| batch(items)))
}

/// Puts the ranks' parts of each batch together. All ranks must have equally many.
fn together(parts: Vec<Vec<Batch>>) -> Vec<Batch> {
    assert!(parts.iter().all(|part| part.len() == parts[0].len()), "the ranks have different numbers of batches");
    (0..parts[0].len()).map(|batch| parts.iter().flat_map(|part| part[batch].clone()).collect()).collect()
}

#[test]
fn ranks_together_load_the_samplers_batches_in_each_epoch() {
    for n in 1..=4 {
        for (len, tail) in [(107, Tail::Keep), (103, Tail::Pad), (103, Tail::Drop), (100, Tail::Keep)] {
            for (seed, workers) in [(Some(5), 0), (Some(5), 4), (None, 1), (None, 4)] {
                let case = Case { len, batch: 10, seed, tail, workers };
                let loaded = ranks(n, |group| {
                    let loader = case.loader(&group);
                    let counted = loader.num_batches();
                    // The epochs one after the other, as burn iterates; then one by its number; then the next.
                    let mut epochs: Vec<_> = (0..3)
                        .map(|_| {
                            let (batches, progress, error) = iterate(&*loader);
                            assert_eq!((error, batches.len()), (None, counted));
                            let sizes = batches.iter().scan(0, |sum, batch| {
                                *sum += batch.len();
                                Some([*sum, loader.num_items()])
                            });
                            assert_eq!(progress, sizes.collect::<Vec<_>>());
                            assert_eq!(progress.last(), Some(&[loader.num_items(); 2]));
                            batches
                        })
                        .collect();
                    epochs.push(loader.epoch(7).unwrap().map(Result::unwrap).collect());
                    epochs.push(iterate(&*loader).0);
                    epochs
                });
                for (at, epoch) in [0, 1, 2, 7, 8].into_iter().enumerate() {
                    let parts = loaded.iter().map(|epochs| epochs[at].clone()).collect();
                    assert_eq!(together(parts), case.expected(epoch, 0), "{n} ranks, {len} samples, {workers} workers");
                }
            }
        }
    }
}

#[test]
fn a_training_resumed_in_any_epoch_and_at_any_batch_goes_on_with_the_samplers_batches() {
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for _ in 0..50 {
        let (len, seed, epoch) = (60 + random(60), Some(random(1000) as u64), random(4));
        let [ranks_before, ranks_after] = [1 + random(4), 1 + random(4)];
        let tail = [Tail::Pad, Tail::Drop][random(2)];
        let [before, after] =
            [4 + random(12), 4 + random(12)].map(|batch| Case { len, batch, seed, tail, workers: [0, 3][random(2)] });
        let made = random(len / before.batch);
        let first = ranks(ranks_before, |group| {
            let batches = before.loader(&group).epoch(epoch).unwrap().take(made);
            batches.map(Result::unwrap).collect::<Vec<_>>()
        });
        assert_eq!(together(first), before.expected(epoch, 0)[..made]);
        let samples = made * before.batch;
        let rest = ranks(ranks_after, |group| {
            let loader = after.loader(&group);
            let mut batches = loader.epoch(epoch).unwrap().after(samples);
            let loaded = batches.by_ref().map(Result::unwrap).collect::<Vec<_>>();
            let count: usize = loaded.iter().map(Vec::len).sum();
            assert_eq!(batches.progress(), [count, count]);
            (loaded, iterate(&*loader).0)
        });
        let (rest, next): (Vec<_>, Vec<_>) = rest.into_iter().unzip();
        assert_eq!(together(rest), after.expected(epoch, samples), "{len} samples, {made} batches of {}", before.batch);
        assert_eq!(together(next), after.expected(epoch + 1, 0));
    }
}

#[test]
fn loaders_of_other_devices_count_epochs_together_and_slices_by_themselves() {
    let case = Case { len: 40, batch: 8, seed: Some(3), tail: Tail::Keep, workers: 2 };
    let loaded = ranks(2, |group| {
        let loader = case.loader(&group);
        let moved: AnyLoader<Batch> = loader.to_device(&Device::default());
        let slice = loader.slice(10, 26);
        let nothing = loader.slice(30, 10);
        assert_eq!([loader.num_items(), moved.num_items(), slice.num_items(), nothing.num_items()], [20, 20, 8, 0]);
        assert!(iterate(&*nothing).2.unwrap().contains("has no samples"));
        [iterate(&*loader), iterate(&*moved), iterate(&*slice), iterate(&*loader)].map(|(batches, ..)| batches)
    });
    let at = |place: usize| together(loaded.iter().map(|epochs| epochs[place].clone()).collect());
    assert_eq!([at(0), at(1), at(3)], [0, 1, 2].map(|epoch| case.expected(epoch, 0)));
    let sliced = Case { len: 16, ..case }.expected(0, 0);
    assert_eq!(at(2), sliced.iter().map(|batch| batch.iter().map(|i| i + 10).collect()).collect::<Vec<Batch>>());
}

#[test]
fn an_iterator_that_is_dropped_in_the_middle_leaves_no_thread() {
    let group = Group::threads(1).unwrap().remove(0);
    for workers in [0, 1, 4] {
        // The batcher is the loader's and its workers'.
        let batcher = Arc::new(());
        let own = batcher.clone();
        let builder = builder(&group, move |items| (items, own.clone())).batch_size(2).num_workers(workers);
        let loader = builder.build(numbers(1000, Some));
        for batches in [0, 1, 5] {
            let mut iterator = loader.epoch(0).unwrap();
            assert!((0..batches).all(|batch| iterator.next().unwrap().unwrap().0 == [2 * batch, 2 * batch + 1]));
        }
        drop(loader);
        assert_eq!(Arc::strong_count(&batcher), 1);
    }
}
