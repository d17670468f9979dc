//! The models, by what they are of.

mod bell;
mod processes;
mod recorder;
mod threads;

use std::time::Duration;

use crate::call::{Call, Operation};
use crate::dtype::{DType, ReduceOp};
use crate::error::Site;
use crate::wait::Deadline;

/// Every model with its name and the bound on its preemptions: how often a thread is stopped that could go on, in one run.
/// Most mistakes show with one or two. Each more takes ten to a hundred times as long, and all models together are to take
/// no more than a minute and a half; one has a bound that it never reaches.
pub const ALL: &[(&str, usize, fn())] = &[
    ("bell: no ring is lost", 3, bell::no_ring_is_lost),
    ("recorder: an operation is recorded while others read", 3, recorder::first),
    ("recorder: an operation takes the place of one that is read", 3, recorder::second),
    ("recorder: two operations overtake a reader", 1, recorder::third),
    ("recorder: a ring is written over while it is read", 3, recorder::ring),
    ("threads: small all_reduces in a row", 3, threads::small),
    ("threads: large all_reduces in a row", 3, threads::large),
    ("threads: a rank gives up while the other arrives", 3, threads::gives_up),
    ("threads: a rank leaves", 3, threads::leaves),
    ("threads: a group fails between two operations", 3, threads::fails),
    ("threads: a message", 3, threads::message),
    ("threads: a message is withdrawn while it is taken", 3, threads::withdrawn),
    ("processes: nobody sleeps for ever", 20, processes::barrier),
    ("processes: small all_reduces in a row", 3, processes::small),
    ("processes: small all_reduces of three", 2, processes::small_of_three),
    ("processes: large all_reduces in a row", 2, processes::large),
    ("processes: large operations of three", 1, processes::large_of_three),
    ("processes: an all_reduce in chunks", 1, processes::all_reduce_in_chunks),
    ("processes: a reduce_scatter in chunks", 1, processes::reduce_scatter_in_chunks),
    ("processes: an all_gather in chunks", 1, processes::all_gather_in_chunks),
    ("processes: a broadcast in chunks", 2, processes::broadcast_in_chunks),
    ("processes: a gather in chunks", 1, processes::gather_in_chunks),
    ("processes: a scatter in chunks", 1, processes::scatter_in_chunks),
    ("processes: a scatter and a gather in chunks", 1, processes::gather_after_scatter),
    ("processes: chunks of different operations", 1, processes::one_after_another),
    ("processes: lent buffers", 2, processes::lent),
    ("processes: lent buffers of three", 1, processes::lent_by_three),
    ("processes: one rank lends, the other does not", 2, processes::mixed),
    ("processes: windows, lent buffers, windows", 1, processes::in_turn),
    ("processes: a rank leaves after a small operation", 3, processes::endings::leaves_after_small),
    ("processes: a rank leaves after a large operation", 2, processes::endings::leaves_after_large),
    ("processes: a group fails between two operations", 3, processes::endings::fails),
    ("processes: a rank gives up while the other arrives", 3, processes::endings::gives_up),
];

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
