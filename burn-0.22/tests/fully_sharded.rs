//! Full sharding on burn 0.22: the same training as on one rank, with two blocks gathered at a time.

#![expect(clippy::single_range_in_vec_init, reason = "a batch is a range of rows")]

use bonfire::train::embedding;
use bonfire::{DeviceMesh, FullyShardedParallel, Group, ShardedBlock};
use bonfire_testing::ranks;
use burn::backend::flex::FlexTensor;
use burn::backend::{AutodiffBackend, Dispatch, DispatchKindConversion, DispatchTensor, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, MuonConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};

const STEPS: usize = 5;
const WIDTH: usize = 6;
const ROWS: usize = 12;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<ShardedBlock<Linear>>,
    norm: LayerNorm,
    head: Linear,
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn values<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

impl Net {
    fn new(device: &Device) -> Net {
        let linear = |outputs, seed| {
            let mut linear = LinearConfig::new(WIDTH, outputs).init(device);
            linear.weight = Param::from_tensor(values([WIDTH, outputs], seed, device) * 0.5);
            linear.bias = Some(Param::from_tensor(values([outputs], seed + 1, device)));
            linear
        };
        Net {
            layers: (0..4).map(|i| ShardedBlock::new(linear(WIDTH, 10 * i + 1))).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: linear(3, 50),
        }
    }

    fn loss(&self, rows: std::ops::Range<usize>, device: &Device) -> Tensor<1> {
        let x = values([ROWS, WIDTH], 9, device).slice([rows, 0..WIDTH]);
        // The first layer is used twice.
        let x = self.layers[0].run(|layer| layer.forward(x).tanh());
        let x = self.layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh()));
        self.head.forward(self.norm.forward(x)).powf_scalar(2.0).mean()
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

fn freeze(mut net: Net, frozen: bool) -> Net {
    net.norm = if frozen { net.norm.freeze() } else { net.norm.unfreeze() };
    net
}

/// Plain burn. A layer is frozen in one step.
fn alone() -> Vec<f32> {
    let (mut net, mut optimizer) = (Net::new(&device()), AdamConfig::new().init());
    for step in 0..STEPS {
        net = freeze(net, step == 1);
        let gradients = GradientsParams::from_grads(net.loss(0..ROWS, &device()).backward(), &net);
        net = optimizer.step(0.01, net, gradients);
    }
    flatten(&net)
}

/// Trains in passes of so many on this rank's rows.
fn train(group: &Group, mesh: DeviceMesh, device: &Device, keep: bool, passes: usize) -> Vec<f32> {
    let (mut net, fsdp) = FullyShardedParallel::new(mesh, Net::new(device)).unwrap();
    let fsdp = if keep { fsdp.keep_gathered() } else { fsdp };
    let mut optimizer = AdamConfig::new().init();
    let (rank, n) = (group.rank(), group.world_size());
    let (start, end) = (rank * ROWS / n, (rank + 1) * ROWS / n);
    let cut = |pass: usize| start + pass * (end - start) / passes;
    for step in 0..STEPS {
        net = freeze(net, step == 1);
        let batches = (0..passes).map(|pass| cut(pass)..cut(pass + 1));
        let pass = |net: &Net, rows: std::ops::Range<usize>| (net.loss(rows.clone(), device), rows.len());
        let parts = fsdp.run(&net, batches, pass).unwrap();
        net = optimizer.step(0.01, net, parts.for_optimizer(&optimizer).unwrap());
        let counts = fsdp.gather_counts();
        if !keep && step > 1 {
            // Two, and once more the block that runs twice. The values were not kept for the backward pass.
            assert!(counts.most <= 3 && counts.backward > 0, "{counts:?}");
        }
    }
    flatten(&fsdp.gather(&net).unwrap())
}

#[test]
fn any_number_of_ranks_and_passes_trains_as_plain_burn_does() {
    let expected = alone();
    let mesh = |group: &Group, hybrid: bool| match hybrid {
        true => DeviceMesh::new(group.clone(), [("replicate", 2), ("shard", 2)]).unwrap(),
        false => group.clone().into(),
    };
    let cases =
        [(1, false, false, 1), (2, false, false, 1), (3, false, false, 2), (2, false, true, 2), (4, true, false, 1)];
    for (n, hybrid, keep, passes) in cases {
        for device in [device(), device().gradient_checkpointing()] {
            let trained = ranks(n, |group| train(&group, mesh(&group, hybrid), &device, keep, passes));
            for own in &trained {
                let worst = own.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 2e-5, "{n} ranks, hybrid {hybrid}, keep {keep}, {passes} passes: {worst}");
                assert_eq!(own, &trained[0], "the ranks differ");
            }
        }
    }
}

