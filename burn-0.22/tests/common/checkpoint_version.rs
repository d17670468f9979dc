//! What shared tests of checkpoints need of burn 0.22 besides `burn_version`. `tests/common/checkpoint_version.rs` of
//! the root package has the same names for burn 0.21, and says what they are for.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{ModuleOptimizer, Optimizer, SgdState};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use crate::burn_version::Model;

pub use burn::optim::{Adam, Sgd};

pub trait Kind: 'static {}

impl<O: Optimizer> Kind for O {}

/// The types for optimizers of all kinds.
pub trait OfKind {
    type Optimizer;
    type Sharded;
    type Training<M, U>;
}

impl<O> OfKind for O {
    type Optimizer = ModuleOptimizer;
    type Sharded = bonfire::ShardedOptimizer;
    type Training<M, U> = bonfire::TrainingState<M, U>;
}

pub type OptimizerOf<O, M> = <(O, M) as OfKind>::Optimizer;
pub type ShardedOf<O, M> = <(O, M) as OfKind>::Sharded;
pub type TrainingOf<O, M, U> = <O as OfKind>::Training<M, U>;
pub type ScheduledTraining<M, U> = bonfire::TrainingState<M, U>;

/// burn 0.22 tells the names of fields, and neither those of optimizers nor of schedulers.
pub const OTHER_OPTIMIZER: &str = "the optimizer does not take `momentum.time` of the state for `linear.weight`; load \
                                   it into the optimizer that was saved";
pub const OTHER_OPTIMIZER_IN_SLICES: &str = "the optimizer does not take `momentum.time` of the state for `few`; load \
                                             it into the optimizer that was saved, the optimizer in slices on 2 ranks";
pub const OTHER_SCHEDULERS: [&str; 3] = [
    "it has `previous_lr` of the scheduler, which now has nothing",
    "it has `previous_lr` of the scheduler, which now has `step`",
    "it has `previous_lr` of the scheduler, which now has `remaining_iters`",
];
pub const OTHER_MODEL_IN_MEMORY: &str =
    "it was saved for another model: `linear.weight` was f32 [3, 5] then and is f32 [3, 2] now";
pub const OTHER_SCHEDULER_IN_MEMORY: &str =
    "loading a checkpoint: it has `previous_lr` of the scheduler, which now has nothing";

pub const TAKES_IDS: bool = false;

pub fn stateless<M: Model>() -> OptimizerOf<Stateless, M> {
    Stateless.into()
}

#[derive(Clone)]
pub struct Stateless;

impl Optimizer for Stateless {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        _: f64,
        value: Tensor<D>,
        _: Tensor<D>,
        _: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        (value, None)
    }

    fn to_device<const D: usize>(state: Self::State<D>, _: &Device) -> Self::State<D> {
        state
    }
}

pub fn last_rate(scheduler: &ModuleLrScheduler) -> f64 {
    scheduler.to_record().record("0").scalar("previous_lr").expect("an exponential schedule")
}

pub fn all_values<M: Module>(model: &M) -> Vec<(String, TensorData)> {
    #[derive(Default)]
    struct Values(Vec<String>, Vec<(String, TensorData)>);
    impl Values {
        fn push(&mut self, data: TensorData) {
            self.1.push((self.0.join("."), data));
        }
    }
    impl ModuleVisitor for Values {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.push(param.val().into_data());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            self.push(param.val().into_data());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            self.push(param.val().into_data());
        }
    }
    let mut values = Values::default();
    model.visit(&mut values);
    values.1
}
