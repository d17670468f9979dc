//! Every form of training on burn 0.22, with ranks as threads and as processes, over shared memory and TCP: each trains
//! as plain burn does alone. Not shared: `Device` names the backend, which on burn 0.21 is a parameter of each type.

use std::ops::Range;

use bonfire::train::embedding;
use bonfire::{DataParallel, DeviceMesh, Error, FullyShardedParallel, Group, ShardedBlock, ShardedOptimizer, Sharding};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::ranks;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

const STEPS: usize = 4;
const ROWS: usize = 13;
const LENGTH: usize = 3;
const WORDS: usize = 11;
const WIDTH: usize = 6;
const RATE: f64 = 0.01;

#[derive(Module, Debug)]
struct Net {
    table: ShardedBlock<Embedding>,
    layers: Vec<ShardedBlock<Linear>>,
    norm: LayerNorm,
    head: Linear,
}

/// Gives all parameters other values of another element type, in visiting order.
struct Fill(usize, DType);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let (seed, dtype) = (self.0, self.1);
        param.map(|old| {
            let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f64 / 2003.0 - 0.5;
            let values: Vec<f64> = (0..old.shape().num_elements()).map(next).collect();
            Tensor::from_data(TensorData::new(values, old.dims()), (&old.device(), dtype)).require_grad()
        })
    }
}

/// The elements of all parameters.
struct Flatten(Vec<f64>);

impl ModuleVisitor for Flatten {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }
}

fn flatten(net: &Net) -> Vec<f64> {
    let mut all = Flatten(Vec::new());
    net.visit(&mut all);
    all.0
}

/// Where and in which elements a model is trained.
#[derive(Clone)]
struct Place {
    device: Device,
    dtype: DType,
    tolerance: f64,
}

impl Place {
    fn net(&self, seed: usize) -> Net {
        let linear = |outputs| LinearConfig::new(WIDTH, outputs).init(&self.device);
        let net = Net {
            table: ShardedBlock::new(EmbeddingConfig::new(WORDS, WIDTH).init(&self.device)),
            layers: (0..3).map(|_| ShardedBlock::new(linear(WIDTH))).collect(),
            norm: LayerNormConfig::new(WIDTH).init(&self.device),
            head: linear(2),
        };
        net.map(&mut Fill(seed, self.dtype))
    }

