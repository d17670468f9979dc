//! Data-parallel training on burn 0.22: any number of ranks trains as plain burn does alone.

use bonfire::{DataParallel, Error, Group};
use bonfire_testing::ranks;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Tensor, TensorData};

const WIDTH: usize = 8;
const ROWS: usize = 12;
const STEPS: usize = 6;

#[derive(Module, Debug)]
struct Net {
    a: Linear,
    b: Linear,
    /// Used twice in each pass.
    twice: Linear,
    head: Linear,
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn values<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), &device())
}

/// Gives all parameters other values, in visiting order.
struct Fill(usize);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(|tensor| (values::<D>(tensor.dims(), seed) * 0.4).detach().require_grad())
    }
}

impl Net {
    fn new(seed: usize) -> Net {
        let linear = |outputs| LinearConfig::new(WIDTH, outputs).init(&device());
        Net { a: linear(WIDTH), b: linear(WIDTH), twice: linear(WIDTH), head: linear(2) }.map(&mut Fill(seed))
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = Tensor::cat(vec![self.a.forward(x.clone()).tanh(), self.b.forward(x)], 0);
        self.head.forward(self.twice.forward(self.twice.forward(x).tanh()))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.forward(x).powf_scalar(2.0).mean()
    }
}

/// Rows of the global batch of a step.
fn batch(step: usize, rows: std::ops::Range<usize>) -> Tensor<2> {
    values([ROWS, WIDTH], 100 + step).slice([rows, 0..WIDTH])
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

/// Plain burn, with a penalty on the weights of `head`, and `b` frozen in some steps.
fn alone(is_frozen: fn(usize) -> bool) -> Vec<f32> {
    let (mut net, mut optimizer) = (Net::new(0), AdamConfig::new().init());
    for step in 0..STEPS {
        net = freeze(net, is_frozen(step));
        let loss = net.loss(batch(step, 0..ROWS)) + penalty(&net);
        net = optimizer.step(0.01, net.clone(), GradientsParams::from_grads(loss.backward(), &net));
    }
    flatten(&net)
}

fn freeze(mut net: Net, frozen: bool) -> Net {
    net.b = if frozen { net.b.freeze() } else { net.b.unfreeze() };
    net
}

fn penalty(net: &Net) -> Tensor<1> {
    net.head.weight.val().powf_scalar(2.0).mean()
}

fn assert_near(own: &[f32], expected: &[f32], what: &str) {
    assert_eq!(own.len(), expected.len());
    let worst = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-5, "{what}: the greatest difference is {worst}");
}

/// This rank's rows, in passes of so many.
fn shard(group: &Group, step: usize, passes: usize) -> Vec<Tensor<2>> {
    let (rank, n) = (group.rank(), group.world_size());
    let (start, end) = (rank * ROWS / n, (rank + 1) * ROWS / n);
    let cut = |pass: usize| start + pass * (end - start) / passes;
    (0..passes).map(|pass| batch(step, cut(pass)..cut(pass + 1))).collect()
}

#[test]
fn any_number_of_ranks_and_passes_trains_as_plain_burn_does() {
    let is_frozen = |step| step == 1 || step == 2;
    let expected = alone(is_frozen);
    for (n, passes) in [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 4), (4, 1)] {
        let trained = ranks(n, |group| {
            // Others begin with other weights.
            let (mut net, ddp) = DataParallel::new(group.clone(), Net::new(10 * group.rank())).unwrap();
            let mut optimizer = AdamConfig::new().init();
            for step in 0..STEPS {
                net = freeze(net, is_frozen(step));
                let gradients = ddp.run(&net, shard(&group, step, passes), |own, x| {
                    let rows = x.dims()[0];
                    // The penalty is on the model in training.
                    (own.loss(x) + penalty(&net), rows)
                });
                net = optimizer.step(0.01, net, gradients.unwrap());
            }
            flatten(&net)
        });
        for own in &trained {
            assert_near(own, &expected, &format!("{n} ranks, {passes} passes"));
            assert_eq!(own, &trained[0], "the ranks differ");
        }
    }
}

#[test]
fn passes_and_sync_give_the_same_bits() {
    let gradients = |synced: bool| {
        ranks(3, move |group| {
            let (net, mut ddp) = DataParallel::new(group.clone(), Net::new(0)).unwrap();
            ddp.set_bucket_bytes(256);
            let mut bits = Vec::new();
            for step in 0..3 {
                let x = shard(&group, step, 1).remove(0);
                let rows = x.dims()[0];
                let mut mean = match synced {
                    false => ddp.run(&net, [x], |net, x| (net.loss(x), rows)).unwrap(),
                    true => {
                        let own = GradientsParams::from_grads(net.loss(x).backward(), &net);
                        ddp.sync(&net, own, rows).unwrap()
                    }
                };
                for id in [net.a.weight.id, net.twice.weight.id, net.head.weight.id] {
                    let gradient = mean.remove::<2>(id).expect("it is trained");
                    bits.extend(gradient.into_data().iter::<f32>().map(f32::to_bits));
                }
            }
            bits
        })
    };
    assert_eq!(gradients(false), gradients(true));
}

