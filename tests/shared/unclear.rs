//! Parameters of which it is not clear whether they are trained, and models that train none.

use bonfire::{Error, Group, Sharding};
use bonfire_testing::logged;
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::ranks;
use burn::module::Param;
use burn::nn::{LinearConfig, LinearLayout};
use burn::optim::{AdamConfig, GradientsParams};

use crate::burn_version::*;

models! {
    struct Mixed {
        clear: Linear,
        frozen: Linear,
        mapped: Linear,
        columns: Linear,
        settled: Linear,
        needy: Param<Tensor<1>>,
    }
}

fn linear() -> Linear {
    LinearConfig::new(2, 2).with_bias(false).init(&device())
}

impl Mixed {
    fn new() -> Self {
        let mapped = || {
            let linear = linear();
            // As to scale the weights that burn has initialised.
            Linear { weight: linear.weight.map(|weight| weight * 0.5), ..linear }
        };
        let settled = mapped();
        let weight = settled.weight.map(|weight| weight.detach()).set_require_grad(true);
        let plain = Tensor::<1>::ones([3], &device());
        Mixed {
            clear: linear(),
            frozen: linear().no_grad(),
            mapped: mapped(),
            columns: LinearConfig::new(2, 2).with_bias(false).with_layout(LinearLayout::Col).init(&device()),
            settled: Linear { weight, ..settled },
            // The tensor needs a gradient, and on burn 0.22 the parameter does not.
            needy: Param::initialized(Default::default(), plain).map(|value| value.require_grad()),
        }
    }
}

#[test]
fn parameters_that_are_not_clearly_trained_are_named_once_with_a_remedy() {
    const NAME: &str = "shared::unclear::parameters_that_are_not_clearly_trained_are_named_once_with_a_remedy";
    if is_child() {
        logged::record();
        let lines = || logged::lines().into_iter().filter(|line| line.contains("not clear whether to train"));
        ranks(2, |group| {
            let (model, ddp) = DataParallel::new(group, Mixed::new()).unwrap();
            let of = |linear: &Linear| linear.weight.is_require_grad();
            assert_eq!(
                [of(&model.mapped), of(&model.columns), model.needy.is_require_grad()],
                [UNCLEAR.mapped, UNCLEAR.columns.unwrap_or(true), UNCLEAR.needy.unwrap_or(true)]
            );
            assert!(of(&model.clear) && !of(&model.frozen) && of(&model.settled));
            ddp.verify(&model, &AdamOf::<Mixed>::from(AdamConfig::new().init())).unwrap();
        });
        lines().for_each(send_line);
        send_line("full sharding");
        logged::clear();
        ranks(2, |group| drop(FullyShardedParallel::new(group, Mixed::new()).unwrap()));
        lines().for_each(send_line);
        send_line("end");
        return;
    }
    let process = Process::start(NAME, &[]);
    let unclear =
        [("`mapped.weight`", Some(UNCLEAR.mapped)), ("`columns.weight`", UNCLEAR.columns), ("`needy`", UNCLEAR.needy)];
    for (operation, end) in [("data parallel", "full sharding"), ("full sharding", "end")] {
        for (is_trained, here) in [(true, "here it is trained"), (false, "here it is not trained")] {
            let names = unclear.iter().filter(|(_, trained)| *trained == Some(is_trained)).map(|(name, _)| *name);
            let names: Vec<&str> = names.collect();
            if names.is_empty() {
                continue;
            }
            let line = process.read_line();
            let start = format!("{operation}: of {} it is not clear whether to train", names.join(", "));
            assert!(line.starts_with(&start) && line.contains(here), "{line}");
            assert!(line.contains("`param.map(|value| value.detach()).set_require_grad(true)`"), "{line}");
        }
        assert_eq!(process.read_line(), end);
    }
}

/// Returns the errors of steps in each form of a model that trains nothing.
fn untrained<M: Model + 'static>(group: &Group, model: impl Fn() -> M, loss: impl Fn(&M) -> Tensor<1>) -> Vec<Error> {
    let (net, ddp) = DataParallel::new(group.clone(), model()).unwrap();
    let sharded: ShardedAdam<M> = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
    let (parts, fsdp) = FullyShardedParallel::new(group.clone(), model()).unwrap();
    let none = GradientsParams::new;
    vec![
        ddp.run(&net, [1], |net, weight| (loss(net), weight)).err().unwrap(),
        // Also in several passes, and on a rank that makes none.
        ddp.run(&net, 0..2 * group.rank(), |net, _| (loss(net), 1)).err().unwrap(),
        ddp.sync(&net, none(), 1).err().unwrap(),
        ddp.skip(&net).err().unwrap(),
        ddp.join(&net).err().unwrap(),
        sharded.run(&net, [1], |net, weight| (loss(net), weight)).err().unwrap(),
        sharded.sync(&net, none(), 1).err().unwrap(),
        sharded.skip(&net).err().unwrap(),
        fsdp.run(&parts, [1], |net, weight| (loss(net), weight)).err().unwrap(),
        fsdp.run(&parts, 0..2 * group.rank(), |net, _| (loss(net), 1)).err().unwrap(),
        fsdp.skip(&parts).err().unwrap(),
    ]
}

#[test]
fn a_step_of_a_model_that_trains_nothing_is_the_same_error_in_every_form() {
    let errors = ranks(2, |group| {
        let frozen = || linear().no_grad();
        let loss = |linear: &Linear| linear.forward(Tensor::<2>::ones([3, 2], &device())).mean();
        // The loss of the first depends on nothing that is trained, and that of the second on something else.
        let other = Tensor::<1>::ones([1], &device()).require_grad();
        let mut errors = untrained(&group, frozen, loss);
        errors.extend(untrained(&group, frozen, |linear| loss(linear) * other.clone()));
        // It can still be evaluated, and its ranks go on.
        let (_, ddp) = DataParallel::new(group.clone(), frozen()).unwrap();
        assert_eq!(ddp.mean(&[group.rank() as f64], 1).unwrap(), [0.5]);
        errors
    });
    assert_eq!(errors[0], errors[1]);
    for error in &errors[0] {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("the model has no parameters to train"), "{error}");
    }
}

#[test]
fn a_loss_that_depends_on_nothing_that_is_trained_is_an_error_on_all_ranks() {
    let errors = ranks(2, |group| {
        let (net, ddp) = DataParallel::new(group.clone(), linear()).unwrap();
        let step = |spoiled: usize| {
            ddp.run(&net, [1], |net, weight| {
                let loss = net.forward(Tensor::<2>::ones([3, 2], &device())).mean();
                (if group.rank() == spoiled { loss.detach() } else { loss }, weight)
            })
        };
        let error = step(1).err().unwrap();
        step(2).unwrap();
        error
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].to_string().contains("rank 1 has samples, and no gradient has arrived"), "{}", errors[0]);
}
