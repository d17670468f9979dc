//! Long trainings of random models on ranks that are threads, with gradient checkpointing and without: memory and the
//! nodes that burn-autodiff makes per step stay as they were at the start, and the weights have the bits of `sync`. Not
//! shared: on burn 0.21 checkpointing is a parameter of the type `Autodiff`, and not a setting of `Device`.

#[path = "common/burn_version.rs"]
mod burn_version;

use bonfire::{DataParallel, FullyShardedParallel, Group, ShardedBlock};
use bonfire_testing::allocation::{self, Counting};
use bonfire_testing::ranks;
use burn::backend::autodiff::NodeId;
use burn::module::{Module, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor, TensorData};

use self::burn_version::floats;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WIDTH: usize = 6;
const ROWS: usize = 8;
const MODELS: usize = 5;
/// How much more may be allocated after the last tenth of the steps than after the first: tables that have grown.
const SLACK: usize = 64 << 10;

/// What a random model does with the output of a layer, and of the one before it.
#[derive(Clone, Copy, Debug)]
enum Join {
    Replace,
    Add,
    Multiply,
    Concatenate,
}

/// The layers of a model, by the number of the block that each runs: some run twice.
type Plan = Vec<(usize, Join)>;

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<ShardedBlock<Linear>>,
    norm: LayerNorm,
}

/// Numbers in [-0.5, 0.5) that depend on the seed.
fn values(shape: [usize; 2], seed: usize, device: &Device) -> Tensor<2> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 2003.0 - 0.5;
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn plan(seed: usize) -> Plan {
    let blocks = 1 + seed % 4;
    let join = |i: usize| [Join::Replace, Join::Add, Join::Multiply, Join::Concatenate][(seed / 2 + i * i) % 4];
    let again = seed.is_multiple_of(3).then_some(0);
    (0..blocks).chain(again).enumerate().map(|(i, block)| (block, join(i))).collect()
}

fn net(seed: usize, device: &Device) -> Net {
    let block = |i: usize| {
        let mut linear = LinearConfig::new(WIDTH, WIDTH).init(device);
        linear.weight = Param::from_tensor(values([WIDTH, WIDTH], seed + i, device));
        linear.bias = Some(Param::from_tensor(Tensor::zeros([WIDTH], device)));
        ShardedBlock::new(linear)
    };
    Net { blocks: (0..1 + seed % 4).map(block).collect(), norm: LayerNormConfig::new(WIDTH).init(device) }
}

impl Net {
    fn loss(&self, plan: &Plan, step: usize, rank: usize, device: &Device) -> Tensor<1> {
        let mut x = values([ROWS, WIDTH], 2 * step + rank, device);
        for (block, join) in plan {
            let y = self.blocks[*block].run(|linear| gelu(linear.forward(x.clone())));
            x = match join {
                Join::Replace => y,
                Join::Add => x + y,
                Join::Multiply => x * y,
                Join::Concatenate => Tensor::cat(vec![x, y], 0).narrow(0, ROWS / 2, ROWS),
            };
        }
        self.norm.forward(x).powf_scalar(2.0).mean()
    }
}

/// The values of all parameters, which are equal if their bits are.
fn bits(net: &Net) -> Vec<TensorData> {
    floats(net).into_iter().map(|parameter| parameter.data).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Sync,
    Run,
    Full,
}

/// What the process has used: bytes that are allocated, and nodes that were made.
#[derive(Clone, Copy)]
struct Used(usize, u64);

/// Trains a model. Returns its bits, and on rank 0 what was used after the first and before the last tenth of the
/// steps, and at the end.
fn train(group: Group, form: Form, seed: usize, steps: usize, device: &Device) -> (Vec<TensorData>, [Used; 4]) {
    let (rank, plan) = (group.rank(), plan(seed));
    let pass = |net: &Net, step: usize| (net.loss(&plan, step, rank, device), ROWS);
    let mut sgd = SgdConfig::new().init();
    let mut used = [Used(0, 0); 4];
    let mut note = |step: usize| {
        let marks = [0, steps / 10, steps - steps / 10, steps];
        if let Some(mark) = marks.iter().position(|mark| *mark == step) {
            // No rank allocates between these.
            group.barrier().unwrap();
            used[mark] = Used(allocation::in_use(), NodeId::new().value);
            group.barrier().unwrap();
        }
    };
    let net = net(seed, device);
    let net = if form == Form::Full {
        let (mut net, fsdp) = FullyShardedParallel::new(group.clone(), net).unwrap();
        for step in 0..steps {
            note(step);
            let parts = fsdp.run(&net, [step], pass).unwrap();
            net = sgd.step(0.01, net, parts.for_optimizer(&sgd).unwrap());
        }
        note(steps);
        fsdp.gather(&net).unwrap()
    } else {
        let (mut net, ddp) = DataParallel::new(group.clone(), net).unwrap();
        for step in 0..steps {
            note(step);
            let gradients = match form {
                Form::Run => ddp.run(&net, [step], pass).unwrap(),
                _ => {
                    let own = GradientsParams::from_grads(pass(&net, step).0.backward(), &net);
                    ddp.sync(&net, own, ROWS).unwrap()
                }
            };
            net = sgd.step(0.01, net, gradients);
        }
        note(steps);
        net
    };
    (bits(&net), used)
}

fn stays(steps: usize) {
    for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
        for seed in 0..MODELS {
            let run = |form: Form| {
                let mut all = ranks(2, |group| train(group, form, seed, steps, &device));
                assert!(all[0].0 == all[1].0, "{form:?} of model {seed}: the ranks differ");
                all.swap_remove(0)
            };
            let expected = run(Form::Sync).0;
            for form in [Form::Run, Form::Full] {
                let (bits, [begun, early, late, ended]) = run(form);
                let what = format!("{form:?} of model {seed}, {steps} steps, {device:?}");
                assert!(bits == expected, "{what}: other weights than with sync");
                assert!(late.0 <= early.0 + SLACK, "{what}: {} bytes, then {}", early.0, late.0);
                let nodes = [early.1 - begun.1, ended.1 - late.1];
                assert!(nodes[1] <= nodes[0] + nodes[0] / 10, "{what}: nodes in a tenth of the steps: {nodes:?}");
            }
        }
    }
}

#[test]
fn memory_and_nodes_stay_as_they_were() {
    stays(100);
}

#[test]
#[ignore = "takes some minutes: .ci/full runs it"]
fn memory_and_nodes_stay_as_they_were_over_2000_steps() {
    stays(2000);
}