#[test]
fn one_backward_pass_ends_the_steps_of_two_models() {
    let norms = ranks(2, |group| {
        let (encoder, a) = DataParallel::new(group.clone(), Net::new(0).a).unwrap();
        let (decoder, b) = DataParallel::new(group.clone(), Net::new(5).b).unwrap();
        let x = batch(0, 6 * group.rank()..6 * (group.rank() + 1));
        let (p, q) = (a.last_pass(&encoder, 6).unwrap(), b.last_pass(&decoder, 6).unwrap());
        let loss = q.model().forward(p.model().forward(x).tanh()).powf_scalar(2.0).mean();
        let mut gradients = loss.backward();
        let mut of_a = p.finish(&mut gradients).unwrap();
        let mut of_b = q.finish(&mut gradients).unwrap();
        let own = [of_a.remove::<2>(encoder.weight.id), of_b.remove::<2>(decoder.weight.id)];
        own.map(|gradient| gradient.expect("it is trained").into_data().iter::<f32>().map(|x| x * x).sum::<f32>())
    });
    let (encoder, decoder) = (Net::new(0).a, Net::new(5).b);
    let loss = decoder.forward(encoder.forward(batch(0, 0..ROWS)).tanh()).powf_scalar(2.0).mean();
    let gradients = loss.backward();
    let expected = [&encoder, &decoder].map(|linear| {
        let gradient = linear.weight.val().grad(&gradients).expect("it is trained");
        gradient.into_data().iter::<f32>().map(|x| x * x).sum::<f32>()
    });
    for own in norms {
        assert_near(&own, &expected, "squared norms");
    }
}

#[test]
fn ranks_with_fewer_batches_join_the_others() {
    let steps = ranks(3, |group| {
        let (mut net, ddp) = DataParallel::new(group.clone(), Net::new(0)).unwrap();
        let (mut optimizer, mut steps) = (AdamConfig::new().init(), 0);
        for step in 0..group.rank() + 1 {
            let gradients = ddp.run(&net, [batch(step, 0..4)], |net, x| (net.loss(x), 4)).unwrap();
            net = optimizer.step(0.01, net, gradients);
            steps += 1;
        }
        while let Some(gradients) = ddp.join(&net).unwrap() {
            net = optimizer.step(0.01, net, gradients);
            steps += 1;
        }
        (steps, flatten(&net))
    });
    assert!(steps.iter().all(|own| *own == steps[0]));
    assert_eq!(steps[0].0, 3);
}

#[test]
fn what_cannot_be_trained_is_the_same_error_on_all_ranks() {
    let errors = |body: fn(Group) -> Error| -> String {
        let errors = ranks(2, |group| body(group).to_string());
        assert_eq!(errors[0], errors[1]);
        errors[0].clone()
    };
    let text = errors(|group| {
        let (net, ddp) = DataParallel::new(group.clone(), Net::new(0)).unwrap();
        let net = freeze(net, group.rank() == 1);
        ddp.run(&net, [batch(0, 0..4)], |net, x| (net.loss(x), 4)).unwrap_err()
    });
    assert!(
        text.contains("`b.weight`") && text.contains("freeze and unfreeze parameters on all ranks alike"),
        "{text}"
    );
    let text = errors(|group| {
        let (net, ddp) = DataParallel::new(group.clone(), Net::new(0)).unwrap();
        let fails = |net: &Net, x: Tensor<2>| match group.rank() {
            1 => Err("on purpose".into()),
            _ => Ok((net.loss(x), 4)),
        };
        ddp.try_run(&net, [batch(0, 0..4)], fails).unwrap_err()
    });
    assert!(text.contains("on purpose"), "{text}");
    let text = errors(|group| {
        let linear = LinearConfig::new(2, 2).init(&Device::flex());
        DataParallel::new(group, linear).map(drop).unwrap_err()
    });
    assert!(text.contains("device without autodiff"), "{text}");
    let text = errors(|group| {
        let linear = LinearConfig::new(2, 2 + group.rank()).init(&device());
        DataParallel::new(group, linear).map(drop).unwrap_err()
    });
    assert!(text.contains("rank 1 has trained float f32 [2, 3]") || text.contains("`weight`"), "{text}");
    let text = errors(|group| {
        let linear = LinearConfig::new(2, 2).init(&device());
        DataParallel::new(group, vec![linear.clone(), linear]).map(drop).unwrap_err()
    });
    assert!(text.contains("are one parameter"), "{text}");
    let text = errors(|group| {
        let (net, ddp) = DataParallel::new(group, Net::new(0)).unwrap();
        ddp.run(&net, Vec::<()>::new(), |net, ()| (net.loss(batch(0, 0..4)), 4)).unwrap_err()
    });
    assert!(text.contains("no rank has any samples"), "{text}");
}

