//! Models of the synchronisation between ranks. Loom runs each model in every order, within a bound on preemptions, in
//! which its threads can take their steps and see each other's. `scripts/models` runs them.
//!
//! They are unit tests on the crate's own modules. Modules that loom cannot run have replacements here: `primitives`,
//! `reduce`, `segment` and `futex`.
//!
//! They do not show what the system does: mappings, pages that are replaced, sleeps of 200 ms. And the code itself has
//! run on x86 only.

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

/// Runs a model in all orders with at most `preemptions` preemptions. A preemption stops a thread that could continue.
/// Most mistakes show with one or two. Each further one takes ten to a hundred times as long, and all models together
/// must take no more than a minute and a half. One model has a bound that it never reaches.
fn check<T, F: Fn() -> T + Send + Sync + 'static>(preemptions: usize, model: F) {
    let (start, runs) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let counter = runs.clone();
    let mut bounds = loom::model::Builder::new();
    bounds.preemption_bound = Some(preemptions);
    bounds.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        memory::reset();
        drop(model());
    });
    let name = type_name::<F>().trim_start_matches("bonfire_core::models::").trim_end_matches("::{{closure}}");
    println!("{name}: {} orders, {:.1?}", runs.load(Ordering::Relaxed), start.elapsed());
}

/// Returns a deadline that never passes: loom's clock stands still.
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
