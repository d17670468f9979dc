//! Measures how well a started all-reduce overlaps with the rank's own computation.
//!
//! Run it as processes, best over a slow link, with `scripts/hosts`, which simulates two hosts on this machine. Rank 0
//! prints the times of the all-reduce alone, of a computation of the same length alone, of starting the all-reduce, and
//! of both at once.

use std::time::{Duration, Instant};

use bonfire::{Error, Group, ReduceOp};

const BYTES: usize = 64 << 20;

fn main() -> Result<(), Error> {
    env_logger::init();
    let group = Group::from_env()?;
    let input = || vec![(group.rank() + 1) as f32; BYTES / 4];
    let sum = (group.world_size() * (group.world_size() + 1) / 2) as f32;

    let mut data = input();
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    let alone = timed(&group, || group.all_reduce(&mut data, ReduceOp::Sum))?;
    let computing = timed(&group, || {
        compute(alone);
        Ok(())
    })?;

    let buffer = input();
    let mut starting = Duration::ZERO;
    let both = timed(&group, || {
        let start = Instant::now();
        let work = group.start_all_reduce(buffer, ReduceOp::Sum)?;
        starting = start.elapsed();
        compute(alone);
        data = work.wait().map_err(|(error, _)| error)?;
        Ok(())
    })?;
    assert!(data.iter().all(|x| *x == sum), "the sum is wrong");
    if group.rank() == 0 {
        println!("all_reduce of {} MiB on {} ranks: {alone:.3?}", BYTES >> 20, group.world_size());
        println!("computation of the same length: {computing:.3?}");
        println!("starting the all_reduce: {starting:.1?}");
        println!("both at once: {both:.3?}, {:.2} times one", both.as_secs_f64() / alone.as_secs_f64());
    }
    Ok(())
}

/// Runs `work` and returns the time of the slowest rank.
fn timed(group: &Group, work: impl FnOnce() -> Result<(), Error>) -> Result<Duration, Error> {
    group.barrier()?;
    let start = Instant::now();
    work()?;
    let mut seconds = [start.elapsed().as_secs_f64()];
    group.all_reduce(&mut seconds, ReduceOp::Max)?;
    Ok(Duration::from_secs_f64(seconds[0]))
}

/// Keeps a core busy for `length`.
fn compute(length: Duration) {
    let (start, mut x) = (Instant::now(), 1.0f64);
    while start.elapsed() < length {
        for _ in 0..1000 {
            x = std::hint::black_box(x * 1.000_000_1 + 1e-9);
        }
    }
}
