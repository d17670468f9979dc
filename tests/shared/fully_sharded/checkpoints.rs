//! Checkpoints of fully sharded trainings: any form of training, on any number of ranks, loads what another has saved.

mod killed;
mod stopped;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::ops::Range;
use std::path::Path;

use bonfire::{Checkpoints, DeviceMesh, Error, Group, ShardedBlock, Sharding};
use bonfire_testing::ranks;
use burn::module::{Param, RunningState};
use burn::nn::{LinearConfig, LinearLayout};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, TensorData};

use super::models::{Form, Language, initial, values};
use super::{close, samples};
use crate::burn_version::*;
use crate::checkpoint_version::*;

models! {
    /// Rows that no number of ranks divides, a mapped weight, a frozen one, and a running state.
    pub struct Net {
        language: Language,
        mapped: ShardedBlock<Linear>,
        frozen: Param<Tensor<2>>,
        seen: RunningState<Tensor<1>>,
    }
}

impl Net {
    pub fn new(outputs: usize, dtype: DType) -> Self {
        let device = device();
        let mut mapped = LinearConfig::new(3, outputs).with_layout(LinearLayout::Col).init(&device);
        // What the mapping has made of the initial weight is no leaf.
        let weight = Tensor::ones([3, outputs], &device).require_grad();
        mapped.weight = mapped.weight.map(|_| weight);
        let model = Net {
            language: Language::new(dtype),
            mapped: ShardedBlock::new(mapped),
            frozen: Param::from_tensor(values([5, 3], 4, dtype)).set_require_grad(false),
            seen: RunningState::new(Tensor::zeros([3], &device)),
        };
        initial(model, dtype)
    }

    fn loss(&self, samples: Range<usize>) -> Tensor<1> {
        let rows = samples.clone().map(|i| values([1, 5], i, self.frozen.val().dtype())).collect();
        let x = Tensor::cat(rows, 0).matmul(self.frozen.val());
        let x = self.mapped.run(|linear| linear.forward(x));
        self.language.loss(samples) + x.powf_scalar(2.0).mean()
    }
}

/// What trains a model.
enum Parallel<O: Kind> {
    Replicas(DataParallel, Option<Box<ShardedOf<O, Net>>>),
    Parts(FullyShardedParallel),
}

/// A training, and which samples a rank has in a step.
pub struct Run<O: Kind> {
    state: TrainingOf<O, Net, u64>,
    parallel: Parallel<O>,
    samples: fn(&Group, usize) -> (Range<usize>, usize),
    /// Called before the forward pass of a fully sharded step with 0, and before its backward pass with 1.
    within: Box<dyn Fn(usize)>,
}

/// One rank has all samples, so that the mean is its gradient, bit for bit, on any number of ranks.
fn of_one_rank(group: &Group, step: usize) -> (Range<usize>, usize) {
    match step % group.world_size() == group.rank() {
        true => (samples(0, 1, step), 12),
        false => (0..2, 0),
    }
}

/// Each rank has a share of the samples.
fn of_all_ranks(group: &Group, step: usize) -> (Range<usize>, usize) {
    (samples(group.rank(), group.world_size(), step), 1)
}

impl<O: Kind> Run<O> {
    pub fn new(group: Group, form: Form, model: Net, optimizer: &dyn Fn() -> OptimizerOf<O, Net>) -> Self {
        let (model, parallel) = match form {
            Form::Replicas | Form::Optimizer => {
                let (model, ddp) = DataParallel::new(group, model).unwrap();
                let sharded = ShardedOptimizer::new(&ddp, optimizer(), Sharding::All).unwrap();
                (model, Parallel::Replicas(ddp, (form == Form::Optimizer).then_some(Box::new(sharded))))
            }
            Form::Hybrid(ranks) => {
                let replicas = group.world_size() / ranks;
                let mesh = DeviceMesh::new(group, [("replicate", replicas), ("shard", ranks)]).unwrap();
                let (model, fsdp) = FullyShardedParallel::new(mesh, model).unwrap();
                (model, Parallel::Parts(fsdp))
            }
            _ => {
                let (model, fsdp) = FullyShardedParallel::new(group, model).unwrap();
                (model, Parallel::Parts(if form == Form::Gradients { fsdp.keep_gathered() } else { fsdp }))
            }
        };
        Run {
            state: TrainingOf::<O, Net, u64>::new(model, optimizer(), 0.01, 7),
            parallel,
            samples: of_one_rank,
            within: Box::new(|_| ()),
        }
    }

