//! The operations of a group on device memory, on any runtime.

use bonfire::server::{DeviceCollectives, DeviceTransport};
use bonfire::{CollectiveRuntime, DType, Error, Group, ReduceOp, partition};
use cubecl::client::ComputeClient;
use cubecl::server::Handle;

/// The input of rank `rank` at index `i`. Sums are exact.
pub fn value(rank: usize, i: usize) -> i32 {
    ((rank * 7 + i * 5) % 11) as i32
}

pub fn mine(rank: usize, len: usize) -> Vec<i32> {
    (0..len).map(|i| value(rank, i)).collect()
}

/// Creates buffers on a device, with padding around each of them, as in a slice of a larger tensor.
pub struct Memory<R: DeviceTransport> {
    pub client: ComputeClient<CollectiveRuntime<R>>,
    padding: usize,
}

impl<R: DeviceTransport> Memory<R> {
    /// Pads buffers with so many elements of 4 bytes on both sides.
    pub fn new(client: ComputeClient<CollectiveRuntime<R>>, padding: usize) -> Self {
        Memory { client, padding }
    }

    pub fn create(&self, values: &[i32]) -> Handle {
        let pad = vec![-1; self.padding];
        let padded: Vec<i32> = [&pad, values, &pad].concat();
        let around = 4 * self.padding as u64;
        self.client.create_from_slice(bytemuck::cast_slice(&padded)).offset_start(around).offset_end(around)
    }

    pub fn read(&self, handle: &Handle) -> Vec<i32> {
        bytemuck::pod_collect_to_vec(&self.client.read_one(handle.clone()).unwrap())
    }
}

/// Compares all operations on `len` elements with results of the host.
pub fn check<R: DeviceTransport>(group: &Group, memory: &Memory<R>, len: usize) -> Result<(), Error> {
    let (rank, n) = (group.rank(), group.world_size());
    let client = &memory.client;
    let own = partition(len, n, rank);
    let label = |what: &str| format!("{what} of {len} elements on rank {rank} of {n}");
    let source = memory.create(&mine(rank, len));
    let sum: Vec<i32> = (0..len).map(|i| (0..n).map(|rank| value(rank, i)).sum()).collect();

    let target = memory.create(&vec![0; len]);
    client.start_all_reduce(group, &source, &target, DType::I32, ReduceOp::Sum)?.wait()?;
    assert_eq!(memory.read(&target), sum, "{}", label("all_reduce"));
    assert_eq!(memory.read(&source), mine(rank, len), "{}", label("all_reduce's source"));

    let target = memory.create(&vec![0; own.len()]);
    client.start_reduce_scatter(group, &source, &target, DType::I32, ReduceOp::Sum)?.wait()?;
    assert_eq!(memory.read(&target), sum[own.clone()], "{}", label("reduce_scatter"));

    let whole = memory.create(&vec![0; len]);
    client.start_all_gather(group, &target, &whole, DType::I32)?.wait()?;
    assert_eq!(memory.read(&whole), sum, "{}", label("all_gather"));

    for root in 0..n {
        let same = memory.create(&mine(rank, len));
        client.start_broadcast(group, &same, DType::I32, root)?.wait()?;
        assert_eq!(memory.read(&same), mine(root, len), "{}", label("broadcast"));
    }

    let parts: Vec<i32> = (0..n * len).map(|i| value(rank, i)).collect();
    let swapped: Vec<i32> = (0..n).flat_map(|from| (0..len).map(move |i| value(from, rank * len + i))).collect();
    let (source, target) = (memory.create(&parts), memory.create(&vec![0; n * len]));
    client.start_all_to_all(group, &source, &target, DType::I32)?.wait()?;
    assert_eq!(memory.read(&target), swapped, "{}", label("all_to_all"));

    // In place, and two in flight: they run in the order in which they were started.
    let same = memory.create(&mine(rank, len));
    client.start_all_reduce(group, &same, &same, DType::I32, ReduceOp::Sum)?.wait()?;
    let first = client.start_all_reduce(group, &same, &same, DType::I32, ReduceOp::Max)?;
    let second = client.start_broadcast(group, &source, DType::I32, n - 1)?;
    second.wait()?;
    first.wait()?;
    assert_eq!(memory.read(&same), sum, "{}", label("all_reduce in place"));
    let last: Vec<i32> = (0..n * len).map(|i| value(n - 1, i)).collect();
    assert_eq!(memory.read(&source), last, "{}", label("broadcast beside all_reduce"));
    Ok(())
}
