//! The operations that can be measured, in two tables: how much data each moves, and its call with the expected result.

use bonfire::{Error, Group, Operation};
use bonfire_core::internal::oracle::Sample;
use clap::ValueEnum;

use super::oracle::Case;
use super::oracle::Extent::{self, Part, Whole};

/// An operation that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Benchmark {
    /// Every rank gets the reduction of all buffers
    AllReduce,
    /// The root gets the reduction of all buffers
    Reduce,
    /// Every rank gets the root's buffer
    Broadcast,
    /// Every rank gets the parts of all ranks; the size is that of all parts together
    AllGather,
    /// Every rank gets its part of the reduction; the size is that of all parts together
    ReduceScatter,
    /// Every rank exchanges a part with every other; the size is that of a rank's parts together
    AllToAll,
    /// The root gets the parts of all ranks; the size is that of all parts together
    Gather,
    /// Every rank gets its part of the root's buffer; the size is that of all parts together
    Scatter,
    /// all_gather with the size of each part given
    AllGatherV,
    /// reduce_scatter with the size of each part given
    ReduceScatterV,
    /// all_to_all with the size of each part given
    AllToAllV,
    /// Every rank sends its buffer to the next rank
    SendRecv,
    /// Every rank waits for all ranks, without data
    Barrier,
    /// DataParallel averages the gradients of one training step: ResNet-50's 161 tensors, 25,557,032 f32
    Gradients,
}

/// Facts that bandwidths and floors depend on. All functions take the number of ranks and return multiples of the size
/// in the table.
#[derive(Clone, Copy)]
pub struct Facts {
    /// The group's operation for which algorithms are selected, if any are.
    pub operation: Option<Operation>,
    pub reduces: bool,
    pub rooted: bool,
    /// Whether the size consists of a part for each rank.
    has_parts: bool,
    /// Data that the busiest rank must send or receive. busbw is algbw times this, both as defined by nccl-tests.
    pub bus_factor: fn(f64) -> f64,
    /// Data that all ranks together must send.
    pub total_sent: fn(f64) -> f64,
    /// Least data to read and write if every rank can access all memory: out of place, and in place.
    pub traffic: fn(f64) -> [f64; 2],
}

impl Facts {
    const NOTHING: Facts = Facts {
        operation: None,
        reduces: false,
        rooted: false,
        has_parts: false,
        bus_factor: |_| 1.0,
        total_sent: |_| 0.0,
        traffic: |_| [0.0, 0.0],
    };

    /// The size consists of parts, one for or from each rank.
    const PARTS: Facts =
        Facts { has_parts: true, bus_factor: |n| (n - 1.0) / n, total_sent: |n| n - 1.0, ..Facts::NOTHING };

    /// Whether the operation moves any data.
    pub fn moves_data(&self) -> bool {
        (self.total_sent)(2.0) > 0.0
    }

    /// Returns how many parts a size consists of.
    pub fn parts(&self, ranks: usize) -> usize {
        if self.has_parts { ranks } else { 1 }
    }
}

