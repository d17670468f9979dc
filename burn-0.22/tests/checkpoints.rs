//! What burn 0.22's types make different in checkpoints: optimizers and schedulers whose types are hidden, a user's
//! state by serde, and burn's float type. `tests/shared` has what both packages do alike.

use std::path::Path;

use bonfire::{Checkpoints, DataParallel, Error, Group, ShardedOptimizer, Sharding, TrainingState};
use bonfire_testing::ranks;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLrScheduler, ModuleLrSchedulerConfig};
use burn::module::{Module, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

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

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

fn linear(device: &Device) -> Linear {
    let linear = LinearConfig::new(3, 2).with_bias(false).init(device);
    let weight = Tensor::from_data(
        TensorData::from([[1.0, -2.0], [0.5, 3.0], [-1.0, 4.0]]),
        (device, linear.weight.val().dtype()),
    );
    Linear { weight: linear.weight.map(|_| weight.require_grad()), ..linear }
}

/// A training on Flex.
struct Run<U> {
    state: TrainingState<Linear, U>,
    ddp: DataParallel,
}

impl<U: Serialize + for<'de> Deserialize<'de> + Clone> Run<U> {
    fn new(group: Group, optimizer: ModuleOptimizer, scheduler: impl Into<ModuleLrScheduler>, user: U) -> Self {
        let (model, ddp) = DataParallel::new(group, linear(&Device::flex().autodiff())).unwrap();
        Run { state: TrainingState::new(model, optimizer, scheduler, user), ddp }
    }

    fn step(&mut self) {
        let input = Tensor::<2>::ones([1, 3], &Device::flex().autodiff()) * (self.state.batch as f64 + 1.0);
        let grads = self.ddp.run(&self.state.model, [input], |model, input| (model.forward(input).mean(), 1)).unwrap();
        self.state.step(grads);
    }

    fn save(&self, folder: &Path) -> Result<(), Error> {
        Checkpoints::new(self.ddp.group(), folder)?.save(&self.state)
    }

    fn load(&mut self, folder: &Path) -> Result<bool, Error> {
        Checkpoints::new(self.ddp.group(), folder)?.load(&mut self.state)
    }

    fn weight(&self) -> TensorData {
        self.state.model.weight.val().into_data()
    }
}

/// Saves a training after two steps with Adam and a cosine schedule.
fn saved(folder: &Path) {
    ranks(2, |group| {
        let mut run = Run::new(group, adam(), cosine(), best());
        (0..2).for_each(|_| run.step());
        run.state.user.names.push("two".into());
        run.save(folder).unwrap();
    });
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
        assert_eq!(run.state.batch, 0);
    });
}

#[test]
fn a_training_goes_on_with_the_same_bits_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let whole = ranks(1, |group| {
        let mut run = Run::new(group, adam(), cosine(), best());
        (0..5).for_each(|_| run.step());
        (run.weight(), run.state.scheduler.step().base())
    });
    for n in 1..=3 {
        let resumed = ranks(n, |group| {
            let mut run = Run::new(group, adam(), cosine(), best());
            assert!(run.load(folder.path()).unwrap());
            assert_eq!(run.state.user, Best { loss: f64::INFINITY, names: vec!["two".into()] });
            (0..3).for_each(|_| run.step());
            (run.weight(), run.state.scheduler.step().base())
        });
        assert!(resumed.iter().all(|resumed| *resumed == whole[0]), "{n} ranks");
    }
}

#[test]
fn another_kind_of_scheduler_optimizer_or_user_state_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    let decay = || -> ModuleLrScheduler { LinearLrSchedulerConfig::new(0.1, 0.01, 10).init().unwrap() };
    let of_scheduler = "it has `current_iter` of the scheduler, which now has ";
    refused(
        folder.path(),
        |group| Run::new(group, adam(), decay(), best()),
        &format!("{of_scheduler}`remaining_iters`"),
    );
    refused(folder.path(), |group| Run::new(group, adam(), 0.1, best()), &format!("{of_scheduler}nothing"));
    let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    refused(folder.path(), |group| Run::new(group, sgd(), cosine(), best()), "the optimizer does not take `");
    let user = "saved with the user's state `user` of type `Best`, and this is the user's state `user` of type `()`";
    refused(folder.path(), |group| Run::new(group, adam(), cosine(), ()), user);
}

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
    let mut expected = Run::new(Group::threads(1).unwrap().remove(0), adam(), groups(), ());
    (0..3).for_each(|_| expected.step());
    expected.save(folder.path()).unwrap();
    let mut run = Run::new(Group::threads(1).unwrap().remove(0), adam(), groups(), ());
    assert!(run.load(folder.path()).unwrap());
    assert_eq!(rates(&mut run), rates(&mut expected));
    refused(
        folder.path(),
        |group| Run::new(group, adam(), cosine(), ()),
        "it has `0.current_iter`, `1.remaining_iters`",
    );
}

#[test]
fn an_optimizer_that_has_made_no_step_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let Run { mut state, ddp } = Run::new(group, adam(), 0.1, ());
        let mut sharded = ShardedOptimizer::new(&ddp, adam(), Sharding::All).unwrap();
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        checkpoints.save(&state).unwrap();
        let input = Tensor::<2>::ones([1, 3], &Device::flex().autodiff());
        let parts = sharded.run(&state.model, [input], |model, input| (model.forward(input).mean(), 1)).unwrap();
        sharded.step(0.1, &mut state.model, parts).unwrap();
        state.batch += 1;
        let error = checkpoints.save(&state).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("the optimizer in the state has made no step, though batches"), "{error}");
        checkpoints.save((&state, &sharded)).unwrap();
        assert!(checkpoints.load(&mut state).unwrap());
        let error = checkpoints.save((&state, &sharded)).unwrap_err();
        assert!(error.to_string().contains("the optimizer in the state has states of its own"), "{error}");
        checkpoints.save(&state).unwrap();
    });
}

#[test]
fn a_state_that_burn_would_round_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::flex().autodiff();
    let wide = linear(&device);
    let weight = Tensor::<2>::ones([3, 2], (&device, DType::F64)).require_grad();
    let wide = Linear { weight: wide.weight.map(|_| weight), ..wide };
    let (model, ddp) = DataParallel::new(Group::threads(1).unwrap().remove(0), wide).unwrap();
    let mut run = Run { state: TrainingState::new(model, adam(), 0.1, ()), ddp };
    run.save(folder.path()).unwrap();
    let input = Tensor::<2>::ones([1, 3], (&device, DType::F64));
    let grads = run.ddp.run(&run.state.model, [input], |model, input| (model.forward(input).mean(), 1)).unwrap();
    run.state.step(grads);
    let error = run.save(folder.path()).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(
        error.to_string().contains("`weight` is F64, and burn loads an optimizer's state in the float type"),
        "{error}"
    );
    // The set before is still there.
    assert!(run.load(folder.path()).unwrap());
    assert_eq!((run.state.batch, run.state.model.valid().weight.val().dtype()), (0, DType::F64));
}

#[test]
fn a_set_of_the_first_format_is_refused_with_what_to_do() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/checkpoints/first-format/adam/begun");
    refused(
        &folder,
        |group| Run::new(group, adam(), cosine(), ()),
        "Bonfire's first format, which the package for burn 0.21",
    );
}
