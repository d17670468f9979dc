//! What operations on tensors give, compared with what burn computes on one rank.
//!
//! `super::tensor_version` says which tensors: burn 0.21 compiles these functions again for a second backend.

use std::ops::Range;

use bonfire::tensor::operation::*;
use bonfire::{Error, Group, ReduceOp};
use burn::tensor::{DType, Int, TensorData};

use super::tensor_version::{DeviceCommunicator, Inner as Tensor, Kind, Numeric, inner_device};

/// Each rank's tensor: small whole numbers, different on each rank, so that sums are exact in every type.
pub fn of_rank<const D: usize, K: Kind>(rank: usize, shape: [usize; D], dtype: DType) -> Tensor<D, K> {
    let values: Vec<i64> = (0..shape.iter().product()).map(|i: usize| ((i * 7 + rank * 5) % 11) as i64 % 7).collect();
    Tensor::from_data(TensorData::new(values, shape), (&inner_device(), dtype))
}

fn along<const D: usize>(shape: [usize; D], dim: usize, len: usize) -> [usize; D] {
    std::array::from_fn(|at| if at == dim { len } else { shape[at] })
}

pub fn part<const D: usize, K: Kind>(tensor: &Tensor<D, K>, dim: usize, range: Range<usize>) -> Tensor<D, K> {
    tensor.clone().narrow(dim, range.start, range.len())
}

/// The ranges of parts of these sizes.
fn ranges(sizes: &[usize]) -> Vec<Range<usize>> {
    (0..sizes.len()).map(|i| sizes[..i].iter().sum()..sizes[..=i].iter().sum()).collect()
}

#[track_caller]
pub fn same<const D: usize, K: Kind>(result: Result<Tensor<D, K>, Error>, expected: &Tensor<D, K>) {
    assert_eq!(result.unwrap().into_data(), expected.to_data());
}

const SHAPE: [usize; 4] = [2, 3, 1, 2];
const SIZES: [usize; 5] = [2, 0, 3, 1, 0];

/// Checks what moves elements, along every dimension of a tensor of `D` dimensions.
pub fn moves<const D: usize, K: Kind>(group: &Group, dtype: DType) {
    let (n, rank, device) = (group.world_size(), group.rank(), inner_device());
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
pub fn reduces<const D: usize, K: Numeric>(group: &Group, dtype: DType) {
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

pub fn every_rank_of_tensor<K: Kind>(group: &Group, dtype: DType) {
    moves::<1, K>(group, dtype);
    moves::<2, K>(group, dtype);
    moves::<3, K>(group, dtype);
    moves::<4, K>(group, dtype);
}

pub fn every_rank_of_numbers<K: Numeric>(group: &Group, dtype: DType) {
    every_rank_of_tensor::<K>(group, dtype);
    reduces::<1, K>(group, dtype);
    reduces::<2, K>(group, dtype);
    reduces::<3, K>(group, dtype);
    reduces::<4, K>(group, dtype);
}

/// Checks a communicator of two ranks on each kind of tensors, and on floats of f64.
pub fn every_kind_of_element(group: &Group) {
    let device = inner_device();
    let communicator = DeviceCommunicator::new(group.clone(), inner_device(), None, "ep").unwrap();
    let own = Tensor::<1, Int>::from_data([1 + group.rank() as i32, 5], &device);
    let all = communicator.all_gather(own.clone(), None).unwrap();
    assert_eq!(all.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 5, 2, 5]);
    let sum = communicator.all_reduce(own.clone()).unwrap();
    assert_eq!(sum.into_data().iter::<i64>().collect::<Vec<_>>(), [3, 10]);
    let flags = communicator.all_gather(own.equal_elem(2), Some(0)).unwrap();
    assert_eq!(flags.into_data().iter::<bool>().collect::<Vec<_>>(), [false, false, true, false]);
    let float = Tensor::<1>::ones([2], (&device, DType::F64));
    assert_eq!(communicator.reduce_scatter(float, None).unwrap().into_data(), TensorData::from([2f64]));
}
