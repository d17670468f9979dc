//! Experts that are distributed over the ranks: tokens are routed to them and back, with and without gradients.

use std::ops::Range;

use bonfire::{Group, partition};
use bonfire_testing::{Kind, run_ranks};
use burn::tensor::{DType, Int, TensorData};

use super::communicator::communicator;
use crate::burn_version::{Inner, Tensor, device, inner_device, values};

#[test]
fn tokens_go_to_several_experts_and_results_return_in_token_order() {
    run_ranks(Kind::Threads, 3, |group| {
        let (communicator, rank) = (communicator(&group), group.rank());
        // Two experts on rank 0, one on each other rank. No token selects rank 1's.
        let experts = Inner::<2, Int>::from_data([[3, 0], [0, 1], [1, 3]], &inner_device());
        let routing = communicator.route(experts, 4, false).unwrap();
        assert_eq!(routing.rows(), [&[6usize, 6][..], &[0], &[6]][rank]);
        let tokens = Inner::<2>::from_data([[0f32], [1.0], [2.0]], &inner_device()) + 10.0 * rank as f32;
        let arrived = routing.dispatch(tokens).unwrap();
        // In the order of experts, and of ranks for each.
        let expected: &[f32] = match rank {
            0 => &[0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 1.0, 2.0, 11.0, 12.0, 21.0, 22.0],
            1 => &[],
            _ => &[0.0, 2.0, 10.0, 12.0, 20.0, 22.0],
        };
        assert_eq!(arrived.to_data().iter::<f32>().collect::<Vec<_>>(), expected);
        // Each rank's experts add 100 times its number.
        let back = routing.combine(arrived + 100.0 * rank as f32).unwrap() - 10.0 * rank as f32;
        assert_eq!(back.into_data().iter::<f32>().collect::<Vec<_>>(), [200.0, 0.0, 1.0, 1.0, 2.0, 202.0]);
        let wrong = communicator.route(Inner::from_data([[4]], &inner_device()), 4, false);
        assert!(wrong.unwrap_err().to_string().contains("no expert 4"));
        assert!(routing.dispatch(Inner::<2>::ones([2, 1], &inner_device())).is_err());
    });
}

const WIDTH: usize = 4;
const EXPERTS: usize = 4;

/// Returns these rows of a tracked matrix of numbers between -1 and 1 that are always the same.
fn matrix(seed: usize, rows: Range<usize>) -> Tensor<2> {
    let shape = [rows.len(), WIDTH];
    let numbers = rows.start * WIDTH..rows.end * WIDTH;
    let numbers = numbers.map(|i| ((seed * 7919 + i * 104_729) as f64).sin()).collect();
    Tensor::from_data(TensorData::new(numbers, shape), (&device(), DType::F64)).require_grad()
}

/// The outputs of a layer of experts for the tokens of some ranks, the gradients of these tokens, and those of this
/// rank's experts. Each token goes to two experts, and the results are added. Rank 1 has no tokens, and no token
/// selects the last expert.
fn experts(group: &Group, ranks: Range<usize>) -> (Vec<f64>, Vec<f64>, Vec<Vec<f64>>) {
    let communicator = communicator(group);
    let tokens = |rank: usize| [3, 0, 5][rank];
    let before = (0..ranks.start).map(tokens).sum::<usize>();
    let own = before..before + ranks.map(tokens).sum::<usize>();
    let inputs = matrix(1, own.clone());
    let choices = own.clone().flat_map(|token| [token % 3, (token + 1) % 3]).map(|expert| expert as i64).collect();
    let choices = Inner::from_data(TensorData::new(choices, [own.len(), 2]), &inner_device());
    let mine = partition(EXPERTS, group.world_size(), group.rank());
    let weights: Vec<_> = mine.map(|expert| matrix(100 + expert, 0..WIDTH)).collect();

    let routing = communicator.route(choices, EXPERTS, true).unwrap();
    let arrived = routing.dispatch_tracked(inputs.clone()).unwrap();
    let (mut results, mut row) = (Vec::new(), 0);
    for (weights, rows) in weights.iter().zip(routing.rows()).filter(|(_, rows)| **rows > 0) {
        results.push(arrived.clone().narrow(0, row, *rows).matmul(weights.clone()).tanh());
        row += rows;
    }
    let results = if results.is_empty() { arrived } else { Tensor::cat(results, 0) };
    let back = routing.combine_tracked(results).unwrap();
    let outputs = if own.is_empty() { back } else { back.reshape([own.len(), 2, WIDTH]).sum_dim(1).squeeze_dim(1) };
    let gradients = outputs.clone().powi_scalar(2).sum().backward();
    let gradient = |of: &Tensor<2>| of.grad(&gradients).map(values).unwrap_or_default();
    (values(outputs.inner()), gradient(&inputs), weights.iter().map(gradient).collect())
}

#[test]
fn experts_on_three_ranks_equal_one_rank_forward_and_backward() {
    let (outputs, of_inputs, of_weights) = run_ranks(Kind::Threads, 1, |group| experts(&group, 0..3)).remove(0);
    let ranks = run_ranks(Kind::Threads, 3, |group| experts(&group, group.rank()..group.rank() + 1));
    let close = |own: Vec<f64>, expected: &[f64]| {
        assert_eq!(own.len(), expected.len());
        assert!(own.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{own:?} is not {expected:?}");
    };
    assert!(ranks[1].0.is_empty() && of_weights[3].is_empty() && of_weights[2].iter().any(|gradient| *gradient != 0.0));
    close(ranks.iter().flat_map(|rank| rank.0.clone()).collect(), &outputs);
    close(ranks.iter().flat_map(|rank| rank.1.clone()).collect(), &of_inputs);
    for (own, expected) in ranks.into_iter().flat_map(|rank| rank.2).zip(&of_weights) {
        close(own, expected);
    }
}
