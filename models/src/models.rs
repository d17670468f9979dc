//! The models, by what they are of.

mod bell;
mod threads;

use std::time::Duration;

use crate::call::{Call, Operation};
use crate::dtype::{DType, ReduceOp};
use crate::error::Site;
use crate::wait::Deadline;

/// Every model with its name.
pub const ALL: &[(&str, fn())] = &[
    ("bell: no ring is lost", bell::no_ring_is_lost),
    ("threads: small all_reduces in a row", threads::small),
    ("threads: large all_reduces in a row", threads::large),
    ("threads: a rank gives up while the other arrives", threads::gives_up),
    ("threads: a rank leaves", threads::leaves),
    ("threads: a group fails between two operations", threads::fails),
    ("threads: a message", threads::message),
    ("threads: a message is withdrawn while it is taken", threads::withdrawn),
];

/// One that never comes: loom's clock stands still.
fn never() -> Deadline {
    Deadline::after(Duration::from_secs(1_000_000))
}

fn all_reduce(sequence: u64, count: usize) -> Site {
    let call =
        Call { operation: Operation::AllReduce, dtype: DType::U64, count, reduction: Some(ReduceOp::Sum), root: None };
    Site { sequence, call }
}
