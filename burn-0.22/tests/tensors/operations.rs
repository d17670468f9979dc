//! Operations on burn's tensors, compared with what burn computes on one rank.

use std::ops::Range;

use bonfire::tensor::operation::*;
use bonfire::{DeviceCommunicator, Error, Group, ReduceOp};
use bonfire_testing::{Kind as TransportKind, errors, run_ranks};
use burn::tensor::kind::Numeric;
use burn::tensor::{Bool, BoolStore, DType, Device, Float, Int, Tensor, TensorData};

const BOOL: DType = DType::Bool(BoolStore::Native);

/// Each rank's tensor: small whole numbers, different on each rank, so that sums are exact in every type.
fn of_rank<const D: usize, K: Kind>(rank: usize, shape: [usize; D], dtype: DType) -> Tensor<D, K> {
    let values: Vec<i64> = (0..shape.iter().product()).map(|i: usize| ((i * 7 + rank * 5) % 11) as i64 % 7).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), dtype))
}

fn along<const D: usize>(shape: [usize; D], dim: usize, len: usize) -> [usize; D] {
    std::array::from_fn(|at| if at == dim { len } else { shape[at] })
}

fn part<const D: usize, K: Kind>(tensor: &Tensor<D, K>, dim: usize, range: Range<usize>) -> Tensor<D, K> {
    tensor.clone().narrow(dim, range.start, range.len())
}

/// The ranges of parts of these sizes.
fn ranges(sizes: &[usize]) -> Vec<Range<usize>> {
    (0..sizes.len()).map(|i| sizes[..i].iter().sum()..sizes[..=i].iter().sum()).collect()
}

#[track_caller]
fn same<const D: usize, K: Kind>(result: Result<Tensor<D, K>, Error>, expected: &Tensor<D, K>) {
    assert_eq!(result.unwrap().into_data(), expected.to_data());
}

const SHAPE: [usize; 4] = [2, 3, 1, 2];
const SIZES: [usize; 5] = [2, 0, 3, 1, 0];

/// Checks what moves elements, along every dimension of a tensor of `D` dimensions.
fn moves<const D: usize, K: Kind>(group: &Group, dtype: DType) {
    let (n, rank, device) = (group.world_size(), group.rank(), Device::flex());
    let shape: [usize; D] = std::array::from_fn(|at| SHAPE[at]);
    let make = |rank, shape| of_rank::<D, K>(rank, shape, dtype);
    let cat = |tensors: Vec<Tensor<D, K>>, dim| {
        Tensor::cat(tensors.into_iter().filter(|tensor| tensor.shape().num_elements() > 0).collect(), dim)
    };
    let root = n - 1;
    same(broadcast(make(rank, shape), root, group), &make(root, shape));
    let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
    let theirs = along(shape, 0, before + 1);
    same(exchange(make(rank, along(shape, 0, rank + 1)), next, theirs, before, group), &make(before, theirs));
    for dim in -(D as isize)..D as isize {
        let at = dim.rem_euclid(D as isize) as usize;

        let all = cat((0..n).map(|rank| make(rank, shape)).collect(), at);
        let own = make(rank, shape);
        same(all_gather(own.clone(), dim, group), &all);
        same(all_gather(make(rank, shape), dim, group), &all);
        assert_eq!(own.into_data(), make(rank, shape).into_data(), "the input is unchanged");
        match gather(make(rank, shape), root, dim, group).unwrap() {
            Some(whole) if rank == root => assert_eq!(whole.into_data(), all.to_data()),
            whole => assert!(rank != root && whole.is_none()),
        }

        let sizes = &SIZES[..n];
        let all = cat((0..n).map(|rank| make(rank, along(shape, at, sizes[rank]))).collect(), at);
        let own = || make(rank, along(shape, at, sizes[rank]));
        same(all_gather_v(own(), dim, Some(sizes), group), &all);
        same(all_gather_v(own(), dim, None, group), &all);
        for sizes in [Some(sizes), None] {
            match gather_v(own(), 0, dim, sizes, group).unwrap() {
                Some(whole) if rank == 0 => assert_eq!(whole.into_data(), all.to_data()),
                whole => assert!(rank != 0 && whole.is_none()),
            }
        }
        let whole = (rank == 0).then(|| (all.clone(), sizes));
        same(scatter_v(whole, 0, dim, (&device, dtype), group), &own());

        let even = along(shape, at, 2 * n);
        let whole = (rank == root).then(|| make(root, even));
        let mine = part(&make(root, even), at, 2 * rank..2 * rank + 2);
        same(scatter(whole, root, dim, (&device, dtype), group), &mine);

        let swapped = cat((0..n).map(|from| part(&make(from, even), at, 2 * rank..2 * rank + 2)).collect(), at);
        same(all_to_all(make(rank, even), dim, group), &swapped);

        // Every rank sends something, since burn has no tensor without a part.
        let sizes = |from: usize| (0..n).map(|to| (2 * from + to + 1) % 3).collect::<Vec<_>>();
        let whole = |from: usize| make(from, along(shape, at, sizes(from).iter().sum()));
        let receive: Vec<_> = (0..n).map(|from| sizes(from)[rank]).collect();
        let parts = (0..n).filter(|from| receive[*from] > 0);
        let swapped: Vec<_> = parts.map(|from| part(&whole(from), at, ranges(&sizes(from))[rank].clone())).collect();
        for receive in [Some(&receive[..]), None] {
            let result = all_to_all_v(whole(rank), dim, &sizes(rank), receive, group).unwrap();
            if swapped.is_empty() {
                assert_eq!(result.shape().num_elements(), 0);
            } else {
                assert_eq!(result.into_data(), Tensor::cat(swapped.clone(), at).into_data());
            }
        }
    }
}