impl Benchmark {
    pub fn facts(self) -> Facts {
        match self {
            // Gradients move the same bytes as an all_reduce.
            Benchmark::AllReduce | Benchmark::Gradients => Facts {
                operation: Some(Operation::AllReduce),
                reduces: true,
                bus_factor: |n| 2.0 * (n - 1.0) / n,
                total_sent: |n| 2.0 * (n - 1.0),
                traffic: |n| [2.0 * n, 2.0 * n],
                ..Facts::NOTHING
            },
            Benchmark::Reduce => Facts {
                operation: Some(Operation::Reduce),
                reduces: true,
                rooted: true,
                total_sent: |n| n - 1.0,
                traffic: |n| [n + 1.0, n + 1.0],
                ..Facts::NOTHING
            },
            Benchmark::Broadcast => Facts {
                operation: Some(Operation::Broadcast),
                rooted: true,
                total_sent: |n| n - 1.0,
                traffic: |n| [n + 1.0, n],
                ..Facts::NOTHING
            },
            Benchmark::AllGather | Benchmark::AllGatherV => {
                Facts { operation: Some(Operation::AllGather), traffic: |n| [n + 1.0, n], ..Facts::PARTS }
            }
            Benchmark::ReduceScatter | Benchmark::ReduceScatterV => Facts {
                operation: Some(Operation::ReduceScatter),
                reduces: true,
                traffic: |n| [n + 1.0, n + 1.0],
                ..Facts::PARTS
            },
            Benchmark::AllToAll => Facts {
                operation: Some(Operation::AllToAll),
                // In place a rank's part for itself does not move.
                traffic: |n| [2.0 * n, 2.0 * (n - 1.0)],
                ..Facts::PARTS
            },
            Benchmark::AllToAllV => Facts { operation: None, ..Benchmark::AllToAll.facts() },
            Benchmark::Gather => Facts {
                operation: Some(Operation::Gather),
                rooted: true,
                total_sent: |n| (n - 1.0) / n,
                traffic: |n| [2.0, 2.0 * (n - 1.0) / n],
                ..Facts::PARTS
            },
            Benchmark::Scatter => Facts { operation: Some(Operation::Scatter), ..Benchmark::Gather.facts() },
            Benchmark::SendRecv => Facts { total_sent: |n| n, traffic: |n| [2.0 * n, 2.0 * n], ..Facts::NOTHING },
            Benchmark::Barrier => Facts { operation: Some(Operation::Barrier), ..Facts::NOTHING },
        }
    }
}

type Call<T> = fn(&Group, &Case<T>, &[T], &mut [T]) -> Result<(), Error>;

/// An operation on slices and its expected result.
#[derive(Clone, Copy)]
pub struct Calls<T> {
    pub input: Extent,
    pub output: Extent,
    pub into: Call<T>,
    /// Works on the output alone, which is then a whole buffer with each part at its offset.
    pub in_place: Option<Call<T>>,
    /// The expected element `i` of the output, None where it is unspecified.
    pub want: fn(&Case<T>, usize) -> Option<T>,
}

