//! What shared tests of checkpoints need of burn 0.21 besides `burn_version`: the types of whole trainings, and
//! messages that depend on what burn says of its types. `burn-0.22/tests/common/checkpoint_version.rs` has the same
//! names for burn 0.22.

use burn::backend::Flex;
use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::exponential::ExponentialLrScheduler;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{SgdState, SimpleOptimizer};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, TensorData};

use crate::burn_version::{AdamOf, Device, Inner, Model, Training};

pub use burn::optim::Adam;

pub type Sgd = burn::optim::Sgd<Flex>;

/// A kind of optimizer.
pub trait Kind: SimpleOptimizer<Flex> + 'static {}

impl<O: SimpleOptimizer<Flex> + 'static> Kind for O {}

pub type OptimizerOf<O, M> = OptimizerAdaptor<O, M, Training>;
pub type ShardedOf<O, M> = bonfire::ShardedOptimizer<O, M, Training>;
/// A training at one learning rate.
pub type TrainingOf<O, M, U> = bonfire::TrainingState<Training, M, OptimizerOf<O, M>, f64, U>;
/// A training with Adam, at a rate that falls exponentially.
pub type ScheduledTraining<M, U> = bonfire::TrainingState<Training, M, AdamOf<M>, ExponentialLrScheduler, U>;

/// What refuses SGD in place of Adam, whose state every rank had whole, or in slices on two ranks.
pub const OTHER_OPTIMIZER: &str = "saved with the optimizer of type `Adam`, and this is the optimizer of type `Sgd`";
pub const OTHER_OPTIMIZER_IN_SLICES: &str =
    "saved with the optimizer of type `Adam` in slices on 2 ranks, and this is the optimizer of type `Sgd`";
/// What refuses a rate, a Noam schedule and a linear one in place of an exponential one. burn's records of all but the
/// last are bare numbers.
pub const OTHER_SCHEDULERS: [&str; 3] = [
    "saved with the scheduler of type `ExponentialLrScheduler`, and this is the scheduler of type `f64`",
    "saved with the scheduler of type `ExponentialLrScheduler`, and this is the scheduler of type `NoamLrScheduler`",
    "saved with the scheduler of type `ExponentialLrScheduler`, and this is the scheduler of type `LinearLrScheduler`",
];
/// What refuses a state in memory for a model whose weight has another shape, and for another scheduler.
pub const OTHER_MODEL_IN_MEMORY: &str =
    "differs first at parameter 4: `linear.weight`: trained float f32 [3, 5] then, ";
pub const OTHER_SCHEDULER_IN_MEMORY: &str = "loading a recorded training: ";

/// Whether ranks that take over another's state have the ids of its parameters then.
pub const TAKES_IDS: bool = true;

/// An optimizer that keeps no states.
pub fn stateless<M: Model>() -> OptimizerOf<Stateless, M> {
    Stateless.into()
}

#[derive(Clone)]
pub struct Stateless;

impl SimpleOptimizer<Flex> for Stateless {
    type State<const D: usize> = SgdState<Flex, D>;

    fn step<const D: usize>(
        &self,
        _: f64,
        value: Inner<D>,
        _: Inner<D>,
        _: Option<Self::State<D>>,
    ) -> (Inner<D>, Option<Self::State<D>>) {
        (value, None)
    }

    fn to_device<const D: usize>(state: Self::State<D>, _: &Device) -> Self::State<D> {
        state
    }
}

/// The rate of the last step.
pub fn last_rate(scheduler: &ExponentialLrScheduler) -> f64 {
    scheduler.to_record::<Training>()
}

/// The paths and values of parameters and states of all kinds, in visiting order.
pub fn all_values<B: Backend, M: Module<B>>(model: &M) -> Vec<(String, TensorData)> {
    #[derive(Default)]
    struct Values(Vec<String>, Vec<(String, TensorData)>);
    impl Values {
        fn push(&mut self, data: TensorData) {
            self.1.push((self.0.join("."), data));
        }
    }
    impl<B: Backend> ModuleVisitor<B> for Values {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<burn::tensor::Tensor<B, D>>) {
            self.push(param.val().into_data());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<burn::tensor::Tensor<B, D, Int>>) {
            self.push(param.val().into_data());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<burn::tensor::Tensor<B, D, Bool>>) {
            self.push(param.val().into_data());
        }
    }
    let mut values = Values::default();
    model.visit(&mut values);
    values.1
}
