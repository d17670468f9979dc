//! Training and checkpoints of the language model.

#[allow(dead_code, reason = "the test calls the training itself")]
#[path = "../language_model/command.rs"]
mod command;
#[path = "../language_model/data.rs"]
mod data;
#[path = "../language_model/form.rs"]
mod form;
#[path = "../language_model/model.rs"]
mod model;
#[path = "../language_model/train.rs"]
mod train;
#[path = "../language_model/writing.rs"]
mod writing;

#[cfg(unix)]
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Command;
#[cfg(unix)]
use std::process::Stdio;

use bonfire_testing::ranks;
use burn::backend::Autodiff;
#[cfg(not(feature = "ndarray"))]
use burn::backend::Flex;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use command::Shard;
use data::Text;
use model::LanguageModel;
use train::{Outcome, Settings, TrainingJob};

/// The backend, and how far losses and parameters may differ, because the order of sums does. .ci/full compares in f64:
/// the generic kernels of NdArray take minutes to compile.
#[cfg(not(feature = "ndarray"))]
type B = Autodiff<Flex>;
#[cfg(not(feature = "ndarray"))]
const CLOSE: f64 = 1e-3;
#[cfg(feature = "ndarray")]
type B = Autodiff<burn::backend::NdArray<f64>>;
#[cfg(feature = "ndarray")]
const CLOSE: f64 = 1e-9;

/// What a rank has trained.
type Trained = (Outcome, LanguageModel<<B as AutodiffBackend>::InnerBackend>);

/// Ranks, what is sharded over them, and a mesh.
type Form = (usize, Shard, Option<[usize; 2]>);

/// Trains up to `steps`. Returns each rank's outcome.
fn train(
    (n, shard, mesh): Form,
    steps: usize,
    paths: (Option<&Path>, Option<&Path>),
    batch: usize,
) -> Vec<Result<Trained, String>> {
    let (save, resume) = paths;
    ranks(n, |group| {
        let job = TrainingJob {
            text: Text::load().unwrap(),
            settings: Settings { batch, seed: 3 },
            steps,
            shard,
            mesh,
            save,
            save_every: 2,
            resume,
            sample: 0,
            report: false,
            alone: true,
        };
        job.run::<B>(group, &Default::default()).map_err(|error| error.to_string())
    })
}

fn trained(form: Form, steps: usize, paths: (Option<&Path>, Option<&Path>)) -> Outcome {
    train(form, steps, paths, 4).swap_remove(0).unwrap().0
}

const ONE: Form = (1, Shard::None, None);

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < CLOSE
}

/// Returns all parameters of a model.
fn parameters(model: &impl Module<<B as AutodiffBackend>::InnerBackend>) -> Vec<f64> {
    struct Values(Vec<f64>);
    impl<B: Backend> ModuleVisitor<B> for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f64>());
        }
    }
    let mut values = Values(Vec::new());
    model.visit(&mut values);
    values.0
}

#[test]
fn the_loss_falls_and_the_training_is_the_same_in_every_form() {
    let train = |form| train(form, 12, (None, None), 4).swap_remove(0).unwrap();
    let (one, expected) = train(ONE);
    assert!(one.losses[11] < one.losses[0] - 1.0, "{:?}", one.losses);
    let hybrid = [
        (1, Shard::Optimizer, None),
        (1, Shard::Full, None),
        (2, Shard::Full, Some([2, 1])),
        (4, Shard::Full, Some([2, 2])),
        (4, Shard::Grads, Some([4, 1])),
    ];
    let shards = [Shard::None, Shard::Optimizer, Shard::Grads, Shard::Full];
    // .ci/full, in f64, has more ranks; four are in the hybrid forms.
    let most = if cfg!(feature = "ndarray") { 4 } else { 2 };
    let plain = (2..=most).flat_map(|n| shards.map(|shard| (n, shard, None)));
    for form in plain.chain(hybrid) {
        let (many, model) = train(form);
        let mut losses = many.losses.iter().zip(&one.losses);
        assert!(losses.all(|(a, b)| close(*a, *b)), "{form:?}: {:?}, not {:?}", many.losses, one.losses);
        assert!(close(many.loss_per_byte, one.loss_per_byte), "{form:?}");
        let pairs = parameters(&model).into_iter().zip(parameters(&expected));
        let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{form:?}: parameters differ by {difference:e}");
        assert!(difference < CLOSE, "{form:?}: parameters differ by {difference:e}");
    }
}