impl<T: Sample> Calls<T> {
    /// None for a benchmark that does not work on slices.
    pub fn of(benchmark: Benchmark) -> Option<Self> {
        Some(match benchmark {
            Benchmark::AllReduce => Calls {
                input: Whole,
                output: Whole,
                into: |group, case, input, output| group.all_reduce_into(input, output, case.op),
                in_place: Some(|group, case, _, data| group.all_reduce(data, case.op)),
                want: |case, i| Some(case.reduced(i)),
            },
            Benchmark::Reduce => Calls {
                input: Whole,
                output: Whole,
                into: |group, case, input, output| group.reduce_into(input, output, case.op, case.root),
                in_place: Some(|group, case, _, data| group.reduce(data, case.op, case.root)),
                want: |case, i| (case.rank == case.root).then(|| case.reduced(i)),
            },
            Benchmark::Broadcast => Calls {
                input: Whole,
                output: Whole,
                into: |group, case, input, output| {
                    group.broadcast_into((case.rank == case.root).then_some(input), output, case.root)
                },
                in_place: Some(|group, case, _, data| group.broadcast(data, case.root)),
                want: |case, i| Some(case.input(case.root, i)),
            },
            Benchmark::AllGather => Calls {
                input: Part,
                output: Whole,
                into: |group, _, input, output| group.all_gather_into(input, output),
                in_place: Some(|group, _, _, data| group.all_gather(data)),
                want: |case, i| Some(case.input(i / case.part(), i % case.part())),
            },
            Benchmark::ReduceScatter => Calls {
                input: Whole,
                output: Part,
                into: |group, case, input, output| group.reduce_scatter_into(input, output, case.op),
                in_place: Some(|group, case, _, data| group.reduce_scatter(data, case.op)),
                want: |case, i| Some(case.reduced(case.rank * case.part() + i)),
            },
            Benchmark::AllToAll => Calls {
                input: Whole,
                output: Whole,
                into: |group, _, input, output| group.all_to_all_into(input, output),
                in_place: Some(|group, _, _, data| group.all_to_all(data)),
                want: |case, i| Some(case.input(i / case.part(), case.rank * case.part() + i % case.part())),
            },
            Benchmark::Gather => Calls {
                input: Part,
                output: Whole,
                into: |group, case, input, output| group.gather_into(input, output, case.root),
                in_place: Some(|group, case, _, data| group.gather(data, case.root)),
                want: |case, i| (case.rank == case.root).then(|| case.input(i / case.part(), i % case.part())),
            },
            Benchmark::Scatter => Calls {
                input: Whole,
                output: Part,
                into: |group, case, input, output| group.scatter_into(input, output, case.root),
                in_place: Some(|group, case, _, data| group.scatter(data, case.root)),
                want: |case, i| Some(case.input(case.root, case.rank * case.part() + i)),
            },
            Benchmark::AllGatherV => Calls {
                into: |group, case, input, output| group.all_gather_v_into(input, &case.sizes, output),
                in_place: None,
                ..Calls::of(Benchmark::AllGather)?
            },
            Benchmark::ReduceScatterV => Calls {
                into: |group, case, input, output| group.reduce_scatter_v_into(input, &case.sizes, output, case.op),
                in_place: None,
                ..Calls::of(Benchmark::ReduceScatter)?
            },
            Benchmark::AllToAllV => Calls {
                into: |group, case, input, output| group.all_to_all_v_into(input, &case.sizes, output, &case.sizes),
                in_place: None,
                ..Calls::of(Benchmark::AllToAll)?
            },
            Benchmark::SendRecv => Calls {
                input: Whole,
                output: Whole,
                // A send may block until its receiver calls, so even ranks send first and odd ranks receive first.
                into: |group, case, input, output| {
                    let (next, previous) = ((case.rank + 1) % case.ranks, (case.rank + case.ranks - 1) % case.ranks);
                    if case.rank.is_multiple_of(2) {
                        group.send(input, next)?;
                        return group.recv(output, previous);
                    }
                    group.recv(output, previous)?;
                    group.send(input, next)
                },
                // A rank that receives first would overwrite the data that it has to send.
                in_place: None,
                want: |case, i| Some(case.input((case.rank + case.ranks - 1) % case.ranks, i)),
            },
            Benchmark::Barrier => Calls {
                input: Whole,
                output: Whole,
                into: |group, _, _, _| group.barrier(),
                in_place: None,
                want: |_, _| None,
            },
            Benchmark::Gradients => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factors = |benchmark: Benchmark| [2.0, 4.0].map(benchmark.facts().bus_factor);
        for benchmark in [Benchmark::AllReduce, Benchmark::Gradients] {
            assert_eq!(factors(benchmark), [1.0, 1.5]);
        }
        for benchmark in
            [Benchmark::AllGather, Benchmark::ReduceScatter, Benchmark::AllToAll, Benchmark::Gather, Benchmark::Scatter]
        {
            assert_eq!(factors(benchmark), [0.5, 0.75]);
        }
        for benchmark in [Benchmark::Reduce, Benchmark::Broadcast, Benchmark::SendRecv] {
            assert_eq!(factors(benchmark), [1.0, 1.0]);
        }
    }

    #[test]
    fn no_rank_sends_more_than_all_ranks_together() {
        for benchmark in Benchmark::value_variants().iter().filter(|benchmark| benchmark.facts().moves_data()) {
            let Facts { bus_factor, total_sent, traffic, .. } = benchmark.facts();
            for n in [2.0, 3.0, 8.0] {
                assert!(bus_factor(n) <= total_sent(n) && total_sent(n) <= n * bus_factor(n), "{benchmark:?} of {n}");
                assert!(traffic(n)[1] <= traffic(n)[0] && total_sent(n) <= traffic(n)[0], "{benchmark:?} of {n}");
            }
        }
    }
}
