//! Programs with several models and one set of checkpoints.

mod errors;

use std::path::Path;
use std::time::Duration;

use bonfire_testing::process::{Process, is_child, send_line};
use burn::nn::LinearConfig;
use burn::tensor::DType;

use super::trained::{FORMS, Form, Saved, Trained, step_both};
use super::*;

/// Steps of the whole training, and those after which it stops once.
const ALL: usize = 8;
const FIRST: usize = 3;

/// A program: how the ranks hold its models, the element type, the folder if it saves, and its number of steps.
type Program = fn(Group, Form, DType, Option<&Path>, usize) -> Vec<f64>;

fn data(samples: &[usize], columns: usize, seed: usize, dtype: DType) -> Tensor<2> {
    let values: Vec<f64> = samples.iter().flat_map(|i| (0..columns).map(move |j| wave(i * 13 + j, seed))).collect();
    let data = TensorData::new(values, [samples.len(), columns]).convert_dtype(dtype);
    Tensor::from_data(data, (&device(), dtype))
}

/// A generator and a critic, which train in turn. If it stops early, it does so when only the critic has made its step
/// of the batch.
fn gan(group: Group, form: Form, dtype: DType, folder: Option<&Path>, steps: usize) -> Vec<f64> {
    let layer = known(LinearConfig::new(INPUTS, INPUTS).init(&device()), 9);
    let mut generator: Trained<Linear> = Trained::new(&group, form, dtype, layer);
    let mut critic = Trained::new(&group, form, dtype, Net::new(1));
    let mut checkpoints = Saved::open(&group, folder);
    checkpoints.load(&mut critic, &mut generator);
    let real = |own: &[usize]| data(own, INPUTS, 1, dtype);
    let noise = |own: &[usize]| data(own, INPUTS, 5, dtype);
    while generator.state.samples < ALL * BATCH {
        let step = generator.state.samples / BATCH;
        if critic.state.samples == generator.state.samples {
            let made = generator.whole();
            critic.step(batch(&group, step), |critic, own| {
                let made = made.forward(noise(own)).detach();
                (critic.forward(real(own)) - 1.0).powi_scalar(2).mean() + critic.forward(made).powi_scalar(2).mean()
            });
        }
        if steps < ALL && step == steps {
            assert!(critic.state.samples > generator.state.samples);
            break;
        }
        let judge = critic.whole();
        generator.step(batch(&group, step), |generator, own| {
            (judge.forward(generator.forward(noise(own))) - 1.0).powi_scalar(2).mean()
        });
    }
    checkpoints.save(&critic, &generator).unwrap();
    [weights(&generator.whole()), weights(&critic.whole())].concat()
}

/// A policy and a value with one backward pass, and a target that follows the value, with which its errors are
/// computed.
fn actor_critic(group: Group, form: Form, dtype: DType, folder: Option<&Path>, steps: usize) -> Vec<f64> {
    let mut policy = Trained::new(&group, form, dtype, Net::new(1));
    let mut value = Trained::new(&group, form, dtype, Net::new(5));
    value.state.average = Some(value.state.model.valid());
    let mut checkpoints = Saved::open(&group, folder);
    checkpoints.load(&mut policy, &mut value);
    while policy.state.samples < steps * BATCH {
        let own = batch(&group, policy.state.samples / BATCH);
        let target = value.state.average.clone().map(in_training).expect("a target");
        let next = value.whole_of(&target).forward(data(&own, INPUTS, 3, dtype)).detach();
        step_both((&mut policy, &mut value), own.len(), |policy, value| {
            let judged = value.forward(data(&own, INPUTS, 1, dtype));
            let expected = data(&own, 1, 2, dtype) + next.clone() * 0.9;
            let advantage = (expected.clone() - judged.clone()).detach();
            let acted = (policy.forward(data(&own, INPUTS, 1, dtype)).tanh() * advantage).mean();
            (judged - expected).powi_scalar(2).mean() - acted
        });
        let mut new = weights(&value.state.model).into_iter();
        let follow = |old: TensorData, _| {
            let values: Vec<f64> = old.iter::<f64>().zip(&mut new).map(|(old, new)| 0.8 * old + 0.2 * new).collect();
            TensorData::new(values, old.shape().clone()).convert_dtype(dtype)
        };
        value.state.average = Some(map_floats(target, follow).valid());
    }
    checkpoints.save(&policy, &value).unwrap();
    let target = value.whole_of(&in_training(value.state.average.clone().expect("a target")));
    [weights(&policy.whole()), weights(&value.whole()), weights(&target)].concat()
}

/// One rank and several train the same in f64, in each form.
fn agrees(program: Program) {
    for form in FORMS {
        equals_one_rank(|group| program(group, form, DType::F64, None, ALL));
    }
}

/// A training that was saved in the middle goes on as if it had never stopped, bit by bit.
fn resumes(program: Program) {
    for form in FORMS {
        let folder = tempfile::tempdir().unwrap();
        let train = |folder: Option<&Path>, steps| ranks(2, |group| program(group, form, DType::F32, folder, steps));
        let whole = train(None, ALL);
        train(Some(folder.path()), FIRST);
        assert_eq!(train(Some(folder.path()), ALL), whole, "{form:?}");
    }
}

#[test]
fn a_gan_trains_in_each_form_what_one_rank_trains() {
    agrees(gan);
}

#[test]
fn an_actor_and_a_critic_with_a_target_train_in_each_form_what_one_rank_trains() {
    agrees(actor_critic);
}

#[test]
fn a_gan_goes_on_from_one_set() {
    resumes(gan);
}

#[test]
fn an_actor_and_a_critic_with_a_target_go_on_from_one_set() {
    resumes(actor_critic);
}

#[test]
fn processes_go_on_from_what_threads_have_saved() {
    const NAME: &str = "shared::programs::several::processes_go_on_from_what_threads_have_saved";
    const FOLDER: &str = "SEVERAL";
    let train = |group: Group, form: Form, folder: &Path, steps| {
        let own = |name| folder.join(format!("{form:?}-{name}"));
        let gan = gan(group.clone(), form, DType::F32, Some(&own("gan")), steps);
        [gan, actor_critic(group, form, DType::F32, Some(&own("actor")), steps)].concat()
    };
    if is_child() {
        let folder = std::env::var_os(FOLDER).expect("set by the parent");
        for form in FORMS {
            let group = Group::from_env().expect("the ranks find each other");
            send_line(format!("{:?}", train(group, form, Path::new(&folder), ALL)));
        }
        return;
    }
    let [stopped, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let expected = FORMS.map(|form| {
        ranks(2, |group| train(group, form, stopped.path(), FIRST));
        ranks(2, |group| train(group, form, whole.path(), ALL)).swap_remove(0)
    });
    let folder = stopped.path().to_str().expect("a path of text").to_owned();
    let mut processes = Process::start_ranks_with(NAME, 2, "shm", "60", &[(FOLDER, folder)]);
    for process in &processes {
        for expected in &expected {
            assert_eq!(process.read_line(), format!("{expected:?}"));
        }
    }
    for process in &mut processes {
        assert!(process.end_within(Duration::from_secs(60)).expect("it ends").success());
    }
}
