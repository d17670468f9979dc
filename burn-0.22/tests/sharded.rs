//! Sharded optimizers on burn 0.22: the same training as with one optimizer on one rank.

use bonfire::{DataParallel, ShardedOptimizer, Sharding};
use bonfire_testing::ranks;
use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, MuonConfig, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};

const STEPS: usize = 5;

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn values<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), &device())
}

impl Net {
    fn new() -> Net {
        let linear = |inputs, outputs, seed| {
            let mut linear = LinearConfig::new(inputs, outputs).init(&device());
            linear.weight = Param::from_tensor(values([inputs, outputs], seed));
            linear.bias = Some(Param::from_tensor(values([outputs], seed + 1)));
            linear
        };
        Net { a: linear(3, 5, 1), b: linear(5, 2, 3) }
    }

    fn loss(&self, rows: std::ops::Range<usize>) -> Tensor<1> {
        let x = values([12, 3], 9).slice([rows, 0..3]);
        self.b.forward(self.a.forward(x).tanh()).powf_scalar(2.0).mean() * 3.0
    }
}

struct Flatten(Vec<f32>);

impl ModuleVisitor for Flatten {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f32>());
    }
}

fn flatten(net: &Net) -> Vec<f32> {
    let mut all = Flatten(Vec::new());
    net.visit(&mut all);
    all.0
}

fn trains_as_alone(optimizer: impl Fn() -> ModuleOptimizer + Sync) {
    let (mut net, mut alone) = (Net::new(), optimizer());
    for _ in 0..STEPS {
        let gradients = GradientsParams::from_grads(net.loss(0..12).backward(), &net);
        net = alone.step(0.05, net, gradients);
    }
    let expected = flatten(&net);
    for (n, sharding) in [(1, Sharding::All), (2, Sharding::All), (4, Sharding::Blocks(2)), (3, Sharding::None)] {
        let trained = ranks(n, |group| {
            let (mut net, ddp) = DataParallel::new(group.clone(), Net::new()).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, optimizer(), sharding).unwrap();
            let rows = 12 / n * group.rank()..12 / n * (group.rank() + 1);
            for _ in 0..STEPS {
                let parts = optimizer.run(&net, [rows.clone()], |net, rows| (net.loss(rows), 12 / n)).unwrap();
                optimizer.step(0.05, &mut net, parts).unwrap();
            }
            flatten(&net)
        });
        for own in &trained {
            let worst = own.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-5, "{n} ranks, {sharding:?}: the greatest difference is {worst}");
            assert_eq!(own, &trained[0], "the ranks differ");
        }
    }
}

#[test]
fn any_sharding_trains_as_one_optimizer() {
    trains_as_alone(|| AdamConfig::new().init());
}

#[test]
fn the_state_of_a_block_is_that_of_one_optimizer() {
    // Two moments in f32.
    let whole = 2 * 4 * flatten(&Net::new()).len();
    for (n, sharding, blocks) in [(1, Sharding::All, 1), (3, Sharding::All, 1), (4, Sharding::Blocks(2), 2)] {
        let bytes = ranks(n, |group| {
            let (mut net, ddp) = DataParallel::new(group, Net::new()).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), sharding).unwrap();
            assert_eq!(optimizer.state_bytes().unwrap(), 0);
            let parts = optimizer.run(&net, [6], |net, rows| (net.loss(0..rows), rows)).unwrap();
            optimizer.step(0.1, &mut net, parts).unwrap();
            optimizer.state_bytes().unwrap()
        });
        assert_eq!(bytes.iter().sum::<usize>(), blocks * whole, "{bytes:?}");
        assert!(bytes.iter().all(|own| *own <= whole * blocks / n + 4 * 2 * 4), "{bytes:?}");
    }
}

#[test]
fn groups_of_parameters_have_optimizers_of_their_own() {
    trains_as_alone(|| {
        let of_b = ParamGroup::from_predicate("b.");
        AdamConfig::new().init().with_group(of_b, SgdConfig::new().build(), Some(GradientClipping::Value(0.1)))
    });
}

#[test]
fn an_optimizer_clips_by_the_norms_of_whole_gradients() {
    trains_as_alone(|| SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(0.2))).init());
}

#[test]
fn an_optimizer_that_mixes_elements_is_refused() {
    let errors = ranks(2, |group| {
        let (_, ddp) = DataParallel::new(group, Net::new()).unwrap();
        ShardedOptimizer::new(&ddp, MuonConfig::new().init(), Sharding::All).map(drop).unwrap_err().to_string()
    });
    let text = "the optimizer of `a.weight` updates an element by others of its parameter";
    assert!(errors.iter().all(|error| error.contains(text)), "{errors:?}");
}

#[test]
fn rates_that_differ_change_nothing() {
    ranks(2, |group| {
        let (mut net, ddp) = DataParallel::new(group.clone(), Net::new()).unwrap();
        let mut optimizer = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), Sharding::All).unwrap();
        let before = flatten(&net);
        let parts = || optimizer.run(&net, [6], |net, rows| (net.loss(0..rows), rows)).unwrap();
        let (parts, more) = (parts(), parts());
        let error = optimizer.step(0.1 + group.rank() as f64, &mut net, parts).unwrap_err().to_string();
        assert!(error.contains("0.1") && error.contains("1.1"), "{error}");
        assert_eq!(flatten(&net), before);
        optimizer.step(0.1, &mut net, more).unwrap();
        assert_ne!(flatten(&net), before);
    });
}
