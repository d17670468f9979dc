//! A training whose state after a number of steps does not depend on the number of ranks, bit by bit.

use bonfire::{DataParallel, Group, TrainingState};
use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::exponential::{ExponentialLrScheduler, ExponentialLrSchedulerConfig};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, RunningState};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsParams};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

pub type B = burn::backend::Autodiff<burn::backend::Flex>;
pub type Adaptor = OptimizerAdaptor<Adam, Net<B>, B>;
pub type State = TrainingState<B, Net<B>, Adaptor, ExponentialLrScheduler, (u64, Vec<f64>)>;

/// Elements of the parameter that is cut into parts, and bytes of it and of its two moments.
const LARGE: usize = 20_011;
pub const LARGE_BYTES: u64 = 3 * 4 * LARGE as u64;

/// Parameters of all kinds, a mapped one, a frozen one of another element type, and a state.
#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    pub linear: Linear<B>,
    large: Param<Tensor<B, 1>>,
    frozen: Param<Tensor<B, 1>>,
    state: RunningState<Tensor<B, 1>>,
    count: Param<Tensor<B, 1, Int>>,
    mask: Param<Tensor<B, 1, Bool>>,
}

impl<B: Backend> Net<B> {
    pub fn new(outputs: usize) -> Self {
        let device = Default::default();
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
            count: Param::initialized(Default::default(), Tensor::from_ints([1, -7, i32::MAX], &device)),
            mask: Param::initialized(Default::default(), Tensor::from_bool([true, false].into(), &device)),
        }
    }

    pub fn forward(&self, input: Tensor<B, 2>) -> Tensor<B, 2> {
        self.linear.forward(input) + self.large.val().powi_scalar(2).mean().unsqueeze()
    }
}

/// The state at the start of a training.
pub fn start(group: Group, outputs: usize) -> (State, DataParallel<B>) {
    let (model, ddp) = DataParallel::new(group, Net::new(outputs)).unwrap();
    (initial(model), ddp)
}

pub fn initial(model: Net<B>) -> State {
    let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.8).init().unwrap();
    TrainingState::new(model, AdamConfig::new().init(), schedule, (7, Vec::new()))
}

/// A step on the same sample on all ranks, whose mean is that of one rank: all sums are exact.
pub fn step(state: &mut State, ddp: &DataParallel<B>) {
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
    let row = [1.0, (state.batch % 3) as f32, -2.0];
    let input = Tensor::<B, 2>::from_data(TensorData::new(row.to_vec(), [1, 3]), &Default::default());
    let loss = state.model.forward(input).powi_scalar(2).mean();
    let mut grads = GradientsParams::from_grads(loss.backward(), &state.model);
    struct Round<'a>(&'a mut GradientsParams);
    impl ModuleVisitor<B> for Round<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some(grad) = self.0.remove::<burn::backend::Flex, D>(param.id) else { return };
            self.0.register(param.id, (grad.clamp(-16.0, 16.0) * 65536.0).round() / 65536.0);
        }
    }
    state.model.visit(&mut Round(&mut grads));
    grads
}

fn apply(state: &mut State, grads: GradientsParams) {
    state.step(grads);
    state.model.state.update(Tensor::full([3], state.batch as f32, &Default::default()));
    state.user.0 += 3;
    state.user.1.push(1.0 / state.user.0 as f64);
    if state.batch % 2 == 1 {
        state.average = Some(state.model.valid());
    }
}

/// All that a set must restore, except the optimizer's moments, which the next steps show.
#[derive(Clone, Debug)]
pub struct Contents {
    pub model: Vec<TensorData>,
    average: Option<Vec<TensorData>>,
    rate: u64,
    pub position: (usize, usize),
    user: (u64, Vec<f64>),
}

impl PartialEq for Contents {
    fn eq(&self, other: &Self) -> bool {
        // Also NaN equals itself.
        let bits = |values: &[TensorData]| {
            let bits = values.iter().map(|data| (data.dtype, data.shape.to_vec(), data.bytes.to_vec()));
            bits.collect::<Vec<_>>()
        };
        bits(&self.model) == bits(&other.model)
            && self.average.as_deref().map(bits) == other.average.as_deref().map(bits)
            && (self.rate, self.position, &self.user) == (other.rate, other.position, &other.user)
    }
}

pub fn contents(state: &State) -> Contents {
    Contents {
        // A running state's last update is pending until `valid`.
        model: values(&state.model.valid()),
        average: state.average.as_ref().map(values),
        rate: state.scheduler.to_record::<B>().to_bits(),
        position: (state.epoch, state.batch),
        user: state.user.clone(),
    }
}

/// The values and the paths of all parameters.
#[derive(Default)]
struct Values(Vec<TensorData>, Vec<String>, Vec<String>);

impl Values {
    fn push(&mut self, data: TensorData) {
        self.0.push(data);
        self.1.push(self.2.join("."));
    }
}

impl<B: Backend> ModuleVisitor<B> for Values {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.2.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.2.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.push(param.val().into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.push(param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.push(param.val().into_data());
    }
}

pub fn values<B: Backend, M: Module<B>>(model: &M) -> Vec<TensorData> {
    let mut values = Values::default();
    model.visit(&mut values);
    values.0
}

/// The paths of [`values`].
pub fn paths() -> Vec<String> {
    let mut values = Values::default();
    Net::<B>::new(2).visit(&mut values);
    values.1
}
