//! Seeded initialisation, on threads and on processes. Every case is a process of its own: burn's backends have one
//! random generator per process, from which other tests draw too.

use bonfire::train::seeded;
use bonfire::{Error, Group};
use bonfire_testing::process::{Process, is_child, send_line};
use burn::nn::{DropoutConfig, LinearConfig};
use burn::tensor::{Distribution, TensorData};

use crate::burn_version::*;

models! {
    struct Mlp {
        hidden: Linear,
        output: Linear,
    }
}

/// Returns a rank's initial weights as text, and then what dropout leaves of ones. It draws other numbers around it.
fn draw(group: &Group) -> Result<[String; 2], Error> {
    let device = device();
    let noise = |count: usize| Tensor::<1>::random([count], Distribution::Default, &device).into_data();
    noise(group.rank() + 1);
    let new = || Mlp { hidden: LinearConfig::new(20, 8).init(&device), output: LinearConfig::new(8, 3).init(&device) };
    let model: Mlp = seeded(group, 7, &device, new)?;
    let dropped = DropoutConfig::new(0.5).init().forward(Tensor::<1>::ones([64], &device).require_grad());
    noise(100);
    let Mlp { hidden, output } = model;
    let weights = [hidden.weight.to_data(), output.weight.to_data(), output.bias.expect("a bias").to_data()];
    // All digits that tell one float from another.
    let text = |data: &TensorData| format!("{:?}", data.iter::<f32>().collect::<Vec<_>>());
    Ok([weights.iter().map(text).collect(), text(&dropped.into_data())])
}

/// Returns what `n` ranks that are processes draw.
fn processes(n: usize) -> Vec<[String; 2]> {
    let name = "shared::randomness::seeded_weights_depend_on_the_seed_only";
    let ranks = Process::start_ranks(name, n, "auto", "60");
    ranks.iter().map(|process| [process.read_line(), process.read_line()]).collect()
}

#[test]
fn seeded_weights_depend_on_the_seed_only() {
    if is_child() {
        let drawn = draw(&Group::from_env().expect("the ranks find each other")).expect("no failure");
        return drawn.into_iter().for_each(send_line);
    }
    let (alone, three) = (processes(1), processes(3));
    let threads = Process::start("shared::randomness::seeded_weights_of_threads", &[]).read_line();
    assert!(three.iter().all(|[weights, _]| *weights == alone[0][0]), "{three:?} is not {alone:?}");
    assert_eq!(threads, alone[0][0]);
    // Dropout of processes differs between ranks and repeats.
    assert_eq!(processes(3), three);
    assert!(three[0][1] != three[1][1] && three[1][1] != three[2][1], "{three:?}");
}

/// The weights of 1 to 4 ranks that are threads, 25 times each: all ranks have the same.
#[test]
fn seeded_weights_of_threads() {
    if !is_child() {
        let name = "shared::randomness::seeded_weights_of_threads";
        assert!(Process::start(name, &[]).end().success());
        return;
    }
    let mut first = None;
    for n in (1..=4).cycle().take(100) {
        for drawn in bonfire_testing::ranks(n, |group| draw(&group).map(|[weights, _]| weights)) {
            let weights = drawn.expect("no failure");
            assert_eq!(first.get_or_insert_with(|| weights.clone()), &weights, "{n} ranks");
        }
    }
    send_line(first.expect("a model"));
}