    fn group(&self) -> &Group {
        match &self.parallel {
            Parallel::Replicas(ddp, _) => ddp.group(),
            Parallel::Parts(fsdp) => fsdp.group(),
        }
    }

    fn should_stop(&self) -> bool {
        match &self.parallel {
            Parallel::Replicas(ddp, _) => ddp.should_stop(),
            Parallel::Parts(fsdp) => fsdp.should_stop(),
        }
    }

    /// Returns the mean loss over all ranks.
    fn step(&mut self) -> f64 {
        self.try_step().unwrap()
    }

    fn try_step(&mut self) -> Result<f64, Error> {
        let step = self.state.samples;
        let (chosen, count) = (self.samples)(self.group(), step);
        let number = |loss: &Tensor<1>| loss.clone().into_data().iter::<f64>().next().unwrap();
        let Run { state, parallel, .. } = self;
        let loss = match parallel {
            Parallel::Replicas(ddp, None) => {
                let loss = state.model.loss(chosen);
                let grads = GradientsParams::from_grads(loss.backward(), &state.model);
                state.step(ddp.sync(&state.model, grads, count)?, 1);
                ddp.mean(&[number(&loss)], count)?
            }
            Parallel::Replicas(ddp, Some(optimizer)) => {
                let loss = state.model.loss(chosen);
                let grads = GradientsParams::from_grads(loss.backward(), &state.model);
                let parts = optimizer.sync(&state.model, grads, count)?;
                optimizer.step(0.01, &mut state.model, parts)?;
                state.samples += 1;
                ddp.mean(&[number(&loss)], count)?
            }
            Parallel::Parts(fsdp) => {
                let running = fsdp.last_pass(&state.model, count)?;
                (self.within)(0);
                let loss = running.model().loss(chosen);
                let number = number(&loss);
                (self.within)(1);
                let parts = running.finish(&mut loss.backward())?;
                state.step(parts.for_optimizer(&state.optimizer)?, 1);
                fsdp.mean(&[number], count)?
            }
        };
        state.model.seen.update(Tensor::full([3], step as f64, (&device(), state.model.seen.value().dtype())));
        state.user += 3;
        if step == 1 {
            state.average = Some(state.model.valid());
        }
        Ok(loss[0])
    }

    fn save(&self, folder: &Path) -> Result<(), Error> {
        let mut checkpoints = Checkpoints::new(self.group(), folder).unwrap();
        match &self.parallel {
            Parallel::Replicas(_, None) => checkpoints.save(&self.state),
            Parallel::Replicas(_, Some(optimizer)) => checkpoints.save((&self.state, &**optimizer)),
            Parallel::Parts(fsdp) => {
                checkpoints.save_in_background((&self.state, fsdp)).and_then(|()| checkpoints.wait())
            }
        }
    }

    pub fn load(&mut self, folder: &Path) -> Result<bool, Error> {
        let mut checkpoints = Checkpoints::new(self.group(), folder).unwrap();
        match &mut self.parallel {
            Parallel::Replicas(_, None) => checkpoints.load(&mut self.state),
            Parallel::Replicas(_, Some(optimizer)) => checkpoints.load((&mut self.state, &mut **optimizer)),
            Parallel::Parts(fsdp) => checkpoints.load((&mut self.state, &*fsdp)),
        }
    }

    /// The values of this rank's model, padding included, and of the whole one.
    fn values(&mut self) -> [Vec<TensorData>; 2] {
        let of = |model: &Net| all_values(&model.valid()).into_iter().map(|(_, data)| data).collect::<Vec<_>>();
        let own = of(&self.state.model);
        let whole = match &mut self.parallel {
            Parallel::Replicas(..) => own.clone(),
            Parallel::Parts(fsdp) => of(&fsdp.gather(&self.state.model).unwrap()),
        };
        [own, whole]
    }
}

pub fn adam() -> OptimizerOf<Adam, Net> {
    AdamConfig::new().with_amsgrad(true).init()
}

