//! Checkpoints: sets that all ranks write, that any number of ranks load, and that are complete or absent.

mod faults;
mod folder;
mod killed;
pub mod state;

use std::fs;
use std::path::{Path, PathBuf};

use bonfire::{Checkpoints, Error, Sharding, TrainingState};
use bonfire_testing::ranks;
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::noam::NoamLrSchedulerConfig;
use burn::module::Param;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, TensorData};

use crate::burn_version::*;
use crate::checkpoint_version::*;
use state::{Contents, Net, contents, start, step};

/// Saves the state after `steps` steps on `n` ranks. Returns what is in it, and after three more steps.
fn saved(n: usize, steps: usize, folder: &Path) -> [Contents; 2] {
    let mut results = ranks(n, |group| {
        let (mut state, ddp) = start(group, 2);
        (0..steps).for_each(|_| step(&mut state, &ddp));
        Checkpoints::new(ddp.group(), folder).unwrap().save(&state).unwrap();
        let saved = contents(&state);
        (0..3).for_each(|_| step(&mut state, &ddp));
        [saved, contents(&state)]
    });
    results.swap_remove(n - 1)
}

/// Loads the newest set on `n` ranks. Returns what is in it, and after three more steps.
fn loaded(n: usize, folder: &Path) -> Vec<[Contents; 2]> {
    ranks(n, |group| {
        let (mut state, ddp) = start(group, 2);
        let id = state.model.linear.weight.id;
        assert!(Checkpoints::read_only(ddp.group(), folder).unwrap().load(&mut state).unwrap());
        // The parameters keep this rank's ids.
        assert_eq!(state.model.linear.weight.id, id);
        let loaded = contents(&state);
        (0..3).for_each(|_| step(&mut state, &ddp));
        [loaded, contents(&state)]
    })
}

/// Returns the file of a rank in the only set of a folder.
fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("set-00000001/rank-{rank}.safetensors"))
}

/// Loads on two ranks, which get the same error, and do not change their states.
fn refused(folder: &Path, outputs: usize) -> Error {
    let mut errors = ranks(2, |group| {
        let (mut state, ddp) = start(group, outputs);
        let before = contents(&state);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder).unwrap();
        let error = checkpoints.load(&mut state).unwrap_err();
        assert_eq!(contents(&state), before);
        // The group is still usable.
        assert_eq!(checkpoints.load(&mut state).unwrap_err(), error);
        error
    });
    assert_eq!(errors[0], errors[1]);
    errors.swap_remove(0)
}

#[test]
fn a_set_is_loaded_on_any_number_of_ranks_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let expected = saved(4, 5, folder.path());
    assert_ne!(expected[0], expected[1]);
    for n in [3, 1, 2, 4] {
        assert!(loaded(n, folder.path()).iter().all(|loaded| *loaded == expected), "{n} ranks");
    }
    // Each rank has written a part.
    let bytes: Vec<u64> = (0..4).map(|rank| fs::metadata(file(folder.path(), rank)).unwrap().len()).collect();
    assert!(bytes.iter().all(|bytes| (state::LARGE_BYTES / 4..state::LARGE_BYTES / 2).contains(bytes)), "{bytes:?}");
}

#[test]
fn the_newest_sets_are_kept_and_the_newest_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    // What an interrupted save and an interrupted removal leave.
    for left in [".part-0123", ".old-7"] {
        fs::create_dir(folder.path().join(left)).unwrap();
    }
    let names = || {
        let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = entries.collect();
        names.sort();
        names
    };
    ranks(2, |group| {
        let (mut state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap().keep(3);
        assert!(!checkpoints.load(&mut state).unwrap());
        for _ in 0..5 {
            step(&mut state, &ddp);
            checkpoints.save(&state).unwrap();
        }
    });
    assert_eq!(names(), ["job.json", "set-00000003", "set-00000004", "set-00000005"]);
    let newest = saved(2, 1, folder.path());
    assert_eq!(names(), ["job.json", "set-00000005", "set-00000006"]);
    assert_eq!(loaded(1, folder.path())[0], newest);
}

#[test]
fn a_save_in_the_background_has_the_bits_of_the_moment_in_which_it_began() {
    let folder = tempfile::tempdir().unwrap();
    let [expected, _] = saved(2, 4, folder.path());
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let (mut state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        for i in 0..8 {
            step(&mut state, &ddp);
            if i == 3 {
                checkpoints.save_in_background(&state).unwrap();
            }
        }
        // Dropping it waits.
    });
    assert!(loaded(3, folder.path()).iter().all(|[loaded, _]| *loaded == expected));
}

