//! Gradients through collectives, compared with one rank that computes everything, and with finite differences.
//!
//! A test covers one operation: every rank's tensor, different on each rank, goes through it, and the rank's loss is
//! the sum of the result's squares times the rank's weights.

use bonfire::tensor::autodiff::*;
use bonfire::{Error, Group};
use bonfire_testing::{Kind, run_ranks};
use burn::tensor::{DType, TensorData};

use crate::burn_version::{self, Device, Inner, Tensor, device};

/// A collective on one rank's tensor, and the same on all ranks' tensors at once, in burn alone.
type Collective = fn(Tensor<3>, &Group) -> Tensor<3>;
type AtOnce = fn(Vec<Tensor<3>>) -> Vec<Tensor<3>>;

pub fn values(rank: usize, shape: [usize; 3]) -> Vec<f64> {
    (0..shape.iter().product()).map(|i: usize| ((i * 7 + rank * 3 + 1) % 13) as f64 / 4.0 - 1.5).collect()
}

pub fn tensor(values: &[f64], shape: [usize; 3]) -> Tensor<3> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (&device(), DType::F64))
}

/// Uses different weights on each rank and for each element.
pub fn loss(result: Tensor<3>, rank: usize) -> Tensor<1> {
    let shape = result.dims();
    let weights = (0..shape.iter().product()).map(|i: usize| (i % 5 + rank) as f64 / 2.0 + 0.25).collect::<Vec<_>>();
    // Uses the result twice, so that what flows back is a sum.
    (result.clone().powi_scalar(2) * tensor(&weights, shape) + result).sum()
}

/// Returns the elements of a tensor of f64.
pub fn read<const D: usize>(tensor: Inner<D>) -> Vec<f64> {
    assert_eq!(tensor.dtype(), DType::F64);
    burn_version::values(tensor)
}

/// Compares every rank's result and gradient.
fn check(ranks: usize, shape: fn(usize) -> [usize; 3], collective: Collective, at_once: AtOnce) {
    let gradients = run_ranks(Kind::Threads, ranks, move |group| {
        let (rank, own) = (group.rank(), shape(group.rank()));
        let input = tensor(&values(rank, own), own).require_grad();
        let result = collective(input.clone(), &group);
        let gradients = loss(result.clone(), rank).backward();
        (read(result.inner()), read(input.grad(&gradients).expect("tracked")))
    });

    let inputs: Vec<_> =
        (0..ranks).map(|rank| tensor(&values(rank, shape(rank)), shape(rank)).require_grad()).collect();
    let results = at_once(inputs.clone());
    let total = |results: Vec<Tensor<3>>| {
        results.into_iter().enumerate().map(|(rank, result)| loss(result, rank)).reduce(|a, b| a + b).unwrap()
    };
    for (rank, result) in results.iter().enumerate() {
        assert_eq!(gradients[rank].0, read(result.clone().inner()), "the result of rank {rank}");
    }
    let expected = total(results).backward();
    for (rank, input) in inputs.iter().enumerate() {
        // burn has no gradients of tensors without elements.
        let expected = input.grad(&expected).map(read).unwrap_or_default();
        assert!(
            close(&gradients[rank].1, &expected, 1e-12),
            "rank {rank}: {:?} is not {expected:?}",
            gradients[rank].1
        );
    }

    // Central differences, through the ranks.
    let (h, moved) = (1e-5, 0);
    let total = |by: f64| {
        let losses = run_ranks(Kind::Threads, ranks, move |group| {
            let (rank, own) = (group.rank(), shape(group.rank()));
            let mut values = values(rank, own);
            if rank == moved {
                // All elements of one rank at once, each by a different step.
                values.iter_mut().enumerate().for_each(|(i, value)| *value += by * (i % 3 + 1) as f64);
            }
            read(loss(collective(tensor(&values, own), &group), rank).inner())[0]
        });
        losses.into_iter().sum::<f64>()
    };
    let difference = (total(h) - total(-h)) / (2.0 * h);
    let slope: f64 = gradients[moved].1.iter().enumerate().map(|(i, gradient)| gradient * (i % 3 + 1) as f64).sum();
    assert!((difference - slope).abs() <= 1e-6 * slope.abs().max(1.0), "{difference} is not {slope}");
}

