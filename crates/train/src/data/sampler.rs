//! Distribution of a data set's samples over the ranks.

use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};

use crate::agree::all_gather_values;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group, partition};

/// A sampler that distributes the samples of a data set over the ranks, in shuffled batches.
///
/// Batches are global: their sizes and samples depend on the seed and the epoch, but not on the world size. Each rank
/// gets its [`partition`](bonfire_core::partition()) of a batch, its *shard*: 17, 17 and 16 samples of a batch of 50 on
/// 3 ranks. All ranks make the same number of steps. If a batch has fewer samples than there are ranks, the last ranks
/// get an *empty* shard. They still take part in the step, with no samples:
///
/// ```
/// use bonfire_core::Group;
/// use bonfire_train::ShardedSampler;
///
/// # let group = Group::threads(1)?.remove(0);
/// let sampler = ShardedSampler::new(&group, 10, 4)?.seed(7);
/// for shard in sampler.epoch(0)? {
///     // This rank's samples of a batch: `shard.len()` may be 0.
/// # assert!(shard.len() == 4 || shard.len() == 2);
/// }
/// # Ok::<(), bonfire_core::Error>(())
/// ```
///
/// This works if the model's layers do not communicate. If they do, as batch normalisation over all ranks does, every
/// rank must run the model in every step, and many layers cannot run on a batch without samples. Use [`pad`](Self::pad)
/// or [`drop_last`](Self::drop_last), with at least as many samples in a batch as there are ranks. Then no shard is
/// empty.
///
/// The order of samples is the same on every platform and in every version of Bonfire. So a position in an epoch is a
/// number of samples, and a training goes on from it with batches of another size, and on any number of ranks.
#[derive(Clone, Debug)]
pub struct ShardedSampler {
    group: Group,
    len: usize,
    batch: usize,
    order: Order,
    tail: Tail,
}

/// The order of an epoch's samples.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// That of the data set.
    Sequential,
    /// Shuffled, by this seed and the epoch.
    Shuffled(u64),
}

/// How the samples that do not fill a batch are handled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tail {
    /// They are a smaller batch.
    Keep,
    /// The first samples of the epoch fill their batch.
    Pad,
    /// They are left out.
    Drop,
}

impl ShardedSampler {
    /// Makes a sampler for this rank of `group`, over a data set of `len` samples in global batches of `batch` samples.
    /// All ranks use the same settings: [`epoch`](Self::epoch) compares them. If `batch` does not divide `len`, the
    /// last batch is smaller, unless [`pad`](Self::pad) or [`drop_last`](Self::drop_last) is used.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `batch` is 0.
    pub fn new(group: &Group, len: usize, batch: usize) -> Result<ShardedSampler, Error> {
        if batch == 0 {
            return Err(Error::argument("sampler", "a batch needs at least one sample"));
        }
        Ok(ShardedSampler::of_batches(group, len, batch))
    }

    /// As [`new`](Self::new), where `batch` is not 0.
    pub(crate) fn of_batches(group: &Group, len: usize, batch: usize) -> ShardedSampler {
        ShardedSampler { group: group.clone(), len, batch, order: Order::Shuffled(0), tail: Tail::Keep }
    }

    /// Sets the seed of the shuffle. Default: 0. Replaces an earlier [`sequential`](Self::sequential).
    pub fn seed(mut self, seed: u64) -> Self {
        self.order = Order::Shuffled(seed);
        self
    }

    /// Takes the samples in the order of the data set, the same in each epoch, as for validation.
    pub fn sequential(mut self) -> Self {
        self.order = Order::Sequential;
        self
    }

    /// Fills the last batch of an epoch with samples from the start of the epoch, which then occur more than once.
    /// Replaces an earlier [`drop_last`](Self::drop_last).
    pub fn pad(self) -> Self {
        self.tail(Tail::Pad)
    }

    /// Drops the samples that do not fill a batch. Their selection depends on the epoch. Replaces an earlier
    /// [`pad`](Self::pad).
    pub fn drop_last(self) -> Self {
        self.tail(Tail::Drop)
    }

    /// Returns the number of batches in an epoch: the number of training steps, on every rank.
    pub fn batches(&self) -> usize {
        let (whole, rest) = self.batches_after(0);
        whole + usize::from(rest > 0)
    }

