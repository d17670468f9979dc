//! What worker threads make of a sequence of jobs, delivered in the order of the jobs.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use bonfire_core::internal::lock;

/// An iterator over what threads make of jobs, in the order of the jobs. Dropping it ends the threads: it waits for
/// what they are just making.
pub struct Ordered<J, T> {
    shared: Arc<Shared<J, T>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<J, T> {
    state: Mutex<State<J, T>>,
    /// What is made and not yet delivered has room again, or the iterator is dropped. For the workers.
    room: Condvar,
    /// A result has arrived. For the iterator.
    ready: Condvar,
    /// How many jobs may have begun that are not yet delivered.
    bound: usize,
}

struct State<J, T> {
    /// `None` when all have begun, or the iterator is dropped.
    jobs: Option<J>,
    begun: usize,
    delivered: usize,
    /// What is made and not yet delivered, by the number of its job.
    made: BTreeMap<usize, T>,
}

impl<J, T> Ordered<J, T>
where
    J: Iterator + Send + 'static,
    T: Send + 'static,
{
    /// Starts `workers` threads. At most twice as many jobs have begun and are not yet delivered. `make` must not
    /// panic: a job without a result would be waited for without end.
    ///
    /// # Errors
    /// That of the system, if it starts no further thread.
    pub fn start(workers: usize, jobs: J, make: impl Fn(J::Item) -> T + Send + Sync + 'static) -> io::Result<Self> {
        let state = State { jobs: Some(jobs), begun: 0, delivered: 0, made: BTreeMap::new() };
        let (room, ready) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { state: Mutex::new(state), room, ready, bound: 2 * workers });
        let make = Arc::new(make);
        let mut ordered = Ordered { shared, threads: Vec::with_capacity(workers) };
        for worker in 0..workers {
            let (shared, make) = (ordered.shared.clone(), make.clone());
            let thread = Builder::new().name(format!("bonfire-loader-{worker}"));
            ordered.threads.push(thread.spawn(move || shared.work(&*make))?);
        }
        Ok(ordered)
    }
}

impl<J: Iterator, T> Shared<J, T> {
    /// Does jobs until there are no more.
    fn work(&self, make: &dyn Fn(J::Item) -> T) {
        while let Some((number, job)) = self.next_job() {
            let made = make(job);
            lock(&self.state).made.insert(number, made);
            self.ready.notify_one();
        }
    }

    /// Waits until there is room for what another job makes, and begins it.
    fn next_job(&self) -> Option<(usize, J::Item)> {
        let mut state = lock(&self.state);
        while state.jobs.is_some() && state.begun - state.delivered >= self.bound {
            state = wait(&self.room, state);
        }
        let job = state.jobs.as_mut()?.next();
        match job {
            Some(job) => {
                state.begun += 1;
                Some((state.begun - 1, job))
            }
            None => {
                state.jobs = None;
                drop(state);
                // The other workers end, and the iterator may have waited for a job that does not exist.
                self.room.notify_all();
                self.ready.notify_one();
                None
            }
        }
    }
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

impl<J, T> Iterator for Ordered<J, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let mut state = lock(&self.shared.state);
        loop {
            let number = state.delivered;
            if let Some(made) = state.made.remove(&number) {
                state.delivered += 1;
                drop(state);
                self.shared.room.notify_one();
                return Some(made);
            }
            if state.jobs.is_none() && state.begun == state.delivered {
                return None;
            }
            state = wait(&self.shared.ready, state);
        }
    }
}

impl<J, T> Drop for Ordered<J, T> {
    fn drop(&mut self) {
        lock(&self.shared.state).jobs = None;
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // No worker panics: neither does `make`, nor what is here.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn results_come_in_the_order_of_the_jobs_even_if_the_first_ends_last() {
        let (first, others) = mpsc::channel::<()>();
        let (first, others) = (Mutex::new(Some(first)), Mutex::new(others));
        // Job 0 ends when job 5 has begun, so jobs 1 to 4 arrive before it.
        let make = move |job: usize| {
            match job {
                0 => drop(lock(&others).recv()),
                5 => drop(lock(&first).take()),
                _ => {}
            }
            10 * job
        };
        let made: Vec<_> = Ordered::start(4, 0..100, make).unwrap().collect();
        assert_eq!(made, (0..100).map(|job| 10 * job).collect::<Vec<_>>());
    }

    #[test]
    fn the_next_result_is_waited_for_though_later_ones_are_there() {
        let ((release, held), (sender, made)) = (mpsc::channel::<()>(), mpsc::channel());
        let held = Mutex::new(held);
        let make = move |job: usize| {
            match job {
                0 => drop(lock(&held).recv()),
                _ => sender.send(()).unwrap(),
            }
            job
        };
        let ordered = Ordered::start(2, 0..4, make).unwrap();
        let (deliver, delivered) = mpsc::channel();
        let consumer = thread::spawn(move || ordered.for_each(|job| deliver.send(job).unwrap()));
        (1..4).for_each(|_| made.recv().unwrap());
        // An iterator that would return one of these has time to do so.
        (0..1000).for_each(|_| thread::yield_now());
        assert_eq!(delivered.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(release);
        consumer.join().unwrap();
        assert_eq!(delivered.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn no_jobs_have_no_results() {
        assert_eq!(Ordered::start(3, 0..0, |job: usize| job).unwrap().next(), None);
    }

    #[test]
    fn no_more_jobs_begin_than_there_is_room_for() {
        let begun = Arc::new(AtomicUsize::new(0));
        let (counter, (sender, receiver)) = (begun.clone(), mpsc::channel());
        let make = move |job: usize| {
            counter.fetch_add(1, Ordering::SeqCst);
            sender.send(job).unwrap();
        };
        let mut ordered = Ordered::start(2, 0.., make).unwrap();
        for delivered in 0..50 {
            // The workers begin jobs until four are not yet delivered, and then no other.
            while begun.load(Ordering::SeqCst) < delivered + 4 {
                receiver.recv().unwrap();
            }
            assert_eq!(begun.load(Ordering::SeqCst), delivered + 4);
            assert_eq!(ordered.next(), Some(()));
        }
    }

    #[test]
    fn dropping_ends_the_threads_though_jobs_are_left() {
        // The workers hold it, so it is alone when they have ended.
        let held = Arc::new(());
        let of_workers = held.clone();
        let mut ordered = Ordered::start(4, 0.., move |job: usize| (job, of_workers.clone())).unwrap();
        assert_eq!(ordered.next().map(|(job, _)| job), Some(0));
        drop(ordered);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
