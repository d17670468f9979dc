//! Models of the hand-offs between ranks: loom runs each in every order, within a bound on preemptions, in which its
//! threads can take their steps and see each other's. `scripts/models` runs them.
//!
//! They are unit tests, on the crate's own modules. What loom cannot run has others in its place, which are here too:
//! `primitives`, `reduce`, `segment` and `futex`.

mod bell;
pub(crate) mod memory;
mod processes;
mod recorder;
mod threads;

use std::any::type_name;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::Deadline;
use crate::types::{Call, DType, Operation, ReduceOp, Site};

/// Runs a model in all orders with so many preemptions at most: how often a thread is stopped that could go on, in one run.
/// Most mistakes show with one or two. Each more takes ten to a hundred times as long, and all models together are to take
/// no more than a minute and a half; one has a bound that it never reaches.
fn check<T, F: Fn() -> T + Send + Sync + 'static>(preemptions: usize, model: F) {
    let (start, runs) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let counter = runs.clone();
    let mut bounds = loom::model::Builder::new();
    bounds.preemption_bound = Some(preemptions);
    bounds.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        memory::forget();
        drop(model());
    });
    let name = type_name::<F>().trim_start_matches("bonfire_core::models::").trim_end_matches("::{{closure}}");
    println!("{name}: {} orders, {:.1?}", runs.load(Ordering::Relaxed), start.elapsed());
}

/// One that never comes: loom's clock stands still.
fn never() -> Deadline {
    Deadline::after(Duration::from_secs(1_000_000))
}

fn all_reduce(sequence: u64, count: usize) -> Site {
    let call = Call {
        operation: Operation::AllReduce,
        dtype: DType::U64,
        count,
        reduction: Some(ReduceOp::Sum),
        root: None,
        sizes: None,
    };
    Site { sequence, call }
}
