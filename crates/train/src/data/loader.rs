//! Batches of a rank's samples, in the order of a [`ShardedSampler`]: what a data loader does that needs no tensor
//! library. An adapter says how a batch is made of samples.
//!
//! Making a loader communicates nothing, so one thread may make those of several ranks. An epoch begins with a small
//! all-gather of what is wrong on each rank and one of what each samples, so a data set that is empty or too short is
//! an error on all ranks before the first batch. A batch that cannot be made is known in the middle of a step of the
//! others: it fails the group.

mod ordered;
mod strategy;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use self::ordered::Ordered;
pub use self::strategy::{at_epoch, for_rank};
use super::sampler::{Epoch, ShardedSampler, Tail};
use crate::agree::all_or_none;
use bonfire_core::internal::{AgreedOperations, panic_message};
use bonfire_core::{Error, Group};

const OPERATION: &str = "data loader";

/// Makes a batch of the samples with these indices.
pub type Make<T> = Arc<dyn Fn(&[usize]) -> Result<T, Error> + Send + Sync>;

/// The settings of a [`Loader`].
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Samples in a batch of all ranks together.
    pub batch: usize,
    /// Threads that make batches ahead. With none the caller's thread makes them.
    pub workers: usize,
    /// The seed of the shuffle. `None` for the order of the data set.
    pub shuffle: Option<u64>,
    /// What happens to the samples that do not fill a batch.
    pub tail: Tail,
}

/// The order in which a rank gets its batches, over any number of epochs. Clones count epochs together.
#[derive(Clone)]
pub struct Loader {
    sampler: ShardedSampler,
    settings: Settings,
    /// The epoch of the next iterator that is asked for without one.
    next_epoch: Arc<AtomicUsize>,
}

impl Loader {
    /// Makes a loader over a data set of `len` samples. It does not communicate: [`epoch`](Self::epoch) finds what is
    /// wrong, on all ranks.
    pub fn new(group: &Group, len: usize, settings: Settings) -> Loader {
        let sampler = ShardedSampler::of_batches(group, len, settings.batch.max(1)).tail(settings.tail);
        let sampler = match settings.shuffle {
            Some(seed) => sampler.seed(seed),
            None => sampler.sequential(),
        };
        Loader { sampler, settings, next_epoch: Arc::default() }
    }

    /// Returns the number of batches in an epoch, the same on all ranks.
    pub fn batches(&self) -> usize {
        self.sampler.batches()
    }

    /// Returns the number of this rank's samples in an epoch.
    pub fn samples(&self) -> usize {
        self.sampler.own_after(0)
    }

    /// Returns a loader over a part of the data set that has `len` samples. It counts epochs by itself.
    pub fn part(&self, len: usize) -> Loader {
        Loader::new(self.sampler.group(), len, self.settings)
    }

    /// Inside [`for_rank`], returns a loader of the same data set for that rank, which counts epochs by itself.
    pub fn for_strategy(&self) -> Option<Loader> {
        strategy::group().map(|group| Loader::new(&group, self.sampler.len(), self.settings))
    }

    /// Begins an epoch. `len` is the data set's present length. All ranks must call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if a data set has no samples or another length than at first, if some
    /// rank would get an empty batch, or if the ranks differ in what they load. The group remains usable. Otherwise
    /// those of [`Group::all_gather`].
    #[track_caller]
    pub fn epoch<T>(&self, epoch: usize, len: usize, make: Make<T>) -> Result<Batches<T>, Error> {
        all_or_none(self.sampler.group(), self.check(len))?;
        let samples = self.sampler.epoch(epoch)?;
        // Relaxed: a number by itself. Threads that begin epochs of one loader at once have no order anyway.
        self.next_epoch.store(epoch.saturating_add(1), Ordering::Relaxed);
        let total = samples.own_samples();
        let source = Source::Ahead { samples, make, workers: self.settings.workers };
        Ok(Batches { group: self.sampler.group().clone(), epoch, source, processed: 0, total })
    }

    /// Begins the epoch after the last one, or the one that [`at_epoch`] says. Where [`epoch`](Self::epoch) fails, its
    /// error is all that the iterator returns. All ranks must call it.
    #[track_caller]
    pub fn next_epoch<T>(&self, len: usize, make: Make<T>) -> Batches<T> {
        // Relaxed: as above.
        let epoch = strategy::epoch().unwrap_or_else(|| self.next_epoch.load(Ordering::Relaxed));
        self.epoch(epoch, len, make).unwrap_or_else(|error| Batches {
            group: self.sampler.group().clone(),
            epoch,
            source: Source::Failed(error),
            processed: 0,
            total: self.samples(),
        })
    }

    /// Returns the error of a data set that does this.
    pub fn wrong(&self, what: &str) -> Error {
        let (rank, len) = (self.sampler.group().rank(), self.sampler.len());
        let reason = format!(
            "rank {rank}'s data set {what}; it had {len} samples when its loader was built, and must keep them during \
             an epoch"
        );
        Error::argument(OPERATION, reason)
    }

    /// Returns the error of a data set that failed.
    pub fn failed(&self, error: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::io(format!("{OPERATION}: rank {}'s data set", self.sampler.group().rank()), error)
    }

