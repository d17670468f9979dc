//! Checkpoints that one package writes and the other loads: `tests/fixtures/checkpoints` has sets of both.

use std::ops::Range;
use std::path::PathBuf;

use bonfire::{Checkpoints, Group, Sharding, TrainingState};
use bonfire_testing::ranks;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::nn::LinearConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, SgdConfig};
use burn::tensor::TensorData;

use crate::burn_version::*;
use crate::model_data::map_floats;

/// The steps before the checkpoint, and those after it.
const STEPS: [usize; 2] = [10, 20];

models! {
    struct Net {
        first: Linear,
        second: Linear,
    }
}

/// A number between -1 and 1.
fn wave(i: usize, seed: usize) -> f32 {
    ((i * 37 + seed * 101 + 11) as f32 * 0.61).sin()
}

fn net() -> Net {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device());
    let mut seed = 0;
    map_floats(Net { first: linear(3, 5), second: linear(5, 2) }, |data, _| {
        seed += 1;
        let values: Vec<f32> = (0..data.num_elements()).map(|i| wave(i, seed)).collect();
        TensorData::new(values, data.shape().clone())
    })
}

/// The loss of the rows of a step that a rank has.
fn loss(net: &Net, step: usize, rows: Range<usize>) -> Tensor<1> {
    let elements = |columns: usize, seed: usize| {
        let values: Vec<f32> =
            rows.clone().flat_map(|row| (0..columns).map(move |i| wave(row * 7 + i, seed))).collect();
        Tensor::<2>::from_data(TensorData::new(values, [rows.len(), columns]), &device())
    };
    let output = net.second.forward(net.first.forward(elements(3, step)).tanh());
    (output - elements(2, step + 1000)).powf_scalar(2.0).mean()
}

/// Rows of a step, so that ranks differ in their number.
const BATCH: usize = 7;

/// The rows of a rank in a step that begins with this one.
fn rows(group: &Group, first: usize) -> Range<usize> {
    let own = bonfire::partition(BATCH, group.world_size(), group.rank());
    first + own.start..first + own.end
}

/// What a program does with the position in a set of the first format, which counts batches.
fn in_samples(position: &mut usize) {
    if *position == STEPS[0] {
        *position *= BATCH;
    }
}

/// How a training is spread over the ranks.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    Replicas,
    /// The optimizer's state is sharded (ZeRO-1).
    Optimizer,
    /// Parameters too (ZeRO-3).
    Parts,
}

/// Trains with this optimizer up to `end` steps, from a checkpoint if there is one in `load`. Saves one in `save`.
/// Returns the whole model's values.
macro_rules! train {
    ($group:expr, $form:expr, $optimizer:expr, $end:expr, $load:expr, $save:expr) => {{
        let (group, load, save): (Group, Option<&PathBuf>, Option<&PathBuf>) = ($group, $load, $save);
        let schedule = || CosineAnnealingLrSchedulerConfig::new(0.05, 40).init().unwrap();
        let new = |model| TrainingState::new(model, $optimizer.init(), schedule(), ());
        let checkpoints = |folder: &PathBuf| Checkpoints::new(&group, folder).unwrap();
        let loads = |folder: &PathBuf| Checkpoints::read_only(&group, folder).unwrap();
        let of_whole = |net: &Net| floats(net).into_iter().map(|parameter| parameter.data).collect::<Vec<TensorData>>();
        match $form {
            Form::Replicas => {
                let (model, ddp) = DataParallel::new(group.clone(), net()).unwrap();
                let mut state = new(model);
                load.inspect(|folder| assert!(loads(folder).load(&mut state).unwrap()));
                in_samples(&mut state.samples);
                while state.samples < $end * BATCH {
                    let own = rows(&group, state.samples);
                    let batch = [(state.samples / BATCH, own.clone())];
                    let grads = ddp.run(&state.model, batch, |net, (step, rows)| (loss(net, step, rows), own.len()));
                    state.step(grads.unwrap(), BATCH);
                }
                save.inspect(|folder| checkpoints(folder).save(&state).unwrap());
                of_whole(&state.model)
            }
            Form::Optimizer => {
                let (model, ddp) = DataParallel::new(group.clone(), net()).unwrap();
                let mut optimizer = ShardedOptimizer::new(&ddp, $optimizer.init(), Sharding::All).unwrap();
                let mut state = new(model);
                load.inspect(|folder| assert!(loads(folder).load((&mut state, &mut optimizer)).unwrap()));
                in_samples(&mut state.samples);
                while state.samples < $end * BATCH {
                    let own = rows(&group, state.samples);
                    let batch = [(state.samples / BATCH, own.clone())];
                    let parts = optimizer
                        .run(&state.model, batch, |net, (step, rows)| (loss(net, step, rows), own.len()))
                        .unwrap();
                    optimizer.step(state.scheduler.step(), &mut state.model, parts).unwrap();
                    state.samples += BATCH;
                }
                save.inspect(|folder| checkpoints(folder).save((&state, &optimizer)).unwrap());
                of_whole(&state.model)
            }
            Form::Parts => {
                let (model, fsdp) = FullyShardedParallel::new(group.clone(), net()).unwrap();
                let mut state = new(model);
                load.inspect(|folder| assert!(loads(folder).load((&mut state, &fsdp)).unwrap()));
                in_samples(&mut state.samples);
                while state.samples < $end * BATCH {
                    let own = rows(&group, state.samples);
                    let batch = [(state.samples / BATCH, own.clone())];
                    let parts =
                        fsdp.run(&state.model, batch, |net, (step, rows)| (loss(net, step, rows), own.len())).unwrap();
                    state.step(parts.for_optimizer(&state.optimizer).unwrap(), BATCH);
                }
                save.inspect(|folder| checkpoints(folder).save((&state, &fsdp)).unwrap());
                of_whole(&fsdp.gather(&state.model).unwrap())
            }
        }
    }};
}