#[test]
fn the_next_call_returns_the_error_of_a_save_in_the_background() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sets");
    ranks(2, |group| {
        let (state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), &path).unwrap();
        if ddp.group().rank() == 0 {
            fs::remove_dir_all(&path).unwrap();
            fs::write(&path, "not a folder").unwrap();
        }
        checkpoints.save_in_background(&state).unwrap();
        let error = checkpoints.save_in_background(&state).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().starts_with("saving a checkpoint: reading "), "{error}");
        checkpoints.wait().unwrap();
    });
}

#[test]
fn ranks_at_different_samples_do_not_save() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |group| {
        let rank = group.rank();
        let (mut state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        state.samples += rank / 2;
        let error = checkpoints.save(&state).unwrap_err().to_string();
        assert!(error.contains("rank 0 is at epoch 0, sample 0, rank 2 at epoch 0, sample 1; call this"), "{error}");
        state.samples = 0;
        checkpoints.save(&state).unwrap();
    });
}

#[test]
fn damaged_files_are_refused_on_all_ranks() {
    let other = tempfile::tempdir().unwrap();
    saved(3, 2, other.path());
    type Damage<'a> = &'a dyn Fn(&Path);
    let cases: [(Damage<'_>, &str); 8] = [
        (&|folder| fs::remove_file(file(folder, 1)).unwrap(), "rank-1.safetensors: it is missing; restore the files"),
        (
            &|folder| {
                let bytes = fs::read(file(folder, 2)).unwrap();
                fs::write(file(folder, 2), &bytes[..bytes.len() - 1]).unwrap();
            },
            "it is truncated; restore the files of this set, or remove the set's folder",
        ),
        (
            &|folder| fs::write(file(folder, 0), [7; 5]).unwrap(),
            "rank-0.safetensors: its header is truncated or damaged",
        ),
        (&|folder| _ = fs::copy(file(other.path(), 1), file(folder, 1)).unwrap(), "it is of another save than the"),
        (
            &|folder| _ = fs::copy(file(folder, 1), file(folder, 2)).unwrap(),
            "rank-2.safetensors: it is the file of rank 1",
        ),
        (
            &|folder| {
                let mut bytes = fs::read(file(folder, 1)).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(file(folder, 1), bytes).unwrap();
            },
            "rank-1.safetensors: its part of `",
        ),
        (&|folder| fs::remove_file(folder.join("set-00000001/set.json")).unwrap(), "set.json: No such file"),
        (&|folder| fs::write(folder.join("set-00000001/set.json"), "{}").unwrap(), "set.json: it is no manifest: "),
    ];
    for (damage, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        saved(3, 2, folder.path());
        damage(folder.path());
        let error = refused(folder.path(), 2);
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}, not {expected}");
    }
}

#[test]
fn a_set_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    saved(3, 2, folder.path());
    let error = refused(folder.path(), 5).to_string();
    let expected = "it was saved for another model: `linear.weight` was f32 [3, 2] then and is f32 [3, 5] now; load it";
    assert!(error.contains(expected), "{error}");
    let errors = ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group, Net::new(2).linear).unwrap();
        let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.1, ());
        Checkpoints::new(ddp.group(), folder.path()).unwrap().load(&mut state).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("`weight` was nothing then and is f32 [3, 2] now")), "{errors:?}");
}

#[test]
fn a_state_of_another_kind_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    saved(2, 2, folder.path());
    let schedule = || ExponentialLrSchedulerConfig::new(0.1, 0.8).init().unwrap();
    macro_rules! refused {
        ($optimizer:expr, $schedule:expr, $user:expr, $expected:expr) => {
            ranks(2, |group| {
                let (model, ddp) = DataParallel::new(group, Net::new(2)).unwrap();
                let mut state = TrainingState::new(model, $optimizer, $schedule, $user);
                let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
                let error = checkpoints.load(&mut state).unwrap_err();
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                assert!(error.to_string().contains($expected), "{error}");
                assert_eq!(state.samples, 0);
            });
        };
    }
    let user = || (7u64, Vec::<f64>::new());
    for momentum in [None, Some(MomentumConfig::new())] {
        let sgd = SgdConfig::new().with_momentum(momentum);
        refused!(sgd.init(), schedule(), user(), OTHER_OPTIMIZER);
    }
    let [rate, noam, linear] = OTHER_SCHEDULERS;
    refused!(AdamConfig::new().init(), 0.1, user(), rate);
    refused!(AdamConfig::new().init(), NoamLrSchedulerConfig::new(0.1).init().unwrap(), user(), noam);
    let falling = LinearLrSchedulerConfig::new(0.1, 0.01, 10);
    refused!(AdamConfig::new().init(), falling.init().unwrap(), user(), linear);
    refused!(
        AdamConfig::new().init(),
        schedule(),
        5u64,
        "the user's state `user` of type `(u64, Vec<f64>)`, and this is the user's state `user` of type `u64`"
    );
    refused!(
        AdamConfig::new().init(),
        schedule(),
        (),
        "the user's state `user` of type `(u64, Vec<f64>)`, and this is the user's state `user` of type `()`"
    );
}