    fn loss(&self, net: &Net, rows: Range<usize>) -> Tensor<1> {
        let words = rows.clone().flat_map(|row| (0..LENGTH).map(move |at| ((7 * row + 5 * at) % WORDS) as i32));
        let words = TensorData::new(words.collect::<Vec<_>>(), [rows.len(), LENGTH]);
        let words = Tensor::<2, Int>::from_data(words, &self.device);
        let x = net.table.run(|table| embedding(table.weight.val(), words));
        // burn's `Linear` may keep its weights for the backward pass, by the shape of an input of three dimensions. Not
        // where it has two.
        let (last, layers) = net.layers.split_last().expect("there are layers");
        let x = x.reshape([rows.len() * LENGTH, WIDTH]);
        let x = layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh()));
        let x = x.reshape([rows.len(), LENGTH, WIDTH]);
        let x = last.run(|layer| layer.forward(x).tanh());
        net.head.forward(net.norm.forward(x)).powf_scalar(2.0).mean()
    }

    /// Plain burn.
    fn alone(&self) -> Vec<f64> {
        let (mut net, mut adam) = (self.net(0), AdamConfig::new().init());
        for _ in 0..STEPS {
            let gradients = GradientsParams::from_grads(self.loss(&net, 0..ROWS).backward(), &net);
            net = adam.step(RATE, net, gradients);
        }
        flatten(&net)
    }

    /// Trains on this rank's rows in every form. Returns the parameters of each.
    fn trained(&self, group: &Group) -> Result<Vec<(Form, Vec<f64>)>, Error> {
        let mut forms = vec![Form::Run, Form::Sync, Form::Optimizer, Form::Full];
        forms.extend((group.world_size() == 4).then_some(Form::Hybrid));
        forms.into_iter().map(|form| Ok((form, self.train(group, form)?))).collect()
    }

    fn train(&self, group: &Group, form: Form) -> Result<Vec<f64>, Error> {
        let (rank, n) = (group.rank(), group.world_size());
        let rows = rank * ROWS / n..(rank + 1) * ROWS / n;
        let pass = |net: &Net, rows: Range<usize>| (self.loss(net, rows.clone()), rows.len());
        // Others begin with other weights.
        let (net, mut adam) = (self.net(10 * rank), AdamConfig::new().init());
        if matches!(form, Form::Full | Form::Hybrid) {
            let mesh = match form {
                Form::Hybrid => DeviceMesh::new(group.clone(), [("replicate", 2), ("shard", 2)])?,
                _ => group.clone().into(),
            };
            let (mut net, fsdp) = FullyShardedParallel::new(mesh, net)?;
            for _ in 0..STEPS {
                let parts = fsdp.run(&net, [rows.clone()], pass)?;
                net = adam.step(RATE, net, parts.for_optimizer(&adam)?);
            }
            return Ok(flatten(&fsdp.gather(&net)?));
        }
        let (mut net, ddp) = DataParallel::new(group.clone(), net)?;
        if form == Form::Optimizer {
            let mut adam = ShardedOptimizer::new(&ddp, adam, Sharding::All)?;
            for _ in 0..STEPS {
                let parts = adam.run(&net, [rows.clone()], pass)?;
                adam.step(RATE, &mut net, parts)?;
            }
            return Ok(flatten(&net));
        }
        for _ in 0..STEPS {
            let gradients = if form == Form::Run {
                ddp.run(&net, [rows.clone()], pass)?
            } else {
                let own = GradientsParams::from_grads(self.loss(&net, rows.clone()).backward(), &net);
                ddp.sync(&net, own, rows.len())?
            };
            net = adam.step(RATE, net, gradients);
        }
        Ok(flatten(&net))
    }

    /// Checks 2 and 3 ranks, and 4 for hybrid sharding. `test` is the test that calls this, which is also what a rank
    /// runs that is a process.
    fn check(&self, test: &str) {
        if is_child() {
            let group = Group::from_env().expect("the ranks find each other");
            for (form, values) in self.trained(&group).expect("no failure") {
                let values: Vec<_> = values.iter().map(f64::to_string).collect();
                send_line(format!("{form:?} {}", values.join(" ")));
            }
            return send_line("end");
        }
        let expected = self.alone();
        for n in [2, 3, 4] {
            let trained = ranks(n, |group| self.trained(&group).expect("no failure"));
            for (rank, forms) in trained.iter().enumerate() {
                for (form, values) in forms {
                    self.compare(values, &expected, &format!("{form:?}, rank {rank} of {n} threads"));
                }
            }
            for transport in ["shm", "tcp"] {
                for (rank, process) in Process::start_ranks(test, n, transport, "60").iter_mut().enumerate() {
                    let mut forms = 0;
                    loop {
                        let line = process.read_line();
                        let Some((form, values)) = line.split_once(' ') else { break };
                        let values: Vec<f64> = values.split(' ').map(|value| value.parse().unwrap()).collect();
                        self.compare(&values, &expected, &format!("{form}, rank {rank} of {n} processes, {transport}"));
                        forms += 1;
                    }
                    assert_eq!(forms, if n == 4 { 5 } else { 4 });
                    assert!(process.end().success());
                }
            }
        }
    }

    fn compare(&self, own: &[f64], expected: &[f64], what: &str) {
        assert_eq!(own.len(), expected.len(), "{what}");
        let worst = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < self.tolerance, "{what}: the greatest difference is {worst}");
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Run,
    Sync,
    Optimizer,
    Full,
    Hybrid,
}

#[test]
fn forms_in_f64() {
    Place { device: Device::flex().autodiff(), dtype: DType::F64, tolerance: 1e-12 }.check("forms_in_f64");
}

#[test]
fn forms_in_f32() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    Place { device, dtype: DType::F32, tolerance: 1e-5 }.check("forms_in_f32");
}

#[cfg(feature = "wgpu")]
mod wgpu {
    use bonfire_testing::logged;
    use burn::tensor::DeviceKind;

    use super::*;

    fn device() -> Device {
        Device::wgpu(DeviceKind::DefaultDevice).autodiff()
    }

    #[test]
    #[ignore = "needs a Vulkan device"]
    fn forms() {
        Place { device: device(), dtype: DType::F32, tolerance: 1e-5 }.check("wgpu::forms");
    }

    /// In a process of its own, because it is said once per process.
    #[test]
    #[ignore = "needs a Vulkan device"]
    fn that_gradients_go_through_host_memory_is_said_once() {
        if !is_child() {
            let test = "wgpu::that_gradients_go_through_host_memory_is_said_once";
            return assert!(Process::start(test, &[]).end().success());
        }
        logged::record_from(log::LevelFilter::Info);
        let said = || logged::lines().iter().filter(|line| line.contains("through host memory")).count();
        let make = |device: &Device| {
            let group = Group::threads(1).unwrap().remove(0);
            let net = || Place { device: device.clone(), dtype: DType::F32, tolerance: 0.0 }.net(0);
            drop(DataParallel::new(group.clone(), net()).unwrap());
            drop(FullyShardedParallel::new(group, net()).unwrap());
        };
        make(&Device::flex().autodiff());
        assert_eq!(said(), 0);
        make(&device());
        make(&device());
        assert_eq!(said(), 1, "{:?}", logged::lines());
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    /// Within what a GPU loses that rounds the factors of a matrix product to 11 bits (TF32).
    #[test]
    #[ignore = "needs a CUDA GPU"]
    fn forms() {
        let device = Device::cuda(0).autodiff();
        Place { device, dtype: DType::F32, tolerance: 1e-3 }.check("cuda::forms");
    }
}
