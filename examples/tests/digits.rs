//! Training and checkpoints of the digits example.

#[path = "../digits/checkpoint.rs"]
mod checkpoint;
#[path = "../digits/data.rs"]
mod data;
#[path = "../digits/job.rs"]
mod job;
#[path = "../digits/model.rs"]
mod model;
#[path = "../digits/progress.rs"]
mod progress;
#[path = "../digits/train.rs"]
mod train;

use std::fs;
#[cfg(unix)]
use std::io::{BufRead, BufReader};
use std::path::Path;
#[cfg(unix)]
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;

use bonfire::{Checkpoints, DataParallel, Group, Sharding};
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::AdamConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use checkpoint::Settings;
use data::Digits;
use job::{Outcome, TrainingJob};
use model::Network;
use train::State;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type B = Autodiff<Flex>;

/// The backend of tests that compare different numbers of ranks, and how far parameters may differ, because the order
/// of sums does. .ci/full compares in f64: the generic kernels of NdArray take minutes to compile.
#[cfg(not(feature = "ndarray"))]
type Compared = Autodiff<Flex>;
#[cfg(not(feature = "ndarray"))]
const CLOSE: f64 = 1e-3;
#[cfg(feature = "ndarray")]
type Compared = Autodiff<burn::backend::NdArray<f64>>;
#[cfg(feature = "ndarray")]
const CLOSE: f64 = 1e-9;

/// The backend has one random generator for the whole process, so runs that are compared must not overlap other runs.
static ALONE: Mutex<()> = Mutex::new(());

fn settings() -> Settings {
    Settings { batch: 50, seed: 3, lr: 0.003, backend: "flex".into(), shard: false }
}

/// Trains with two ranks up to `epochs` on a part of the digits. Returns the error of each rank, if any.
fn train(settings: &Settings, epochs: usize, save: Option<&Path>, resume: Option<&Path>) -> Vec<Option<String>> {
    errors(train_on::<B>(2, settings, epochs, (save, resume), None, None))
}

/// Returns the first `count` training images, and all test images.
fn images(count: usize) -> Result<(Digits, Digits), Failure> {
    let (mut digits, test) = Digits::load()?;
    digits.images.truncate(count);
    digits.labels.truncate(count);
    Ok((digits, test))
}

fn errors(outcomes: Vec<Result<Outcome, String>>) -> Vec<Option<String>> {
    outcomes.into_iter().map(Result::err).collect()
}

fn train_on<B: AutodiffBackend>(
    ranks: usize,
    settings: &Settings,
    epochs: usize,
    (save, resume): (Option<&Path>, Option<&Path>),
    shard: Option<Sharding>,
    chaos: Option<usize>,
) -> Vec<Result<Outcome, String>> {
    let job = || -> Result<TrainingJob<'_>, Failure> {
        let data = images(280)?;
        Ok(TrainingJob { data, settings: settings.clone(), epochs, save, resume, shard, compression: None, chaos })
    };
    let rank = |group: Group| -> Result<Outcome, Failure> { job()?.run::<B>(group, Default::default()) };
    thread::scope(|scope| {
        let threads: Vec<_> =
            Group::threads(ranks).unwrap().into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().map_err(|e| e.to_string())).collect()
    })
}

/// Returns the values of all parameters and running states in a checkpoint.
fn values<B: AutodiffBackend>(path: &Path) -> Vec<TensorData> {
    struct Values(Vec<TensorData>);
    impl<B: Backend> ModuleVisitor<B> for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data());
        }
    }
    let (group, device) = (Group::threads(1).unwrap().remove(0), Default::default());
    let (model, ddp) = DataParallel::new(group.clone(), Network::<B>::new(&device)).unwrap();
    let mut state = State::new(model, AdamConfig::new().init(), 0.0, String::new());
    assert!(Checkpoints::new(ddp.group(), path).unwrap().load(&mut state).unwrap());
    let mut values = Values(Vec::new());
    state.model.visit(&mut values);
    values.0
}