    /// Returns how many batches are whole behind the first `begun` samples of an epoch, and the samples of a last one
    /// that is smaller; 0 without one.
    pub(crate) fn batches_after(&self, begun: usize) -> (usize, usize) {
        let left = self.len.saturating_sub(begun);
        match self.tail {
            Tail::Keep => (left / self.batch, left % self.batch),
            Tail::Pad => (left.div_ceil(self.batch), 0),
            Tail::Drop => (left / self.batch, 0),
        }
    }

    /// Returns the number of this rank's samples behind the first `begun` ones of an epoch, which are of all ranks.
    pub(crate) fn own_after(&self, begun: usize) -> usize {
        let (whole, rest) = self.batches_after(begun);
        let own = |batch| partition(batch, self.group.world_size(), self.group.rank()).len();
        whole * own(self.batch) + own(rest)
    }

    /// Returns the number of samples in the data set.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the group whose ranks get the samples.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Sets what happens to the samples that do not fill a batch.
    pub(crate) fn tail(mut self, tail: Tail) -> Self {
        self.tail = tail;
        self
    }

    /// Returns an iterator over this rank's shards of the batches of epoch number `epoch`. A shard is a list of sample
    /// indices in `0..len`. A shuffled order differs between epochs. All ranks must call it: it compares what they
    /// sample.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if they differ in the number of samples, the size of batches, the order
    /// or the seed, [`pad`](Self::pad) or [`drop_last`](Self::drop_last), or the epoch: it names two ranks and what
    /// each has. The group remains usable. Otherwise those of [`Group::all_gather`].
    #[track_caller]
    pub fn epoch(&self, epoch: usize) -> Result<Epoch, Error> {
        let _call = self.group.enter("ShardedSampler::epoch");
        let (shuffled, seed) = match self.order {
            Order::Sequential => (0, 0),
            Order::Shuffled(seed) => (1, seed),
        };
        let own = [self.len as u64, self.batch as u64, shuffled, seed, self.tail as u64, epoch as u64];
        let all = if self.group.world_size() > 1 { all_gather_values(&self.group, own)? } else { Vec::new() };
        match all.iter().position(|other| *other != all[0]) {
            Some(rank) => Err(difference(&all[0], rank, &all[rank])),
            None => Ok(self.shards(epoch)),
        }
    }

    fn shards(&self, epoch: usize) -> Epoch {
        let order = match self.order {
            Order::Sequential => (0..self.len).collect(),
            Order::Shuffled(seed) => shuffled(self.len, seed, epoch as u64),
        };
        Epoch { sampler: self.clone(), order, next: 0 }
    }
}

/// Says in what a rank's sampler differs from rank 0's. These are the words that [`ShardedSampler::epoch`] compares.
fn difference(first: &[u64; 6], rank: usize, other: &[u64; 6]) -> Error {
    let texts = |words: &[u64; 6]| {
        let [len, batch, shuffled, seed, tail, epoch] = words;
        let order = if *shuffled == 1 { "a shuffled" } else { "the data set's" };
        let rest = ["kept", "padded", "dropped"][*tail as usize % 3];
        [
            format!("{len} samples"),
            format!("batches of {batch}"),
            format!("{order} order"),
            format!("the seed {seed}"),
            format!("a last batch that is {rest}"),
            format!("epoch {epoch}"),
        ]
    };
    let [first, other] = [first, other].map(texts);
    let differs = first.iter().zip(&other).find(|(first, other)| first != other);
    let (first, other) = differs.unwrap_or((&first[0], &other[0]));
    let reason = format!(
        "rank 0's sampler has {first}, and rank {rank}'s {other}; make the same sampler on all ranks, of the whole \
         data set, and begin the same epoch"
    );
    Error::argument("sampler", reason)
}

/// An iterator over a rank's shards of an epoch, made by [`ShardedSampler::epoch`].
#[derive(Clone, Debug)]
pub struct Epoch {
    sampler: ShardedSampler,
    order: Vec<usize>,
    /// The samples before the next batch.
    next: usize,
}

impl Epoch {
    /// Leaves out the first samples of the epoch, which all ranks together have used. The batches behind them need not
    /// begin where they would without this: so a training goes on with batches of another size.
    pub fn after(mut self, samples: usize) -> Self {
        self.next = samples;
        self
    }