/// Checks what reduces elements.
fn reduces<const D: usize, K: Numeric>(group: &Group, dtype: DType) {
    let (n, rank) = (group.world_size(), group.rank());
    let shape: [usize; D] = std::array::from_fn(|at| SHAPE[at]);
    let make = |rank, shape| of_rank::<D, K>(rank, shape, dtype);
    let sum = |shape: [usize; D]| (1..n).fold(make(0, shape), |sum, rank| sum + make(rank, shape));
    let own = make(rank, shape);
    same(all_reduce(own.clone(), ReduceOp::Sum, group), &sum(shape));
    assert_eq!(own.into_data(), make(rank, shape).into_data(), "the input is unchanged");
    same(all_reduce(make(rank, shape), ReduceOp::Sum, group), &sum(shape));
    for dim in -(D as isize)..D as isize {
        let at = dim.rem_euclid(D as isize) as usize;
        let even = along(shape, at, 2 * n);
        let mine = part(&sum(even), at, 2 * rank..2 * rank + 2);
        let own = make(rank, even);
        same(reduce_scatter(own.clone(), ReduceOp::Sum, dim, group), &mine);
        assert_eq!(own.into_data(), make(rank, even).into_data(), "the input is unchanged");

        let sizes = &SIZES[..n];
        let uneven = along(shape, at, sizes.iter().sum());
        let result = reduce_scatter_v(make(rank, uneven), ReduceOp::Sum, dim, sizes, group).unwrap();
        assert_eq!(result.dims(), along(shape, at, sizes[rank]));
        if sizes[rank] > 0 {
            assert_eq!(result.into_data(), part(&sum(uneven), at, ranges(sizes)[rank].clone()).into_data());
        }
    }
}

fn every_rank_of_tensor<K: Kind>(group: &Group, dtype: DType) {
    moves::<1, K>(group, dtype);
    moves::<2, K>(group, dtype);
    moves::<3, K>(group, dtype);
    moves::<4, K>(group, dtype);
}

fn every_rank_of_numbers<K: Numeric>(group: &Group, dtype: DType) {
    every_rank_of_tensor::<K>(group, dtype);
    reduces::<1, K>(group, dtype);
    reduces::<2, K>(group, dtype);
    reduces::<3, K>(group, dtype);
    reduces::<4, K>(group, dtype);
}

#[test]
fn one_to_three_ranks_match_burn_on_one_rank() {
    for n in 1..=3 {
        run_ranks(TransportKind::Threads, n, |group| {
            every_rank_of_numbers::<Float>(&group, DType::F32);
            every_rank_of_numbers::<Float>(&group, DType::F64);
            every_rank_of_numbers::<Float>(&group, DType::F16);
            every_rank_of_numbers::<Float>(&group, DType::BF16);
            every_rank_of_numbers::<Int>(&group, DType::I32);
            every_rank_of_numbers::<Int>(&group, DType::I64);
            every_rank_of_tensor::<Bool>(&group, BOOL);
        });
    }
}

#[test]
fn tcp_and_shared_memory_match_burn_on_one_rank() {
    for kind in [TransportKind::Tcp, TransportKind::Shm] {
        run_ranks(kind, 3, |group| {
            moves::<3, Int>(&group, DType::I16);
            moves::<2, Bool>(&group, BOOL);
            reduces::<3, Float>(&group, DType::F16);
            reduces::<2, Int>(&group, DType::U8);
        });
    }
}

