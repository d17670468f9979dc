//! Measures a group's operations on the memory of CUDA devices.

use bonfire::server::{DeviceCollectives, Transfer};
use bonfire::{CollectiveRuntime, CudaDevice, DType, Error, Group, ReduceOp};
use bonfire_core::internal::oracle::Sample;
use cubecl::Runtime;
use cubecl::client::ComputeClient;
use cubecl::cuda::CudaRuntime;
use cubecl::server::Handle;

use super::operation::{Benchmark, Calls};
use super::oracle::{Case, Extent, POISON, wrong};
use super::timing::{RankError, Workload};

type Collective = CollectiveRuntime<CudaRuntime>;

/// A rank's device.
pub struct Rank(ComputeClient<Collective>);

impl Rank {
    /// Takes the device of this rank's number on its host.
    pub fn new(group: &Group) -> Result<Rank, RankError> {
        let device = CudaDevice::of_rank(group.by_host()?.rank())?;
        Ok(Rank(Collective::client(&device)))
    }
}

/// Whether the operation can be measured on devices.
pub fn measures(benchmark: Benchmark) -> bool {
    starts_in_place(benchmark).is_some()
}

/// Whether the operation has a form in place here. `None` if it has no form on devices.
fn starts_in_place(benchmark: Benchmark) -> Option<bool> {
    match benchmark {
        Benchmark::AllReduce | Benchmark::AllGather | Benchmark::ReduceScatter | Benchmark::AllToAll => Some(true),
        // On devices the root's buffer and those of the others are one argument.
        Benchmark::Broadcast | Benchmark::Reduce | Benchmark::Gather | Benchmark::Scatter => Some(false),
        _ => None,
    }
}

/// An operation on device memory, and its expected result.
pub struct Devices<'a, T: Sample> {
    rank: &'a Rank,
    group: &'a Group,
    benchmark: Benchmark,
    calls: Calls<T>,
    case: Case<T>,
    in_place: bool,
    input: Handle,
    output: Handle,
}

impl<'a, T: Sample> Devices<'a, T> {
    /// Prepares an operation on whole buffers of `count` elements. `None` if it has no such form.
    pub fn new(
        rank: &'a Rank,
        group: &'a Group,
        benchmark: Benchmark,
        (op, root): (ReduceOp, usize),
        count: usize,
        in_place: bool,
    ) -> Option<Self> {
        let possible = starts_in_place(benchmark)?;
        let calls = Calls::of(benchmark).filter(|_| possible || !in_place)?;
        let case = Case::new(benchmark.facts().reduces, op, [group.world_size(), group.rank(), root], count);
        let (input, output) = (rank.0.empty(1), rank.0.empty(1));
        Some(Devices { rank, group, benchmark, calls, case, in_place, input, output })
    }

    fn part_of(&self, whole: &Handle, extent: Extent) -> Handle {
        let range = self.case.range(extent);
        let end = (self.case.count - range.end) * size_of::<T>();
        whole.clone().offset_start((range.start * size_of::<T>()) as u64).offset_end(end as u64)
    }

    fn start(&self) -> Result<Transfer<CudaRuntime>, Error> {
        let Devices { rank: Rank(client), group, case, input, output, .. } = self;
        let (dtype, op, root): (DType, _, _) = (T::DTYPE, case.op, case.root);
        let here = case.rank == root;
        match self.benchmark {
            Benchmark::AllGather => client.start_all_gather(group, input, output, dtype),
            Benchmark::ReduceScatter => client.start_reduce_scatter(group, input, output, dtype, op),
            Benchmark::AllToAll => client.start_all_to_all(group, input, output, dtype),
            // The root's buffer is the source and stays as it is.
            Benchmark::Broadcast => client.start_broadcast(group, if here { input } else { output }, dtype, root),
            Benchmark::Reduce => client.start_reduce(group, input, here.then_some(output), dtype, op, root),
            Benchmark::Gather => client.start_gather(group, input, here.then_some(output), dtype, root),
            Benchmark::Scatter => client.start_scatter(group, here.then_some(input), output, dtype, root),
            _ => client.start_all_reduce(group, input, output, dtype, op),
        }
    }
}

impl<T: Sample> Workload for Devices<'_, T> {
    fn reset(&mut self) {
        let client = &self.rank.0;
        let input: Vec<T> =
            (0..self.case.range(self.calls.input).len()).map(|i| self.case.input(self.case.rank, i)).collect();
        if self.in_place {
            let mut whole = vec![T::of(POISON); self.case.count];
            whole[self.case.range(self.calls.input)].copy_from_slice(&input);
            let whole = client.create_from_slice(bytemuck::cast_slice(&whole));
            (self.input, self.output) =
                (self.part_of(&whole, self.calls.input), self.part_of(&whole, self.calls.output));
            return;
        }
        let poison = vec![T::of(POISON); self.case.range(self.calls.output).len()];
        self.input = client.create_from_slice(bytemuck::cast_slice(&input));
        self.output = client.create_from_slice(bytemuck::cast_slice(&poison));
    }

    fn call(&mut self) -> Result<(), RankError> {
        Ok(self.start()?.wait()?)
    }

    fn wrong(&mut self) -> Result<u64, RankError> {
        let source = self.benchmark == Benchmark::Broadcast && self.case.rank == self.case.root;
        let result = if source { &self.input } else { &self.output };
        let unreadable = |error| Error::io("reading a result", std::io::Error::other(format!("{error:?}")));
        let bytes = self.rank.0.read_one(result.clone()).map_err(unreadable)?;
        let output: Vec<T> = bytemuck::pod_collect_to_vec(&bytes);
        Ok(wrong(&output, |i| (self.calls.want)(&self.case, i)))
    }
}
