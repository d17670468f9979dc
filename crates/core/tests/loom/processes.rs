//! Models of `transport::shm`: ranks as processes of one host.
//!
//! # Limits
//!
//! * The models do not show what the system does: mappings, pages that are taken back, and the naps of 200 ms.
//! * They pass with less synchronization than there is. Of the operations here only broadcast, gather and scatter need
//!   the wait before a buffer is filled again. In the others a rank has waited for a later step of all peers by then.
//! * A sleeper need not acquire the rings that it has heard, because the fence after that does.

mod endings;

use std::sync::Arc;

use loom::thread;

use super::{check, memory, never};
use crate::control::GroupStatus;
use crate::sync::Deadline;
use crate::transport::shm::{Segment, Shm};
use crate::transport::tcp::Tcp;
use crate::transport::{Buffers, Collectives, Storage};
use crate::types::{Call, DType, Fault, Operation, Parts, ReduceOp, Site, partition};

/// One process.
struct Rank {
    shm: Shm,
    rank: usize,
    /// The statuses of all ranks.
    statuses: Vec<Arc<GroupStatus>>,
}

impl Rank {
    fn group(world_size: usize) -> Vec<Rank> {
        let segment = Segment::new(world_size);
        let statuses: Vec<_> = (0..world_size).map(|_| Arc::new(GroupStatus::new(world_size).unwrap())).collect();
        let rank = |rank: usize| {
            let tcp = Arc::new(Tcp::unconnected(rank, statuses[rank].clone(), world_size));
            let shm = Shm::new(segment.clone(), rank, (0..world_size).collect(), tcp);
            Rank { shm, rank, statuses: statuses.clone() }
        };
        (0..world_size).map(rank).collect()
    }

    fn world_size(&self) -> usize {
        self.statuses.len()
    }

    fn run(
        &self,
        (sequence, operation): (u64, Operation),
        input: Option<&[u64]>,
        output: &mut [u64],
        deadline: &Deadline,
    ) -> Result<(), Fault> {
        let reduces = matches!(operation, Operation::AllReduce | Operation::ReduceScatter);
        let reduction = reduces.then_some(ReduceOp::Sum);
        let rooted = matches!(operation, Operation::Broadcast | Operation::Gather | Operation::Scatter);
        let root = rooted.then_some(0);
        let call = Call { operation, dtype: DType::U64, count: output.len(), reduction, root, sizes: None };
        let mut buffers = Buffers {
            input: input.map(bytemuck::cast_slice),
            output: bytemuck::cast_slice_mut(output),
            parts: Parts::Even,
        };
        let site = Site { sequence, call };
        self.statuses[self.rank].begin(&site)?.for_each(drop);
        self.shm.run(&site, &mut buffers, deadline)
    }

    /// Watches a buffer, divided into an operation's parts.
    fn watch(&self, data: &[u64]) {
        memory::watch(data, data.len().div_ceil(self.world_size()).max(1) * size_of::<u64>());
    }

    /// Runs an operation in place. Filling the buffer and reading the result are reported to loom too.
    fn check(&self, (sequence, operation): (u64, Operation), data: &mut [u64]) {
        let n = self.world_size() as u64;
        let contributed = |rank: usize| (rank as u64 + 1) << (8 * sequence);
        let sum = (n * (n + 1) / 2) << (8 * sequence);
        memory::write(data.as_ptr().cast(), size_of_val(data));
        data.fill(contributed(self.rank));
        self.run((sequence, operation), None, data, &never()).unwrap();
        memory::read(data.as_ptr().cast(), size_of_val(data));
        for part in 0..self.world_size() {
            let expected = match operation {
                Operation::AllReduce => sum,
                Operation::ReduceScatter if part == self.rank => sum,
                Operation::AllGather => contributed(part),
                Operation::Broadcast => contributed(0),
                Operation::Gather if self.rank == 0 => contributed(part),
                Operation::Scatter if part == self.rank => contributed(0),
                Operation::Gather | Operation::Scatter => contributed(self.rank),
                _ => continue,
            };
            let part = &data[partition(data.len(), self.world_size(), part)];
            assert!(part.iter().all(|element| *element == expected), "{operation}: {part:x?}, not {expected:x}");
        }
    }

    /// Runs operations in sequence on the same memory.
    fn check_all(&self, operations: &[Operation], data: &mut [u64]) {
        self.watch(data);
        (0..).zip(operations).for_each(|(sequence, operation)| self.check((sequence, *operation), data));
    }
}

/// Runs `run` on each of `world_size` ranks.
fn all(world_size: usize, run: impl Fn(&Rank) + Copy + 'static) {
    let mut ranks = Rank::group(world_size);
    let first = ranks.remove(0);
    let others: Vec<_> = ranks.into_iter().map(|rank| thread::spawn(move || run(&rank))).collect();
    run(&first);
    others.into_iter().for_each(|other| other.join().unwrap());
}

