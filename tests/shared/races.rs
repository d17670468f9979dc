//! Ranks as threads: no pass loses a gradient to the race of burn-autodiff 0.21
//! ([burn#5573](https://github.com/tracel-ai/burn/issues/5573)). A backward pass that ends frees steps which another
//! thread is building, if their leaves were in an earlier pass. Operations that burn makes of `cat` meet it.

use bonfire::{Group, Sharding};
use bonfire_testing::ranks;
use burn::module::Param;
use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::TensorData;

use crate::burn_version::*;
use crate::model_data::{add, map_floats, norm};

const WIDTH: usize = 16;
/// Enough that operations of different ranks overlap.
const ROWS: usize = 128;

#[derive(Clone, Copy, Debug)]
enum Operation {
    Cat,
    Stack,
    Roll,
}

models! {
    struct Net {
        a: Linear,
        b: Linear,
        c: Linear,
    }
}

fn values<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), &device())
}

impl Net {
    fn new(seed: usize) -> Self {
        let linear = |seed| {
            let mut linear = LinearConfig::new(WIDTH, WIDTH).init(&device());
            linear.weight = Param::from_tensor(values([WIDTH, WIDTH], seed) * 0.2);
            linear.bias = Some(Param::from_tensor(values([WIDTH], seed + 1)));
            linear
        };
        Net { a: linear(seed), b: linear(seed + 2), c: linear(seed + 4) }
    }

    fn forward(&self, x: Tensor<2>, operation: Operation) -> Tensor<2> {
        let (p, q) = (self.a.forward(x.clone()).tanh(), self.b.forward(x));
        self.c.forward(match operation {
            Operation::Cat => Tensor::cat(vec![p, q], 0),
            Operation::Stack => Tensor::stack::<3>(vec![p, q], 0).reshape([2 * ROWS, WIDTH]),
            Operation::Roll => (p + q).roll(&[1], &[0]),
        })
    }

    fn loss(&self, seed: usize, operation: Operation) -> Tensor<1> {
        self.forward(values([ROWS, WIDTH], seed), operation).powf_scalar(2.0).mean()
    }
}

/// What a program does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Four passes, one after the other.
    Accumulates,
    /// Two forward passes, and then their backward passes.
    TwoLosses,
    /// Two forward passes in one pass.
    TwoViews,
    /// One layer in both branches.
    SharedEncoder,
    /// Two models: one through the other.
    Adversarial,
    /// A forward pass of the model in training, without a backward pass, before each step.
    Evaluates,
    /// Two passes, and a layer that no step changes.
    StillPart,
}

const KINDS: [Kind; 7] = [
    Kind::Accumulates,
    Kind::TwoLosses,
    Kind::TwoViews,
    Kind::SharedEncoder,
    Kind::Adversarial,
    Kind::Evaluates,
    Kind::StillPart,
];

impl Kind {
    /// The seeds of the data of a pass, for each pass.
    fn passes(self) -> &'static [&'static [usize]] {
        match self {
            Kind::Accumulates => &[&[1], &[2], &[3], &[4]],
            Kind::TwoLosses | Kind::StillPart => &[&[1], &[2]],
            Kind::TwoViews => &[&[1, 2]],
            Kind::SharedEncoder | Kind::Adversarial | Kind::Evaluates => &[&[1]],
        }
    }

    /// The loss of a pass.
    fn loss(self, net: &Net, seeds: &[usize], operation: Operation, critic: &Net) -> Tensor<1> {
        let input = |seed| values([ROWS, WIDTH], seed);
        let losses = seeds.iter().map(|&seed| match self {
            Kind::SharedEncoder => {
                let branches = vec![net.a.forward(input(seed)), net.a.forward(input(seed + 1)).tanh()];
                net.c.forward(Tensor::cat(branches, 0)).powf_scalar(2.0).mean()
            }
            Kind::Adversarial => {
                let made = net.forward(input(seed), operation).slice(0..ROWS);
                critic.forward(made, operation).powf_scalar(2.0).mean()
            }
            _ => net.loss(seed, operation),
        });
        losses.reduce(|one, other| one + other).expect("a pass has data")
    }
}

/// The norm of the mean gradients of a step, from passes that each have a model of their own. A gradient that is
/// missing, or a part of one, changes it.
fn expected(kind: Kind, operation: Operation) -> f64 {
    let mut sum = GradientsParams::new();
    let net = Net::new(1);
    for seed in kind.passes().concat() {
        // With leaves of its own.
        let own = map_floats(net.clone(), |data, _| data);
        let gradients = kind.loss(&own, &[seed], operation, &Net::new(50)).backward();
        add(&net, &GradientsParams::from_grads(gradients, &own), &mut sum, 1.0 / kind.passes().len() as f64);
    }
    norm(&net, &sum)
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Step,
    Zero1,
    Zero3,
}