/// A backward pass of burn-autodiff that ends may free steps which another thread is building, if their leaves were in
/// an earlier pass ([burn#5573](https://github.com/tracel-ai/burn/issues/5573)).
#[test]
fn passes_of_threads_lose_no_gradients() {
    let norm = |net: &Net, gradients: &mut GradientsParams| {
        let linears = [&net.a, &net.b, &net.twice, &net.head];
        let squares = linears.map(|linear| {
            let gradient = gradients.remove::<2>(linear.weight.id).expect("it is trained");
            gradient.into_data().iter::<f32>().map(|x| x * x).sum::<f32>()
        });
        squares.iter().sum::<f32>()
    };
    let net = Net::new(0);
    let expected = norm(&net, &mut GradientsParams::from_grads(net.loss(batch(0, 0..ROWS)).backward(), &net));
    let wrong = ranks(3, |group| {
        let (net, ddp) = DataParallel::new(group.clone(), Net::new(0)).unwrap();
        let is_wrong = |_: &usize| {
            let gradients = ddp.run(&net, shard(&group, 0, 4), |net, x| (net.loss(x.clone()), x.dims()[0]));
            (norm(&net, &mut gradients.unwrap()) - expected).abs() > 1e-4 * expected
        };
        (0..200).filter(is_wrong).count()
    });
    assert_eq!(wrong, [0; 3]);
}

#[test]
fn verify_finds_another_model_and_another_optimizer() {
    let texts = ranks(3, |group| {
        let (mut net, ddp) = DataParallel::new(group.clone(), Net::new(0)).unwrap();
        let mut optimizer = AdamConfig::new().init();
        for step in 0..2 {
            let gradients = ddp.run(&net, shard(&group, step, 1), |net, x| (net.loss(x), 4)).unwrap();
            net = optimizer.step(0.01, net, gradients);
        }
        ddp.verify(&net, &optimizer).unwrap();
        let odd = group.rank() == 1;
        let other = if odd { Net::new(0) } else { net.clone() };
        let of_model = ddp.verify(&other, &optimizer).unwrap_err().to_string();
        let other = if odd { AdamConfig::new().init() } else { optimizer.clone() };
        let of_optimizer = ddp.verify(&net, &other).unwrap_err().to_string();
        ddp.verify(&net, &optimizer).unwrap();
        (of_model, of_optimizer)
    });
    assert!(texts.iter().all(|text| *text == texts[0]));
    assert!(texts[0].1.contains("the optimizer's state for `a.weight` of rank 1 differs"), "{}", texts[0].1);
    assert!(!texts[0].0.contains("optimizer's state for"), "{}", texts[0].0);
}

#[test]
fn states_that_differ_are_averaged() {
    let states = ranks(3, |group| {
        let norm = BatchNormConfig::new(WIDTH).init(&device());
        let (norm, ddp) = DataParallel::new(group.clone(), norm).unwrap();
        norm.forward(values([4, WIDTH], group.rank()));
        let own: Vec<f32> = norm.valid().running_mean.value().into_data().iter::<f32>().collect();
        let norm = ddp.average_states(norm).unwrap();
        let gamma = norm.gamma.val();
        assert!(gamma.is_require_grad() && gamma.into_data().iter::<f32>().all(|x| x == 1.0));
        (own, norm.valid().running_mean.value().into_data().iter::<f32>().collect::<Vec<_>>())
    });
    let mean: Vec<f32> =
        (0..WIDTH).map(|i| states.iter().map(|(own, _)| own[i]).sum::<f32>() / states.len() as f32).collect();
    for (_, averaged) in states {
        assert_near(&averaged, &mean, "the mean");
    }
}

#[test]
fn a_model_keeps_the_checkpointing_of_its_device() {
    let norms = |device: Device| {
        ranks(2, move |group| {
            let net = LinearConfig::new(WIDTH, WIDTH).init(&device);
            let (net, ddp) = DataParallel::new(group.clone(), net).unwrap();
            assert_eq!(net.weight.val().gradient_checkpointing_strategy(), device.gradient_checkpointing_strategy());
            let x = Tensor::<2>::from_data(values([4, WIDTH], group.rank()).into_data(), &device);
            let loss = |net: &Linear, x| (net.forward(net.forward(x).tanh()).powf_scalar(2.0).mean(), 4);
            let gradients = ddp.run(&net, [x], loss).unwrap();
            AdamConfig::new().init().step(0.1, net, gradients).weight.val().is_require_grad()
        })
    };
    assert_eq!(norms(device()), [true; 2]);
    assert_eq!(norms(device().gradient_checkpointing()), [true; 2]);
}