    /// Returns the number of this rank's samples that are left.
    pub(crate) fn own_samples(&self) -> usize {
        self.sampler.own_after(self.next)
    }

    /// Returns the samples of all ranks in a last batch that is smaller than the others; 0 without one.
    pub(crate) fn rest(&self) -> usize {
        self.sampler.batches_after(self.next).1
    }
}

impl Iterator for Epoch {
    type Item = Vec<usize>;

    fn next(&mut self) -> Option<Vec<usize>> {
        let group = &self.sampler.group;
        let batch = match self.sampler.batches_after(self.next) {
            (0, 0) => return None,
            (0, rest) => rest,
            _ => self.sampler.batch,
        };
        let own = partition(batch, group.world_size(), group.rank());
        // Behind the last sample the first ones pad the batch.
        let shard = own.map(|i| self.order[(self.next + i) % self.order.len()]).collect();
        self.next += batch;
        Some(shard)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let (whole, rest) = self.sampler.batches_after(self.next);
        let batches = whole + usize::from(rest > 0);
        (batches, Some(batches))
    }
}

impl ExactSizeIterator for Epoch {}

/// Returns `0..len`, shuffled by seed and epoch. The shuffle is implemented here instead of taken from a library,
/// because the order must never change: a resumed run must see the same one.
fn shuffled(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        // Uniform up to one part in 2^64 / len.
        let chosen = (u128::from(random.next_u64()) * (last as u128 + 1)) >> 64;
        order.swap(last, chosen as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samplers(ranks: usize, len: usize, batch: usize, seed: u64) -> Vec<ShardedSampler> {
        let groups = Group::threads(ranks).unwrap();
        groups.iter().map(|group| ShardedSampler::new(group, len, batch).unwrap().seed(seed)).collect()
    }

    /// The global batches of an epoch, concatenated from all ranks' shards.
    fn batches(samplers: &[ShardedSampler], epoch: usize) -> Vec<Vec<usize>> {
        let mut epochs: Vec<_> = samplers.iter().map(|sampler| sampler.shards(epoch)).collect();
        let steps: Vec<_> = epochs.iter().map(ExactSizeIterator::len).collect();
        assert!(steps.iter().all(|&n| n == samplers[0].batches()), "{steps:?}");
        let batches = (0..steps[0]).map(|_| epochs.iter_mut().flat_map(|epoch| epoch.next().unwrap()).collect());
        let batches = batches.collect();
        assert!(epochs.iter_mut().all(|epoch| epoch.next().is_none()));
        batches
    }

    proptest! {
        #[test]
        fn ranks_together_see_the_batches_of_one_rank(
            ranks in 1usize..9, len in 0usize..300, batch in 1usize..60, seed: u64, epoch in 0usize..5,
        ) {
            for tail in [|s: ShardedSampler| s, ShardedSampler::pad, ShardedSampler::drop_last] {
                let many: Vec<_> = samplers(ranks, len, batch, seed).into_iter().map(tail).collect();
                let one: Vec<_> = samplers(1, len, batch, seed).into_iter().map(tail).collect();
                prop_assert_eq!(batches(&many, epoch), batches(&one, epoch));
            }
        }

        #[test]
        fn every_sample_occurs_once_and_the_tail_is_kept_padded_or_dropped(
            len in 0usize..300, batch in 1usize..60, seed: u64,
        ) {
            let sampler = samplers(1, len, batch, seed).remove(0);
            let kept = sampler.shards(0).flatten().collect::<Vec<_>>();
            let mut sorted = kept.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..len).collect::<Vec<_>>());

            let dropped = sampler.clone().drop_last().shards(0).collect::<Vec<_>>();
            prop_assert!(dropped.iter().all(|shard| shard.len() == batch));
            prop_assert_eq!(&dropped.concat()[..], &kept[..len - len % batch]);

            let padded = sampler.pad().shards(0).collect::<Vec<_>>();
            prop_assert!(padded.iter().all(|shard| shard.len() == batch));
            prop_assert!(padded.concat().iter().zip(kept.iter().cycle()).all(|(a, b)| a == b));
            prop_assert_eq!(padded.len(), len.div_ceil(batch));
        }
    }

    proptest! {
        #[test]
        fn no_sample_is_used_twice_or_never_if_a_training_goes_on_with_other_ranks_and_batches(
            len in 1usize..300, batches in [1usize..60, 1usize..60], ranks in [1usize..5, 1usize..5], made in 0usize..9,
        ) {
            let [first, then] = [0, 1].map(|part| samplers(ranks[part], len, batches[part], 3));
            let mut used = Vec::new();
            for _ in 0..made.min(first[0].batches()) {
                let batch = used.len() / batches[0];
                used.extend(first.iter().flat_map(|sampler| sampler.shards(0).nth(batch).unwrap()));
            }
            let rest: Vec<_> = then.iter().map(|sampler| sampler.shards(0).after(used.len())).collect();
            prop_assert_eq!(rest[0].len(), (len - used.len()).div_ceil(batches[1]));
            used.extend(rest.into_iter().flatten().flatten());
            used.sort_unstable();
            prop_assert_eq!(used, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn samplers_that_differ_are_an_error_on_all_ranks() {
        type Make = fn(&Group) -> Result<ShardedSampler, Error>;
        let cases: [(Make, usize, &str); 6] = [
            (|group| ShardedSampler::new(group, 100 - group.rank(), 10), 0, "100 samples, and rank 1's 99 samples"),
            (
                |group| ShardedSampler::new(group, 100, 10 + group.rank() / 2),
                0,
                "batches of 10, and rank 2's batches of 11",
            ),
            (
                |group| {
                    let sampler = ShardedSampler::new(group, 9, 2)?;
                    Ok(if group.rank() == 1 { sampler.sequential() } else { sampler })
                },
                0,
                "a shuffled order, and rank 1's the data set's order",
            ),
            (
                |group| Ok(ShardedSampler::new(group, 9, 2)?.seed(group.rank() as u64)),
                0,
                "seed 0, and rank 1's the seed 1",
            ),
            (
                |group| {
                    let sampler = ShardedSampler::new(group, 9, 2)?;
                    Ok(if group.rank() == 2 { sampler.pad() } else { sampler.drop_last() })
                },
                0,
                "a last batch that is dropped, and rank 2's a last batch that is padded",
            ),
            (|group| ShardedSampler::new(group, 9, 2), 1, "epoch 0, and rank 1's epoch 1"),
        ];
        for (make, epoch, expected) in cases {
            let threads = Group::threads(3).unwrap().into_iter().map(|group| {
                std::thread::spawn(move || {
                    let error = make(&group).unwrap().epoch(epoch * group.rank()).unwrap_err();
                    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                    assert!(error.to_string().contains(expected), "{error}");
                    // The group remains usable.
                    assert_eq!(ShardedSampler::new(&group, 9, 2).unwrap().epoch(0).unwrap().len(), 5);
                })
            });
            threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
        }
    }

    #[test]
    fn orders_differ_between_seeds_and_epochs_and_never_change() {
        let sampler = samplers(1, 8, 8, 42).remove(0);
        let order = |sampler: &ShardedSampler, epoch| sampler.shards(epoch).next().unwrap();
        assert_eq!(order(&sampler, 0), order(&sampler, 0));
        assert_ne!(order(&sampler, 0), order(&sampler, 1));
        assert_ne!(order(&sampler, 0), order(&sampler.clone().seed(43), 0));
        // This order must never change: checkpoints rely on it.
        assert_eq!(order(&sampler, 0), [4, 5, 0, 3, 6, 7, 1, 2]);
        let sequential = sampler.sequential();
        assert_eq!([0, 1].map(|epoch| order(&sequential, epoch)), [0, 1].map(|_| (0..8).collect::<Vec<_>>()));
    }

    #[test]
    fn a_batch_of_50_on_3_ranks_is_17_17_16_and_small_batches_leave_ranks_empty() {
        let lens = |ranks, len, batch| -> Vec<usize> {
            samplers(ranks, len, batch, 0).iter().map(|s| s.shards(0).next().unwrap().len()).collect()
        };
        assert_eq!(lens(3, 100, 50), [17, 17, 16]);
        assert_eq!(lens(4, 2, 50), [1, 1, 0, 0]);
        assert!(ShardedSampler::new(&Group::threads(1).unwrap()[0], 10, 0).is_err());
    }
}