fn sgd() -> OptimizerOf<Sgd, Net> {
    SgdConfig::new().init()
}

/// A tensor of a set: its shape and its bytes.
type Saved = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

/// Puts the tensors of the only set in a folder together. Every element is in one file.
fn contents(folder: &Path) -> Saved {
    let mut saved = Saved::new();
    let mut counts = BTreeMap::<String, usize>::new();
    for rank in 0.. {
        let Ok(bytes) = fs::read(state_file(folder, rank)) else { break };
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let ranges = &metadata.metadata().as_ref().unwrap()["ranges"];
        let ranges: BTreeMap<String, serde_json::Value> = serde_json::from_str(ranges).unwrap();
        for (name, range) in ranges {
            let tensor = tensors.tensor(&name).unwrap();
            let shape: Vec<usize> = serde_json::from_value(range["shape"].clone()).unwrap();
            let (len, width) = (shape.iter().product::<usize>(), tensor.dtype().bitsize() / 8);
            let start = range["start"].as_u64().unwrap() as usize * width;
            *counts.entry(name.clone()).or_default() += tensor.data().len();
            let (own, whole) = saved.entry(name).or_insert_with(|| (shape.clone(), vec![0; len * width]));
            assert_eq!(*own, shape);
            whole[start..start + tensor.data().len()].copy_from_slice(tensor.data());
        }
    }
    assert!(saved.iter().all(|(name, (_, bytes))| counts[name] == bytes.len()), "a part is missing or there twice");
    saved
}

fn state_file(folder: &Path, rank: usize) -> std::path::PathBuf {
    folder.join(format!("set-00000001/rank-{rank}.safetensors"))
}

fn check(saved: &Saved, expected: &Saved, what: impl Debug) {
    assert!(saved.keys().eq(expected.keys()), "{what:?}");
    let differs = saved.iter().find(|(name, tensor)| expected[*name] != **tensor);
    assert!(differs.is_none(), "{what:?}: {differs:?}, not {:?}", differs.map(|(name, _)| &expected[name]));
}

/// What a training of three more steps after a set has shown on each rank.
#[derive(Debug, PartialEq)]
struct After {
    /// This rank's values before and after these steps.
    own: [Vec<TensorData>; 2],
    whole: [Vec<TensorData>; 2],
    losses: Vec<f64>,
}

const FORMS: [(usize, Form); 9] = [
    (4, Form::Full),
    (3, Form::Full),
    (1, Form::Full),
    (4, Form::Hybrid(2)),
    (3, Form::Hybrid(1)),
    (2, Form::Gradients),
    (3, Form::Replicas),
    (2, Form::Optimizer),
    (1, Form::Replicas),
];

fn go_on(run: &mut Run<Adam>) -> After {
    let [own, whole] = run.values();
    let losses = (0..3).map(|_| run.step()).collect();
    let [own_after, whole_after] = run.values();
    After { own: [own, own_after], whole: [whole, whole_after], losses }
}

#[test]
fn every_form_loads_what_another_has_saved_bit_for_bit() {
    let folders: Vec<_> = FORMS.iter().map(|_| tempfile::tempdir().unwrap()).collect();
    let expected: Vec<Vec<After>> = FORMS
        .iter()
        .zip(&folders)
        .map(|(&(n, form), folder)| {
            ranks(n, |group| {
                let mut run = Run::<Adam>::new(group, form, Net::new(7, DType::F32), &adam);
                for _ in 0..4 {
                    run.step();
                }
                run.save(folder.path()).unwrap();
                go_on(&mut run)
            })
        })
        .collect();
    let of_one = &expected[FORMS.len() - 1][0];
    let saved = contents(folders[FORMS.len() - 1].path());
    assert_eq!(saved["model/language.embedding.weight"].0, [11, 6]);
    assert_eq!(saved["optimizer/language.embedding.weight/momentum.moment_1"].0, [11, 6]);
    for (saver, folder) in folders.iter().enumerate() {
        // What each form has computed and saved is what one rank has.
        let what = FORMS[saver];
        check(&contents(folder.path()), &saved, what);
        for after in &expected[saver] {
            assert!(after.whole == of_one.whole && after.losses == of_one.losses, "{what:?}");
        }
        for (loader, &(n, form)) in FORMS.iter().enumerate() {
            let again = tempfile::tempdir().unwrap();
            let loaded = ranks(n, |group| {
                let mut run = Run::<Adam>::new(group, form, Net::new(7, DType::F32), &adam);
                let id = run.state.model.frozen.id;
                assert!(run.load(folder.path()).unwrap());
                assert_eq!((run.state.samples, run.state.user, run.state.model.frozen.id), (4, 19, id));
                run.save(again.path()).unwrap();
                go_on(&mut run)
            });
            check(&contents(again.path()), &saved, (what, n, form));
            assert!(loaded == expected[loader], "{what:?} to {n} ranks, {form:?}");
        }
    }
}

