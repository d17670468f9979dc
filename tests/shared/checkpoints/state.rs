//! A training whose state after a number of steps does not depend on the number of ranks, bit by bit.

use bonfire::Group;
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::{Param, ParamId, RunningState};
use burn::nn::{LinearConfig, LinearLayout};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Bool, DType, Int, TensorData};

use crate::burn_version::*;
use crate::checkpoint_version::{ScheduledTraining, all_values, last_rate};
use crate::model_data::with_few_bits;

/// Any state of the user's: a counter and a list.
pub type User = (u64, Vec<f64>);
pub type State = ScheduledTraining<Net, User>;

/// Elements of the parameter that is cut into parts, and bytes of it and of its two moments.
const LARGE: usize = 20_011;
pub const LARGE_BYTES: u64 = 3 * 4 * LARGE as u64;

models! {
    /// Parameters of all kinds, a mapped one, a frozen one of another element type, and a state.
    pub struct Net {
        pub linear: Linear,
        large: Param<Tensor<1>>,
        frozen: Param<Tensor<1>>,
        state: RunningState<Tensor<1>>,
        count: Param<Tensor<1, Int>>,
        mask: Param<Tensor<1, Bool>>,
    }
}

impl Net {
    pub fn new(outputs: usize) -> Self {
        let device = device();
        let wave = |len: usize| (0..len).map(|i| (i as f32 * 12.9898).sin()).collect::<Vec<_>>();
        let mut linear = LinearConfig::new(3, outputs).with_bias(false).with_layout(LinearLayout::Col).init(&device);
        let weight = Tensor::from_data(TensorData::new(wave(3 * outputs), [3, outputs]), &device).require_grad();
        linear.weight = linear.weight.map(|_| weight);
        let options = (&device, DType::F64);
        let frozen = Tensor::from_data(TensorData::from([0.1f64, -1e-300, f64::NAN]), options);
        Net {
            linear,
            large: Param::from_data(TensorData::new(wave(LARGE), [LARGE]), &device),
            frozen: Param::from_tensor(frozen).set_require_grad(false),
            state: RunningState::new(Tensor::zeros([3], &device)),
            count: Param::initialized(ParamId::new(), Tensor::from_ints([1, -7, i32::MAX], &device)),
            mask: Param::initialized(ParamId::new(), Tensor::from_bool(TensorData::from([true, false]), &device)),
        }
    }

    pub fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.linear.forward(input) + self.large.val().powi_scalar(2).mean().unsqueeze()
    }
}

/// The state at the start of a training.
pub fn start(group: Group, outputs: usize) -> (State, DataParallel) {
    let (model, ddp) = DataParallel::new(group, Net::new(outputs)).unwrap();
    (initial(model), ddp)
}

pub fn initial(model: Net) -> State {
    let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.8).init().unwrap();
    State::new(model, AdamConfig::new().init(), schedule, (7, Vec::new()))
}

/// A step on the same sample on all ranks, whose mean is that of one rank: all sums are exact.
pub fn step(state: &mut State, ddp: &DataParallel) {
    let grads = gradients(state);
    let grads = ddp.sync(&state.model, grads, 1).unwrap();
    apply(state, grads);
}

/// The same step without other ranks.
pub fn step_alone(state: &mut State) {
    let grads = gradients(state);
    apply(state, grads);
}

/// Gradients of so few bits that their sum over a few ranks is exact.
fn gradients(state: &State) -> GradientsParams {
    let row = [1.0, (state.samples % 3) as f32, -2.0];
    let input = Tensor::<2>::from_data(TensorData::new(row.to_vec(), [1, 3]), &device());
    let loss = state.model.forward(input).powi_scalar(2).mean();
    with_few_bits(&state.model, &GradientsParams::from_grads(loss.backward(), &state.model))
}

fn apply(state: &mut State, grads: GradientsParams) {
    state.step(grads, 1);
    state.model.state.update(Tensor::full([3], state.samples as f32, &device()));
    state.user.0 += 3;
    state.user.1.push(1.0 / state.user.0 as f64);
    if state.samples % 2 == 1 {
        state.average = Some(state.model.valid());
    }
}

/// All of a training that must be the same, except the optimizer's moments, which the next steps show. `TensorData`
/// compares bytes, so NaN equals itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Contents {
    pub model: Vec<TensorData>,
    average: Option<Vec<TensorData>>,
    pub rate: u64,
    pub position: (usize, usize),
    pub user: User,
}

pub fn contents<M: Model>(state: &ScheduledTraining<M, User>) -> Contents {
    let data = |(_, data)| data;
    Contents {
        // A running state's last update is pending until `valid`.
        model: all_values(&state.model.valid()).into_iter().map(data).collect(),
        average: state.average.as_ref().map(|average| all_values(average).into_iter().map(data).collect()),
        rate: last_rate(&state.scheduler).to_bits(),
        position: (state.epoch, state.samples),
        user: state.user.clone(),
    }
}
