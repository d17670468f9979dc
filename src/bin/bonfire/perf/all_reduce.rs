//! All-reduce over a range of sizes.

use std::time::{Duration, Instant};

use bonfire::{DType, Error, Group, ReduceOp};

use super::report::{Measurement, Report};
use super::slowest_and_total;

#[derive(clap::Args)]
pub struct Sizes {
    /// Smallest buffer in bytes, a multiple of 4
    #[arg(long, value_name = "BYTES", default_value_t = 8)]
    min_bytes: usize,

    /// Largest buffer in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 32 << 20)]
    max_bytes: usize,

    /// Factor from one size to the next
    #[arg(long, value_name = "FACTOR", default_value_t = 4)]
    factor: usize,
}

impl Sizes {
    pub fn list(&self) -> Result<Vec<usize>, String> {
        let Sizes { min_bytes, max_bytes, factor } = *self;
        if min_bytes == 0 || min_bytes % 4 != 0 {
            return Err(format!("--min-bytes {min_bytes}: give a positive multiple of 4, the size of an f32"));
        }
        if max_bytes < min_bytes {
            return Err(format!("--max-bytes {max_bytes} is below --min-bytes {min_bytes}"));
        }
        if factor < 2 {
            return Err(format!("--factor {factor}: give 2 or more"));
        }
        let next = |bytes: &usize| bytes.checked_mul(factor).filter(|next| *next <= max_bytes);
        Ok(std::iter::successors(Some(min_bytes), next).collect())
    }
}

/// Time to spend on each size, and bounds on the calls.
const BUDGET: Duration = Duration::from_millis(300);
const CALLS: std::ops::RangeInclusive<u64> = 10..=2000;

pub fn run(group: &Group, sizes: &[usize], report: &Report) -> Result<u64, Error> {
    let mut all_wrong = 0;
    for bytes in sizes {
        let (rank, n) = (group.rank(), group.world_size());
        // Small whole numbers: every order of summation gives the same exact result.
        let input: Vec<f32> = (0..bytes / 4).map(|i| (rank + 1 + i % 7) as f32).collect();
        let mut output = vec![-1.0f32; bytes / 4];
        let calls = calls(group, &input, &mut output)?;
        group.barrier()?;
        let start = Instant::now();
        for _ in 0..calls {
            group.all_reduce_into(&input, &mut output, ReduceOp::Sum)?;
        }
        let seconds = start.elapsed().as_secs_f64() / calls as f64;
        let want = |i: usize| (n * (n + 1) / 2 + n * (i % 7)) as f32;
        let wrong = output.iter().enumerate().filter(|(i, x)| **x != want(*i)).count() as u64;
        let (seconds, wrong) = slowest_and_total(group, seconds, wrong)?;
        all_wrong += wrong;
        report
            .print(group, &Measurement { collective: "all_reduce", dtype: DType::F32, bytes: *bytes, seconds, wrong });
    }
    Ok(all_wrong)
}

/// Warms up, and decides together how many calls to time.
fn calls(group: &Group, input: &[f32], output: &mut [f32]) -> Result<u64, Error> {
    let (mut warm, start) = (0, Instant::now());
    // Rank 0 decides after each call whether it was warm enough, for all.
    loop {
        group.all_reduce_into(input, output, ReduceOp::Sum)?;
        warm += 1;
        let mut calls = [0];
        if warm >= 3 && start.elapsed() >= BUDGET / 10 {
            let possible = BUDGET.as_secs_f64() / (start.elapsed().as_secs_f64() / f64::from(warm));
            calls = [(possible as u64).clamp(*CALLS.start(), *CALLS.end())];
        }
        group.broadcast(&mut calls, 0)?;
        if calls[0] > 0 {
            return Ok(calls[0]);
        }
    }
}
