//! The operations of a group on device memory, on any runtime.

use bonfire::server::{DeviceCollectives, DeviceTransport};
use bonfire::tensor::operation::{self, Kind};
use bonfire::{CollectiveRuntime, DType, Error, Group, ReduceOp, partition};
use burn::tensor::backend::Backend;
use burn::tensor::{Element, Numeric, Tensor, TensorData};
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

    let wholes = |from: usize, at: usize| (0..len).map(move |i| value(from, at * len + i)).collect::<Vec<_>>();
    for root in 0..n {
        let here = rank == root;
        let target = memory.create(&vec![0; len]);
        client.start_reduce(group, &source, here.then_some(&target), DType::I32, ReduceOp::Sum, root)?.wait()?;
        assert_eq!(memory.read(&target), if here { sum.clone() } else { vec![0; len] }, "{}", label("reduce"));

        let target = memory.create(&vec![0; n * len]);
        client.start_gather(group, &source, here.then_some(&target), DType::I32, root)?.wait()?;
        let all = if here { (0..n).flat_map(|from| mine(from, len)).collect() } else { vec![0; n * len] };
        assert_eq!(memory.read(&target), all, "{}", label("gather"));

        let whole = memory.create(&(0..n).flat_map(|at| wholes(root, at)).collect::<Vec<_>>());
        let part = memory.create(&vec![0; len]);
        client.start_scatter(group, here.then_some(&whole), &part, DType::I32, root)?.wait()?;
        assert_eq!(memory.read(&part), wholes(root, rank), "{}", label("scatter"));
        assert_eq!(memory.read(&source), mine(rank, len), "{}", label("the source of the operations with a root"));
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

/// Compares operations on tensors of this shape, with parts along each of these dimensions, with what they are defined
/// as.
pub fn check_tensors<B: Backend, K>(
    group: &Group,
    device: &B::Device,
    shape: [usize; 3],
    dims: &[usize],
) -> Result<(), Error>
where
    K: Kind<B> + Numeric<B>,
    K::Elem: Element,
{
    let (rank, n) = (group.rank(), group.world_size());
    // The element of a rank's input at a place. Sums are exact.
    let input = |rank: usize, place: [usize; 3]| value(rank, (place[0] * 29 + place[1]) * 31 + place[2]);
    let data = |shape: [usize; 3], element: &dyn Fn([usize; 3]) -> i32| {
        let places = (0..shape.iter().product())
            .map(|i: usize| [i / (shape[1] * shape[2]), i / shape[2] % shape[1], i % shape[2]]);
        TensorData::new(places.map(element).collect::<Vec<i32>>(), shape)
    };
    let expect = |tensor: Tensor<B, 3, K>, expected: TensorData, what: &str| {
        let data = tensor.into_data();
        assert_eq!(data.shape, expected.shape, "{what} on rank {rank} of {n}");
        assert_eq!(data.convert::<i32>(), expected, "{what} on rank {rank} of {n}");
    };
    let own = Tensor::<B, 3, K>::from_data(data(shape, &|place| input(rank, place)), device);
    let sum = |place| (0..n).map(|rank| input(rank, place)).sum();

    let reduced = operation::all_reduce(own.clone(), ReduceOp::Sum, group)?;
    expect(reduced, data(shape, &sum), "all_reduce");
    for root in 0..n {
        let received = operation::broadcast(own.clone(), root, group)?;
        expect(received, data(shape, &|place| input(root, place)), "broadcast");
        let reduced = operation::reduce(own.clone(), ReduceOp::Sum, root, group)?;
        assert_eq!(reduced.is_some(), rank == root);
        reduced.into_iter().for_each(|reduced| expect(reduced, data(shape, &sum), "reduce"));
    }
    for &dim in dims {
        let (len, part) = (shape[dim], shape[dim] / n);
        let with = |mut place: [usize; 3], at: usize| {
            place[dim] = at;
            place
        };
        let whole = with(shape, n * len);
        let gathered = operation::all_gather(own.clone(), dim as isize, group)?;
        let element = |place: [usize; 3]| input(place[dim] / len, with(place, place[dim] % len));
        expect(gathered, data(whole, &element), &format!("all_gather along {dim}"));
        for root in 0..n {
            let gathered = operation::gather(own.clone(), root, dim as isize, group)?;
            assert_eq!(gathered.is_some(), rank == root);
            gathered.into_iter().for_each(|whole_of| expect(whole_of, data(whole, &element), "gather"));
            let given = (rank == root).then(|| own.clone());
            let scattered = operation::scatter(given, root, dim as isize, (device, own.dtype()), group)?;
            let element = |place: [usize; 3]| input(root, with(place, rank * part + place[dim]));
            expect(scattered, data(with(shape, part), &element), &format!("scatter along {dim}"));
        }
        let scattered = operation::reduce_scatter(own.clone(), ReduceOp::Sum, dim as isize, group)?;
        let element = |place: [usize; 3]| sum(with(place, rank * part + place[dim]));
        expect(scattered, data(with(shape, part), &element), &format!("reduce_scatter along {dim}"));
        let swapped = operation::all_to_all(own.clone(), dim as isize, group)?;
        let element = |place: [usize; 3]| input(place[dim] / part, with(place, rank * part + place[dim] % part));
        expect(swapped, data(shape, &element), &format!("all_to_all along {dim}"));
    }
    // Inputs are not modified.
    expect(own, data(shape, &|place| input(rank, place)), "the input");
    Ok(())
}

/// Compares operations on parts of unequal sizes along each dimension with what they are defined as. The ranks' parts
/// have lengths of their own, which are 0 on one rank.
pub fn check_unequal_parts<B: Backend, K>(group: &Group, device: &B::Device) -> Result<(), Error>
where
    K: Kind<B> + Numeric<B>,
    K::Elem: Element,
{
    let (rank, n) = (group.rank(), group.world_size());
    let sizes: Vec<usize> = (0..n).map(|rank| ((3 * rank + 2) % (2 * n) + 1) * usize::from(rank != 1)).collect();
    let total = sizes.iter().sum();
    let expect = |tensor: Tensor<B, 3, K>, expected: Tensor<B, 3, K>, what: &str| {
        assert_eq!(tensor.dims(), expected.dims(), "{what} on rank {rank} of {n}");
        // On CUDA burn reads and writes no tensor of three dimensions without elements.
        if tensor.shape().num_elements() > 0 {
            assert_eq!(tensor.into_data(), expected.into_data(), "{what} on rank {rank} of {n}");
        }
    };
    let concatenated = |parts: Vec<Tensor<B, 3, K>>, dim: usize| {
        // burn would launch kernels on no elements.
        Tensor::cat(parts.into_iter().filter(|part| part.dims()[dim] > 0).collect(), dim)
    };
    for dim in 0..3 {
        let shape = |len: usize| {
            let mut shape = [5, 4, 3];
            shape[dim] = len;
            shape
        };
        let tensor = |from: usize, len: usize| {
            if len == 0 {
                return Tensor::<B, 3, K>::empty(shape(len), device);
            }
            let elements = (0..shape(len).iter().product()).map(|i| value(from, i)).collect();
            Tensor::<B, 3, K>::from_data(TensorData::new::<i32, _>(elements, shape(len)), device)
        };
        let start_of = |rank: usize| sizes[..rank].iter().sum::<usize>();
        let (at, own) = (dim as isize, || tensor(rank, sizes[rank]));
        let all = || concatenated((0..n).map(|rank| tensor(rank, sizes[rank])).collect(), dim);
        for known in [Some(&sizes[..]), None] {
            expect(operation::all_gather_v(own(), at, known, group)?, all(), "all_gather_v");
            for root in 0..n {
                let gathered = operation::gather_v(own(), root, at, known, group)?;
                assert_eq!(gathered.is_some(), rank == root);
                gathered.into_iter().for_each(|gathered| expect(gathered, all(), "gather_v"));
            }
        }
        // An empty part has no elements to compare, and burn cuts no empty slices on CUDA.
        let part_of = |whole: Tensor<B, 3, K>| match sizes[rank] {
            0 => tensor(rank, 0),
            len => whole.narrow(dim, start_of(rank), len),
        };
        for root in 0..n {
            let given = (rank == root).then(|| (tensor(root, total), &sizes[..]));
            let part = operation::scatter_v(given, root, at, (device, own().dtype()), group)?;
            expect(part, part_of(tensor(root, total)), "scatter_v");
        }
        let part = operation::reduce_scatter_v(tensor(rank, total), ReduceOp::Sum, at, &sizes, group)?;
        let sum = (1..n).fold(tensor(0, total), |sum, rank| sum + tensor(rank, total));
        expect(part, part_of(sum), "reduce_scatter_v");

        // Rank `from` sends each rank another length, and rank 1 nothing to rank 0.
        let length = |from: usize, to: usize| (from + 2 * to + 1) * usize::from((from, to) != (1, 0));
        let send = |from: usize| (0..n).map(|to| length(from, to)).collect::<Vec<_>>();
        let outgoing = |from: usize| tensor(from, send(from).iter().sum());
        let recv: Vec<usize> = (0..n).map(|from| length(from, rank)).collect();
        let arriving = (0..n).filter(|from| length(*from, rank) > 0).map(|from| {
            let before = (0..rank).map(|to| length(from, to)).sum();
            outgoing(from).narrow(dim, before, length(from, rank))
        });
        let arriving = concatenated(arriving.collect(), dim);
        for known in [Some(&recv[..]), None] {
            let received = operation::all_to_all_v(outgoing(rank), at, &send(rank), known, group)?;
            expect(received, arriving.clone(), "all_to_all_v");
        }
    }
    Ok(())
}

/// Passes tensors between every two ranks and around the ring, and compares what arrives with what was sent.
pub fn check_messages<B: Backend, K>(group: &Group, device: &B::Device) -> Result<(), Error>
where
    K: Kind<B> + Numeric<B>,
    K::Elem: Element,
{
    let (rank, n) = (group.rank(), group.world_size());
    let numbers = |from: usize, len: usize| -> Vec<i32> { (0..len).map(|i| value(from, i)).collect() };
    let tensor = |from: usize, shape: [usize; 2]| {
        let data = TensorData::new(numbers(from, shape[0] * shape[1]), shape);
        Tensor::<B, 2, K>::from_data(data, device)
    };
    let expect = |tensor: Tensor<B, 2, K>, expected: Tensor<B, 2, K>, what: &str| {
        let (found, expected) = (tensor.into_data(), expected.into_data());
        assert_eq!(found, expected, "{what} on rank {rank} of {n}");
    };
    let options = (device, tensor(0, [1, 1]).dtype());
    for shape in [[0, 3], [1, 1], [5, 128], [300, 128]] {
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))).filter(|(from, to)| from != to) {
            if rank == from {
                let sent = tensor(from, shape);
                operation::send(sent.clone(), to, group)?;
                // The sender may change its tensor at once, in place if burn can. CUDA runs no kernel on no elements.
                let _changed = (shape[0] > 0).then(|| sent + 1);
            } else if rank == to {
                let received = operation::recv(shape, from, options, group)?;
                expect(received, tensor(from, shape), &format!("{shape:?} from rank {from}"));
            }
        }
    }
    // Ranks send lengths of their own, of a tensor whose elements are not in its order.
    let sent = |rank: usize| tensor(rank, [128, 128 * (rank + 1)]).transpose();
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    for _ in 0..3 {
        let shape = [128 * (previous + 1), 128];
        let received = operation::exchange(sent(rank), next, shape, previous, group)?;
        expect(received, sent(previous), "exchange around the ring");
    }
    // What cannot be meant is refused, and the group stays usable.
    for peer in [rank, n] {
        let sent = operation::send(tensor(rank, [1, 1]), peer, group);
        let received = operation::recv::<B, 2, K>([1, 1], peer, options, group).map(drop);
        assert!([sent, received].iter().all(|refused| matches!(refused, Err(Error::InvalidArgument { .. }))));
    }
    let itself = operation::exchange(sent(rank), rank, [128 * (rank + 1), 128], rank, group)?;
    expect(itself, sent(rank), "exchange with itself");
    Ok(())
}