#[test]
fn a_resumed_run_equals_the_uninterrupted_one_bit_for_bit() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let [whole, half, resumed] = ["whole", "half", "resumed"].map(|name| folder.path().join(name));
    assert_eq!(train(&settings(), 4, Some(&whole), None), [None, None]);
    assert_eq!(train(&settings(), 2, Some(&half), None), [None, None]);
    assert_eq!(train(&settings(), 4, Some(&resumed), Some(&half)), [None, None]);
    assert_ne!(values::<B>(&whole), values::<B>(&half));
    assert_eq!(values::<B>(&whole), values::<B>(&resumed));
    // Nothing but the checkpoints is left.
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 3);
}

#[test]
fn the_network_with_batch_norm_trains_the_same_on_any_number_of_ranks() {
    trains_the_same(1);
}

#[cfg(feature = "ndarray")]
#[test]
#[ignore = "needs minutes without link-time optimisation"]
fn the_network_trains_the_same_for_ten_epochs() {
    trains_the_same(10);
}

fn trains_the_same(epochs: usize) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    // Batches of 50 and a last one of 30: uneven shards on 3 and on 4 ranks.
    let trained: Vec<Vec<f64>> = (1..=4)
        .map(|ranks| {
            let path = folder.path().join(ranks.to_string());
            let outcomes = train_on::<Compared>(ranks, &settings(), epochs, (Some(&path), None), None, None);
            assert_eq!(errors(outcomes), vec![None; ranks]);
            values::<Compared>(&path).iter().flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect()
        })
        .collect();
    for (ranks, values) in (2..).zip(&trained[1..]) {
        let difference = values.iter().zip(&trained[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{ranks} ranks differ from one by {difference:e}");
        assert!(difference < CLOSE, "{ranks} ranks differ from one by {difference:e} after {epochs} epochs");
    }
}

#[test]
fn remaining_ranks_continue_as_if_none_was_lost() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let trained: Vec<Vec<f64>> = [None, Some(0), Some(2)]
        .into_iter()
        .map(|dies| {
            let path = folder.path().join(format!("{dies:?}"));
            let outcomes = train_on::<Compared>(3, &settings(), 4, (Some(&path), None), None, dies);
            assert_eq!(errors(outcomes), vec![None; 3]);
            values::<Compared>(&path).iter().flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect()
        })
        .collect();
    for values in &trained[1..] {
        let difference = values.iter().zip(&trained[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("the remaining ranks differ by {difference:e}");
        assert!(difference < CLOSE, "the remaining ranks differ by {difference:e} from a run without a loss");
    }
}

#[test]
fn the_loss_is_the_same_with_a_sharded_optimizer() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let (whole, sharded) = (settings(), Settings { shard: true, ..settings() });
    let train = |ranks, settings, epochs, paths, shard| {
        let outcomes = train_on::<Compared>(ranks, settings, epochs, paths, shard, None);
        outcomes.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let plain = train(4, &whole, 2, (None, None), None).remove(0).losses;
    // The whole state on each rank, as without sharding.
    let whole = train(1, &sharded, 1, (None, None), Some(Sharding::None))[0].part_bytes.unwrap();
    let save = (Some(path.as_path()), None);
    for (shard, most) in [(Sharding::All, 0.3), (Sharding::Blocks(2), 0.55)] {
        for (rank, outcome) in train(4, &sharded, 1, save, Some(shard)).iter().enumerate() {
            let (bytes, difference) = (outcome.part_bytes.unwrap(), (outcome.losses[0] - plain[0]).abs());
            println!("{shard:?}, rank {rank}: {bytes} of {whole} bytes, loss {} ({difference:e})", outcome.losses[0]);
            assert!(bytes as f64 <= most * whole as f64);
            assert!(difference < CLOSE / 1e3);
        }
    }
    // Three ranks resume from the state of four, sharded over blocks of two.
    for outcome in train(3, &sharded, 2, (None, Some(path.as_path())), Some(Sharding::All)) {
        assert!((outcome.losses[0] - plain[1]).abs() < CLOSE);
    }
}

#[test]
fn every_rank_reports_a_bad_checkpoint() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let fails = |settings: &Settings, expected: &str| {
        for error in train(settings, 2, None, Some(&path)) {
            let error = error.unwrap();
            assert!(error.contains(expected), "{error}");
        }
    };
    fails(&settings(), "there is no checkpoint in ");
    assert_eq!(train(&settings(), 1, Some(&path), None), [None, None]);
    fails(&Settings { lr: 0.1, ..settings() }, "was made with --lr 0.003, not 0.1");
    let file = path.join("set-00000001/rank-0.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).unwrap();
    fails(&settings(), "rank-0.safetensors: its part of ");
    fs::write(&file, "no checkpoint").unwrap();
    fails(&settings(), "rank-0.safetensors: its header is truncated or damaged");
}

#[test]
#[cfg(unix)]
fn a_program_that_is_asked_to_stop_saves_and_can_go_on() {
    for shard in [&[][..], &["--shard"]] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().to_str().unwrap();
        let program = || {
            let mut program = Command::new(env!("CARGO_BIN_EXE_digits"));
            program.args(["--ranks", "2"]).args(shard);
            program
        };
        let arguments = ["--epochs", "100000", "--save", folder];
        let mut child = program().args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.starts_with("epoch 1/100000: ")), "it ends before");
        assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
        assert_eq!(lines.last().as_deref(), Some("stopped, and saved: go on with --resume"));
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert!(program().args(["--epochs", "1", "--resume", folder]).output().unwrap().status.success());
    }
}