/// Trains with one of burn's optimizers, by name.
pub fn trained(
    optimizer: &str,
    n: usize,
    form: Form,
    end: usize,
    load: Option<&PathBuf>,
    save: Option<&PathBuf>,
) -> Vec<TensorData> {
    let models = ranks(n, |group: Group| match optimizer {
        "adam" => train!(group, form, AdamConfig::new().with_amsgrad(true), end, load, save),
        "adamw" => train!(group, form, AdamWConfig::new(), end, load, save),
        _ => train!(
            group,
            form,
            SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9))),
            end,
            load,
            save
        ),
    });
    assert!(models.iter().all(|model| *model == models[0]));
    models.into_iter().next().unwrap()
}

/// Which optimizer is saved on how many ranks in which form.
pub const SAVED: [(&str, usize, Form); 3] =
    [("adam", 3, Form::Parts), ("adamw", 2, Form::Optimizer), ("sgd", 1, Form::Replicas)];

/// The sets that a version has saved: of each optimizer one in `begun`, and in `end` what it has trained from there.
pub fn fixtures(version: &str) -> PathBuf {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let fixtures = ["tests/fixtures", "../tests/fixtures"].map(|folder| package.join(folder));
    fixtures.into_iter().find(|folder| folder.is_dir()).unwrap().join("checkpoints").join(version)
}

/// Trains what a version has begun, in each form on one to three ranks, to the end that the version `expected` has
/// come to.
pub fn goes_on(begun: &str, expected: &str) {
    let end = STEPS[0] + STEPS[1];
    for (optimizer, ..) in SAVED {
        let begun_set = fixtures(begun).join(optimizer).join("begun");
        let expected =
            trained(optimizer, 1, Form::Replicas, 0, Some(&fixtures(expected).join(optimizer).join("end")), None);
        for (form, n) in
            [Form::Replicas, Form::Optimizer, Form::Parts].into_iter().flat_map(|form| (1..=3).map(move |n| (form, n)))
        {
            let found = trained(optimizer, n, form, end, Some(&begun_set), None);
            for (found, expected) in found.iter().zip(&expected) {
                for (found, expected) in found.iter::<f64>().zip(expected.iter::<f64>()) {
                    let case = format!("{optimizer} of {begun} in {form:?} on {n}: {found}, not {expected}");
                    assert!((found - expected).abs() < 1e-5, "{case}");
                }
            }
        }
    }
}

#[test]
fn what_either_package_saves_goes_on_in_this_one() {
    for version in ["burn-0.21", "burn-0.22"] {
        goes_on(version, version);
    }
}

#[test]
#[ignore = "writes the sets of this package anew"]
fn write_sets() {
    for (optimizer, n, form) in SAVED {
        let folder = fixtures(concat!("burn-0.", env!("CARGO_PKG_VERSION_MINOR"))).join(optimizer);
        if folder.exists() {
            std::fs::remove_dir_all(&folder).unwrap();
        }
        let (begun, end) = (folder.join("begun"), folder.join("end"));
        trained(optimizer, n, form, STEPS[0], None, Some(&begun));
        trained(optimizer, 1, Form::Replicas, STEPS[0] + STEPS[1], Some(&begun), Some(&end));
    }
}