fn close(a: &[f64], b: &[f64], tolerance: f64) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= tolerance * b.abs().max(1.0))
}

fn cat(tensors: Vec<Tensor<3>>, dim: usize) -> Tensor<3> {
    Tensor::cat(tensors.into_iter().filter(|tensor| tensor.dims()[dim] > 0).collect(), dim)
}

fn sum(tensors: Vec<Tensor<3>>) -> Tensor<3> {
    tensors.into_iter().reduce(|a, b| a + b).unwrap()
}

fn same<T: Clone>(value: T, ranks: usize) -> Vec<T> {
    vec![value; ranks]
}

#[test]
fn all_reduce_sends_the_sum_of_the_gradients_back() {
    check(3, |_| [2, 1, 3], |x, group| all_reduce_sum(x, group).unwrap(), |all| same(sum(all), 3));
}

#[test]
fn broadcast_sends_the_sum_to_the_root_and_zeros_elsewhere() {
    check(
        3,
        |_| [2, 1, 3],
        |x, group| broadcast(x, 1, group).unwrap(),
        |all| {
            // Every input is in the graph, so that each has a gradient.
            let zeros = (all[0].clone() + all[2].clone()) * 0.0;
            same(all[1].clone() + zeros, 3)
        },
    );
}

#[test]
fn all_gather_sends_each_rank_its_part_of_the_sum() {
    check(3, |_| [2, 2, 1], |x, group| all_gather(x, 0, group).unwrap(), |all| same(cat(all, 0), 3));
    check(2, |_| [2, 2, 1], |x, group| all_gather(x, -1, group).unwrap(), |all| same(cat(all, 2), 2));
    let uneven = |rank| [2, [3, 0, 1][rank], 2];
    check(3, uneven, |x, group| all_gather_v(x, 1, None, group).unwrap(), |all| same(cat(all, 1), 3));
    check(3, uneven, |x, group| all_gather_v(x, -2, Some(&[3, 0, 1]), group).unwrap(), |all| same(cat(all, 1), 3));
}

#[test]
fn reduce_scatter_sends_all_parts_to_every_rank() {
    check(3, |_| [2, 3, 2], |x, group| reduce_scatter(x, 1, group).unwrap(), |all| sum(all).chunk(3, 1));
    check(2, |_| [2, 1, 4], |x, group| reduce_scatter(x, -1, group).unwrap(), |all| sum(all).chunk(2, 2));
    check(
        3,
        |_| [2, 2, 4],
        |x, group| reduce_scatter_v(x, 2, &[1, 2, 1], group).unwrap(),
        |all| sum(all).split_with_sizes(vec![1, 2, 1], 2),
    );
}

#[test]
fn all_to_all_sends_each_part_back() {
    check(
        3,
        |_| [3, 2, 1],
        |x, group| all_to_all(x, 0, group).unwrap(),
        |all| {
            let parts: Vec<_> = all.into_iter().map(|x| x.chunk(3, 0)).collect();
            (0..3).map(|to| cat(parts.iter().map(|part| part[to].clone()).collect(), 0)).collect()
        },
    );
    // Rank 0 sends 1 to itself and 2 to rank 1, which sends 3 to rank 0 and 1 to itself.
    const SEND: [[usize; 2]; 2] = [[1, 2], [3, 1]];
    let uneven = |rank: usize| [2, SEND[rank].iter().sum(), 1];
    let at_once: AtOnce = |all| {
        let parts: Vec<_> = all.into_iter().zip(SEND).map(|(x, sizes)| x.split_with_sizes(sizes.to_vec(), 1)).collect();
        (0..2).map(|to| cat(parts.iter().map(|part| part[to].clone()).collect(), 1)).collect()
    };
    check(2, uneven, |x, group| all_to_all_v(x, 1, &SEND[group.rank()], None, group).unwrap(), at_once);
    let with_sizes = |x, group: &Group| {
        let receive = SEND.map(|sizes| sizes[group.rank()]);
        all_to_all_v(x, -2, &SEND[group.rank()], Some(&receive), group).unwrap()
    };
    check(2, uneven, with_sizes, at_once);
}

