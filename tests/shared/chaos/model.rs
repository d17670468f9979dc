//! A model whose training can be replayed bit for bit, without ranks.

use std::hash::{DefaultHasher, Hash, Hasher};

use bonfire::{Error, Group, ShardedSampler, partition};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::{Param, RunningState};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::TensorData;
use burn::tensor::activation::relu;

use crate::burn_version::*;
use crate::checkpoint_version::ScheduledTraining;
use crate::model_data::{add, map_gradients, with_few_bits};

/// The user's state: the world size of each step.
pub type State = ScheduledTraining<Net, Vec<u64>>;

/// Samples of an epoch, and of a batch: up to 5 ranks, all shards of a batch have the same size.
const SAMPLES: usize = 180;
pub const BATCH: usize = 60;
/// Steps of an epoch.
pub const STEPS: usize = SAMPLES / BATCH;
const INPUTS: usize = 8;

models! {
    /// Two layers, and a state that differs between ranks.
    pub struct Net {
        first: Linear,
        second: Linear,
        state: RunningState<Tensor<1>>,
    }
}

impl Net {
    /// With more than 8,191 hidden units, the first weights are a bucket of their own.
    fn new(hidden: usize) -> Self {
        let device = device();
        let param = |shape: [usize; 2], scale: f32| {
            let values = (0..shape[0] * shape[1]).map(|i| scale * ((i * 37 % 101) as f32 / 50.0 - 1.0)).collect();
            Param::from_data(TensorData::new::<f32, _>(values, shape), &device)
        };
        let bias = |len| Some(Param::from_tensor(Tensor::zeros([len], &device)));
        Net {
            first: Linear { weight: param([INPUTS, hidden], 0.5), bias: bias(hidden) },
            second: Linear { weight: param([hidden, 1], 1.0 / (hidden as f32).sqrt()), bias: bias(1) },
            state: RunningState::new(Tensor::zeros([1], &device)),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(input)))
    }
}

/// The state at the start of a training.
pub fn start(model: Net) -> State {
    let schedule = ExponentialLrSchedulerConfig::new(0.02, 0.99).init().expect("a valid schedule");
    State::new(model, adam(), schedule, Vec::new())
}

pub fn model(hidden: usize) -> Net {
    Net::new(hidden)
}

pub fn adam() -> AdamOf<Net> {
    AdamConfig::new().init()
}

/// Returns the samples of this rank in the next step, or `None` at the end of the epoch. Does not communicate.
pub fn shard(group: &Group, state: &State) -> Result<Option<Vec<usize>>, Error> {
    let alone = ShardedSampler::new(&Group::threads(1)?[0], SAMPLES, BATCH)?.seed(5);
    let batch = alone.epoch(state.epoch)?.after(state.samples).next();
    Ok(batch.map(|batch| batch[partition(BATCH, group.world_size(), group.rank())].to_vec()))
}

/// The mean gradients over these samples, rounded to multiples of 2^-16 and limited to 16: so the sum over ranks is
/// exact, and does not depend on their order.
pub fn gradients(model: &Net, samples: &[usize]) -> GradientsParams {
    let device = device();
    let rows: Vec<f32> =
        samples.iter().flat_map(|i| (0..INPUTS).map(move |j| ((i * 7 + j * 13 + i * j) % 11) as f32 / 4.0)).collect();
    let targets: Vec<f32> = samples.iter().map(|i| (i * i % 9) as f32 / 4.0).collect();
    let input = Tensor::<2>::from_data(TensorData::new(rows, [samples.len(), INPUTS]), &device);
    let target = Tensor::<2>::from_data(TensorData::new(targets, [samples.len(), 1]), &device);
    let loss = (model.forward(input) - target).powi_scalar(2).mean();
    with_few_bits(model, &GradientsParams::from_grads(loss.backward(), model))
}

/// What a rank's state is after a step.
fn own_state(step: usize, rank: usize) -> f32 {
    (8 * step + rank) as f32
}

/// Notes a step: its world size, and this rank's state.
pub fn note(state: &mut State, group: &Group) {
    let step = state.user.len();
    state.user.push(group.world_size() as u64);
    state.model.state.update(Tensor::full([1], own_state(step, group.rank()), &device()));
}

/// The digest of the trained parameters, and the value of the state.
pub fn contents(state: &State) -> (u64, f32) {
    // A running state's last update is pending until `valid`.
    let net = state.model.valid();
    let mut hasher = DefaultHasher::new();
    for layer in [net.first, net.second] {
        layer.weight.val().into_data().as_bytes().hash(&mut hasher);
        let bias = layer.bias.expect("both layers have one");
        bias.val().into_data().as_bytes().hash(&mut hasher);
    }
    (hasher.finish(), values(net.state.value_sync())[0] as f32)
}

/// Returns the digest of the trained parameters after steps with these world sizes, and the values that the ranks'
/// state may have after the last of them: the mean, or, if ranks were lost meanwhile, that of one rank.
pub fn replay(hidden: usize, history: &[u64]) -> Result<(u64, Vec<f32>), Error> {
    let mut state = start(model(hidden));
    for &world_size in history {
        let groups = Group::threads(world_size as usize)?;
        let mut sum = GradientsParams::new();
        for group in &groups {
            let shard = shard(group, &state)?.expect("an epoch has this step");
            add(&state.model, &gradients(&state.model, &shard), &mut sum, 1.0);
        }
        let mean = map_gradients(&state.model, &sum, |sum| sum / world_size as f64);
        state.step(mean, BATCH);
        if state.samples == SAMPLES {
            state.next_epoch();
        }
    }
    let (last, ranks) = (history.len().saturating_sub(1), *history.last().unwrap_or(&1) as usize);
    let values: Vec<f32> = (0..ranks).map(|rank| own_state(last, rank)).collect();
    let mean = values.iter().sum::<f32>() / ranks as f32;
    Ok((contents(&state).0, [values, vec![mean]].concat()))
}