/// Makes steps, in which nothing changes but the leaves. Returns how many norms were wrong on this rank.
fn wrong_steps(group: &Group, (kind, form): (Kind, Form), steps: usize, expected: &[f64; 3]) -> usize {
    let operations = [Operation::Cat, Operation::Stack, Operation::Roll];
    let (critic, of_critic) = DataParallel::new(group.clone(), Net::new(50)).unwrap();
    let (mut net, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
    let sgd = || -> SgdOf<Net> { SgdConfig::new().init() };
    let mut zero1 = ShardedOptimizer::new(&ddp, sgd(), Sharding::All).unwrap();
    let mut optimizer = sgd();
    let (mut parts_of_net, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(1)).unwrap();
    let mut wrong = 0;
    for step in 0..steps {
        let operation = operations[step % 3];
        if kind == Kind::Adversarial {
            let run = |critic: &Net, seed| (critic.loss(seed, operation), 1);
            // Its gradients are those of another model.
            drop(of_critic.run(&critic, [1, 2], run).unwrap());
        }
        if kind == Kind::Evaluates {
            // burn keeps the graphs of a model that is evaluated, until its leaves are gone.
            match form {
                Form::Zero3 => drop(fsdp.gather(&parts_of_net).unwrap().loss(9, operation)),
                Form::Step | Form::Zero1 => drop(net.loss(9, operation)),
            }
        }
        let loss = |net: &Net, seeds: &&[usize]| (kind.loss(net, seeds, operation, &critic), 1);
        let is_still = |id| kind == Kind::StillPart && (id == net.c.weight.id);
        let own = match form {
            Form::Step if kind == Kind::TwoLosses => {
                let open = (ddp.pass(&net, 1).unwrap(), ddp.pass(&net, 1).unwrap());
                let losses = (open.0.model().loss(1, operation), open.1.model().loss(2, operation));
                open.1.finish(&mut losses.1.backward()).unwrap();
                open.0.finish(&mut losses.0.backward()).unwrap();
                let gradients = ddp.skip(&net).unwrap();
                let own = norm(&net, &gradients);
                net = optimizer.step(0.0, net, gradients);
                own
            }
            Form::Step => {
                let mut gradients = ddp.run(&net, kind.passes(), loss).unwrap();
                let own = norm(&net, &gradients);
                if is_still(net.c.weight.id) {
                    drop(remove_gradient::<2>(&mut gradients, net.c.weight.id));
                }
                net = optimizer.step(0.0, net, gradients);
                own
            }
            Form::Zero1 => {
                let parts = zero1.run(&net, kind.passes(), loss).unwrap();
                let own = parts.norm().unwrap();
                let parts = parts.split(is_still).1;
                zero1.step(0.0, &mut net, parts).unwrap();
                own
            }
            Form::Zero3 => {
                let parts = fsdp.run(&parts_of_net, kind.passes(), loss).unwrap();
                let own = parts.norm().unwrap();
                parts_of_net = optimizer.step(0.0, parts_of_net, parts.for_optimizer(&optimizer).unwrap());
                own
            }
        };
        let right = expected[step % 3];
        wrong += usize::from((own - right).abs() > 1e-4 * right);
    }
    wrong
}

fn all_kinds(steps: usize) {
    for kind in KINDS {
        let operations = [Operation::Cat, Operation::Stack, Operation::Roll];
        let expected = operations.map(|operation| expected(kind, operation));
        for form in [Form::Step, Form::Zero1, Form::Zero3] {
            for n in 2..=4 {
                let wrong = ranks(n, move |group| wrong_steps(&group, (kind, form), steps, &expected));
                println!("{kind:?}, {form:?}, {n} ranks: {wrong:?} of {steps} steps are wrong");
                assert!(wrong.iter().all(|wrong| *wrong == 0), "{kind:?}, {form:?}, {n} ranks: {wrong:?} of {steps}");
            }
        }
    }
}

#[test]
fn passes_of_threads_lose_no_gradients() {
    all_kinds(30);
}

#[test]
#[ignore = "takes some minutes: .ci/full runs it"]
fn passes_of_threads_lose_no_gradients_in_4000_steps_of_each_kind() {
    all_kinds(4000);
}