#[test]
fn training_goes_on_with_the_same_loss_in_f64() {
    // burn loads the state of an optimizer in f32 with this backend, so the optimizer has none.
    let train = |n: usize, form: Form, steps: usize, load: Option<&Path>, save: Option<&Path>| {
        ranks(n, |group| {
            let mut run = Run::<Sgd>::new(group, form, Net::new(7, DType::F64), &sgd);
            run.samples = of_all_ranks;
            if let Some(folder) = load {
                assert!(run.load(folder).unwrap());
            }
            let losses: Vec<f64> = (0..steps).map(|_| run.step()).collect();
            if let Some(folder) = save {
                run.save(folder).unwrap();
            }
            losses
        })
        .swap_remove(0)
    };
    let whole = train(1, Form::Replicas, 10, None, None);
    assert!(whole[9] < whole[0]);
    let forms = [(4, Form::Full), (3, Form::Full), (4, Form::Hybrid(2)), (2, Form::Optimizer), (1, Form::Replicas)];
    for (n, form) in forms {
        let folder = tempfile::tempdir().unwrap();
        let first = train(n, form, 5, None, Some(folder.path()));
        for (n, form) in forms {
            let second = train(n, form, 5, Some(folder.path()), None);
            assert!(close(&[&first[..], &second].concat(), &whole), "{n} ranks, {form:?}: {second:?}, not {whole:?}");
        }
    }
}

#[test]
fn a_set_of_another_model_is_refused_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    ranks(4, |group| Run::<Adam>::new(group, Form::Full, Net::new(7, DType::F32), &adam).save(folder.path()).unwrap());
    for (n, form) in [(3, Form::Full), (4, Form::Hybrid(2)), (2, Form::Optimizer)] {
        let errors = ranks(n, |group| {
            let mut run = Run::<Adam>::new(group, form, Net::new(9, DType::F32), &adam);
            let before = run.values();
            let error = run.load(folder.path()).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert_eq!(run.values(), before);
            // The groups are still usable.
            run.step();
            error
        });
        assert!(errors.iter().all(|error| *error == errors[0]));
        let expected =
            "another model: `mapped.weight` was f32 [3, 7] then and is f32 [3, 9] now; load it into the model";
        assert!(errors[0].to_string().contains(expected), "{}", errors[0]);
    }
}

#[test]
fn what_is_no_part_of_the_model_in_training_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let mut run = Run::<Adam>::new(group, Form::Full, Net::new(7, DType::F32), &adam);
        let refused = |run: &Run<Adam>, expected: &str| {
            let error = run.save(folder.path()).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        };
        let Parallel::Parts(fsdp) = &mut run.parallel else { panic!("another form") };
        let (whole, parts) = (fsdp.gather(&run.state.model).unwrap(), run.state.model.clone());
        run.state.model = whole.clone();
        refused(&run, "the model has no part of `language.embedding.weight`; pass the model in training");
        assert!(run.load(folder.path()).is_ok_and(|found| !found));
        run.state.model = parts;
        run.state.average = Some(whole.valid());
        refused(&run, "has the shape [11, 6], and this rank's part of [11, 6] has [6, 6]; save the model that");
        run.state.average = None;
        run.save(folder.path()).unwrap();
        run.state.model = whole;
        let error = run.load(folder.path()).unwrap_err().to_string();
        assert!(error.contains("the model has no part of `language.embedding.weight`"), "{error}");
    });
}