#[test]
fn a_rank_without_elements_takes_part_in_the_backward_pass() {
    let gradients = run_ranks(Kind::Threads, 2, |group| {
        let own = if group.rank() == 0 { 2.0 } else { 5.0 };
        let x = Tensor::<2>::full([2, 3], own, &device()).require_grad();
        let send = [[2, 0], [2, 0]][group.rank()];
        let here = all_to_all_v(x.clone(), 0, &send, None, &group).unwrap();
        assert_eq!(here.dims(), [[4, 3], [0, 3]][group.rank()]);
        let back = all_to_all_v(here * 3.0, 0, &[[2, 2], [0, 0]][group.rank()], None, &group).unwrap();
        let gradients = back.powi_scalar(2).sum().backward();
        x.grad(&gradients).unwrap().into_data()
    });
    // The gradient of (3 x)^2.
    assert_eq!(gradients, [TensorData::from([[36f32; 3]; 2]), TensorData::from([[90f32; 3]; 2])]);
}

#[test]
fn untracked_tensors_need_no_backward_pass_on_other_ranks() {
    run_ranks(Kind::Threads, 2, |group| {
        let own = || tensor(&[1.0, 2.0], [1, 2, 1]);
        let gathered = all_gather(own(), 0, &group).unwrap();
        let sum = all_reduce_sum(own(), &group).unwrap();
        if group.rank() == 0 {
            (gathered * tensor(&[1.0; 4], [2, 2, 1]).require_grad()).sum().backward();
            (sum * own().require_grad()).sum().backward();
        }
    });
}

/// The gradients of a residual pair of column and row parallel layers with a bias behind it: of the input, this rank's
/// columns, this rank's rows, and the bias. All ranks compute the same loss.
fn tensor_parallel(group: &Group) -> [Vec<f64>; 4] {
    const HIDDEN: usize = 12;
    let own = bonfire::partition(HIDDEN, group.world_size(), group.rank());
    let matrix = |seed, shape| tensor(&values(seed, shape), shape);
    let input = matrix(1, [1, 5, 4]).require_grad();
    let columns = matrix(2, [1, 4, HIDDEN]).slice([0..1, 0..4, own.clone()]).require_grad();
    let rows = matrix(3, [1, HIDDEN, 3]).slice([0..1, own]).require_grad();
    let bias = matrix(4, [1, 1, 3]).require_grad();
    let hidden = input.clone().matmul(columns.clone()).tanh();
    let output = all_reduce_sum(hidden.matmul(rows.clone()), group).unwrap() + bias.clone();
    let residual = output + input.clone().slice([0..1, 0..5, 0..3]);
    // Not divided: burn-autodiff 0.21 rounds the gradient of a division by a scalar to f32.
    let loss = residual.powi_scalar(2).mean() * (1.0 / group.world_size() as f64);
    let gradients = loss.backward();
    // The input and the bias are replicated.
    let replicated = |x: &Tensor<3>| {
        let own = x.grad(&gradients).expect("tracked");
        read(bonfire::tensor::operation::all_reduce(own, bonfire::ReduceOp::Sum, group).unwrap())
    };
    let split = |x: &Tensor<3>| read(x.grad(&gradients).expect("tracked"));
    [replicated(&input), split(&columns), split(&rows), replicated(&bias)]
}