#[test]
fn a_state_that_burn_would_round_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |result: Result<bool, Error>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let [begin, end] = ["`weight` is F64, and burn loads an optimizer's state in the ", "float type"];
        assert!(error.to_string().contains(begin) && error.to_string().contains(end), "{error}");
    };
    ranks(2, |group| {
        let options = (&device(), DType::F64);
        let data = TensorData::from([[1.0, -2.0], [0.5, 3.0], [-1.0, 1e-300]]);
        let wide = Linear { weight: Param::from_tensor(Tensor::from_data(data, options)), bias: None };
        let (model, ddp) = DataParallel::new(group, wide).unwrap();
        let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.1, ());
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        // At the start of a training, before there is a set.
        refused(checkpoints.load(&mut state));
        // An optimizer without moments is saved.
        let mut plain = TrainingState::new(state.model.clone(), SgdConfig::new().init(), 0.1, ());
        assert!(!checkpoints.load(&mut plain).unwrap());
        checkpoints.save(&state).unwrap();
        let saved = state.model.weight.to_data();
        let input = Tensor::<2>::ones([1, 3], options);
        let grads = ddp.run(&state.model, [input], |model, input| (model.forward(input).mean(), 1)).unwrap();
        state.step(grads, 1);
        refused(checkpoints.save(&state).map(|()| true));
        // The set before is still there.
        assert!(Checkpoints::read_only(ddp.group(), folder.path()).unwrap().load(&mut state).unwrap());
        assert_eq!((state.samples, state.model.weight.to_data()), (0, saved));
    });
}

#[test]
fn an_optimizer_that_has_made_no_step_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group, Net::new(2)).unwrap();
        let mut sharded = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        // An optimizer without states may have made its steps, and at the start none has.
        let mut stateless = TrainingState::new(model.clone(), stateless::<Net>(), 0.1, ());
        stateless.samples = 1;
        checkpoints.save(&stateless).unwrap();
        let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.1, ());
        checkpoints.save(&state).unwrap();
        let input = || Tensor::<2>::ones([1, 3], &device());
        let parts = sharded.run(&state.model, [input()], |model, input| (model.forward(input).mean(), 1)).unwrap();
        sharded.step(0.1, &mut state.model, parts).unwrap();
        state.samples += 1;
        let error = checkpoints.save(&state).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("the optimizer in the state has made no step, though batches"), "{error}");
        checkpoints.save((&state, &sharded)).unwrap();
        // Loaded without the sharded optimizer, the state's own one has its moments: the pair would lose them.
        assert!(checkpoints.load(&mut state).unwrap());
        let error = checkpoints.save((&state, &sharded)).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("the optimizer in the state has states of its own"), "{error}");
        checkpoints.save(&state).unwrap();
    });
}

#[test]
fn a_file_can_be_read_by_other_programs() {
    let folder = tempfile::tempdir().unwrap();
    let [expected, _] = saved(2, 1, folder.path());
    let bytes = fs::read(file(folder.path(), 0)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weight = tensors.tensor("model/linear.weight").unwrap();
    let position = all_values(&Net::new(2)).iter().position(|(path, _)| path == "linear.weight").unwrap();
    assert_eq!((weight.shape(), weight.data()), (&[6][..], expected.model[position].as_bytes()));
    // Wide elements come first, so all are aligned.
    let aligned = |data: &[u8]| (data.as_ptr().addr() - bytes.as_ptr().addr()).is_multiple_of(4);
    assert!(tensors.iter().all(|(_, tensor)| aligned(tensor.data()) || tensor.dtype().bitsize() == 8));
}
