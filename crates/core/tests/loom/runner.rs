//! Models of the hand-offs between ranks: loom runs each in every order, within a bound on preemptions, in which its
//! threads can take their steps and see each other's.
//!
//! Most modules are the crate's own files, on loom's atomics, locks and cells; others stand for what loom cannot run: shared
//! memory, the futex, connections, kernels. `cargo run --release` runs all models, `cargo run --release -- NAME` those whose
//! name contains it.

#![allow(clippy::arc_with_non_send_sync, reason = "loom runs all threads of a model on one")]
#![allow(clippy::wrong_self_convention, reason = "public names of the crate")]
#![allow(dead_code, unused_imports, reason = "the crate uses more of its files than the models do")]

mod call;
mod dtype;
mod error;
mod group;
mod memory;
mod models;
mod partition;
mod reduce;
mod sync;
mod transport;
mod wait;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

fn main() -> ExitCode {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let mut ran = 0;
    for (name, preemptions, model) in models::ALL.iter().filter(|(name, ..)| name.contains(&wanted)) {
        let (start, runs) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let counter = runs.clone();
        let mut bounds = loom::model::Builder::new();
        bounds.preemption_bound = Some(*preemptions);
        bounds.check(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            memory::forget();
            model();
        });
        println!("{name}: {} orders, {:.1?}", runs.load(Ordering::Relaxed), start.elapsed());
        ran += 1;
    }
    if ran == 0 {
        eprintln!("no model has '{wanted}' in its name");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
