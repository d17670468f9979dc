//! An LSTM that reads sequences of different lengths, padded in each batch, and predicts one number of each.

use burn::nn::LinearConfig;
use burn::tensor::activation::sigmoid;

use super::learns::Learns;
use super::*;

models! {
    /// Cells of our own: burn's makes its state in f32.
    pub struct Recurrent {
        input: Linear,
        hidden: Linear,
        head: Linear,
    }
}

impl Recurrent {
    /// Reads the next token of each sequence. Those that have ended keep their state.
    fn read(&self, [hidden, cell]: [Tensor<2>; 2], token: Tensor<2>, goes_on: Tensor<2>) -> [Tensor<2>; 2] {
        let gates = self.input.forward(token) + self.hidden.forward(hidden.clone());
        let gate = |i: usize| gates.clone().narrow(1, i * HIDDEN, HIDDEN);
        let kept = sigmoid(gate(1)) * cell.clone();
        let next = kept + sigmoid(gate(0)) * gate(2).tanh();
        let shown = sigmoid(gate(3)) * next.clone().tanh();
        let choose = |new: Tensor<2>, old: Tensor<2>| new * goes_on.clone() + old * (goes_on.clone().neg() + 1.0);
        [choose(shown, hidden), choose(next, cell)]
    }
}

impl Learns for Recurrent {
    fn new() -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device());
        let [input, hidden] = [INPUTS, HIDDEN].map(|inputs| linear(inputs, 4 * HIDDEN));
        known(Recurrent { input, hidden, head: linear(HIDDEN, 1) }, 22)
    }

    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        let sequences = padded(samples, INPUTS, 3.0, |token, column| wave(token * 13 + column, 1));
        let mask = padded(samples, 1, 0.0, |_, _| 1.0);
        let [count, longest, _] = sequences.dims();
        let mut state = [(); 2].map(|()| Tensor::zeros([count, HIDDEN], (&device(), DType::F64)));
        for place in 0..longest {
            let token = sequences.clone().narrow(1, place, 1).reshape([count, INPUTS]);
            state = self.read(state, token, mask.clone().narrow(1, place, 1).reshape([count, 1]));
        }
        let [hidden, _] = state;
        (self.head.forward(hidden) - targets(samples)).powf_scalar(2.0).mean()
    }

    fn weight(samples: &[usize]) -> usize {
        samples.len()
    }
}

#[test]
fn an_lstm_over_padded_sequences_trains_as_on_burn_alone() {
    agrees("LSTM");
}
