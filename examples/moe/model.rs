//! A layer of experts that are distributed over several ranks.

use bonfire::tensor::operation::all_reduce;
use bonfire::{DeviceCommunicator, Error, Group, ReduceOp, partition};
use burn::tensor::activation::{softmax, tanh};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};

/// The width of a token.
pub const WIDTH: usize = 8;

/// Routes each token to the expert with the highest score. All ranks have the router; each has some of the experts.
pub struct Experts<B: AutodiffBackend> {
    router: Tensor<B, 2>,
    own: Vec<Tensor<B, 2>>,
    count: usize,
}

impl<B: AutodiffBackend> Experts<B> {
    /// Creates the layer on this rank; `router` has a column for each expert.
    pub fn new(router: Vec<f64>, count: usize, group: &Group) -> Self {
        let own = partition(count, group.world_size(), group.rank());
        let expert = |expert| tensor(numbers(100 + expert, WIDTH * WIDTH, 0.4), [WIDTH, WIDTH]).require_grad();
        Experts { router: tensor(router, [WIDTH, count]).require_grad(), own: own.map(expert).collect(), count }
    }

    /// Returns the experts' outputs for this rank's tokens. The tokens must be tracked by autodiff, so that the
    /// backward passes of all ranks call the same collectives.
    pub fn forward(&self, tokens: Tensor<B, 2>, communicator: &DeviceCommunicator<B>) -> Result<Tensor<B, 2>, Error> {
        // Some backends do not support tensors without rows.
        let (gate, chosen) = if tokens.dims()[0] == 0 {
            (None, Tensor::empty([0, 1], &tokens.device()))
        } else {
            let (gate, chosen) = softmax(tokens.clone().matmul(self.router.clone()), 1).max_dim_with_indices(1);
            (Some(gate), chosen)
        };
        let routing = communicator.route(chosen, self.count, true)?;
        let arrived = routing.dispatch_tracked(tokens)?;

        let (mut results, mut row) = (Vec::new(), 0);
        for (expert, rows) in self.own.iter().zip(routing.rows()).filter(|(_, rows)| **rows > 0) {
            results.push(tanh(arrived.clone().narrow(0, row, *rows).matmul(expert.clone())));
            row += rows;
        }
        let results = if results.is_empty() { arrived } else { Tensor::cat(results, 0) };
        let back = routing.combine_tracked(results)?;
        Ok(gate.map_or(back.clone(), |gate| back * gate))
    }

    /// Returns the gradients of this rank's tokens, of the router (summed over all ranks), and of this rank's experts,
    /// which have processed all of their tokens.
    pub fn gradients(
        &self,
        loss: Tensor<B, 1>,
        tokens: &Tensor<B, 2>,
        group: &Group,
    ) -> Result<Vec<Tensor<B::InnerBackend, 2>>, Error> {
        let gradients = loss.backward();
        let of = |x: &Tensor<B, 2>| x.grad(&gradients).unwrap_or_else(|| x.clone().inner().zeros_like());
        let router = all_reduce(of(&self.router), ReduceOp::Sum, group)?;
        Ok([of(tokens), router].into_iter().chain(self.own.iter().map(of)).collect())
    }

    /// Makes a step of gradient descent for the router and the experts.
    pub fn update(&mut self, gradients: Vec<Tensor<B::InnerBackend, 2>>, rate: f64) {
        let weights = [&mut self.router].into_iter().chain(&mut self.own);
        for (weights, gradient) in weights.zip(gradients.into_iter().skip(1)) {
            *weights = Tensor::from_inner(weights.clone().inner() - gradient * rate).require_grad();
        }
    }
}

/// Returns the tokens of some ranks and their targets: half of the token or of its negative, so that two experts fit
/// them better than one.
pub fn tokens<B: AutodiffBackend>(ranks: impl Iterator<Item = usize>) -> [Tensor<B, 2>; 2] {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for rank in ranks {
        for token in 0..count(rank) {
            let input = numbers(1000 * rank + token, WIDTH, 1.0);
            targets.extend(input.iter().map(|x| if input[1] > 0.0 { 0.5 * x } else { -0.5 * x }));
            inputs.extend(input);
        }
    }
    let rows = inputs.len() / WIDTH;
    [tensor(inputs, [rows, WIDTH]), tensor(targets, [rows, WIDTH])]
}

/// Returns how many tokens a rank has. Rank 1 has none.
pub fn count(rank: usize) -> usize {
    if rank == 1 { 0 } else { 24 + 8 * rank }
}

/// Returns numbers between `-scale` and `scale` that look random but are always the same.
pub fn numbers(seed: usize, len: usize, scale: f64) -> Vec<f64> {
    (0..len).map(|i| scale * ((seed * 7919 + i * 104_729) as f64).sin()).collect()
}

fn tensor<B: AutodiffBackend>(numbers: Vec<f64>, shape: [usize; 2]) -> Tensor<B, 2> {
    // In f64, so that losses differ by little more than the order of sums.
    Tensor::from_data(TensorData::new(numbers, shape), (&Default::default(), DType::F64))
}
