//! Adapters of a low rank on a frozen base, whose loss is a mean over tokens that are not padding.

use burn::nn::LinearConfig;

use super::learns::Learns;
use super::*;

models! {
    pub struct Adapted {
        base: Net,
        of_first: Adapter,
        of_second: Adapter,
    }

    struct Adapter {
        down: Linear,
        up: Linear,
    }
}

impl Adapter {
    fn new(inputs: usize, outputs: usize) -> Adapter {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(&device());
        Adapter { down: linear(inputs, 2), up: linear(2, outputs) }
    }

    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        self.up.forward(self.down.forward(input)) * 0.5
    }
}

impl Learns for Adapted {
    fn new() -> Self {
        let [of_first, of_second] =
            [(INPUTS, HIDDEN), (HIDDEN, 1)].map(|(inputs, outputs)| Adapter::new(inputs, outputs));
        let mut adapted = known(Adapted { base: Net::new(1), of_first, of_second }, 24);
        adapted.base = Net { first: trains(adapted.base.first, false), second: trains(adapted.base.second, false) };
        adapted
    }

    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        let input = padded(samples, INPUTS, 3.0, |token, column| wave(token * 13 + column, 1));
        let target = padded(samples, 1, -7.0, |token, _| wave(token, 2));
        let mask = padded(samples, 1, 0.0, |_, _| 1.0);
        let hidden = (self.base.first.forward(input.clone()) + self.of_first.forward(input)).tanh();
        let output = self.base.second.forward(hidden.clone()) + self.of_second.forward(hidden);
        mean_of(((output - target) * mask).powf_scalar(2.0).sum(), tokens(samples))
    }

    fn weight(samples: &[usize]) -> usize {
        tokens(samples)
    }
}

#[test]
fn adapters_on_a_frozen_base_train_as_on_burn_alone() {
    agrees("adapters");
    let base = weights(&Adapted::new().base);
    assert_eq!(learns::plain::<Adapted>()[..base.len()], base);
}