#[test]
fn a_resumed_run_equals_the_uninterrupted_one_bit_for_bit() {
    for shard in [Shard::None, Shard::Optimizer, Shard::Grads, Shard::Full] {
        let (folder, form) = (tempfile::tempdir().unwrap(), (2, shard, None));
        let whole = trained(form, 6, (None, None));
        let half = trained(form, 3, (Some(folder.path()), None));
        let resumed = trained(form, 6, (None, Some(folder.path())));
        assert_eq!([half.losses, resumed.losses].concat(), whole.losses, "{shard:?}");
        assert_eq!(resumed.loss_per_byte.to_bits(), whole.loss_per_byte.to_bits(), "{shard:?}");
    }
}

#[test]
fn every_form_goes_on_from_the_checkpoint_of_another() {
    let whole = trained(ONE, 6, (None, None));
    let forms = [
        (3, Shard::Full, None),
        ONE,
        (2, Shard::Optimizer, None),
        (4, Shard::Full, Some([2, 2])),
        (3, Shard::Grads, None),
    ];
    for (saver, loader) in forms.into_iter().zip(forms.into_iter().cycle().skip(1)) {
        let folder = tempfile::tempdir().unwrap();
        let half = trained(saver, 3, (Some(folder.path()), None));
        let resumed = trained(loader, 6, (None, Some(folder.path())));
        let losses = [half.losses, resumed.losses].concat();
        let mut both = losses.iter().zip(&whole.losses);
        assert!(both.all(|(a, b)| close(*a, *b)), "{saver:?}, {loader:?}: {losses:?}, not {:?}", whole.losses);
        assert!(close(resumed.loss_per_byte, whole.loss_per_byte), "{saver:?}, {loader:?}");
    }
}

#[test]
fn every_rank_reports_a_missing_or_another_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |batch, expected: &str| {
        for result in train((2, Shard::None, None), 2, (None, Some(folder.path())), batch) {
            let error = result.err().unwrap();
            assert!(error.contains(expected), "{error}");
        }
    };
    fails(4, "there is no checkpoint in ");
    trained((2, Shard::None, None), 1, (Some(folder.path()), None));
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
        (&["--shard", "half"], "invalid value 'half'"),
        (&["--mesh", "1x2"], "--mesh is for --shard full and --shard grads: give one of them"),
        (&["--mesh", "2x2", "--shard", "full"], "--mesh 2x2 is not 2 ranks: give factors of 2"),
        (&["--mesh", "0x2", "--shard", "grads"], "--mesh 0x2 is not 2 ranks: give factors of 2"),
        (&["--mesh", "2", "--shard", "full"], "give replicas and ranks that shard each, such as 2x2"),
        (&["--ranks", "0"], "0 is not in 1..=65535"),
        (&["--resume", "/nonexistent", "--steps", "1"], "there is no checkpoint in /nonexistent"),
    ] {
        let output = program().args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let status = if arguments[0] == "--resume" { 1 } else { 2 };
        assert!(output.status.code() == Some(status) && text.contains(expected), "{arguments:?}: {text}");
    }
}

#[test]
#[cfg(unix)]
fn a_program_that_is_asked_to_stop_saves_and_can_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let program = env!("CARGO_BIN_EXE_language_model");
    let mut child = Command::new(program)
        .args(["--ranks", "2", "--batch", "2", "--steps", "600", "--save-every", "600", "--save", folder])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 60/600: ")), "it ends before");
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(lines.last().as_deref(), Some("stopped, and saved: go on with --resume"));
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let output =
        Command::new(program).args(["--ranks", "2", "--batch", "2", "--steps", "1", "--resume", folder]).output();
    assert!(output.unwrap().status.success());
}