/// Only synchronisation, without data.
#[test]
fn no_rank_sleeps_for_ever() {
    check(20, || all(2, |rank| rank.check_all(&[Operation::Barrier], &mut [])));
}

/// Three operations, so that the first one's offer is reused.
#[test]
fn small_all_reduces_in_a_row() {
    check(3, || all(2, |rank| rank.check_all(&[Operation::AllReduce; 3], &mut [0])));
}

#[test]
fn small_all_reduces_of_three() {
    check(2, || all(3, |rank| rank.check_all(&[Operation::AllReduce], &mut [0])));
}

/// Elements of a part of a chunk.
const PART: usize = 8;

/// One chunk each: covers the transition from one operation to the next.
#[test]
fn large_all_reduces_in_a_row() {
    check(2, || all(2, |rank| rank.check_all(&[Operation::AllReduce; 2], &mut [0; 2 * PART])));
}

/// One chunk more than there are buffers, so that a buffer is reused.
const CHUNKS: usize = 5;

#[test]
fn an_all_reduce_in_chunks() {
    check(1, || all(2, |rank| rank.check_all(&[Operation::AllReduce], &mut [0; CHUNKS * 2 * PART])));
}

#[test]
fn a_reduce_scatter_in_chunks() {
    check(1, || all(2, |rank| rank.check_all(&[Operation::ReduceScatter], &mut [0; CHUNKS * 2 * PART])));
}

#[test]
fn an_all_gather_in_chunks() {
    check(1, || all(2, |rank| rank.check_all(&[Operation::AllGather], &mut [0; CHUNKS * 2 * PART])));
}

#[test]
fn a_broadcast_in_chunks() {
    check(2, || all(2, |rank| rank.check_all(&[Operation::Broadcast], &mut [0; CHUNKS * 2 * PART])));
}

#[test]
fn a_gather_in_chunks() {
    check(1, || all(2, |rank| rank.check_all(&[Operation::Gather], &mut [0; CHUNKS * 2 * PART])));
}

#[test]
fn a_scatter_in_chunks() {
    check(1, || all(2, |rank| rank.check_all(&[Operation::Scatter], &mut [0; CHUNKS * 2 * PART])));
}

/// Operations of three chunks whose buffers become free after different steps.
#[test]
fn chunks_of_different_operations() {
    check(1, || {
        all(2, |rank| rank.check_all(&[Operation::Broadcast, Operation::AllReduce], &mut [0; 3 * 2 * PART]));
    });
}

/// Operations in which one rank only contributes and another one only receives.
#[test]
fn a_scatter_and_a_gather_in_chunks() {
    check(1, || {
        all(2, |rank| rank.check_all(&[Operation::Scatter, Operation::Gather], &mut [0; 3 * 2 * PART]));
    });
}

/// A rank that waits for two, and two that wait for one.
#[test]
fn large_operations_of_three() {
    check(1, || {
        all(3, |rank| rank.check_all(&[Operation::AllGather, Operation::Broadcast], &mut [0; 3 * PART]));
    });
}

/// A buffer in the rank's arena.
struct Buffer(Box<dyn Storage>, usize);

impl Buffer {
    fn new(rank: &Rank, elements: usize) -> Buffer {
        let storage = rank.shm.allocate(elements * size_of::<u64>()).unwrap().unwrap();
        Buffer(storage, elements)
    }

    fn elements(&mut self) -> &mut [u64] {
        // SAFETY: `new` allocated this many elements, and `self`, which alone owns them, is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().cast().as_ptr(), self.1) }
    }
}

/// Directly between buffers.
#[test]
fn lent_buffers() {
    check(2, || all(2, |rank| rank.check_all(&[Operation::AllReduce; 2], Buffer::new(rank, 4).elements())));
}

#[test]
fn lent_buffers_of_three() {
    check(1, || all(3, |rank| rank.check_all(&[Operation::AllReduce], Buffer::new(rank, 6).elements())));
}

/// One rank lends its buffer, and finds after its offer that the other does not.
#[test]
fn one_rank_lends_the_other_does_not() {
    check(2, || {
        all(2, |rank| match rank.rank {
            0 => rank.check_all(&[Operation::AllReduce; 2], Buffer::new(rank, 4).elements()),
            _ => rank.check_all(&[Operation::AllReduce; 2], &mut [0; 4]),
        });
    });
}

/// Through windows, directly between buffers, and through windows again.
#[test]
fn windows_lent_buffers_windows() {
    check(1, || {
        all(2, |rank| {
            let (mut ordinary, mut lent) = ([0; 4], Buffer::new(rank, 4));
            rank.watch(&ordinary);
            rank.watch(lent.elements());
            rank.check((0, Operation::AllReduce), &mut ordinary);
            rank.check((1, Operation::AllReduce), lent.elements());
            rank.check((2, Operation::AllReduce), &mut ordinary);
        });
    });
}