#[test]
fn tensor_parallel_layers_have_one_ranks_gradients_if_the_loss_is_divided_and_replicated_ones_are_summed() {
    let one = run_ranks(Kind::Threads, 1, |group| tensor_parallel(&group)).remove(0);
    for n in [2, 3] {
        let many = run_ranks(Kind::Threads, n, |group| tensor_parallel(&group));
        let close = |ours: &[f64], theirs: &[f64]| {
            assert_eq!(ours.len(), theirs.len());
            assert!(ours.iter().zip(theirs).all(|(a, b)| (a - b).abs() < 1e-12), "{n} ranks: {ours:?} {theirs:?}");
        };
        for rank in &many {
            close(&rank[0], &one[0]);
            close(&rank[3], &one[3]);
        }
        // Each rank has columns of every row of the matrix.
        let columns = (0..4).flat_map(|row| many.iter().flat_map(move |rank| rank[1].chunks(12 / n).nth(row).unwrap()));
        close(&columns.copied().collect::<Vec<_>>(), &one[1]);
        close(&many.iter().flat_map(|rank| rank[2].clone()).collect::<Vec<_>>(), &one[2]);
    }
}

/// Checks the gradients of three ranks in each element type. The loss of rank `r` is `(r + 1) * sum(s^2)` with the
/// ranks' sum `s`, so the gradient is `2 * s * (1 + 2 + 3)`.
pub fn each_element_type_on(device: fn() -> Device) {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let gradients = run_ranks(Kind::Threads, 3, move |group| {
            let x = Tensor::<1>::from_data([group.rank() as f32, 1.0], (&device(), dtype)).require_grad();
            let sum = all_reduce_sum(x.clone(), &group).unwrap();
            assert_eq!(sum.dtype(), dtype);
            let gradients = sum.powi_scalar(2).mul_scalar((group.rank() + 1) as f64).sum().backward();
            let gradient = x.grad(&gradients).expect("tracked");
            assert_eq!(gradient.dtype(), dtype);
            burn_version::values(gradient)
        });
        assert_eq!(gradients, vec![vec![36.0, 36.0]; 3]);
    }
}

#[test]
fn each_element_type_gets_the_gradient_of_all_losses() {
    each_element_type_on(device);
}

#[test]
fn sixteen_bit_tensors_keep_their_type_and_are_added_in_f32() {
    for dtype in [DType::F16, DType::BF16] {
        let sums = run_ranks(Kind::Threads, 3, move |group| {
            let values = [[256f32, 2048.0], [1.0; 2], [1.0; 2]][group.rank()];
            let sum = all_reduce_sum(Tensor::<1>::from_data(values, (&device(), dtype)), &group).unwrap();
            assert_eq!(sum.dtype(), dtype);
            burn_version::values(sum)
        });
        // Rounded after each addition, bf16 would stay at 256 and f16 at 2048.
        assert_eq!(sums[0], if dtype == DType::F16 { [258.0, 2050.0] } else { [258.0, 2048.0] });
    }
}

#[test]
fn a_collective_that_fails_in_a_backward_pass_is_the_error_of_attempt() {
    let outcomes = run_ranks(Kind::Threads, 2, |group| {
        let own = tensor(&values(0, [1, 1, 2]), [1, 1, 2]);
        if group.rank() == 1 {
            // Not tracked: a graph of burn 0.21 would keep the group.
            all_reduce_sum(own, &group).unwrap();
            return None;
        }
        let sum = all_reduce_sum(own.require_grad(), &group).unwrap();
        let outcome = attempt(|| sum.sum().backward());
        // burn's locks are free: another backward pass runs.
        let other = tensor(&[1.0, 2.0], [1, 1, 2]).require_grad();
        assert!(other.grad(&other.clone().sum().backward()).is_some());
        Some(outcome.err())
    });
    assert!(matches!(&outcomes[0], Some(Some(Error::Left { rank: 1, .. }))), "{outcomes:?}");
}
