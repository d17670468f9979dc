//! Models with frozen, quantised parameters, beside which others are trained (QLoRA).

use bonfire::{Checkpoints, Error, Group};
use bonfire_testing::ranks;
use burn::module::{Param, ParamId};
use burn::optim::AdamConfig;
use burn::tensor::{TensorData, Tolerance};

use crate::burn_version::*;
use crate::checkpoint_version::*;

models! {
    /// A quantised layer with an adapter.
    struct Adapted {
        base: Param<Tensor<2>>,
        down: Linear,
        up: Linear,
    }
}

const INPUTS: usize = 6;
const OUTPUTS: usize = 4;

fn wave(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i + 31 * seed) as f32 * 12.9898).sin()).collect()
}

fn base(seed: usize) -> Tensor<2> {
    quantised(Tensor::from_data(TensorData::new(wave(INPUTS * OUTPUTS, seed), [INPUTS, OUTPUTS]), &device()))
}

impl Adapted {
    /// The same adapter on all ranks, on another base on each.
    fn new(seed: usize) -> Self {
        let linear = |inputs, outputs| {
            let weight = TensorData::new(wave(inputs * outputs, 7), [inputs, outputs]);
            Linear { weight: Param::from_data(weight, &device()), bias: None }
        };
        Adapted {
            base: Param::initialized(ParamId::new(), base(seed)),
            down: linear(INPUTS, 2),
            up: linear(2, OUTPUTS),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        input.clone().matmul(dequantised(self.base.val())) + self.up.forward(self.down.forward(input))
    }
}

type State = TrainingOf<Adam, Adapted, ()>;

/// Trains up to `steps` steps on batches of six rows, from a checkpoint in `folder` if there is one, and saves.
fn train(group: Group, steps: usize, folder: &std::path::Path) -> Result<(TensorData, Vec<TensorData>), Error> {
    let (rank, n) = (group.rank(), group.world_size());
    let (model, ddp) = DataParallel::new(group, Adapted::new(rank))?;
    let mut state = State::new(model, AdamConfig::new().init(), 0.05, ());
    let mut checkpoints = Checkpoints::new(ddp.group(), folder)?;
    checkpoints.load(&mut state)?;
    while state.samples < steps {
        let (rows, step) = (6 / n, state.samples);
        let own = wave(6 * INPUTS, 100 + step)[rank * rows * INPUTS..][..rows * INPUTS].to_vec();
        let input = Tensor::<2>::from_data(TensorData::new(own, [rows, INPUTS]), &device());
        let gradients =
            ddp.run(&state.model, [input], |model, input| (model.forward(input).powf_scalar(2.0).mean(), rows))?;
        state.step(gradients, 1);
    }
    checkpoints.save(&state)?;
    ddp.verify(&state.model, &state.optimizer)?;
    let state = ddp.average_states(state.model)?;
    let adapters = [state.down.weight.val().into_data(), state.up.weight.val().into_data()];
    Ok((dequantised(state.base.val()).into_data(), adapters.to_vec()))
}

#[test]
fn adapters_of_a_quantised_model_are_trained_and_saved() {
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let [alone, together, in_parts] = [&folders[0], &folders[1], &folders[2]].map(|folder| folder.path());
    let (of_base, expected) = ranks(1, |group| train(group, 8, alone).unwrap()).remove(0);
    assert_eq!(of_base, dequantised(base(0)).into_data());
    let first = ranks(3, |group| train(group, 3, in_parts).unwrap()).remove(0);
    assert_ne!(first.1, expected);
    let trained =
        [ranks(2, |group| train(group, 8, together).unwrap()), ranks(2, |group| train(group, 8, in_parts).unwrap())];
    for (found_base, adapters) in trained.iter().flatten() {
        // Rank 0's, on all ranks, and not trained.
        assert_eq!(found_base, &of_base);
        for (found, expected) in adapters.iter().zip(&expected) {
            found.assert_approx_eq::<f32>(expected, Tolerance::absolute(1e-4));
        }
    }
}