/// From the same weights, the first steps on two logical devices of a GPU and on the host have nearly the same losses
/// and change the weights alike.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a CUDA GPU"]
fn the_first_steps_on_a_gpu_equal_those_on_the_host() {
    use bonfire::CudaDevice;
    type Gpu = Autodiff<bonfire::Cuda>;
    /// Trains two more epochs, of one step each. Returns their losses.
    fn steps<B: AutodiffBackend>(from: &Path, to: &Path, device: impl Fn(u8) -> B::Device + Sync) -> Vec<f64> {
        let rank = |(group, number): (Group, u8)| {
            let data = images(settings().batch)?;
            let (save, resume) = (Some(to), Some(from));
            let job = TrainingJob {
                data,
                settings: settings(),
                epochs: 3,
                save,
                resume,
                shard: None,
                compression: None,
                chaos: None,
            };
            job.run::<B>(group, device(number))
        };
        thread::scope(|scope| {
            let ranks = Group::threads(2).unwrap().into_iter().zip(0..);
            let ranks: Vec<_> = ranks.map(|own| scope.spawn(|| rank(own))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().unwrap().losses).next_back().unwrap()
        })
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let [start, host, gpu] = ["start", "host", "gpu"].map(|name| folder.path().join(name));
    let job = TrainingJob {
        data: images(settings().batch).unwrap(),
        settings: settings(),
        epochs: 1,
        save: Some(&start),
        resume: None,
        shard: None,
        compression: None,
        chaos: None,
    };
    job.run::<B>(Group::threads(1).unwrap().remove(0), Default::default()).unwrap();
    let expected = steps::<B>(&start, &host, |_| Default::default());
    let losses = steps::<Gpu>(&start, &gpu, |number| CudaDevice::new(Default::default(), number));
    println!("losses {losses:?}, on the host {expected:?}");
    // Matrix products may be in TF32, which has a mantissa of 10 bits.
    assert!((losses[0] / expected[0] - 1.0).abs() < 1e-2 && (losses[1] / expected[1] - 1.0).abs() < 1e-2);

    let flat =
        |path| values::<B>(path).iter().flat_map(|data| data.iter::<f64>().collect::<Vec<_>>()).collect::<Vec<_>>();
    let [start, host, gpu] = [&start, &host, &gpu].map(|path| flat(path));
    let change = start.iter().zip(&host).map(|(from, to)| (to - from).abs()).sum::<f64>();
    let difference = gpu.iter().zip(&host).map(|(gpu, host)| (gpu - host).abs()).sum::<f64>();
    println!("the changes of the weights have a relative difference of {:.4}", difference / change);
    assert!(difference < 0.1 * change);
}
