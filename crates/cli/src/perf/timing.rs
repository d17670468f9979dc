//! Checks and times calls.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bonfire::{Error, Group, ReduceOp};
use serde::Serialize;

/// An error of a rank of a measurement.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    #[error(transparent)]
    Group(#[from] Error),
    #[cfg(unix)]
    #[error(transparent)]
    Collective(#[from] bonfire::CollectiveError),
    #[error("a rank panicked; its message is above")]
    Panicked,
    #[error("cannot print: {0}")]
    Print(#[from] io::Error),
    #[error("cannot draw {0}: {1}")]
    Draw(PathBuf, String),
    #[cfg(unix)]
    #[error("MPI's launcher starts the ranks: mpirun -n {0} bonfire perf ... --transport mpi")]
    NotUnderMpi(u32),
}

/// Calls of one kind, on one rank.
pub trait Workload {
    /// Prepares a call whose result can be checked: fresh input, and an output without the expected result.
    fn reset(&mut self);
    fn call(&mut self) -> Result<(), RankError>;
    /// Returns the number of wrong elements after a prepared call.
    fn wrong(&mut self) -> Result<u64, RankError>;
}

#[derive(clap::Args, Clone)]
pub struct Counts {
    /// Calls to time for each size [default: as many as take 0.2 s, 10 to 20,000]
    #[arg(short = 'n', long, value_name = "CALLS", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    iters: Option<u64>,

    /// Warm-up calls before the timed ones [default: as many as take 30 ms]
    #[arg(short = 'w', long, value_name = "CALLS")]
    warmup: Option<u64>,

    /// Calls whose result is checked, before any is timed; 0 disables the check
    #[arg(short = 'c', long, value_name = "CALLS", default_value_t = 1)]
    check: u64,
}

/// Times of one call, in microseconds. Each is the largest over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    /// The time from which bandwidths are computed: the mean of many calls, or the median of whole steps.
    pub time_us: f64,
    pub median_us: f64,
    pub p99_us: f64,
    pub min_us: f64,
}

#[derive(Clone, Copy)]
pub struct Measured {
    pub times: Times,
    /// Wrong elements over all ranks; None if results were not checked.
    pub wrong: Option<u64>,
}

/// Time to spend on the mean of one size, and limits on the number of calls.
const BUDGET: Duration = Duration::from_millis(200);
const CALL_LIMITS: std::ops::RangeInclusive<u64> = 10..=20_000;
const WARM_UP: Duration = Duration::from_millis(30);
/// Calls to time one by one: enough for a 99th percentile.
const SAMPLES: u64 = 1000;

/// Checks results, warms up, and times back-to-back calls: first all together, for a mean without the cost of reading
/// the clock, then one by one.
pub fn measure(group: &Group, counts: &Counts, work: &mut dyn Workload) -> Result<Measured, RankError> {
    let wrong = check(group, counts.check, work)?;
    let affordable = warm_up(group, counts, work)?;
    let calls = counts.iters.unwrap_or(affordable);
    group.barrier()?;
    let start = Instant::now();
    for _ in 0..calls {
        work.call()?;
    }
    let mean = microseconds(start.elapsed()) / calls as f64;
    group.barrier()?;
    let mut samples = Vec::new();
    let mut before = Instant::now();
    for _ in 0..calls.min(SAMPLES) {
        work.call()?;
        let now = Instant::now();
        samples.push(microseconds(now - before));
        before = now;
    }
    Ok(Measured { times: slowest(group, Times::of(samples, Some(mean)))?, wrong })
}

/// Checks one call, then times `steps` calls, each prepared and after a barrier. Their median is the reported time.
pub fn measure_steps(group: &Group, steps: usize, work: &mut dyn Workload) -> Result<Measured, RankError> {
    let wrong = check(group, 1, work)?;
    let mut samples = Vec::new();
    for _ in 0..steps {
        work.reset();
        group.barrier()?;
        let start = Instant::now();
        work.call()?;
        samples.push(microseconds(start.elapsed()));
    }
    Ok(Measured { times: slowest(group, Times::of(samples, None))?, wrong })
}

fn check(group: &Group, calls: u64, work: &mut dyn Workload) -> Result<Option<u64>, RankError> {
    let mut wrong = [0];
    for _ in 0..calls {
        work.reset();
        work.call()?;
        wrong[0] += work.wrong()?;
    }
    if calls == 0 {
        // Timed calls work on real data, checked or not.
        work.reset();
    }
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok((calls > 0).then_some(wrong[0]))
}

/// Warms up and returns the number of calls to time, which is the same on all ranks.
fn warm_up(group: &Group, counts: &Counts, work: &mut dyn Workload) -> Result<u64, RankError> {
    let (mut warm, start) = (0, Instant::now());
    // Rank 0 decides for all ranks, after each call, whether the warm-up is complete.
    loop {
        let enough = counts.warmup.map_or(warm >= 3 && start.elapsed() >= WARM_UP, |warmup| warm >= warmup);
        let possible = BUDGET.as_secs_f64() / (start.elapsed().as_secs_f64() / warm as f64);
        let mut calls = [if enough { (possible as u64).clamp(*CALL_LIMITS.start(), *CALL_LIMITS.end()) } else { 0 }];
        group.broadcast(&mut calls, 0)?;
        if calls[0] > 0 {
            return Ok(calls[0]);
        }
        work.call()?;
        warm += 1;
    }
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Returns the largest of each time over all ranks.
fn slowest(group: &Group, times: Times) -> Result<Times, Error> {
    let Times { time_us, median_us, p99_us, min_us } = times;
    let mut all = [time_us, median_us, p99_us, min_us];
    group.all_reduce(&mut all, ReduceOp::Max)?;
    let [time_us, median_us, p99_us, min_us] = all;
    Ok(Times { time_us, median_us, p99_us, min_us })
}

impl Times {
    /// `samples` must not be empty.
    fn of(mut samples: Vec<f64>, mean: Option<f64>) -> Times {
        samples.sort_by(f64::total_cmp);
        let at = |quantile: f64| samples[((samples.len() as f64 * quantile).ceil() as usize).max(1) - 1];
        Times { time_us: mean.unwrap_or(at(0.5)), median_us: at(0.5), p99_us: at(0.99), min_us: at(0.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let samples: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let times = Times::of(samples, Some(7.0));
        assert_eq!(times, Times { time_us: 7.0, median_us: 100.0, p99_us: 198.0, min_us: 1.0 });
        let few = Times { time_us: 2.0, median_us: 2.0, p99_us: 3.0, min_us: 1.0 };
        assert_eq!(Times::of(vec![3.0, 1.0, 2.0], None), few);
    }

    struct Counted {
        resets: u64,
        calls: u64,
    }

    impl Workload for Counted {
        fn reset(&mut self) {
            self.resets += 1;
        }
        fn call(&mut self) -> Result<(), RankError> {
            self.calls += 1;
            Ok(())
        }
        fn wrong(&mut self) -> Result<u64, RankError> {
            Ok(3)
        }
    }

    #[test]
    fn flags_say_how_many_calls_are_made() {
        let group = Group::threads(1).unwrap().remove(0);
        let mut work = Counted { resets: 0, calls: 0 };
        let counts = Counts { iters: Some(5), warmup: Some(7), check: 2 };
        let measured = measure(&group, &counts, &mut work).unwrap();
        // Two checked, seven warm, five together and five one by one.
        assert_eq!((measured.wrong, work.calls, work.resets), (Some(6), 2 + 7 + 5 + 5, 2));
        let counts = Counts { iters: Some(1), warmup: Some(0), check: 0 };
        assert_eq!(measure(&group, &counts, &mut work).unwrap().wrong, None);
        assert_eq!(work.calls, 19 + 2);
    }
}
