//! Programs of the kinds that burn's users write. Each is there twice: on burn alone, on one rank, and with Bonfire, on
//! ranks that have different numbers of samples, of other lengths, in micro-batches. Both compute the same.

mod adapters;
mod convolution;
mod learns;
mod lstm;
mod ppo;
mod sac;
mod state_space;
mod transformer;

use std::time::Duration;

use bonfire::ReduceOp;
use bonfire_testing::process::{Process, is_child, send_line};

use super::tokens::{length, padded, tokens};
use super::trained::{ALL_FORMS, Form, RATE, Trained};
use super::*;

/// Steps of a program.
const STEPS: usize = 12;

/// A kind of program: its name, without Bonfire, and with it.
type Kind = (&'static str, fn() -> Vec<f64>, fn(Group, Form) -> Vec<f64>);

const KINDS: [Kind; 7] = [
    ("convolution", learns::plain::<convolution::Pixels>, learns::in_form::<convolution::Pixels>),
    ("LSTM", learns::plain::<lstm::Recurrent>, learns::in_form::<lstm::Recurrent>),
    ("transformer", learns::plain::<transformer::Words>, learns::in_form::<transformer::Words>),
    ("state space", learns::plain::<state_space::Scanned>, learns::in_form::<state_space::Scanned>),
    ("adapters", learns::plain::<adapters::Adapted>, learns::in_form::<adapters::Adapted>),
    ("PPO", ppo::plain, ppo::with_bonfire),
    ("SAC", sac::plain, sac::with_bonfire),
];

/// All samples of a step.
fn all(step: usize) -> Vec<usize> {
    (BATCH * step..BATCH * (step + 1)).collect()
}

/// This rank's samples of a step: other ranks have more of them, or fewer, and each in turn.
fn uneven(group: &Group, step: usize) -> Vec<usize> {
    let n = group.world_size();
    let weights: Vec<usize> = (0..n).map(|rank| 1 + (rank + step) % n).collect();
    let total: usize = weights.iter().sum();
    let start = |rank: usize| BATCH * weights[..rank].iter().sum::<usize>() / total;
    all(step)[start(group.rank())..start(group.rank() + 1)].to_vec()
}

/// Returns the means over what all ranks have.
fn mean<const N: usize>(group: &Group, means: [f64; N], weight: usize) -> [f64; N] {
    let mut sums: Vec<f64> = means.iter().map(|mean| mean * weight as f64).chain([weight as f64]).collect();
    group.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
    std::array::from_fn(|i| sums[i] / sums[N])
}

/// One number of each sample.
fn column(values: impl IntoIterator<Item = f64>) -> Tensor<2> {
    let values: Vec<f64> = values.into_iter().collect();
    let rows = values.len();
    Tensor::from_data(TensorData::new(values, [rows, 1]), (&device(), DType::F64))
}

fn compare(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - expected).abs();
        assert!(difference < 1e-9, "{what}, number {place}: {found}, not {expected}");
    }
}

/// Fails unless ranks that are threads train in each form what the program on burn alone trains.
fn agrees(name: &str) {
    let (_, plain, with_bonfire) = KINDS.into_iter().find(|(kind, ..)| *kind == name).expect("a kind");
    let expected = plain();
    for form in ALL_FORMS {
        for n in [2, 3] {
            for (rank, found) in ranks(n, |group| with_bonfire(group, form)).into_iter().enumerate() {
                compare(&format!("{form:?}, rank {rank} of {n}"), &found, &expected);
            }
        }
    }
}

#[test]
fn processes_train_each_kind_in_each_form_as_burn_alone_does() {
    const NAME: &str = "shared::programs::kinds::processes_train_each_kind_in_each_form_as_burn_alone_does";
    if is_child() {
        let group = Group::from_env().expect("the ranks find each other");
        for (_, _, with_bonfire) in KINDS {
            for form in ALL_FORMS {
                let numbers = with_bonfire(group.clone(), form);
                send_line(numbers.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
            }
        }
        return;
    }
    let expected = KINDS.map(|(_, plain, _)| plain());
    for (n, transport) in [(2, "shm"), (3, "tcp")] {
        let mut processes = Process::start_ranks(NAME, n, transport, "60");
        for ((name, ..), expected) in KINDS.iter().zip(&expected) {
            for form in ALL_FORMS {
                for (rank, process) in processes.iter().enumerate() {
                    let line = process.read_line();
                    let found: Vec<f64> = line.split(' ').map(|number| number.parse().expect("a number")).collect();
                    compare(&format!("{name}, {form:?}, process {rank} of {n}"), &found, expected);
                }
            }
        }
        for process in &mut processes {
            assert!(process.end_within(Duration::from_secs(60)).expect("it ends").success());
        }
    }
}
