//! A state-space model: a recurrence whose decay depends on the input, which is an operation of the program's own, with
//! a backward step of its own.

use burn::nn::LinearConfig;
use burn::tensor::activation::sigmoid;

use super::learns::Learns;
use super::*;
use crate::scan_version::scan;

models! {
    pub struct Scanned {
        input: Linear,
        decay: Linear,
        output: Linear,
    }
}

impl Learns for Scanned {
    fn new() -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device());
        let [input, decay] = [(); 2].map(|()| linear(INPUTS, HIDDEN));
        known(Scanned { input, decay, output: linear(HIDDEN, 1) }, 27)
    }

    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        let sequences = padded(samples, INPUTS, 3.0, |token, column| wave(token * 13 + column, 1));
        let target = padded(samples, 1, -7.0, |token, _| wave(token, 2));
        let mask = padded(samples, 1, 0.0, |_, _| 1.0);
        // A state depends on what came before, so that of a token on no padding.
        let states = scan(sigmoid(self.decay.forward(sequences.clone())), self.input.forward(sequences));
        mean_of(((self.output.forward(states) - target) * mask).powf_scalar(2.0).sum(), tokens(samples))
    }

    fn weight(samples: &[usize]) -> usize {
        tokens(samples)
    }
}

#[test]
fn an_operation_with_a_backward_step_of_its_own_has_the_gradients_of_those_it_stands_for() {
    let tensor = |seed: usize| {
        let values: Vec<f64> = (0..2 * 4 * 3).map(|i| wave(i, seed)).collect();
        Tensor::<3>::from_data(TensorData::new(values, [2, 4, 3]), (&device(), DType::F64)).require_grad()
    };
    let gradients = |states: fn(Tensor<3>, Tensor<3>) -> Tensor<3>| {
        let (decay, input) = (tensor(1), tensor(2));
        let states = states(decay.clone(), input.clone());
        let grads = (states.clone() * tensor(3)).powf_scalar(2.0).sum().backward();
        let of = |tensor: Tensor<3>| tensor.grad(&grads).unwrap().into_data().iter::<f64>().collect::<Vec<_>>();
        [values(states), of(decay), of(input)].concat()
    };
    let found = gradients(scan);
    let expected = gradients(|decay, input| {
        let at = |tensor: &Tensor<3>, place| tensor.clone().narrow(1, place, 1);
        let mut states = vec![at(&input, 0)];
        for place in 1..4 {
            states.push(at(&decay, place) * states[place - 1].clone() + at(&input, place));
        }
        Tensor::cat(states, 1)
    });
    compare("scan", &found, &expected);
}

#[test]
fn a_state_space_model_trains_as_on_burn_alone() {
    agrees("state space");
}
