//! What can be measured, as rows of two tables: what moves, and what is called and must come of it.

use bonfire::{Error, Group, Operation};
use bonfire_core::internal::oracle::Sample;
use clap::ValueEnum;

use super::oracle::Case;
use super::oracle::Extent::{self, Part, Whole};

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Benchmark {
    /// Every rank gets the reduction of all buffers
    AllReduce,
    /// The root gets the reduction of all buffers
    Reduce,
    /// Every rank gets the root's buffer
    Broadcast,
    /// Every rank gets the parts of all; the size is that of all parts together
    AllGather,
    /// Every rank gets its part of the reduction; the size is that of all parts together
    ReduceScatter,
    /// Every rank swaps a part with every other; the size is that of a rank's parts together
    AllToAll,
    /// The root gets the parts of all; the size is that of all parts together
    Gather,
    /// Every rank gets its part of the root's buffer; the size is that of all parts together
    Scatter,
    /// As all_gather, with the sizes of the parts given
    AllGatherV,
    /// As reduce_scatter, with the sizes of the parts given
    ReduceScatterV,
    /// As all_to_all, with the sizes of the parts given
    AllToAllV,
    /// Every rank sends its buffer to the next one
    SendRecv,
    /// Every rank waits for all, without any data
    Barrier,
    /// One training step's gradients by DataParallel: ResNet-50's 161 tensors, 25,557,032 f32, averaged
    Gradients,
}

/// What bandwidths and floors depend on. All functions take the number of ranks, and count in sizes: 1 is the size that
/// stands in the table.
#[derive(Clone, Copy)]
pub struct Facts {
    /// The group's operation for which algorithms are chosen, if they are.
    pub operation: Option<Operation>,
    pub reduces: bool,
    pub rooted: bool,
    /// Whether a size consists of a part for each rank.
    parted: bool,
    /// What the busiest rank must send or receive: busbw is algbw times this, as nccl-tests define both.
    pub bus: fn(f64) -> f64,
    /// What all ranks together must send.
    pub crossing: fn(f64) -> f64,
    /// What must be read and written at least where all memory is in reach: out of place, and in place.
    pub touched: fn(f64) -> [f64; 2],
}

impl Facts {
    const NOTHING: Facts = Facts {
        operation: None,
        reduces: false,
        rooted: false,
        parted: false,
        bus: |_| 1.0,
        crossing: |_| 0.0,
        touched: |_| [0.0, 0.0],
    };

    /// Every rank has a part for, or of, every other.
    const PARTS: Facts = Facts { parted: true, bus: |n| (n - 1.0) / n, crossing: |n| n - 1.0, ..Facts::NOTHING };

    /// Whether it moves anything at all.
    pub fn moves(&self) -> bool {
        (self.crossing)(2.0) > 0.0
    }

    /// How many parts a size consists of.
    pub fn parts(&self, ranks: usize) -> usize {
        if self.parted { ranks } else { 1 }
    }
}

impl Benchmark {
    pub fn facts(self) -> Facts {
        match self {
            // The gradients are an all_reduce, as far as bytes go.
            Benchmark::AllReduce | Benchmark::Gradients => Facts {
                operation: Some(Operation::AllReduce),
                reduces: true,
                bus: |n| 2.0 * (n - 1.0) / n,
                crossing: |n| 2.0 * (n - 1.0),
                touched: |n| [2.0 * n, 2.0 * n],
                ..Facts::NOTHING
            },
            Benchmark::Reduce => Facts {
                operation: Some(Operation::Reduce),
                reduces: true,
                rooted: true,
                crossing: |n| n - 1.0,
                touched: |n| [n + 1.0, n + 1.0],
                ..Facts::NOTHING
            },
            Benchmark::Broadcast => Facts {
                operation: Some(Operation::Broadcast),
                rooted: true,
                crossing: |n| n - 1.0,
                touched: |n| [n + 1.0, n],
                ..Facts::NOTHING
            },
            Benchmark::AllGather | Benchmark::AllGatherV => {
                Facts { operation: Some(Operation::AllGather), touched: |n| [n + 1.0, n], ..Facts::PARTS }
            }
            Benchmark::ReduceScatter | Benchmark::ReduceScatterV => Facts {
                operation: Some(Operation::ReduceScatter),
                reduces: true,
                touched: |n| [n + 1.0, n + 1.0],
                ..Facts::PARTS
            },
            Benchmark::AllToAll => Facts {
                operation: Some(Operation::AllToAll),
                // In place a rank's part for itself stays where it is.
                touched: |n| [2.0 * n, 2.0 * (n - 1.0)],
                ..Facts::PARTS
            },
            Benchmark::AllToAllV => Facts { operation: None, ..Benchmark::AllToAll.facts() },
            Benchmark::Gather => Facts {
                operation: Some(Operation::Gather),
                rooted: true,
                crossing: |n| (n - 1.0) / n,
                touched: |n| [2.0, 2.0 * (n - 1.0) / n],
                ..Facts::PARTS
            },
            Benchmark::Scatter => Facts { operation: Some(Operation::Scatter), ..Benchmark::Gather.facts() },
            Benchmark::SendRecv => Facts { crossing: |n| n, touched: |n| [2.0 * n, 2.0 * n], ..Facts::NOTHING },
            Benchmark::Barrier => Facts { operation: Some(Operation::Barrier), ..Facts::NOTHING },
        }
    }
}

type Call<T> = fn(&Group, &Case<T>, &[T], &mut [T]) -> Result<(), Error>;

/// An operation on slices.
#[derive(Clone, Copy)]
pub struct Calls<T> {
    pub input: Extent,
    pub output: Extent,
    pub into: Call<T>,
    /// Works on the output alone, which is then a whole buffer: parts lie in it where they belong.
    pub in_place: Option<Call<T>>,
    /// Element `i` of the output, None where it is unspecified.
    pub want: fn(&Case<T>, usize) -> Option<T>,
}

impl<T: Sample> Calls<T> {
    /// None for what is not on slices.
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
                // A send may wait for its receiver, so neighbours take turns.
                into: |group, case, input, output| {
                    let (next, previous) = ((case.rank + 1) % case.ranks, (case.rank + case.ranks - 1) % case.ranks);
                    if case.rank.is_multiple_of(2) {
                        group.send(input, next)?;
                        return group.recv(output, previous);
                    }
                    group.recv(output, previous)?;
                    group.send(input, next)
                },
                // Who receives first would overwrite what it is to send.
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
        let factors = |benchmark: Benchmark| [2.0, 4.0].map(benchmark.facts().bus);
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
    fn no_rank_sends_more_than_all_together_do() {
        for benchmark in Benchmark::value_variants().iter().filter(|benchmark| benchmark.facts().moves()) {
            let Facts { bus, crossing, touched, .. } = benchmark.facts();
            for n in [2.0, 3.0, 8.0] {
                assert!(bus(n) <= crossing(n) && crossing(n) <= n * bus(n), "{benchmark:?} of {n}");
                assert!(touched(n)[1] <= touched(n)[0] && crossing(n) <= touched(n)[0], "{benchmark:?} of {n}");
            }
        }
    }
}
