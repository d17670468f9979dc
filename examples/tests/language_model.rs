//! Training and checkpoints of the language model.

#[path = "../language_model/data.rs"]
mod data;
#[path = "../language_model/model.rs"]
mod model;
#[path = "../language_model/train.rs"]
mod train;

use std::path::Path;
use std::process::Command;

use bonfire_testing::ranks;
use burn::backend::{Autodiff, Flex};
use data::Text;
use train::{Outcome, Settings, Shard, TrainingJob};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Trains up to `steps`. Returns each rank's outcome.
fn train(
    n: usize,
    shard: Shard,
    steps: usize,
    paths: (Option<&Path>, Option<&Path>),
    batch: usize,
) -> Vec<Result<Outcome, String>> {
    let (save, resume) = paths;
    ranks(n, |group| {
        let job = TrainingJob {
            text: Text::load().unwrap(),
            settings: Settings { batch, seed: 3 },
            steps,
            shard,
            save,
            save_every: 2,
            resume,
            sample: 0,
            report: false,
            alone: true,
        };
        job.run::<Autodiff<Flex>>(group, &Default::default()).map_err(|error| error.to_string())
    })
}

fn trained(n: usize, shard: Shard, steps: usize, paths: (Option<&Path>, Option<&Path>)) -> Outcome {
    train(n, shard, steps, paths, 4).swap_remove(0).unwrap()
}

#[test]
fn the_loss_falls_and_is_the_same_on_any_number_of_ranks() {
    let one = trained(1, Shard::None, 6, (None, None));
    assert!(one.losses[5] < one.losses[0] - 0.5, "{:?}", one.losses);
    for (n, shard) in
        [(2, Shard::None), (4, Shard::None), (1, Shard::Optimizer), (2, Shard::Optimizer), (4, Shard::Optimizer)]
    {
        let many = trained(n, shard, 6, (None, None));
        let losses = || many.losses.iter().zip(&one.losses);
        assert!(
            losses().all(|(a, b)| (a - b).abs() < 1e-3),
            "{n} ranks, {shard:?}: {:?} {:?}",
            many.losses,
            one.losses
        );
        assert!((many.loss_per_byte - one.loss_per_byte).abs() < 1e-3, "{n} ranks, {shard:?}");
    }
}

#[test]
fn a_resumed_run_equals_the_uninterrupted_one_bit_for_bit() {
    for shard in [Shard::None, Shard::Optimizer] {
        let folder = tempfile::tempdir().unwrap();
        let whole = trained(2, shard, 6, (None, None));
        let half = trained(2, shard, 3, (Some(folder.path()), None));
        let resumed = trained(2, shard, 6, (None, Some(folder.path())));
        assert_eq!([half.losses, resumed.losses].concat(), whole.losses, "{shard:?}");
        assert_eq!(resumed.loss_per_byte.to_bits(), whole.loss_per_byte.to_bits(), "{shard:?}");
    }
}

#[test]
fn every_rank_reports_a_missing_or_another_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |batch, expected: &str| {
        for result in train(2, Shard::None, 2, (None, Some(folder.path())), batch) {
            let error = result.err().unwrap();
            assert!(error.contains(expected), "{error}");
        }
    };
    fails(4, "there is no checkpoint in ");
    trained(2, Shard::None, 1, (Some(folder.path()), None));
    fails(6, "was made with --batch 4 --seed 3: give the same");
}

#[test]
fn the_program_prints_the_loss_last_and_refuses_wrong_arguments() {
    let program = || Command::new(env!("CARGO_BIN_EXE_language_model"));
    let output = program().args(["--steps", "2", "--batch", "2", "--sample", "5"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let number = text.lines().last().and_then(|line| line.strip_prefix("loss per byte: ")).expect(&text);
    let (whole, decimals) = number.split_once('.').expect(number);
    assert!(whole.parse::<u32>().is_ok() && decimals.len() == 4 && decimals.parse::<u32>().is_ok(), "{number}");
    assert!(text.contains("tokens/s") && text.contains("peak memory"), "{text}");
    for (arguments, expected) in [
        (&["--batch", "1"][..], "--batch 1 is too small: give at least 2"),
        (&["--shard", "full"], "invalid value 'full'"),
        (&["--ranks", "0"], "0 is not in 1..=65535"),
        (&["--resume", "/nonexistent", "--steps", "1"], "there is no checkpoint in /nonexistent"),
    ] {
        let output = program().args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(expected), "{arguments:?}: {text}");
    }
}
