//! Saves that fail: the same error on all ranks, and the set before is still there.

use std::fs;

use bonfire::{Checkpoints, Error, Group, TrainingState};
use bonfire_testing::ranks;
use burn::nn::LinearConfig;
use burn::optim::SgdConfig;

use super::state::{start, step};
use super::{loaded, saved};
use crate::burn_version::{FullyShardedParallel, Linear, Tensor, device};

#[test]
fn a_folder_that_cannot_be_written_is_an_error_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "not a folder").unwrap();
    for path in [path.clone(), path.join("below")] {
        let errors = ranks(2, |group| {
            let error = Checkpoints::new(&group, &path).unwrap_err();
            // The group is still usable.
            assert_eq!(Checkpoints::new(&group, &path).unwrap_err(), error);
            error
        });
        assert_eq!(errors[0], errors[1]);
        assert!(matches!(errors[0], Error::Io { .. }), "{}", errors[0]);
        assert!(errors[0].to_string().contains(&path.display().to_string()), "{}", errors[0]);
    }
}

#[test]
fn ranks_that_do_not_share_the_folder_get_an_error() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    ranks(2, |group: Group| {
        let error = Checkpoints::new(&group, folders[group.rank()].path()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let expected = "rank 1 does not see the folder ";
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.to_string().ends_with("give a folder that all ranks share"), "{error}");
    });
}

/// Each system call of a save that fails, in a process of two ranks: the disk is full.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn a_full_disk_is_an_error_on_all_ranks_and_leaves_the_set_before() {
    use bonfire_testing::process::{Process, is_child, send_line};
    use bonfire_testing::syscalls::{self, Failing};

    const NAME: &str = "shared::checkpoints::faults::a_full_disk_is_an_error_on_all_ranks_and_leaves_the_set_before";
    const FAILING: &str = "FAILING";
    const FOLDER: &str = "FOLDER";
    const ENOSPC: i32 = 28;
    if is_child() {
        let folder = std::env::var_os(FOLDER).expect("set by the parent");
        let failing = Failing::from_word(&std::env::var(FAILING).expect("set by the parent")).expect("a word");
        let groups = Group::threads(2).unwrap();
        std::thread::scope(|scope| {
            let threads = groups.into_iter().map(|group| {
                let folder = &folder;
                scope.spawn(move || {
                    let (mut state, ddp) = start(group, 2);
                    (0..3).for_each(|_| step(&mut state, &ddp));
                    let mut checkpoints = Checkpoints::new(ddp.group(), folder).unwrap();
                    if ddp.group().rank() == 1 {
                        syscalls::fail(failing).expect("a filter");
                    }
                    ddp.group().barrier().unwrap();
                    let error = checkpoints.save(&state).map_err(|error| error.to_string());
                    error.err().unwrap_or_default()
                })
            });
            for thread in threads.collect::<Vec<_>>() {
                send_line(thread.join().unwrap());
            }
        });
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let expected = saved(3, 2, folder.path());
    // write, fsync: of rank 1's file, its header, and its folder.
    for (call, first) in [(1, 1), (1, 2), (74, 1), (74, 2)] {
        let failing = Failing { call, own: false, errno: ENOSPC, first, step: 0 };
        let variables =
            [(FAILING, failing.to_word()), (FOLDER, folder.path().to_str().expect("a path of text").to_owned())];
        let mut process = Process::start(NAME, &variables);
        let errors = [process.read_line(), process.read_line()];
        assert!(process.end().success());
        assert_eq!(errors[0], errors[1], "call {call}");
        assert!(errors[0].ends_with("No space left on device (os error 28)"), "call {call}: {}", errors[0]);
        assert!(errors[0].contains("rank-1.safetensors") || errors[0].contains("flushing"), "{}", errors[0]);
        assert!(loaded(2, folder.path()).iter().all(|loaded| *loaded == expected), "call {call}");
        // Nothing but the set is left, and the name of the job.
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    }
}

#[test]
fn a_state_of_parts_cannot_be_saved_alone() {
    let folder = tempfile::tempdir().unwrap();
    let errors = ranks(2, |group| {
        // Each part has 128 KiB.
        let linear: Linear = LinearConfig::new(256, 256).init(&device());
        let (model, parallel) = FullyShardedParallel::new(group.clone(), linear).unwrap();
        let state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
        let mut checkpoints = Checkpoints::new(&group, folder.path()).unwrap();
        let blocking = checkpoints.save(&state).unwrap_err();
        checkpoints.save_in_background(&state).unwrap();
        assert_eq!(checkpoints.wait(), Err(blocking.clone()));
        checkpoints.save((&state, &parallel)).unwrap();
        blocking
    });
    for error in errors {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("of rank 1 differs from rank 0's, so what each rank saves"), "{error}");
    }
}

#[test]
fn models_that_differ_in_one_element_of_many_are_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |group| {
        let mut linear: Linear = LinearConfig::new(256, 256).init(&device());
        linear.weight = linear.weight.map(|weight| Tensor::ones_like(&weight));
        linear.bias = linear.bias.map(|bias| bias.map(|bias| Tensor::zeros_like(&bias)));
        let whole = linear.clone();
        if group.rank() == 2 {
            linear.weight = linear.weight.map(|weight| {
                let last = Tensor::full([1, 1], 1.5, &device());
                weight.slice_assign([255..256, 255..256], last)
            });
        }
        let mut state = TrainingState::new(linear, SgdConfig::new().init(), 0.1, ());
        let mut checkpoints = Checkpoints::new(&group, folder.path()).unwrap();
        let error = checkpoints.save(&state).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("`model/weight` of rank 2 differs from rank 0's"), "{error}");
        state.model = whole;
        // A small one, which rank 0 alone would write.
        if group.rank() == 1 {
            state.model.bias = state.model.bias.map(|bias| bias.map(|bias| bias + 1.0));
        }
        let error = checkpoints.save(&state).unwrap_err();
        assert!(error.to_string().contains("`model/bias` of rank 1 differs from rank 0's"), "{error}");
    });
}