#[test]
fn views_are_read_in_logical_order() {
    run_ranks(TransportKind::Threads, 2, |group| {
        let device = Device::flex();
        let table = Tensor::<1, Int>::arange(0..6, &device).reshape([2, 3]) + group.rank() as i32 * 10;
        let turned = all_gather(table.clone().transpose(), 1, &group).unwrap();
        assert_eq!(turned.to_data().iter::<i64>().collect::<Vec<_>>(), [0, 3, 10, 13, 1, 4, 11, 14, 2, 5, 12, 15]);
        let row = all_reduce(table.clone().slice([1..2, 0..3]), ReduceOp::Max, &group).unwrap();
        assert_eq!(row.to_data().iter::<i64>().collect::<Vec<_>>(), [13, 14, 15]);
        let expanded = Tensor::<1>::ones([1], &device).expand([3]);
        assert_eq!(all_reduce(expanded, ReduceOp::Sum, &group).unwrap().to_data(), TensorData::from([2f32; 3]));
    });
}

#[test]
fn messages_keep_shape_and_type() {
    run_ranks(TransportKind::Threads, 2, |group| {
        let device = Device::flex();
        let table = || of_rank::<3, Int>(0, [2, 3, 2], DType::I16);
        if group.rank() == 0 {
            send(table(), 1, &group).unwrap();
            send(table().equal_elem(3), 1, &group).unwrap();
        } else {
            same(recv([2, 3, 2], 0, (&device, DType::I16), &group), &table());
            same(recv::<3, Bool>([2, 3, 2], 0, &device, &group), &table().equal_elem(3));
        }
    });
}

#[test]
fn invalid_arguments_are_rejected_and_the_group_stays_usable() {
    run_ranks(TransportKind::Threads, 2, |group| {
        let device = Device::flex();
        let table = || Tensor::<2>::ones([3, 2], &device);
        let refused = |result: Result<Tensor<2>, Error>, words: &str| match result {
            Err(Error::InvalidArgument { reason, .. }) if reason.contains(words) => {}
            other => panic!("{other:?} does not mention '{words}'"),
        };
        for dim in [2, -3, isize::MIN] {
            refused(all_gather(table(), dim, &group), "give one from -2 to 1");
            refused(reduce_scatter(table(), ReduceOp::Sum, dim, &group), "give one from -2 to 1");
            refused(all_to_all(table(), dim, &group), "give one from -2 to 1");
        }
        refused(reduce_scatter(table(), ReduceOp::Sum, 0, &group), "multiple of 2");
        refused(all_to_all(table(), 0, &group), "multiple of 2");
        refused(all_gather_v(table(), 0, Some(&[3]), &group), "1 sizes for 2 ranks");
        refused(all_gather_v(table(), 0, Some(&[4, 4]), &group), "its tensor has 3");
        refused(reduce_scatter_v(table(), ReduceOp::Sum, 0, &[2, 2], &group), "do not add up");
        refused(reduce_scatter_v(table(), ReduceOp::Sum, 0, &[usize::MAX, 4], &group), "do not add up");
        refused(all_to_all_v(table(), 0, &[3, 1], None, &group), "do not add up");
        refused(all_to_all_v(table(), 0, &[3, 0], Some(&[0]), &group), "1 sizes for 2 ranks");
        refused(all_to_all_v(table(), 0, &[3, 0], Some(&[usize::MAX, 3]), &group), "no tensor is so long");
        refused(broadcast(table(), 2, &group), "root 2");
        refused(scatter(None, group.rank(), 0, &device, &group), "gives the only tensor");
        refused(recv([usize::MAX, 2], 1 - group.rank(), &device, &group), "no tensor");
        assert!(gather(table(), 5, 0, &group).is_err());
        same(all_reduce(table(), ReduceOp::Sum, &group), &(table() * 2));
    });
}

/// Two ranks whose tensors have equally many elements and different shapes.
#[test]
fn different_shapes_are_detected_by_all_ranks() {
    type Call = fn(&Group, Tensor<2>) -> Result<(), Error>;
    let calls: [Call; 8] = [
        |group, tensor| all_reduce(tensor, ReduceOp::Sum, group).map(drop),
        |group, tensor| broadcast(tensor, 0, group).map(drop),
        |group, tensor| all_gather(tensor, 0, group).map(drop),
        |group, tensor| all_gather_v(tensor, 0, None, group).map(drop),
        |group, tensor| gather(tensor, 0, 1, group).map(drop),
        |group, tensor| reduce_scatter(tensor, ReduceOp::Sum, 0, group).map(drop),
        |group, tensor| all_to_all(tensor, 1, group).map(drop),
        |group, tensor| all_to_all_v(tensor, 0, &[1, 1], None, group).map(drop),
    ];
    for (index, call) in calls.into_iter().enumerate() {
        let results = run_ranks(TransportKind::Threads, 2, move |group| {
            let shape = match (index, group.rank()) {
                (7, rank) => [2, 3 + rank],
                (_, 0) => [2, 4],
                _ => [4, 2],
            };
            call(&group, Tensor::ones(shape, &Device::flex()))
        });
        for error in errors(results) {
            assert!(matches!(error, Error::Mismatch { .. }), "{index}: {error}");
        }
    }
}