    /// Fails if the data set has another length than at first, or if a rank would get a batch without samples.
    fn check(&self, now: usize) -> Result<(), Error> {
        let (group, len, batch) = (self.sampler.group(), self.sampler.len(), self.settings.batch);
        let (rank, ranks) = (group.rank(), group.world_size());
        let reason = if now != len {
            format!(
                "rank {rank}'s data set had {len} samples when its loader was built, and has {now} now; build another \
                 loader, on all ranks, when it has changed"
            )
        } else if len == 0 {
            format!("rank {rank}'s data set has no samples; give each rank the whole data set")
        } else if batch < ranks {
            format!(
                "on rank {rank}, a batch has {batch} samples for {ranks} ranks; the size is that of a batch of all \
                 ranks together: make it at least {ranks}"
            )
        } else if self.batches() == 0 {
            format!(
                "rank {rank}'s data set has {len} samples, and `drop_last` leaves no batch of {batch}; make batches \
                 smaller, or do without it"
            )
        } else {
            return has_enough(group, self.sampler.batches_after(0).1);
        };
        Err(Error::argument(OPERATION, reason))
    }
}

/// Fails if the last batch of an epoch has samples, and too few for all ranks.
fn has_enough(group: &Group, rest: usize) -> Result<(), Error> {
    let ranks = group.world_size();
    if rest == 0 || rest >= ranks {
        return Ok(());
    }
    let reason = format!(
        "the last batch of an epoch has {rest} samples, so rank {rest} of {ranks} would have none; use `drop_last` or \
         `pad`, or batches of another size"
    );
    Err(Error::argument(OPERATION, reason))
}

/// An iterator over a rank's batches of an epoch, made by the `epoch` of a loader.
///
/// # Errors
/// If a batch cannot be made, the iterator returns the batches before it and then the error, and ends. It has then
/// poisoned the group, so that all ranks get the same error, in their next operation. [`Error::Broken`] has the text of
/// a panic of the data set or the batcher.
///
/// Dropping it ends its threads; it waits for the batches that they are just making.
pub struct Batches<T> {
    group: Group,
    epoch: usize,
    source: Source<T>,
    processed: usize,
    total: usize,
}

/// A batch, and how many samples it has.
type Made<T> = Result<(usize, T), Error>;

enum Source<T> {
    /// Nothing is made yet.
    Ahead {
        samples: Epoch,
        make: Make<T>,
        workers: usize,
    },
    /// This thread makes the batches.
    Here {
        samples: Epoch,
        make: Make<T>,
    },
    Threads(Ordered<Epoch, Made<T>>),
    /// The epoch could not begin.
    Failed(Error),
    Ended,
}

impl<T> Batches<T> {
    /// Leaves out the first samples of the epoch, which all ranks together have used, as
    /// [`Epoch::after`] does: `TrainingState` counts them. Call it before the first batch.
    ///
    /// If this makes the last batch too small for all ranks, the first batch is an error.
    pub fn after(mut self, samples: usize) -> Self {
        if let Source::Ahead { samples: epoch, make, workers } = self.source {
            let epoch = epoch.after(samples);
            self.total = epoch.own_samples();
            self.source = Source::Ahead { samples: epoch, make, workers };
        }
        self
    }

    /// Returns the samples in this rank's batches so far, and in all of them.
    pub fn progress(&self) -> [usize; 2] {
        [self.processed, self.total]
    }
}

impl<T: Send + 'static> Batches<T> {
    /// Begins to make batches, at the first one.
    fn start(&self, samples: Epoch, make: Make<T>, workers: usize) -> Result<Source<T>, Error> {
        has_enough(&self.group, samples.rest())?;
        if workers == 0 {
            return Ok(Source::Here { samples, make });
        }
        let (rank, epoch) = (self.group.rank(), self.epoch);
        let threads = Ordered::start(workers, samples, move |shard| made(rank, epoch, &shard, &make));
        let failed = |error| Error::io(format!("{OPERATION}: starting a worker of rank {rank}"), error);
        threads.map(Source::Threads).map_err(failed)
    }

    fn next_made(&mut self) -> Option<Made<T>> {
        loop {
            match &mut self.source {
                Source::Here { samples, make } => {
                    return samples.next().map(|shard| made(self.group.rank(), self.epoch, &shard, make));
                }
                Source::Threads(threads) => return threads.next(),
                Source::Ahead { .. } | Source::Failed(_) | Source::Ended => {}
            }
            match std::mem::replace(&mut self.source, Source::Ended) {
                Source::Ahead { samples, make, workers } => match self.start(samples, make, workers) {
                    Ok(source) => self.source = source,
                    Err(error) => return Some(Err(error)),
                },
                _ => return None,
            }
        }
    }
}

impl<T: Send + 'static> Iterator for Batches<T> {
    type Item = Result<T, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Source::Failed(error) = &self.source {
            let error = error.clone();
            self.source = Source::Ended;
            return Some(Err(error));
        }
        match self.next_made() {
            Some(Ok((samples, batch))) => {
                self.processed += samples;
                Some(Ok(batch))
            }
            Some(Err(error)) => {
                self.source = Source::Ended;
                Some(Err(self.group.abandon(error)))
            }
            None => {
                self.source = Source::Ended;
                None
            }
        }
    }
}

/// Makes the batch of these samples.
fn made<T>(rank: usize, epoch: usize, shard: &[usize], make: &Make<T>) -> Made<T> {
    let panicked = |panic: Box<dyn std::any::Any + Send>| {
        let text = panic_message(&*panic);
        let first = shard.first().map_or(String::new(), |first| format!(", the first of which is {first}"));
        let reason = format!(
            "loading {} samples{first}, of epoch {epoch} panicked on rank {rank}: {text}; the data set and the batcher \
             of the program ran then, and that rank's output says where it was",
            shard.len()
        );
        Error::broken(OPERATION, reason)
    };
    let batch = catch_unwind(AssertUnwindSafe(|| make(shard))).map_err(panicked)??;
    Ok((shard.len(), batch))
}
