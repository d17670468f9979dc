//! Checkpoints on burn 0.21 alone: what `tests/shared/checkpoints.rs` cannot have.

use bonfire::train::InnerRecord;
use bonfire::{Checkpoints, Error, Group, TrainingState};
use bonfire_testing::ranks;
use burn::module::AutodiffModule;
use burn::nn::LinearConfig;
use burn::optim::{Adam, AdamConfig, GradientsParams, MultiGradientsParams, Optimizer};
use burn::tensor::{DType, TensorData};

use crate::burn_version::{AdamOf, DataParallel, FullyShardedParallel, Inner, Linear, Model, Tensor, Training, device};
use crate::model_data::map_gradients;
use crate::shared::checkpoint_versions::goes_on;
use crate::shared::checkpoints::state::Net;
use crate::shared::fully_sharded::checkpoints::{self as fully_sharded, Run};
use crate::shared::fully_sharded::models::Form;

/// Two optimizers in one, as for two groups of parameters, whose records burn's `OptimizerAdaptor` does not write. burn
/// 0.22 has no trait for it, but the type `ModuleOptimizer`.
#[derive(Clone)]
struct Two<M: Model>(AdamOf<M>, AdamOf<M>);

impl<M: Model> Two<M> {
    fn new() -> Self {
        Two(AdamConfig::new().init(), AdamConfig::new().init())
    }
}

impl<M: Model> Optimizer<M, Training> for Two<M> {
    type Record = (<AdamOf<M> as Optimizer<M, Training>>::Record, <AdamOf<M> as Optimizer<M, Training>>::Record);

    fn step(&mut self, rate: f64, module: M, grads: GradientsParams) -> M {
        let copy = map_gradients(&module, &grads, |value| value);
        let module = self.0.step(rate, module, grads);
        self.1.step(rate / 16.0, module, copy)
    }

    fn step_multi(&mut self, rate: f64, module: M, grads: MultiGradientsParams) -> M {
        self.0.step_multi(rate, module, grads)
    }

    fn to_record(&self) -> Self::Record {
        (self.0.to_record(), self.1.to_record())
    }

    fn load_record(self, (first, second): Self::Record) -> Self {
        Two(self.0.load_record(first), self.1.load_record(second))
    }
}

// Not shared: the trait `Optimizer` of whole models, as above.
#[test]
fn an_optimizer_of_another_form_is_saved_whole() {
    let folder = tempfile::tempdir().unwrap();
    let run = |n, steps, resume: bool| {
        ranks(n, |group: Group| {
            let (model, ddp) = DataParallel::new(group, Net::new(2)).unwrap();
            let mut state = TrainingState::new(model, Two::new(), 0.1, ());
            let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
            if resume {
                assert!(checkpoints.load(&mut state).unwrap());
            }
            for _ in 0..steps {
                let input = Tensor::<2>::from_data(TensorData::from([[1f32, 2.0, -1.0]]), &device());
                let loss = state.model.forward(input).powi_scalar(2).mean();
                let grads = GradientsParams::from_grads(loss.backward(), &state.model);
                let grads = ddp.sync(&state.model, grads, 1).unwrap();
                state.step(grads, 1);
                if !resume && state.samples == 2 {
                    checkpoints.save(&state).unwrap();
                }
            }
            state.model.linear.weight.to_data()
        })
    };
    // On one and two ranks the mean of equal gradients is exact.
    let (whole, resumed) = (run(2, 4, false), run(1, 2, true));
    assert!(resumed.iter().all(|weight| *weight == whole[0]));
}

// Not shared: the trait `Optimizer` of whole models, as above. The ids of parameters, by which each rank's records name
// states, and the order of states differ between ranks.
#[test]
fn verify_compares_the_states_of_an_optimizer_of_another_form() {
    ranks(3, |group: Group| {
        let rank = group.rank();
        let (mut model, ddp) = DataParallel::new(group, Net::new(2)).unwrap();
        let mut optimizer = Two::new();
        let gradients = |model: &Net| {
            let input = Tensor::<2>::from_data(TensorData::from([[1f32, 2.0, -1.0]]), &device());
            GradientsParams::from_grads(model.forward(input).powi_scalar(2).mean().backward(), model)
        };
        for _ in 0..2 {
            let mean = ddp.sync(&model, gradients(&model), 1).unwrap();
            model = optimizer.step(0.1, model, mean);
            ddp.verify(&model, &optimizer).unwrap();
        }
        let own = gradients(&model);
        if rank == 1 {
            optimizer.1.step(0.0, model.clone(), own);
        }
        let error = ddp.verify(&model, &optimizer).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let expected = "after 2 steps, the optimizer's state for `linear.weight` of rank 1 differs from rank 0's";
        assert!(error.to_string().contains(expected), "{error}");
    });
}