#[test]
fn float_tensors_on_a_device_with_autodiff_are_refused_on_all_ranks_because_gradients_would_be_lost() {
    #[track_caller]
    fn refused<T>(result: Result<T, Error>) {
        let Err(Error::InvalidArgument { reason, .. }) = result else { panic!("it was not refused") };
        assert!(reason.contains("`tensor::autodiff`") && reason.contains("`tensor.inner()`"), "{reason}");
    }

    run_ranks(TransportKind::Threads, 2, |group| {
        let (rank, device) = (group.rank(), Device::flex().autodiff());
        let leaf = Tensor::<2>::ones([2, 2], &device).require_grad();
        let tensor = || leaf.clone() * 2.0;
        refused(all_reduce(tensor(), ReduceOp::Sum, &group));
        refused(all_reduce(leaf.clone(), ReduceOp::Sum, &group));
        refused(reduce(tensor(), ReduceOp::Sum, 0, &group));
        refused(broadcast(tensor(), 0, &group));
        refused(all_gather(tensor(), 0, &group));
        refused(all_gather_v(tensor(), 0, None, &group));
        refused(reduce_scatter(tensor(), ReduceOp::Sum, 0, &group));
        refused(gather(tensor(), 0, 0, &group));
        refused(all_to_all(tensor(), 0, &group));
        refused(all_to_all_v(tensor(), 0, &[1, 1], None, &group));
        refused(send(tensor(), 1 - rank, &group));
        refused(exchange(tensor(), 1 - rank, [2, 2], 1 - rank, &group));
        // Also on the rank that passes no tensor: it would wait for the other one.
        refused(scatter((rank == 0).then(tensor), 0, 0, &device, &group));
        refused(recv::<2, Float>([2, 2], 1 - rank, &device, &group));
        // Nothing was sent. Tensors without gradients are not concerned.
        let counts = Tensor::<1, Int>::from_data([rank as i64], &device);
        let all = all_gather(counts, 0, &group).unwrap();
        assert_eq!(all.into_data().iter::<i64>().collect::<Vec<_>>(), [0, 1]);
        let sum = Tensor::<2>::from_inner(all_reduce(tensor().inner(), ReduceOp::Sum, &group).unwrap());
        assert_eq!(sum.into_data(), TensorData::from([[4f32; 2]; 2]));
    });
}

#[test]
fn tensors_that_a_device_or_the_group_lacks_are_typed_errors_before_anything_is_sent() {
    run_ranks(TransportKind::Threads, 2, |group| {
        let (rank, device) = (group.rank(), Device::flex());
        let refused = |result: Result<(), Error>, words: &str| match result {
            Err(Error::InvalidArgument { reason, .. }) if reason.contains(words) => {}
            other => panic!("{other:?} does not mention '{words}'"),
        };
        let received = recv::<1, Float>([2], 1 - rank, (&device, DType::I32), &group);
        refused(received.map(drop), "cannot be sent as float tensors");
        let received = recv::<1, Int>([2], 1 - rank, (&device, DType::F32), &group);
        refused(received.map(drop), "cannot be sent as int tensors");
        // What the root has counts there, so that it alone would know.
        let scattered = scatter::<1, Float>(None, 1 - rank, 0, (&device, DType::Bool(BoolStore::Native)), &group);
        refused(scattered.map(drop), "Bool");
        assert!(!device.supports_dtype(DType::Flex32));
        refused(
            recv::<1, Float>([2], 1 - rank, (&device, DType::Flex32), &group).map(drop),
            "has no tensors of Flex32",
        );
        assert_eq!(group.trace().operations.len(), 0, "nothing was sent");
    });
}

#[test]
fn traces_name_the_line_of_the_caller() {
    run_ranks(TransportKind::Threads, 2, |group| {
        let x = || of_rank::<2, Float>(group.rank(), [2, 2], DType::F32);
        all_reduce(x(), ReduceOp::Sum, &group).unwrap();
        reduce(x(), ReduceOp::Sum, 0, &group).unwrap();
        broadcast(x(), 0, &group).unwrap();
        all_gather_v(x(), 0, None, &group).unwrap();
        reduce_scatter(x(), ReduceOp::Sum, 0, &group).unwrap();
        gather(x(), 0, 0, &group).unwrap();
        all_to_all_v(x(), 0, &[1, 1], None, &group).unwrap();
        exchange(x(), 1 - group.rank(), [2, 2], 1 - group.rank(), &group).unwrap();
        let communicator = DeviceCommunicator::new(group.clone(), Device::flex(), None, "tp").unwrap();
        communicator.all_gather_v(x(), None, None).unwrap();
        let records = group.trace().operations;
        assert!(records.len() >= 11);
        for record in records {
            assert!(record.at.starts_with(file!()), "{} is recorded at {}", record.call, record.at);
        }
    });
}
