//! Checkpoints on burn 0.22 alone: what `tests/shared/checkpoints.rs` cannot have.

use std::path::Path;

use bonfire::{Checkpoints, DataParallel, Error, Group, TrainingState};
use bonfire_testing::ranks;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLrScheduler, ModuleLrSchedulerConfig};
use burn::module::ParamGroup;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::burn_version::device;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Best {
    loss: f64,
    names: Vec<String>,
}

fn best() -> Best {
    Best { loss: f64::INFINITY, names: Vec::new() }
}

fn cosine() -> ModuleLrScheduler {
    CosineAnnealingLrSchedulerConfig::new(0.1, 10).init().unwrap()
}

fn linear() -> Linear {
    let device = device();
    let linear = LinearConfig::new(3, 2).with_bias(false).init(&device);
    let weight = Tensor::from_data(TensorData::from([[1.0f32, -2.0], [0.5, 3.0], [-1.0, 4.0]]), &device);
    Linear { weight: linear.weight.map(|_| weight.require_grad()), ..linear }
}

/// A training with Adam.
struct Run<U> {
    state: TrainingState<Linear, U>,
    ddp: DataParallel,
}

impl<U: Serialize + for<'de> Deserialize<'de> + Clone> Run<U> {
    fn new(group: Group, scheduler: ModuleLrScheduler, user: U) -> Self {
        let (model, ddp) = DataParallel::new(group, linear()).unwrap();
        Run { state: TrainingState::new(model, AdamConfig::new().init(), scheduler, user), ddp }
    }

    fn step(&mut self) {
        let input = Tensor::<2>::ones([1, 3], &device()) * (self.state.samples as f64 + 1.0);
        let grads = self.ddp.run(&self.state.model, [input], |model, input| (model.forward(input).mean(), 1)).unwrap();
        self.state.step(grads, 1);
    }

    fn save(&self, folder: &Path) -> Result<(), Error> {
        Checkpoints::new(self.ddp.group(), folder)?.save(&self.state)
    }

    fn load(&mut self, folder: &Path) -> Result<bool, Error> {
        Checkpoints::read_only(self.ddp.group(), folder)?.load(&mut self.state)
    }

    fn weight(&self) -> TensorData {
        self.state.model.weight.val().into_data()
    }
}

fn refused<U>(folder: &Path, new: impl Fn(Group) -> Run<U> + Sync, expected: &str)
where
    U: Serialize + for<'de> Deserialize<'de> + Clone,
{
    ranks(2, |group| {
        let mut run = new(group);
        let error = run.load(folder).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(run.state.samples, 0);
    });
}

// Not shared: the user's state is what serde can serialise. On burn 0.21 it is a `Record`.
#[test]
fn a_training_goes_on_with_a_state_of_the_users_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let mut run = Run::new(group, cosine(), best());
        (0..2).for_each(|_| run.step());
        run.state.user.names.push("two".into());
        run.save(folder.path()).unwrap();
    });
    let whole = ranks(1, |group| {
        let mut run = Run::new(group, cosine(), best());
        (0..5).for_each(|_| run.step());
        (run.weight(), run.state.scheduler.step().base())
    });
    for n in 1..=3 {
        let resumed = ranks(n, |group| {
            let mut run = Run::new(group, cosine(), best());
            assert!(run.load(folder.path()).unwrap());
            assert_eq!(run.state.user, Best { loss: f64::INFINITY, names: vec!["two".into()] });
            (0..3).for_each(|_| run.step());
            (run.weight(), run.state.scheduler.step().base())
        });
        assert!(resumed.iter().all(|resumed| *resumed == whole[0]), "{n} ranks");
    }
    let user = "saved with the user's state `user` of type `Best`, and this is the user's state `user` of type `()`";
    refused(folder.path(), |group| Run::new(group, cosine(), ()), user);
}

// Not shared: `ModuleLrScheduler` has a schedule for each group of parameters. burn 0.21 has no such groups.
#[test]
fn a_scheduler_with_groups_keeps_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let groups = || {
        let base = ModuleLrSchedulerConfig::new(CosineAnnealingLrSchedulerConfig::new(0.1, 10).into());
        base.with_group(ParamGroup::from_predicate("bias"), LinearLrSchedulerConfig::new(0.5, 0.1, 4)).init().unwrap()
    };
    let rates = |run: &mut Run<()>| {
        let rates = run.state.scheduler.step();
        [Some("weight"), Some("bias")].map(|path| rates.lr_from_param(run.state.model.weight.id, path))
    };
    let mut expected = Run::new(Group::threads(1).unwrap().remove(0), groups(), ());
    (0..3).for_each(|_| expected.step());
    expected.save(folder.path()).unwrap();
    let mut run = Run::new(Group::threads(1).unwrap().remove(0), groups(), ());
    assert!(run.load(folder.path()).unwrap());
    assert_eq!(rates(&mut run), rates(&mut expected));
    let fields = "it has `0.current_iter`, `1.remaining_iters`";
    refused(folder.path(), |group| Run::new(group, cosine(), ()), fields);
}

// Not shared: burn 0.21's record of a model would round it, so it is refused there. Here it is a checkpoint in memory.
#[test]
fn a_model_of_another_float_type_is_resumed_exactly() {
    ranks(2, |group| {
        let weight = linear().weight.map(|weight| (weight / 3.0).cast(DType::F16).detach().require_grad());
        let (model, mut ddp) = DataParallel::new(group, Linear { weight, bias: None }).unwrap();
        let new = |model| TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
        let (mut state, mut resumed) = (new(model.clone()), new(model));
        let input = Tensor::<2>::ones([1, 3], (&device(), DType::F16));
        state.step(ddp.run(&state.model, [input], |model, input| (model.forward(input).mean(), 1)).unwrap(), 1);
        let (bytes, trained) = (state.save().unwrap(), state.model.weight.to_data());
        assert_ne!(resumed.model.weight.to_data(), trained);
        ddp.resume(&mut resumed, || Ok(bytes)).unwrap();
        assert_eq!((resumed.samples, resumed.model.weight.to_data()), (1, trained.clone()));
        ddp.shrink(&mut resumed).unwrap();
        assert_eq!((resumed.samples, resumed.model.weight.to_data()), (1, trained));
    });
}

// Not shared: the first format has burn 0.21's records of optimizer states, which `OptimizerRecord` does not read.
#[test]
fn a_set_of_the_first_format_is_refused_with_what_to_do() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/checkpoints/first-format/adam/begun");
    let remedy = "Bonfire's first format, which the package for burn 0.21";
    refused(&folder, |group| Run::new(group, cosine(), ()), remedy);
}