#[test]
fn a_rank_without_samples_takes_part() {
    let norms = ranks(3, |group| {
        let (net, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(&device())).unwrap();
        let norm = |batches: Vec<std::ops::Range<usize>>| {
            let pass = |net: &Net, rows: std::ops::Range<usize>| (net.loss(rows.clone(), &device()), rows.len());
            fsdp.run(&net, batches, pass).unwrap().norm().unwrap()
        };
        let (start, idle) = (4 * group.rank(), group.rank() == 1);
        let all = norm(vec![start..start + 4]);
        [all, norm(if idle { vec![] } else { vec![start..start + 4] }), norm(vec![start..start + 4])]
    });
    assert!(norms.iter().all(|own| *own == norms[0]), "{norms:?}");
    assert_eq!(norms[0][0], norms[0][2]);
    assert_ne!(norms[0][0], norms[0][1]);
}

#[test]
fn an_optimizer_that_mixes_elements_is_refused() {
    let errors = ranks(2, |group| {
        let (net, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(&device())).unwrap();
        let parts = fsdp.run(&net, [0..4], |net, rows| (net.loss(rows, &device()), 4)).unwrap();
        parts.for_optimizer(&MuonConfig::new().init()).map(drop).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("updates an element by others of its parameter")), "{errors:?}");
}

#[test]
fn a_part_that_is_used_as_the_whole_is_an_error() {
    let errors = ranks(2, |group| {
        let (net, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(&device())).unwrap();
        let penalty = |part: &Net| part.head.bias.as_ref().unwrap().val().powf_scalar(2.0).mean();
        let pass = |own: &Net, rows| (own.loss(rows, &device()) + penalty(&net), 4);
        fsdp.run(&net, [0..4], pass).map(drop).unwrap_err().to_string()
    });
    let text = "has used its part of `head.bias` as if it were the whole parameter";
    assert!(errors.iter().all(|error| error.contains(text)), "{errors:?}");
}

#[derive(Module, Debug)]
struct Words {
    table: ShardedBlock<Embedding>,
    head: ShardedBlock<Linear>,
}

/// Returns whether nothing else holds the table after its run, and the gradient of this rank's part of it.
fn embed(group: Group, as_burn: bool) -> (bool, TensorData) {
    let device = device();
    let mut table = EmbeddingConfig::new(10, WIDTH).init(&device);
    table.weight = Param::from_tensor(values([10, WIDTH], 3, &device));
    let mut head = LinearConfig::new(WIDTH, 2).with_bias(false).init(&device);
    head.weight = Param::from_tensor(values([WIDTH, 2], 5, &device));
    let id = table.weight.id;
    let words = Words { table: ShardedBlock::new(table), head: ShardedBlock::new(head) };
    let (model, fsdp) = FullyShardedParallel::new(group, words).unwrap();
    let step = fsdp.last_pass(&model, 1).unwrap();
    let mut held: Option<FlexTensor> = None;
    let x = step.model().table.run(|table| {
        let whole = Dispatch::inner(table.weight.val().into_dispatch());
        held =
            <DispatchTensor as DispatchKindConversion<Flex>>::try_into_backend(whole).ok().map(|whole| whole.float());
        let words = Tensor::<2, Int>::from_ints([[1, 7, 3], [1, 0, 9]], &device);
        if as_burn { table.forward(words) } else { embedding(table.weight.val(), words) }
    });
    let loss = step.model().head.run(|head| head.forward(x)).powf_scalar(2.0).mean();
    let is_freed = held.expect("it is on Flex").is_unique();
    let mut gradients = step.finish(&mut loss.backward()).unwrap().for_optimizer(&AdamConfig::new().init()).unwrap();
    (is_freed, gradients.remove::<2>(id).expect("it is trained").into_data())
}

#[test]
fn an_embedding_that_keeps_no_table_has_the_gradients_of_burns() {
    let [own, burn] = [false, true].map(|as_burn| ranks(2, |group| embed(group, as_burn)));
    for ((own_freed, own), (burn_freed, burn)) in own.into_iter().zip(burn) {
        assert!(own_freed && !burn_freed, "{own_freed}, {burn_freed}");
        assert_eq!(own, burn);
    }
}