// Not shared: the trait `Optimizer` of whole models, as above.
#[test]
fn an_optimizer_whose_state_is_not_one_by_parameter_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let net = || fully_sharded::Net::new(7, DType::F32);
        let mut checkpoints = Checkpoints::new(&group, folder.path()).unwrap();
        let (model, fsdp) = FullyShardedParallel::new(group.clone(), net()).unwrap();
        let error = checkpoints.save((&TrainingState::new(model, Two::new(), 0.01, 7u64), &fsdp)).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("the optimizer's state is not one by parameter, so it cannot"), "{error}");
        let (model, _) = DataParallel::new(group.clone(), net()).unwrap();
        checkpoints.save(&TrainingState::new(model, Two::new(), 0.01, 7u64)).unwrap();
        let mut run = Run::<Adam>::new(group, Form::Full, net(), &fully_sharded::adam);
        let error = run.load(folder.path()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("an optimizer whose state cannot be sharded"), "{error}");
    });
}

// Not shared: these sets have burn 0.21's records of optimizer states, whose traits (`Record`) burn 0.22 lacks.
#[test]
fn sets_of_the_first_format_go_on() {
    goes_on("first-format", "burn-0.21");
}

// Not shared: `TrainingState::save` has burn 0.21's record of a model, whose `PrecisionSettings` and backend set the
// element type. On burn 0.22 it is a checkpoint in memory.
#[test]
fn a_model_that_burn_would_round_is_refused() {
    ranks(2, |group| {
        let half: Linear = LinearConfig::new(2, 1).init(&device());
        let weight = half.weight.map(|weight| weight.cast(DType::F16).detach().require_grad());
        let (model, mut ddp) = DataParallel::new(group, Linear { weight, bias: None }).unwrap();
        let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.1, ());
        for error in [state.save().map(drop), ddp.shrink(&mut state)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("`weight` is F16, and burn loads records in"), "{error}");
        }
    });
}

/// A record of the backend without autodiff.
type Weights = (Inner<2>, Vec<Inner<1>>);

// Not shared: burn 0.22 has one type of tensors, with and without autodiff, and the user's state is serde's there.
#[test]
fn a_record_of_the_backend_without_autodiff_is_part_of_a_training() {
    let folder = tempfile::tempdir().unwrap();
    let linear = |group: Group| {
        let linear: Linear = LinearConfig::new(3, 2).init(&device());
        DataParallel::new(group, linear).unwrap()
    };
    let run = |saved: Option<Vec<u8>>| {
        ranks(2, |group: Group| {
            let (model, mut ddp) = linear(group);
            let of = |model: &Linear| {
                let linear = model.valid();
                InnerRecord((linear.weight.val(), vec![linear.bias.expect("a bias").val()]))
            };
            let user = (7u64, of(&model));
            let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.1, user);
            let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
            let of_user = |(_, InnerRecord((weight, biases))): &(u64, InnerRecord<Weights>)| {
                [weight.to_data(), biases[0].to_data()]
            };
            let Some(saved) = &saved else {
                checkpoints.save(&state).unwrap();
                return (state.save().unwrap(), of_user(&state.user));
            };
            checkpoints.load(&mut state).unwrap();
            let loaded = of_user(&state.user);
            let (model, _) = linear(ddp.group().clone());
            state.user = (8, of(&model));
            assert_ne!(of_user(&state.user), loaded);
            ddp.resume(&mut state, || Ok(saved.clone())).unwrap();
            assert_eq!((state.user.0, of_user(&state.user)), (7, loaded.clone()));
            (saved.clone(), loaded)
        })
    };
    let (saved, expected) = run(None).swap_remove(0);
    assert!(run(Some(saved)).iter().all(|(_, loaded)| *loaded == expected));
}
